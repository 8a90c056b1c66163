"""What a sublayer reads is made again in backward: less is kept, and nothing else is different.

Here by torch, told to take a place for one kernel; tests/kernels/test_remade.py has the kernels.
"""

import gc
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import depthroute as dr
from depthroute import nn
from depthroute.nn.remade import Remade, Watch
from depthroute.parallel.tracing import _Storages
from tests.families import family_model
from tests.support import disturb_routing, llama_config, loss_and_gradients, tokens, trained_like

ATTNRES = dr.RoutingConfig("attnres", num_blocks=4)
PLACES = [1, 2, 3, 4, 5]
"""That are made again, in blocks of three."""


@pytest.fixture(autouse=True)
def _as_kernels_do(monkeypatch):
    monkeypatch.setattr("depthroute.ops.most_fused", lambda *_: 99)
    monkeypatch.setattr("depthroute.nn.remade.LEAST_WIDTH", 1)


@pytest.fixture
def again(monkeypatch):
    """The places of inputs that are made again, as it happens."""
    places, make = [], Remade._remade

    def spy(self):
        places.append(self._stream.index)
        return make(self)

    monkeypatch.setattr(Remade, "_remade", spy)
    return places


@pytest.fixture
def keeping(monkeypatch):
    """Has inputs kept from here on."""
    return lambda: monkeypatch.setattr("depthroute.models.routed.remaking", lambda call, *_: call)


def routed(routing=ATTNRES, dtype=torch.float32, **settings):
    model = trained_like(dr.from_config(llama_config(**settings), routing))
    return disturb_routing(model).to(dtype).train()


def step(model, ids=None, seed=0, **options):
    ids = tokens() if ids is None else ids
    torch.manual_seed(seed)
    loss, gradients = loss_and_gradients(model, ids, **options)
    return loss, {name: grad for name, grad in gradients.items() if grad is not None}


def assert_same_bits(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() and found[1]
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.bfloat16},
        {"attention_dropout": 0.3, "attn_implementation": "eager"},
        {"routing": dr.RoutingConfig("attnres", block_size=3, heads=4)},
        {"routing": dr.RoutingConfig("attnres", block_size=3, init="complete")},
        {"routing": dr.RoutingConfig("delta", 3, routing="replacement", include_partial=True)},
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_same_to_the_bit(change, again, keeping):
    model = routed(**change)
    plan = change.get("routing", ATTNRES).resolve(6, width=32)
    found = step(model)
    assert sorted(again) == [place.index for place in plan.places if place.remakes] != []
    assert sorted(again, reverse=True) == again, "each once, for all that saved it"
    keeping()
    assert_same_bits(found, step(model))
    assert len(again) == len({*again})


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_other_families_have_the_same_gradients(family, again, keeping):
    """A gain with an offset; experts."""
    model = disturb_routing(dr.convert(family_model(family), ATTNRES)).train()
    found, count = step(model), len(again)
    keeping()
    assert_same_bits(found, step(model))
    assert len(again) == count > 0


def test_what_is_made_again_is_what_was_read_to_the_bit(monkeypatch):
    """Both dtypes, without a sublayer that would hide a difference."""
    read, made, make = {}, {}, Remade._remade

    def begin(self, x, remade):
        read[remade._stream.index] = x.detach().clone()
        start(self, x, remade)

    def spy(self):
        made[self._stream.index] = make(self)
        return made[self._stream.index]

    start = Watch.__init__
    monkeypatch.setattr(Watch, "__init__", begin)
    monkeypatch.setattr(Remade, "_remade", spy)
    for dtype in (torch.float32, torch.bfloat16):
        step(routed(dtype=dtype))
        assert [*read] == sorted(made) == PLACES
        for index, x in read.items():
            assert x.dtype == made[index].dtype == dtype
            assert torch.equal(made[index], x)


def reads_of(monkeypatch):
    """The storages of what is read, by place."""
    storages, read = {}, nn.ResidualStream.read

    def spy(self, site=None, norm=None):
        x, after = read(self, site, norm)
        storages[self.index] = StorageWeakRef(x.untyped_storage())
        return x, after

    monkeypatch.setattr(nn.ResidualStream, "read", spy)
    return storages


@pytest.mark.parametrize("regions", [False, True])
def test_an_input_is_gone_after_the_forward_where_it_is_made_again(regions, monkeypatch):
    torch._dynamo.reset()
    model, storages, ids = routed(), reads_of(monkeypatch), tokens()
    if regions:
        dr.compile_regions(model, "aot_eager", dynamic=False)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    gone = [index for index, storage in storages.items() if storage.expired()]
    assert len(storages) == 13 and loss.requires_grad
    assert gone == PLACES


def test_so_many_bytes_less_are_kept(keeping):
    model, ids = routed(), tokens(batch=4, length=32)

    def kept():
        storages = _Storages()
        storages.add([ids, *model.parameters(), *model.buffers()])
        storages.kept = []
        with storages:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert loss.requires_grad
        return sum(size for reference, size in storages.kept if not reference.expired())

    less = kept()
    keeping()
    assert kept() - less == len(PLACES) * ids.numel() * 32 * 4


def test_regions_have_as_many_graphs_and_the_same_gradients(again, keeping):
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        model = routed()
        counter = CompileCounterWithBackend("aot_eager")
        dr.compile_regions(model, counter, dynamic=False)
        results += [(step(model), step(model), counter.frame_count)]
        keeping()
    (first, second, graphs), (expected, expected_second, expected_graphs) = results
    assert_same_bits(first, expected)
    assert_same_bits(second, expected_second)
    assert graphs == expected_graphs
    assert len(again) == 2 * len(PLACES)


def test_a_second_backward_makes_it_again_and_nothing_is_held_between(again, monkeypatch):
    storages, taken = [], Remade.taken

    def spy(self):
        x = taken(self)
        storages.append(StorageWeakRef(x.untyped_storage()))
        return x

    monkeypatch.setattr(Remade, "taken", spy)
    model, ids = routed(), tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    gradients = []
    for _ in range(2):
        parameters = [*model.parameters()]
        gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True))
        assert all(storage.expired() for storage in storages)
    assert len(again) == 2 * len(PLACES)
    # attention has three projections that read it, an MLP two
    assert len(storages) == 2 * sum(3 if place % 2 == 0 else 2 for place in PLACES)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_a_few_parameters_alone_are_right(again, keeping):
    """Then not all that saved an input take it."""
    model, ids = routed(), tokens()
    layer = model.model.layers[1]
    wanted = [layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight]

    def gradients():
        return torch.autograd.grad(model(input_ids=ids, labels=ids, use_cache=False).loss, wanted)

    found, count = gradients(), len(again)
    keeping()
    for one, other in zip(found, gradients(), strict=True):
        assert torch.equal(one, other)
    assert count > 0


def test_nothing_waits_for_the_garbage_collector(monkeypatch):
    alive, start = [], Remade.__init__

    def spy(self, *args):
        start(self, *args)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(Remade, "__init__", spy)
    model, ids = routed(), tokens()
    gc.collect()
    gc.disable()
    try:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert [ref() is not None for ref in alive] == [True] * len(PLACES)
        loss.backward()
        assert [ref() for ref in alive] == [None] * len(PLACES)
        model(input_ids=ids, labels=ids, use_cache=False).loss.detach()
        assert [ref() for ref in alive] == [None] * 2 * len(PLACES)
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert [ref() for ref in alive] == [None] * 3 * len(PLACES), "nobody has saved its input"
        assert loss.requires_grad
    finally:
        gc.enable()


def scaled_in_place(_, args):
    args[0].mul_(1.5)


def scaled(_, args):
    return (args[0] * 1.5,)


def test_an_input_that_a_sublayer_wrote_into_is_the_one_with_what_it_wrote(keeping):
    """The first of three projections writes before any of them reads."""
    model = routed()
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(scaled_in_place)
    found = step(model)
    keeping()
    assert_same_bits(found, step(model))


def test_an_input_that_a_sublayer_wrote_into_later_is_the_one_it_has_read(keeping):
    """Without, torch refuses the backward: it has only what was written."""
    attention = (model := routed()).model.layers[1].self_attn
    handle = attention.k_proj.register_forward_pre_hook(scaled_in_place)
    found = step(model)
    handle.remove()
    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_pre_hook(scaled)
    _, gradients = expected = step(model)
    assert torch.equal(found[0], expected[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[1][name], gradient)
    attention.k_proj._forward_pre_hooks.clear()
    attention.v_proj._forward_pre_hooks.clear()
    attention.k_proj.register_forward_pre_hook(scaled_in_place)
    keeping()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.routing.layers_1_attention.query",
    ],
)
def test_whoever_writes_between_forward_and_backward_is_told(name):
    """Torch does not check what has hooks."""
    model, ids = routed(), tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [model.model.layers[1].self_attn.q_proj.weight])


def test_hooks_around_it_see_what_they_saw(again, keeping):
    model, ids, counts, results = routed(), tokens(), [], []
    for _ in range(2):
        seen = []
        with saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t.detach(), lambda t: t):
            results.append(step(model, ids))
        counts.append(len(seen))
        with save_on_cpu():
            results.append(step(model, ids))
        keeping()
    assert counts[0] == counts[1] > 100
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert again == []


def test_hooks_within_a_sublayer_see_what_it_reads(again, keeping):
    model, ids, seen = routed(), tokens(), []
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def offloaded(x):
        with saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
            return forward(x)

    mlp.forward = offloaded
    found = step(model, ids)
    assert sum(t.shape[-1] == 32 and t.numel() == ids.numel() * 32 for t in seen) >= 2
    assert 3 not in again and len(again) == len(PLACES) - 1
    keeping()
    assert_same_bits(found, step(model, ids))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_make_it_once(reentrant, again):
    model = routed()
    expected = step(model)
    again.clear()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    loss, gradients = step(model)
    assert again == []
    assert torch.equal(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_nothing_is_made_again_without_gradients_under_an_observer_or_a_compiler(monkeypatch):
    def refuse(*_):
        raise AssertionError

    model, ids = routed(), tokens()
    expected = step(model)[0]
    monkeypatch.setattr(Remade, "__init__", refuse)
    with torch.no_grad():
        model(input_ids=ids)
    dr.trace(model, ids)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        model(input_ids=ids, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)


def test_a_norm_that_is_watched_is_left_to_its_module_and_its_output_kept(again):
    model = routed()
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *_: None)
    step(model)
    assert sorted(again) == [place for place in PLACES if place != 2]


def test_adapters_have_the_same_gradients(again, keeping):
    peft = pytest.importorskip("peft")  # which an environment of other versions has not
    model = routed()
    settings = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings, lora_dropout=0.2)).train()
    found, count = step(model), len(again)
    keeping()
    assert_same_bits(found, step(model))
    assert {name.split(".")[-2] for name in found[1]} == {"default"}
    assert len(again) == count


@pytest.mark.parametrize("precision", ["autocast", "accumulated", "hooked"])
def test_other_ways_to_train_have_the_same_gradients(precision, keeping):
    model, ids = routed(), tokens()
    if precision == "hooked":
        model.model.layers[1].register_forward_hook(lambda layer, args, h: h * 1.25)

    def run():
        if precision == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return step(model, ids)
        if precision == "accumulated":  # two forwards before one backward, as ranks share a model
            model.zero_grad(set_to_none=True)
            losses = [model(input_ids=i, labels=i, use_cache=False).loss for i in (ids, ids + 1)]
            (losses[0] + losses[1]).backward()
            return losses[0].detach(), {n: p.grad for n, p in model.named_parameters()}
        return step(model, ids)

    found = run()
    keeping()
    assert_same_bits(found, run())


def test_short_rows_are_kept(again, monkeypatch):
    monkeypatch.setattr("depthroute.nn.remade.LEAST_WIDTH", 33)
    step(routed())
    assert not again
    monkeypatch.setattr("depthroute.nn.remade.LEAST_WIDTH", 32)
    step(routed())
    assert sorted(again) == PLACES
