"""What a layout costs, worked out on `meta`: hops, memory of a rank, order and bubble."""

import pytest
import torch
from tests.families import family_config
from tests.support import routed_model, tokens

import depthroute as dr
from depthroute.models import attention
from depthroute.models.architecture import ARCHITECTURES
from depthroute.parallel import timeline, tracing
from depthroute.parallel.cache import BlockCache
from depthroute.parallel.layout import ORDERS, PipelineLayout
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.planner import forecast
from depthroute.parallel.stages import StageModule

ROWS, LENGTH = 2, 16
DEEP = dr.RoutingConfig("attnres", block_size=2, evaluation="one_pass").resolve(32)


def on_meta(family="llama", method="delta", **overrides):
    with torch.device("meta"):
        config = family_config(family, **overrides)
        return attention.use(dr.from_config(config, dr.RoutingConfig.named(method)))


def plan_of(model=None, batch_size=16, **settings):
    options = {name: settings.pop(name) for name in ("precision", "recomputes") if name in settings}
    model = on_meta(num_hidden_layers=8) if model is None else model
    return forecast(model, MeshLayout(**settings), batch_size=batch_size, length=LENGTH, **options)


def layout(schedule, ranks, chunks, micro_batches, plan=DEEP, **settings):
    counts = {"chunks": chunks, "micro_batches": micro_batches}
    return PipelineLayout.of(plan, ranks=ranks, schedule=schedule, **counts, **settings)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches"),
    [
        ("gpipe", 4, 1, 8),
        ("1f1b", 4, 1, 8),
        ("1f1b", 2, 1, 5),
        ("interleaved", 4, 2, 8),
        ("interleaved", 8, 4, 32),
    ],
)
def test_the_bubble_is_that_of_the_literature(schedule, ranks, chunks, micro_batches):
    runs = timeline.timeline(layout(schedule, ranks, chunks, micro_batches))
    expected = (ranks - 1) / (chunks * micro_batches + ranks - 1)
    assert timeline.bubble(runs) == pytest.approx(expected)


def test_zero_bubble_schedules_wait_less_where_backward_is_split():
    plan = layout("zero-bubble", 4, 1, 8)
    waits = [timeline.bubble(timeline.timeline(plan, splits_backward=s)) for s in (True, False)]
    assert waits == pytest.approx([1 / 9, 3 / 11])


def test_ranks_wait_for_the_one_with_more_layers():
    even, uneven = (
        timeline.bubble(timeline.timeline(layout("1f1b", 2, 1, 8, layers=layers)))
        for layers in (None, (24, 8))
    )
    assert even == pytest.approx(1 / 9)
    assert uneven > 0.3


@pytest.mark.parametrize("schedule", ORDERS)
def test_every_stage_runs_every_micro_batch_once_each_way(schedule):
    plan = layout(schedule, 4, ORDERS[schedule].least_chunks, 8)
    for rank, order in enumerate(timeline.orders(plan)):
        wanted = {(stage.index, m) for stage in plan.on(rank) for m in range(8)}
        for kinds in ((timeline.FORWARD,), (timeline.BACKWARD, timeline.INPUTS)):
            runs = [action[1:] for action in order if action.kind in kinds]
            assert len(runs) == len(wanted) and set(runs) == wanted


def test_1f1b_keeps_as_many_micro_batches_as_there_are_ranks_behind():
    kept = {
        schedule: [
            timeline.most_alive(order, [1] * 4)
            for order in timeline.orders(layout(schedule, 4, 1, 8))
        ]
        for schedule in ("gpipe", "1f1b")
    }
    assert kept == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1]}


QUICK = ("llama", "phi3", "gpt2", "qwen3_moe", "gpt_oss", "kimi_linear")
UNSHARED = ("gpt2", "gpt_oss", "lfm2", "llama4_text")
"""By tensor parallel."""


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in ARCHITECTURES],
)
def test_every_family_can_be_planned(family):
    tp = 1 if family in UNSHARED else 2
    found = plan_of(on_meta(family), pp=2, tp=tp, dp=2)
    assert found.mesh.size == 4 * tp
    assert [hop.tensors for hop in found.hops] == [len(found.layout.hops[0].sent)]
    assert all(memory.activations > 0 for memory in found.memory)


@pytest.mark.parametrize(
    ("method", "recomputes", "is_frozen"),
    [
        ("delta", False, False),
        ("delta", True, False),
        ("delta", False, True),
        ("depth attention", False, False),
        ("mhc", False, False),
    ],
)
def test_what_is_kept_is_what_real_tensors_keep(method, recomputes, is_frozen):
    """The same stages with numbers: what their graphs hold of memory that they have made."""
    real = attention.use(routed_model(method, layers=4)).train()
    with torch.device("meta"):
        meta = attention.use(dr.from_config(real.config, real.config.routing_config())).train()
    for model in (real, meta):
        if is_frozen:
            model.freeze_base()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = PipelineLayout.of(real.plan, ranks=2, schedule="interleaved")
    traces = tracing.traced(meta, plan, ROWS, LENGTH)
    caches, given = [BlockCache() for _ in range(2)], (tokens(ROWS, LENGTH),)
    seen = tracing._Storages()
    seen.add([*given, *real.parameters(), *real.buffers()])
    for stage, trace in zip(plan.stages[:-1], traces, strict=False):
        module, seen.kept = StageModule(real, plan, stage, caches[stage.rank]), []
        with seen:
            handed = module(*given)
        assert trace.sizes == dict(zip(stage.after.sent, (t.nbytes for t in handed), strict=True))
        kept = sum(size for reference, size in seen.kept if not reference.expired())
        assert trace.kept == kept
        given = tuple(t.detach().requires_grad_() for t in handed)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_v_has_a_count_of_its_own(ranks):
    """Down, each rank is sent all that came before; up, what was made since it came by."""
    hops = layout("zbv", ranks, 2, 8).hops
    made = 32 // (2 * ranks)
    sent = sum(len(hop.sent) for hop in hops if not hop.is_local)
    assert sent == 3 * ranks * (ranks - 1) // 2 * made + ranks - 1


def test_bf16_halves_what_is_sent_and_kept_and_copies_the_weights():
    full, half = (plan_of(pp=2, precision=p) for p in ("fp32", "bf16"))
    assert full.hops[0].num_bytes == 2 * half.hops[0].num_bytes
    assert half.memory[0].parameters == full.memory[0].parameters == 2 * half.memory[0].copies
    assert full.memory[0].copies == 0
    assert 0.4 < half.memory[0].activations / full.memory[0].activations < 0.8


def test_a_frozen_base_is_copied_for_every_micro_batch_under_way():
    def frozen(**settings):
        model = on_meta(num_hidden_layers=8)
        model.freeze_base()
        return plan_of(model, precision="bf16", **settings).memory

    def without_copies(**settings):  # each rank of FSDP2 has bf16 shards, and as many rows
        return frozen(mode="fsdp", dp=2, batch_size=32, **settings)

    for settings, under_way in (({}, [1]), ({"pp": 2, "micro_batches": 4}, [2, 1])):  # in 1F1B
        both = zip(frozen(**settings), without_copies(**settings), under_way, strict=True)
        for memory, without, count in both:
            assert 2 * memory.copies == memory.gradients < memory.parameters / 4
            copied = count * (memory.parameters - memory.gradients) // 2
            assert memory.activations == without.activations + copied
    (again,), (without,) = (made(recomputes=True) for made in (frozen, without_copies))
    assert again.activations == without.activations, "copies are made again, too"
    (shared,) = frozen(tp=2)
    assert 0 < shared.gradients < shared.parameters / 4


def test_recomputation_keeps_less_and_sends_the_same():
    plain, again = (plan_of(pp=2, recomputes=r) for r in (False, True))
    assert again.memory[0].activations < plain.memory[0].activations / 3
    assert again.hops == plain.hops


def test_fsdp_leaves_no_gradients_for_later():
    zero = {"pp": 2, "dp": 2, "schedule": "zero-bubble", "micro_batches": 4}
    split, whole = (plan_of(mode=mode, **zero).bubble for mode in ("ddp", "fsdp"))
    assert whole == pytest.approx(1 / 5)
    assert split < whole or torch.__version__ < "2.13"
