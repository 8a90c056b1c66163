"""The stages of a pipeline one after the other in one process: every family and every method.

What ranks do in between is left out (a stage's outputs are the next one's inputs, gradients go
back the same way), so a difference is the stages' or the cache's. In fp64: see test_pipeline.py.
"""

import pytest
import torch

import depthroute as dr
from depthroute import ops
from depthroute.errors import DepthrouteError
from depthroute.parallel.cache import BlockCache
from depthroute.parallel.layout import PipelineLayout
from depthroute.parallel.stages import StageModule
from tests.families import FAMILIES, family_model
from tests.support import METHODS, disturb_routing, routed_model, tokens

IDS, TARGETS = tokens(2, 9), tokens(2, 9, seed=1)
LAYOUTS = {
    "interleaved": {"ranks": 2, "schedule": "interleaved", "chunks": 3},
    "uneven": {"ranks": 2, "schedule": "interleaved", "chunks": 2, "layers": (3, 1, 1, 1)},
    "v": {"ranks": 3, "schedule": "zbv"},
}


def loss_of(logits):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def stages_of(model, **settings):
    layout = PipelineLayout.of(model.plan, **settings)
    caches = [BlockCache() for _ in range(layout.ranks)]
    return [StageModule(model, layout, stage, caches[stage.rank]) for stage in layout.stages]


def forward(stages, micro_batch=0, given=(IDS,)):
    """Inputs and outputs of every stage."""
    passes = []
    for stage in stages:
        with stage.cache.running(micro_batch):
            outputs = stage(*given)
        passes.append((given, outputs))
        if stage.stage.after is not None:
            given = tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs)
    return passes


def backward(passes):
    gradients = None
    for inputs, outputs in reversed(passes):
        if gradients is None:
            loss_of(outputs).backward()
        else:
            torch.autograd.backward(outputs, gradients)
        gradients = [t.grad for t in inputs]


def check_equals_whole(model, budget=1e-9, **settings):
    loss = loss_of(model(IDS, use_cache=False).logits)
    loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    stages = stages_of(model, **settings)
    passes = forward(stages)
    assert loss_of(passes[-1][1]).item() == pytest.approx(loss.item(), abs=budget)
    backward(passes)
    seen = {}
    for stage in stages:
        stage.cache.check_settled()
        for name, gradient in gradients_of(stage.model).items():
            assert name not in seen, f"{name} is on two stages"
            seen[name] = gradient
    for name in seen.keys() - expected.keys():  # a tied head, of which the whole has one copy
        (table,) = (n for n, p in model.named_parameters() if p is embedding_of(model))
        seen[table] = seen[table] + seen.pop(name)
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        budget_here = budget * gradient.abs().max().item()
        torch.testing.assert_close(seen[name], gradient, rtol=0, atol=budget_here)


def embedding_of(model):
    return model.get_input_embeddings().weight


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_stages_of_every_method_compute_what_the_whole_does(method, layout):
    check_equals_whole(routed_model(method).double(), **LAYOUTS[layout])


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_every_family_compute_what_the_whole_does(family):
    routing = dr.RoutingConfig("delta", num_blocks=2)
    model = disturb_routing(dr.convert(family_model(family), routing))
    # in fp32, as experts are: 2e-6 was measured
    check_equals_whole(model, budget=1e-5, ranks=2, schedule="interleaved")


def test_a_block_that_no_rank_holds_is_an_error_that_names_it():
    stages = stages_of(routed_model("delta"), **LAYOUTS["interleaved"])
    passes = forward(stages[:3])
    with (
        stages[3].cache.running(1),  # of which stage 1 of this rank has seen nothing
        pytest.raises(DepthrouteError, match=r"embedding of micro-batch 1 was not sent"),
    ):
        stages[3](*passes[-1][1])


def test_a_gradient_that_was_not_deposited_is_an_error():
    stages = stages_of(routed_model("delta"), **LAYOUTS["interleaved"])
    passes = forward(stages, micro_batch=2)
    loss_of(passes[5][1]).backward()
    outputs = passes[1][1]  # and stage 3 of the same rank was never run backward
    with pytest.raises(DepthrouteError, match=r"1 of 2 gradients of .* for micro-batch 2"):
        torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])


def test_a_step_that_leaves_something_behind_is_an_error():
    stages = stages_of(routed_model("delta"), **LAYOUTS["interleaved"])
    forward(stages[:3])
    with pytest.raises(DepthrouteError, match=r"left embedding, layers\.0\.attention"):
        stages[0].cache.check_settled()
    stages[0].cache.clear()
    stages[0].cache.check_settled()


def test_blocks_go_when_the_last_chunk_of_the_rank_has_started():
    stages = stages_of(routed_model("delta"), **LAYOUTS["interleaved"])
    with torch.no_grad():
        held, given = [], (IDS,)
        for stage in stages:
            with stage.cache.running(0):
                given = stage(*given)
            held.append(len(stage.cache))
    # rank 0: what stage 0 made; with what stage 2 was sent and made; nothing after stage 4
    assert held == [3, 5, 7, 9, 0, 0]


def test_micro_batches_are_kept_apart():
    model = routed_model("attnres block").double()
    stages = stages_of(model, **LAYOUTS["interleaved"])
    both = [forward(stages, m, (IDS.roll(m, 1),)) for m in range(2)]
    for m, passes in enumerate(both):
        with torch.no_grad():
            expected = model(IDS.roll(m, 1), use_cache=False).logits
        torch.testing.assert_close(passes[-1][1], expected)


def test_taking_stages_leaves_the_model_as_it_was():
    model = routed_model("delta block", tie_word_embeddings=True)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        before = model(IDS).logits
        stages = stages_of(model, **LAYOUTS["interleaved"])
        forward(stages)
        assert torch.equal(model(IDS).logits, before)
    assert [name for name, _ in model.named_parameters()] == names
    shared = {id(p) for p in model.parameters()}
    copies = [n for s in stages for n, p in s.model.named_parameters() if id(p) not in shared]
    assert copies == ["lm_head.weight"]


def test_phase_one_is_never_handed_over_and_no_group_crosses_a_cut(monkeypatch):
    routing = dr.RoutingConfig("delta", evaluation="two_phase", group_size=5)
    model = routed_model(routing)
    stages = stages_of(model, ranks=2, schedule="1f1b", layers=(2, 4))
    plan = stages[0].layout.plan
    groups = [place.opens_group for place in plan.places if place.opens_group is not None]
    assert groups == [range(4, 5), range(5, 10), range(10, 12)]
    opened, phase_one = [], ops.depth_mix_group_carried
    monkeypatch.setattr(
        ops,
        "depth_mix_group_carried",
        lambda sources, queries, *rest, **options: (
            opened.append(len(queries)) or phase_one(sources, queries, *rest, **options)
        ),
    )
    ((_, handed), _) = forward(stages)
    assert opened == [len(group) for group in groups]
    assert len(handed) == len(plan.held(2))
    assert [tuple(t.shape) for t in handed] == [(2, 9, 32)] * len(handed)
