"""The kernels on the CPU, interpreted; the same cases as on a GPU, smaller.

Triton decides at import whether to interpret, so in an ordinary test process this file only starts
others with TRITON_INTERPRET=1, which run the tests marked ``interpreter``: most of those below,
and those of test_tuning, test_inductor, test_kept, test_remade and test_fused_regions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthroute import ops
from depthroute.errors import BackendError
from tests.kernels.cases import (
    AttentionCase,
    BoundaryCase,
    GroupCase,
    LossCase,
    MixCase,
    SinkhornCase,
    StaticCase,
)
from tests.processes import PATIENCE

pytest.importorskip("triton")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "names", [["kernels_interpreter"], ["tuning", "inductor"], ["kept", "remade", "fused_regions"]]
)
def test_every_kernel_agrees_with_its_definition_in_the_interpreter(names):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for variable in [n for n in environment if n.startswith("PYTEST_")]:
        del environment[variable]
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    options = ["-m", "interpreter", "-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, "everything was skipped"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the kernels")
def test_asking_for_triton_without_a_gpu_is_an_error_and_auto_is_torch():
    source = torch.randn(2, 8)
    with pytest.raises(BackendError, match="no cpu device"):
        ops.depth_mix([source, source], torch.zeros(8), backend="triton")
    with ops.record_backends() as ran:
        ops.depth_mix([source, source], torch.zeros(8))
    assert ran == {("depth_mix", "torch"): 1}


MIX = [
    MixCase(1, 2, 96, dtype=fp32),
    MixCase(2, 5, 96, heads=4),
    MixCase(7, 2, 1000, heads=8),
    MixCase(7, 2, 1000, dtype=fp16, contiguous=False),
    MixCase(33, 1, 96, heads=8, dtype=fp32),
    MixCase(5, 2, 96, heads=3, head_norm="slice"),
    MixCase(5, 2, 96, residual=True, scale=5 / 6),
    MixCase(5, 2, 96, residual=True, centered=True, dtype=fp32),
    MixCase(3, 2, 96, residual=True, norm=True, adds_sources=True),
    MixCase(19, 2, 96, adds_sources=True, scale=0.5),
    MixCase(3, 2, 7168),
    MixCase(3, 2, 96, prior=True, residual=True),
    MixCase(1, 2, 96, prior=True, heads=4, dtype=fp32),
    MixCase(0, 2, 96, prior=True, dtype=fp32),
    MixCase(4, 2, 96, norm=True, residual=True),
    MixCase(4, 2, 96, norm=True, heads=4, scale=4.0, dtype=fp32),
    # three tiles and more, held and streamed
    MixCase(3, 2, 576),
    MixCase(5, 2, 640, residual=True, norm=True),
    MixCase(2, 2, 1152, heads=4, head_norm="slice", dtype=fp32),
    # tiles of several heads: three without padding, two of 1536, four forward
    MixCase(7, 2, 768, heads=4),
    MixCase(6, 2, 1536, heads=4),
    MixCase(13, 2, 1024, heads=4),
    MixCase(19, 2, 640, scale=0.5),
    MixCase(19, 2, 640, heads=4, residual=True, norm=True, dtype=fp16),
    # lanes that are no heads have no norm either
    MixCase(3, 2, 96, heads=3, head_norm="slice", norm=True, eps=0.0, dtype=fp32),
    MixCase(19, 2, 96, heads=3, head_norm="slice", norm=True, eps=0.0),
    # a column alone
    MixCase(3, 2, 1, residual=True, norm=True),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", MIX, ids=str)
def test_depth_mix_keeps_the_error_budget(case: MixCase):
    case.check("cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_taking_delta_from_the_mix_keeps_the_error_budget(dtype, monkeypatch):
    monkeypatch.setattr("depthroute.ops._record.RESIDENT_SOURCES", 0)
    MixCase(5, 9, 256, dtype=dtype).check("cpu")
    MixCase(5, 3, 256, heads=4, dtype=dtype, scale=5.0).check("cpu")
    MixCase(5, 3, 256, norm=True, dtype=dtype).check("cpu")
    MixCase(5, 3, 96, residual=True, dtype=dtype).check("cpu")  # two sweeps


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_delta_is_taken_from_a_mix_of_tiny_numbers_too(dtype, monkeypatch):
    """Of fp16 they have fewer bits than others, so that more of them are kept apart."""
    monkeypatch.setattr("depthroute.ops._record.RESIDENT_SOURCES", 0)
    sources = [(1e-5 * torch.randn(3, 96)).to(dtype).requires_grad_() for _ in range(5)]
    query, grad = torch.randn(96), torch.randn(3, 96).to(dtype)

    def gradient(dtype, backend):
        q = query.to(dtype or query.dtype).requires_grad_()
        x = ops.depth_mix([s.to(dtype or s.dtype) for s in sources], q, backend=backend)
        return torch.autograd.grad(x, q, grad.to(x.dtype))[0].double()

    torch.testing.assert_close(
        gradient(None, "triton"), gradient(torch.float64, "reference"), rtol=1e-4, atol=1e-9
    )


BOUNDARY = [
    BoundaryCase(3, 5, 96),
    BoundaryCase(3, 2, 96, dtype=fp32, scale=4 / 5),
    BoundaryCase(4, 2, 200, reads_last=False, heads=4),
    BoundaryCase(2, 2, 96, partial=False, dtype=fp16),
    BoundaryCase(2, 2, 96, partial=False, reads_last=False),
    BoundaryCase(5, 2, 96, state=False),
    BoundaryCase(5, 2, 96, state=False, adds_sources=True),
    BoundaryCase(3, 2, 96, partial=False, reads_last=False, adds_sources=True, returns_last=False),
    BoundaryCase(1, 2, 96, state=False, partial=False, norm=False),
    BoundaryCase(1, 4, 96, state=False, prior=True),
    BoundaryCase(0, 2, 96, state=False, partial=False, prior=True),
    BoundaryCase(2, 2, 96, reads_last=False, norm=False, prior=True, dtype=fp32),
    BoundaryCase(3, 2, 640),
    BoundaryCase(2, 2, 1152, heads=4, state=False, prior=True),
    *(BoundaryCase(3, 5, 96, dtype=dtype, gains=True) for dtype in (bf16, fp16, fp32)),
    BoundaryCase(2, 3, 200, heads=4, partial=False, reads_last=False, gains=True),
    BoundaryCase(2, 3, 200, adds_sources=True, gains=True),
    BoundaryCase(1, 3, 96, prior=True, gains=True),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", BOUNDARY, ids=str)
def test_the_sublayer_boundary_keeps_the_error_budget(case: BoundaryCase):
    case.check("cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [BOUNDARY[i] for i in (0, 2, 4, 5, 12)], ids=str)
def test_more_sources_than_a_program_holds_are_streamed(case: BoundaryCase, monkeypatch):
    monkeypatch.setattr("depthroute.ops._record.RESIDENT_SOURCES", 0)
    case.check("cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("resident", [True, False])
def test_sums_of_rows_in_any_layout_are_written_in_order(resident, monkeypatch):
    """Rows of a batch of one that a sublayer transposed are dense, but not [N, D] in memory."""
    if not resident:
        monkeypatch.setattr("depthroute.ops._record.RESIDENT_SOURCES", 0)
    sources, output = [torch.randn(5, 96) for _ in range(2)], torch.randn(96, 5).t()
    state, partial, query = torch.randn(96, 5).t(), torch.randn(96, 5).t(), torch.randn(96)
    given = output, sources, query, None, state, partial
    done = ops.depth_boundary(*given, reads_last=True, backend="triton")
    torch.testing.assert_close(done.state, state + output)
    torch.testing.assert_close(done.last, partial + output)
    expected = ops.reference.depth_mix([*sources, partial + output], query, residual=state + output)
    torch.testing.assert_close(done.x, expected)
    assert done.state.is_contiguous() and done.last.is_contiguous()  # as the compiler is told


GROUP = [
    GroupCase(3, 1, 3, 96, dtype=fp32),
    GroupCase(3, 5, 3, 96, heads=4, carried=True),
    GroupCase(5, 3, 4, 96, heads=3, head_norm="slice"),
    GroupCase(2, 2, 2, 1000, dtype=fp16),
    GroupCase(2, 6, 2, 384),
    GroupCase(3, 2, 18, 96, output_dtype=bf16),
    GroupCase(17, 5, 4, 1000, output_dtype=bf16, carried=True),
    GroupCase(1, 17, 3, 24, output_dtype=bf16),
    GroupCase(70, 2, 2, 48, output_dtype=bf16),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", GROUP, ids=str)
def test_phase_one_keeps_the_error_budget(case: GroupCase):
    case.check("cpu")


ATTENTION = [
    AttentionCase(3, 2, 5, 4, 2, 16),
    AttentionCase(1, 1, 3, 2, 2, 24, value_width=40, dtype=fp32),
    AttentionCase(4, 2, 5, 6, 2, 48, dtype=fp16, transposed=False),
    AttentionCase(9, 1, 3, 2, 1, 16),
    AttentionCase(2, 2, 5, 4, 2, 16, strided_rows=True),
    AttentionCase(1, 2, 3, 4, 2, 16, kept=()),
    AttentionCase(1, 2, 3, 2, 2, 16, kept=(0,), dtype=fp32),
    AttentionCase(2, 2, 5, 4, 2, 16, kept=(0,)),
    AttentionCase(3, 2, 5, 2, 2, 16, kept=(0, 2), missing=3),
    AttentionCase(3, 1, 3, 18, 2, 24, value_width=40, kept=(0, 1, 2), transposed=False),
    AttentionCase(4, 1, 3, 6, 2, 16, kept=(1, 2, 3), dtype=fp16, strided_rows=True),
    *(AttentionCase(n, 1, 3, 4, 2, 16, kept=(0, 1, n - 1)) for n in range(5, 10)),
    AttentionCase(9, 1, 3, 2, 2, 16, kept=(0, 3, 4, 8), missing=2),
    AttentionCase(11, 2, 3, 6, 2, 24, value_width=8, kept=(5,), missing=4, dtype=fp32),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_depth_attention_keeps_the_error_budget(case: AttentionCase):
    case.check("cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("layers", [3, 9])
@pytest.mark.parametrize("is_carried", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_depth_attention_lie_as_what_they_are_of(layers, is_carried, transposed):
    """Whatever the order of those that come: else a compiled graph would copy them."""
    kept = tuple(range(layers)) if is_carried else None
    case = AttentionCase(layers, 2, 5, 4, 2, 16, transposed=transposed, kept=kept)
    inputs = {name: t.requires_grad_() for name, t in case.inputs("cpu").items()}
    read = case.read("triton", **inputs)
    came = [g for g in case.arriving(read) if g is not None]
    grads = torch.autograd.grad(read, list(inputs.values()), came)
    assert [g.stride() for g in grads] == [t.stride() for t in inputs.values()]


@pytest.mark.interpreter
@pytest.mark.parametrize("layers", [2, 9])
def test_query_heads_of_a_kv_head_may_be_further_apart_than_32_bits_say(layers, tmp_path):
    """As those of very long sequences are. Memory that nothing is written to takes no room."""
    apart, heads = 2**30 + 8, 3
    memory = torch.from_file(str(tmp_path / "m"), shared=True, size=2 * 2**32, dtype=bf16)

    def far(start: int) -> torch.Tensor:
        x = memory.as_strided((1, heads, 2, 16), (heads * apart, apart, 16, 1), 2**31 + start)
        return x.copy_(torch.randn(1, heads, 2, 16))

    pairs = [torch.randn(1, 1, 2, 16).to(bf16) for _ in range(2 * layers)]
    grads = far(0), torch.randn(1, 1, 2, 16).to(bf16)

    def run(query, backend):
        query = query.detach().requires_grad_()
        kept = [False] * layers
        given = query, pairs[:layers], pairs[layers:], kept, backend
        made = ops.depth_attention_carried(*given)
        return made.mixed, torch.autograd.grad([made.query, made.mixed], query, grads)[0]

    query = far(64)
    expected, found = run(query.contiguous(), "triton"), run(query, "triton")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


LOSS = [
    LossCase(5, 99),
    LossCase(5, 64, dtype=fp32, chunk=2),
    LossCase(7, 31, dtype=fp16, bias=True, chunk=3),
    LossCase(4, 130, scale=0.25, softcap=3.0),
    LossCase(4, 130, dtype=fp32, scale=3.0, softcap=30.0, bias=True),
    LossCase(3, 33, all_ignored=True, chunk=1),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", LOSS, ids=str)
def test_the_loss_keeps_the_error_budget(case: LossCase):
    case.check("cpu")


STATIC = [
    StaticCase(1, 2, 96, fp32),
    StaticCase(5, 3, 96, residual=True, scale=5 / 6),
    StaticCase(7, 2, 99, fp16, offset=-1, residual=True),
    StaticCase(9, 3, 40, offset=1, carried=True),
    StaticCase(130, 1, 32, fp32, carried=True),
    StaticCase(3, 5, 16, contiguous=False),
]
SINKHORN = [
    SinkhornCase(37),
    SinkhornCase(5, 3, scale=3.0),
    SinkhornCase(9, 1),
    SinkhornCase(3, 8, scale=0.1),
    SinkhornCase(6, 5, scale=100.0),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", STATIC + SINKHORN, ids=str)
def test_static_weights_and_doubly_stochastic_matrices_keep_the_error_budget(case):
    case.check("cpu")


@pytest.mark.interpreter
def test_no_tokens_and_frozen_sources_are_mixed_too():
    logits = torch.zeros(2, requires_grad=True)
    nothing = [torch.ones(0, 8, requires_grad=True) for _ in range(2)]
    ops.static_mix(nothing, logits, backend="triton").sum().backward()
    assert torch.equal(logits.grad, torch.zeros(2))
    assert ops.doubly_stochastic(torch.ones(0, 4, 4), backend="triton").shape == (0, 4, 4)
    frozen, trained = torch.ones(3, 8), torch.ones(3, 8, requires_grad=True)
    ops.static_mix([frozen, trained], logits, backend="triton").sum().backward()
    assert frozen.grad is None and torch.equal(trained.grad, torch.full((3, 8), 0.5))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_an_ignored_row_that_is_no_number_does_no_harm_and_any_other_is_seen(backend):
    """Among logits that are -inf."""
    hidden, weight = torch.ones(3, 4), torch.ones(40, 4)
    weight[7:] = -float("inf")
    hidden[1] = float("nan")
    targets = torch.tensor([3, -100, 0])
    given = hidden.requires_grad_(), weight, targets
    loss = ops.linear_cross_entropy(*given, backend=backend)
    torch.testing.assert_close(loss, 2 * torch.tensor(7.0).log())
    assert torch.isnan(ops.linear_cross_entropy(hidden[1:2], weight, targets[:1], backend=backend))


@pytest.mark.interpreter
@pytest.mark.parametrize("target", [40, -1])
def test_a_target_that_is_no_word_is_seen_in_the_loss(target):
    hidden, weight = torch.ones(2, 4), torch.ones(40, 4)
    loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([3, target]), backend="triton")
    assert torch.isnan(loss)


@pytest.mark.interpreter
def test_centred_weights_vanish_exactly_at_zero_queries():
    sources = [torch.randn(3, 96) for _ in range(5)]
    residual = torch.randn(3, 96)
    x = ops.depth_mix(sources, torch.zeros(96), residual=residual, centered=True, backend="triton")
    assert torch.equal(x, residual)


@pytest.mark.interpreter
def test_scale_preserving_mix_of_complete_sources_is_their_sum():
    sources = [torch.randn(3, 96) for _ in range(4)]
    x = ops.depth_mix(sources, torch.zeros(96), scale=4.0, backend="triton")
    torch.testing.assert_close(x, sources[0] + sources[1] + sources[2] + sources[3])


@pytest.mark.interpreter
def test_double_precision_is_refused_and_auto_takes_torch():
    source = torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(BackendError, match="float64"):
        ops.depth_mix([source, source], torch.zeros(8), backend="triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(1, 5), (127, 1, 96), (300, 2, 1000)])
def test_rows_are_summed_over_programs(shape):
    from depthroute.ops._triton.layout import sum_rows

    rows = torch.randn(shape)
    torch.testing.assert_close(sum_rows(rows), rows.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(sum_rows(rows), sum_rows(rows.clone()))


@pytest.mark.interpreter
def test_the_registered_ops_pass_opcheck():
    sources = [torch.randn(3, 96) for _ in range(3)]
    query = torch.randn(96)
    none = (None, None, None)
    options = (1e-6, 2, False, False, 1.0, 1e-6, torch.float32, False)
    arguments = (sources, query, *none, None, None, None, False, *options, True, False)
    torch.library.opcheck(torch.ops.depthroute.depth_mix_triton.default, arguments)
    weight = torch.rand(96)
    output, state, partial = (torch.randn(3, 96) for _ in range(3))
    for keeps_x, keeps_y in ((True, False), (False, False), (False, True)):
        pushed = (weight, output, partial, True)
        arguments = (sources, query, state, None, None, *pushed, *options, keeps_x, keeps_y)
        torch.library.opcheck(torch.ops.depthroute.depth_mix_triton.default, arguments)


@pytest.mark.interpreter
def test_the_ops_of_depth_attention_and_phase_one_pass_opcheck():
    q, k, v = (torch.randn(2, 5, 4, 16).transpose(1, 2) for _ in range(3))
    torch.library.opcheck(
        torch.ops.depthroute.depth_attention_mix_triton.default, (q, [k], [v], 0.2)
    )
    mixed, kept = torch.ops.depthroute.depth_attention_mix_triton.default(q, [k], [v], 0.2)
    for carried, places in (([], []), ([q, k, k], [0, 1, 1]), ([v], [2])):
        torch.library.opcheck(
            torch.ops.depthroute.depth_attention_mix_triton_backward.default,
            ([mixed, v], carried, places, q, [k], [v], kept, 0.2),
            test_utils=("test_schema", "test_faketensor"),
        )
    sources = [torch.randn(3, 96) for _ in range(2)]
    queries = torch.randn(2, 96)
    torch.library.opcheck(
        torch.ops.depthroute.depth_mix_group_triton.default,
        (sources, queries, 1e-6, 2, False, torch.float32),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("kept", ["x", "state", "y"])
@pytest.mark.parametrize("shape", [(3, 96), (2, 3, 96)])
def test_the_backward_op_passes_opcheck_for_schema_and_fake(shape, prior, kept):
    given = [torch.randn(shape) for _ in range(9)]
    query, weight = torch.randn(96), torch.rand(96)
    before = (given[8], torch.randn(*shape[:-1], 2)) if prior else (None, None)
    options = (1e-6, 2, False, False, 0.5, 1e-6, torch.float32, False)
    stats, (x, y, state, last) = torch.ops.depthroute.depth_mix_triton.default(
        given[:2], query, given[2], *before, weight, given[3], given[4], True, *options, True, False
    )
    flags = (True, True, False, kept == "state", kept == "y", torch.float32)
    torch.library.opcheck(
        torch.ops.depthroute.depth_mix_triton_backward.default,
        (
            *(None, given[5:7], given[6], None, [given[7]] * 3, [*given[:2], last], query, *before),
            *(weight, {"x": x, "state": state, "y": y}[kept], None, stats),
            *(2, False, False, 0.5, *flags),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.interpreter
def test_a_second_derivative_is_refused():
    source, query = torch.randn(3, 96, requires_grad=True), torch.randn(96, requires_grad=True)
    for x in (
        ops.depth_mix([source, 2 * source], query, backend="triton"),
        ops.depth_mix_carried([source, 2 * source], query, backend="triton")[0],
    ):
        (first,) = torch.autograd.grad(x.square().sum(), source, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.sum().backward()


def boundaries(sources, output, state, partial, query, gain, weight):
    """Three sites as a stream runs them; at the first, state and a source are one tensor."""
    options = {"reads_last": True, "norm_weight": weight, "backend": "triton", "returns_x": False}
    a = ops.depth_boundary(output, [state, *sources], query, gain, state, partial, **options)
    b = ops.depth_boundary(2 * a.y, [*a.sources, a.last], query, gain, a.state, **options)
    options |= {"reads_last": False, "norm_weight": None}
    c = ops.depth_boundary(None, [*b.sources, b.last], query, gain, b.state, **options)
    return b.y, c.x, *c.sources


@pytest.mark.interpreter
def test_boundaries_compile_into_one_graph_without_gradients_of_zeros():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def inputs():
        torch.manual_seed(0)
        made = [torch.randn(2, 3, 96).to(bf16).requires_grad_() for _ in range(4)]
        weights = [torch.randn(96, requires_grad=True) for _ in range(2)]
        return [made[:1], *made[1:], *weights, torch.rand(96, dtype=bf16).requires_grad_()]

    def run(function):
        given = inputs()
        with ops.record_backends() as ran:
            found = function(*given)
            leaves = [*given[0], *given[1:]]
            grads = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
        assert ran == {("depth_mix", "triton"): 3, ("depth_mix_backward", "triton"): 3}
        return [*found, *grads]

    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(boundaries, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for one, other in zip(run(compiled), run(boundaries), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert names.count("depthroute.depth_mix_triton_backward.default") == 3
    assert not [name for name in names if "zeros" in name or "full" in name]
