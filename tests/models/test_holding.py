"""A generation asks the routing for its parameters once, and a compiled call takes them as one."""

from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationMixin, StaticCache

import depthroute as dr
from depthroute.nn import Site
from tests.support import METHODS, disturb_routing, plain_model, routed_model

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def prompt():
    return torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(0))


def logits_of(generate, model, ids):
    mask = torch.ones_like(ids)
    options = {"output_logits": True, "return_dict_in_generate": True}
    return torch.stack(generate(model, ids, attention_mask=mask, **GREEDY, **options).logits)


@pytest.mark.parametrize("name", METHODS)
def test_a_generation_is_to_the_bit_what_it_is_without(name):
    model, ids = disturb_routing(routed_model(METHODS[name])), prompt()
    assert torch.equal(
        logits_of(type(model).generate, model, ids),
        logits_of(GenerationMixin.generate, model, ids),
    )
    assert model.sites.held is None


@pytest.mark.parametrize(
    ("routing", "is_held"),
    [
        (dr.RoutingConfig("delta", num_blocks=2), True),
        (dr.RoutingConfig("attnres", value_reads=True), True),
        (dr.RoutingConfig("delta", num_blocks=2, init="gate", include_partial=False), False),
        (dr.RoutingConfig("static"), False),
        (dr.RoutingConfig("mhc"), False),
        (dr.RoutingConfig("standard"), False),
    ],
    ids=str,
)
def test_sites_are_called_once_for_all_tokens_where_queries_are_all_they_have(routing, is_held):
    model, calls = routed_model(routing), []
    for module in model.modules():
        if isinstance(module, Site):
            module.register_forward_hook(lambda *_: calls.append(1))
    model.generate(prompt(), attention_mask=torch.ones(2, 5), **GREEDY)
    times = 1 if is_held else 1 + GREEDY["max_new_tokens"]
    assert len(calls) == times * len(model.sites)


def test_another_generation_sees_parameters_that_have_changed_and_none_keeps_them():
    model, ids = routed_model(METHODS["delta block"]), prompt()
    before = logits_of(type(model).generate, model, ids)
    disturb_routing(model)
    after = logits_of(type(model).generate, model, ids)
    assert not torch.equal(before[0], after[0])
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(ids, no_such_option=1)
    assert model.sites.held is None
    assert not any("held" in name for name in model.state_dict())


def compiled_call(model, holds):
    """The inputs of a token's graph, and the names of what torch guards."""
    inputs, guarded = [], []

    def backend(graph, example, **_):
        inputs.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
        return graph.forward

    def keep_all(entries):
        guarded.extend(entry.name for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=16)
    options = {"guard_filter_fn": keep_all}
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False, options=options)
    with torch.no_grad(), holds:
        model(prompt(), past_key_values=cache, use_cache=True)
        token = {"input_ids": prompt()[:, :1], "position_ids": torch.tensor([[5]] * 2)}
        logits = call(**token, past_key_values=cache, use_cache=True).logits
    return inputs, guarded, logits


def test_a_compiled_call_takes_one_tensor_for_all_sites_and_guards_no_field_of_the_plan():
    model = disturb_routing(routed_model(METHODS["delta block"]))
    (alone,), _, _ = compiled_call(plain_model(), torch.no_grad())
    (every,), guarded, expected = compiled_call(model, torch.no_grad())
    (held,), fewer, found = compiled_call(model, model.sites.holding(model.dtype))
    assert every == alone + sum(1 for _ in model.routing_parameters())
    assert held == alone + 1
    assert torch.equal(found, expected)
    for names in (guarded, fewer):
        assert any("layers" in name for name in names)
        assert not any(".places" in name or ".plan" in name for name in names)
    assert any("query" in name for name in guarded)
    assert not any("query" in name for name in fewer)


PLANS = [
    (dr.RoutingConfig("delta", num_blocks=1), dr.RoutingConfig("delta", num_blocks=2)),
    (dr.RoutingConfig("attnres", block_size=4), dr.RoutingConfig("attnres", block_size=5)),
    (dr.RoutingConfig("delta"), dr.RoutingConfig("delta", sources="cumulative")),
    (dr.RoutingConfig("standard"), dr.RoutingConfig("x0_skip", init="paper")),
    (
        dr.RoutingConfig("depth_attention", stride=1, init="paper"),
        dr.RoutingConfig("depth_attention", stride=2, init="paper"),
    ),
]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("plans", [*PLANS, *(pair[::-1] for pair in PLANS)], ids=str)
def test_a_graph_takes_the_rows_of_another_plan(plans, is_held):
    """Constants of one graph are none of another's, in one process and after each other: models of
    a family share their code, whatever their modules are."""
    torch._dynamo.reset()
    found = []
    for routing in plans:
        model = routed_model(routing, layers=6, amount=1.0).eval()
        call = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad(), model.sites.holding(model.dtype) if is_held else nullcontext():
            found.append(call(prompt(), use_cache=False).logits)
            torch.testing.assert_close(found[-1], model(prompt(), use_cache=False).logits)
    assert not torch.equal(*found)


def test_calls_that_overlap_hold_until_the_last_of_them_ends():
    model = routed_model(METHODS["delta block"])
    first, second = model.sites.holding(model.dtype), model.sites.holding(model.dtype)
    with first:
        held = model.sites.held
        second.__enter__()
    assert model.sites.held is held is not None
    second.__exit__(None, None, None)
    assert model.sites.held is None
    before = model(prompt()).logits
    disturb_routing(model)
    assert not torch.equal(before, model(prompt()).logits)
