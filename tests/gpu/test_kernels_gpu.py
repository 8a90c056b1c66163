"""The kernels on a real GPU: every shape, dtype and way of calling that they promise."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from depthroute import ops
from tests.kernels.cases import (
    AttentionCase,
    BoundaryCase,
    GroupCase,
    MixCase,
    SinkhornCase,
    StaticCase,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = (96, 1000, 1024, 2048, 4096, 7168)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What ``torch.empty`` returns is NaN, so that an element nobody writes is seen."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gc.collect()
    torch.cuda.empty_cache()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


poisoned = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sources", [1, 2, 7, 33, 65, 129])
@poisoned
def test_depth_mix_keeps_the_error_budget_at_every_size(sources, width):
    MixCase(sources, 63, width).check("cuda")


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("width", [96, 1000, 2048, 7168])
@poisoned
def test_depth_mix_keeps_the_error_budget_for_heads_and_dtypes(width, heads, dtype):
    MixCase(7, 15, width, heads=heads, dtype=dtype, contiguous=False).check("cuda")


OPTIONS = [
    MixCase(5, 31, 1000, residual=True, scale=5 / 6),
    MixCase(5, 31, 1000, residual=True, centered=True),
    MixCase(5, 31, 1000, residual=True, norm=True, adds_sources=True),
    MixCase(33, 31, 1024, adds_sources=True, scale=0.5),
    MixCase(5, 31, 1024, heads=4, head_norm="slice", scale=5.0),
    MixCase(33, 31, 1000, heads=5),
    MixCase(3, 31, 2048, prior=True, residual=True),
    MixCase(1, 31, 2048, prior=True, heads=4),
    MixCase(0, 31, 1024, prior=True),
    MixCase(5, 31, 1024, norm=True),
    MixCase(5, 31, 7168, norm=True, residual=True),
    MixCase(5, 31, 1024, norm=True, prior=True, dtype=fp32),
    MixCase(5, 1, 1024),
    MixCase(256, 3, 1024),
    MixCase(57, 1000, 4096),
]


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@poisoned
def test_every_option_of_depth_mix_keeps_the_error_budget(case: MixCase):
    case.check("cuda")


@pytest.mark.parametrize("width", [1024, 4096, 7168])
@poisoned
def test_taking_delta_from_the_mix_keeps_the_error_budget(width, monkeypatch):
    monkeypatch.setattr("depthroute.ops._record.RESIDENT_SOURCES", 0)
    MixCase(9, 63, width).check("cuda")
    MixCase(9, 63, width, heads=4, scale=9.0, dtype=fp32).check("cuda")


@pytest.mark.parametrize(
    "case",
    [
        BoundaryCase(3, 63, 1024),
        BoundaryCase(4, 63, 1024, reads_last=False),
        BoundaryCase(5, 31, 2048, state=False),
        BoundaryCase(4, 31, 1024, state=False, adds_sources=True),
        BoundaryCase(
            4, 31, 768, partial=False, reads_last=False, adds_sources=True, returns_last=False
        ),
        BoundaryCase(8, 31, 4096),
        BoundaryCase(4, 15, 7168, scale=5 / 6),
        BoundaryCase(2, 31, 1000, heads=5, dtype=fp16),
        BoundaryCase(5, 31, 768),
        BoundaryCase(3, 31, 1024, partial=False, dtype=fp32),
        BoundaryCase(2, 31, 1024, state=False, prior=True),
        BoundaryCase(2, 31, 1024, partial=False, prior=True),
        BoundaryCase(3, 1, 1024),
        BoundaryCase(33, 15, 1024),
        *(BoundaryCase(3, 63, 1024, dtype=dtype, gains=True) for dtype in (bf16, fp16, fp32)),
        BoundaryCase(3, 31, 4096, reads_last=False, gains=True),
        BoundaryCase(2, 31, 1000, heads=5, adds_sources=True, gains=True),
        BoundaryCase(2, 31, 1024, partial=False, prior=True, gains=True),
    ],
    ids=str,
)
@poisoned
def test_the_sublayer_boundary_keeps_the_error_budget(case: BoundaryCase):
    case.check("cuda")


@pytest.mark.parametrize(
    "case",
    [
        GroupCase(1, 1, 15, 96),
        GroupCase(9, 8, 63, 1024),
        GroupCase(9, 7, 63, 2048, heads=4),
        GroupCase(33, 8, 31, 4096),
        GroupCase(5, 4, 31, 7168),
        GroupCase(5, 16, 31, 1000, heads=8, head_norm="slice"),
        GroupCase(9, 5, 31, 1000, dtype=fp32),
        GroupCase(9, 5, 31, 1000, dtype=fp16),
        GroupCase(9, 8, 1, 1024),
        GroupCase(1, 1, 15, 96, output_dtype=bf16),
        GroupCase(9, 8, 257, 1024, output_dtype=bf16),
        GroupCase(28, 10, 129, 1024, output_dtype=bf16, carried=True),
        GroupCase(57, 16, 63, 4096, output_dtype=bf16, carried=True),
        GroupCase(129, 17, 31, 1000, output_dtype=bf16, carried=True),
        GroupCase(33, 8, 31, 7168, output_dtype=bf16),
        GroupCase(9, 8, 1, 1024, output_dtype=bf16),
    ],
    ids=str,
)
@poisoned
def test_phase_one_keeps_the_error_budget(case: GroupCase):
    case.check("cuda")


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(3, 2, 63, 16, 8, 128),
        AttentionCase(3, 1, 1, 16, 8, 128),
        AttentionCase(2, 2, 15, 4, 4, 64, dtype=fp32),
        AttentionCase(5, 2, 15, 6, 2, 80, value_width=48, dtype=fp16, transposed=False),
        AttentionCase(30, 1, 33, 4, 2, 64),
        AttentionCase(2, 2, 15, 4, 2, 64, strided_rows=True),
        AttentionCase(1, 2, 15, 4, 4, 64, kept=(0,), dtype=fp32),
        AttentionCase(2, 2, 63, 16, 8, 128, kept=(0,)),
        AttentionCase(3, 2, 63, 16, 8, 128, kept=(0, 1, 2)),
        AttentionCase(3, 2, 15, 32, 2, 80, value_width=48, kept=(0, 2), missing=3, dtype=fp16),
        AttentionCase(8, 1, 33, 4, 2, 64, kept=(0, 3, 7), missing=2),
        AttentionCase(9, 1, 33, 4, 2, 64, kept=(0, 3, 8), missing=4, transposed=False),
        AttentionCase(30, 1, 33, 4, 2, 64, kept=tuple(range(30)), missing=5),
    ],
    ids=str,
)
@poisoned
def test_depth_attention_keeps_the_error_budget(case: AttentionCase):
    case.check("cuda")


@pytest.mark.parametrize(
    "case",
    [
        StaticCase(1, 63, 1024),
        StaticCase(9, 63, 768, residual=True, scale=5 / 6, carried=True),
        StaticCase(24, 2049, 128, carried=True),
        StaticCase(7, 31, 999, fp16, offset=-1, residual=True),
        StaticCase(130, 15, 96, fp32, offset=1, carried=True),
        StaticCase(3, 65, 64, contiguous=False),
        SinkhornCase(1),
        SinkhornCase(65537),
        SinkhornCase(1001, 3, scale=3.0),
        SinkhornCase(33, 8, scale=100.0),
        SinkhornCase(5, 1),
    ],
    ids=str,
)
@poisoned
def test_static_weights_and_doubly_stochastic_matrices_keep_the_error_budget(case):
    case.check("cuda")


def draw(sources: int, tokens: int, width: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(tokens, width, device="cuda").to(bf16) for _ in range(sources)]
    query = torch.randn(width, device="cuda") / width**0.5
    return [s.requires_grad_() for s in made], query.requires_grad_()


def run(sources: list[Tensor], query: Tensor, grad: Tensor) -> list[Tensor]:
    x = ops.depth_mix(sources, query)
    return [x, *torch.autograd.grad(x, [*sources, query], grad)]


def test_auto_takes_triton_on_a_gpu_and_double_precision_does_not():
    sources, query = draw(3, 5, 64)
    with ops.record_backends() as ran:
        ops.depth_mix(sources, query)
    assert ran == {("depth_mix", "triton"): 1}
    with ops.record_backends() as ran:
        ops.depth_mix([s.double() for s in sources], query)
    assert ran == {("depth_mix", "torch"): 1}


@pytest.mark.parametrize("sources", [5, 33])
def test_repeated_runs_are_bit_equal(sources):
    made, query = draw(sources, 4099, 2048)
    grad = torch.randn(4099, 2048, device="cuda").to(bf16)
    first = run(made, query, grad)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(made, query, grad), strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("sources", [3, 33])
def test_a_captured_graph_replays_with_new_values(sources):
    made, query = draw(sources, 257, 1024)
    grad = torch.randn(257, 1024, device="cuda").to(bf16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(made, query, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(made, query, grad)
    torch.empty(2**22, device="cuda").fill_(float("nan"))  # whatever was freed is overwritten
    with torch.no_grad():
        for tensor in (*made, query, grad):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    expected = run(made, query, grad)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("sources", [3, 33])
def test_it_compiles_into_one_graph(sources):
    made, query = draw(sources, 64, 256)
    grad = torch.randn(64, 256, device="cuda").to(bf16)
    compiled = torch.compile(lambda s, q: 2 * ops.depth_mix(s, q), fullgraph=True)
    with ops.record_backends() as ran:
        x = compiled(made, query)
        found = [x, *torch.autograd.grad(x, [*made, query], grad)]
    assert ran == {("depth_mix", "triton"): 1, ("depth_mix_backward", "triton"): 1}
    y = 2 * ops.depth_mix(made, query)  # exact, so nothing depends on what is fused
    expected = [y, *torch.autograd.grad(y, [*made, query], grad)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_registered_ops_pass_opcheck():
    sources, query = draw(3, 5, 96)
    sources, query = [s.detach() for s in sources], query.detach()
    options = (1e-6, 4, False, False, 1.0, 1e-6, bf16, False, True, False)
    torch.library.opcheck(
        torch.ops.depthroute.depth_mix_triton.default,
        (sources, query, *[None] * 6, False, *options),
    )
    queries = torch.randn(3, 96, device="cuda")
    torch.library.opcheck(
        torch.ops.depthroute.depth_mix_group_triton.default,
        (sources, queries, 1e-6, 4, False, fp32),
    )
    q, k, v = (torch.randn(2, 5, 4, 32, device="cuda").transpose(1, 2) for _ in range(3))
    torch.library.opcheck(
        torch.ops.depthroute.depth_attention_mix_triton.default, (q, [k], [v], 0.2)
    )


def test_autocast_and_sources_off_the_alignment():
    base = torch.randn(3 * 65 * 96 + 1, device="cuda").to(bf16)
    sources = list(base[1:].view(3, 65, 96).unbind())  # 2 bytes off the 16 of an allocation
    query = torch.randn(96, device="cuda") / 8
    with torch.autocast("cuda", bf16):
        found = ops.depth_mix(sources, query)
    expected = ops.depth_mix(sources, query, backend="torch")
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_more_elements_than_32_bits_address():
    tokens, width = 2**20 + 3, 2048
    torch.manual_seed(0)
    sources = [torch.randn(tokens, width, device="cuda", dtype=bf16) for _ in range(2)]
    query = torch.randn(width, device="cuda") / width**0.5
    for source in sources:
        source.requires_grad_()
    x = ops.depth_mix(sources, query)
    x.backward(torch.ones_like(x))
    tail = [s.detach()[-5:].clone().requires_grad_() for s in sources]
    y = ops.depth_mix(tail, query)
    y.backward(torch.ones_like(y))
    assert torch.equal(x[-5:], y)
    for source, end in zip(sources, tail, strict=True):
        assert source.grad is not None and end.grad is not None
        assert torch.equal(source.grad[-5:], end.grad)


def test_one_launch_reads_a_few_tokens_for_decoding():
    sources, query = draw(9, 1, 1024)
    weight = torch.ones(1024, device="cuda", dtype=bf16)
    with torch.no_grad(), ops.record_backends() as ran:
        x, y = ops.depth_mix(sources, query, residual=sources[0], norm_weight=weight)
    assert ran == {("depth_mix", "triton"): 1}
    torch.testing.assert_close(y, ops.reference.rms_norm(x, weight))
