"""Gradients that come back in parts are added up by the kernel that reads them."""

from __future__ import annotations

import pytest
import torch

from depthroute import ops
from depthroute.ops.private import inductor
from depthroute.ops.private.inductor import compile_options, pass_terms

WIDTH = 96
ROWS = (2, 2, WIDTH)  # each is a program of its own, which takes an interpreter long
backward = torch.ops.depthroute.depth_mix_triton_backward.default
with_known_torch = pytest.mark.skipif(
    not inductor.IS_KNOWN, reason="Inductor of this torch is told nothing"
)


def sublayer(sources, output, query, weight, projections, elsewhere=False):
    """y is read by every projection; ``elsewhere`` also makes a gradient that is used twice."""
    done = ops.depth_boundary(
        output, sources, query, norm_weight=weight, reads_last=True, returns_x=False,
        backend="triton",
    )  # fmt: skip
    y = done.y * 2 if elsewhere else done.y
    return [y @ p for p in projections]


def inputs(dtype, projections, device="cpu"):
    torch.manual_seed(0)

    def leaf(*shape, kind=dtype):
        made = torch.randn(shape) / (WIDTH**0.5 if shape == (WIDTH, WIDTH) else 1.0)
        return made.to(device, kind).requires_grad_()

    rows = [leaf(*ROWS) for _ in range(3)]
    query, weight = leaf(WIDTH, kind=torch.float32), leaf(WIDTH, kind=torch.float32)
    return rows[:2], rows[2], query, weight, [leaf(WIDTH, WIDTH) for _ in range(projections)]


def with_gradients(function, dtype, projections, device="cpu", **options):
    sources, output, query, weight, square = inputs(dtype, projections, device)
    found = function(sources, output, query, weight, square, **options)
    leaves = [*sources, output, query, weight, *square]
    return [*found, *torch.autograd.grad(found, leaves, [torch.ones_like(f) for f in found])]


def compiled_with_the_pass(graphs):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def change(graph, example):
        pass_terms(graph.graph)
        graph.graph.lint()
        graph.recompile()
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(sublayer, fullgraph=True, backend=aot_autograd(fw_compiler=change))


def parts(graphs) -> list[int]:
    found = [n for g in graphs for n in g.find_nodes(op="call_function", target=backward)]
    return [len(node.args[1]) for node in found]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "projections"),
    [(torch.float32, 1), (torch.bfloat16, 2), (torch.float32, 3), (torch.bfloat16, 3)],
    ids=str,
)
def test_a_kernel_reads_the_gradients_of_all_projections(dtype, projections):
    graphs = []
    found = with_gradients(compiled_with_the_pass(graphs), dtype, projections)
    assert parts(graphs) == [projections]
    sums = [n for g in graphs for n in g.nodes if n.target is torch.ops.aten.add.Tensor]
    assert not [n for n in sums if n.meta["val"].shape == ROWS], "no sum is left"
    expected = with_gradients(sublayer, dtype, projections)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.double().norm()


@with_known_torch
@pytest.mark.interpreter
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_itself_passes_all_of_them(dynamic, monkeypatch):
    graphs = []

    def noted(graph):
        pass_terms(graph)
        graphs.append(graph)

    monkeypatch.setattr(inductor, "pass_terms", noted)
    torch._dynamo.reset()
    options = compile_options()
    compiled = torch.compile(sublayer, fullgraph=True, dynamic=dynamic, options=options)
    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    with caches, torch._inductor.config.patch(fx_graph_cache=False):  # or no graph may pass here
        found = with_gradients(compiled, torch.float32, 3)
    assert parts(graphs) == [3]
    for one, other in zip(found, with_gradients(sublayer, torch.float32, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter
def test_too_many_parts_and_what_is_no_sum_stay_as_they_are():
    for projections, options in ((5, {}), (2, {"elsewhere": True})):
        graphs = []
        found = with_gradients(
            compiled_with_the_pass(graphs), torch.float32, projections, **options
        )
        assert parts(graphs) == [1]
        expected = with_gradients(sublayer, torch.float32, projections, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_what_is_in_parts_already_loses_none():
    def node(name):
        one = graph.placeholder(name)
        one.meta["val"] = torch.empty(2, WIDTH)
        return one

    graph = torch.fx.Graph()
    a, b, c = map(node, "abc")
    total = graph.call_function(torch.ops.aten.add.Tensor, (b, c))
    total.meta["val"] = torch.empty(2, WIDTH)
    call = graph.call_function(backward, (None, [a, total]))
    graph.output(call)
    pass_terms(graph)
    assert list(call.args[1]) == [a, b, c]
    pass_terms(graph)
    assert list(call.args[1]) == [a, b, c], "and it may be run again"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("sources", "width", "dtype"),
    [
        (2, 96, torch.float32),
        (2, 1000, torch.bfloat16),
        (3, 96, torch.float16),
        (18, 96, torch.bfloat16),
    ],
    ids=str,
)
def test_parts_of_a_gradient_are_their_sum_rounded_once(sources, width, dtype):
    torch.manual_seed(0)
    rows = [torch.randn(2, width).to(dtype) for _ in range(sources + 4)]
    query, weight = torch.randn(width) / width**0.5, torch.rand(width)
    stats, (x, *_) = torch.ops.depthroute.depth_mix_triton.default(
        rows[:sources], query, None, None, None, weight, None, None, False, 1e-6, 1, False, 0, 1.0,
        1e-6, dtype, False, True, False,
    )  # fmt: skip

    def gradients(grads):
        dsources, dweights, _ = backward(
            rows[-1], grads, None, None, [], rows[:sources], query, None, None, weight, x, None,
            stats, 1, False, 0, 1.0, False, False, False, False, False, None,
        )  # fmt: skip
        return [*dsources, dweights]

    terms = rows[sources : sources + 3]
    for count in (2, 3):
        wide = sum((t.float() for t in terms[1:count]), start=terms[0].float())
        together = gradients([wide.to(dtype)])
        apart = gradients(terms[:count])
        for one, other in zip(apart, together, strict=True):
            if sources < 18:
                assert torch.equal(one, other)
            else:  # streamed: torch adds them up, rounding every sum
                assert (one.double() - other).norm() <= 1e-2 * other.double().norm()


@pytest.mark.interpreter
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("used", ["both", "state", "mix"])
def test_a_residual_is_handed_on_with_its_gradient(norm, used):
    def run(hands_state_on):
        torch.manual_seed(0)
        rows = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(3)]
        query, weight = torch.randn(WIDTH, requires_grad=True), torch.rand(WIDTH)
        done = ops.depth_boundary(
            None, rows[:2], query, None, rows[2], scale=0.5, backend="triton",
            norm_weight=weight if norm else None, hands_state_on=hands_state_on,
        )  # fmt: skip
        assert torch.equal(done.state, rows[2]) and (done.state is rows[2]) != hands_state_on
        total = 0.0
        if used != "state":
            total = total + (done.y if norm else done.x).square().sum()
        if used != "mix":
            total = total + done.state.sin().sum()
        return torch.autograd.grad(total, [*rows, query], allow_unused=True)

    for one, other in zip(run(True), run(False), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@with_known_torch
def test_options_leave_a_pass_of_the_user_alone(monkeypatch):
    from torch._inductor import config

    (name,) = compile_options()
    assert compile_options()[name] is compile_options()[name]
    assert isinstance(compile_options()[name].uuid(), bytes)
    with config.patch({name: lambda graph: None}):
        assert compile_options() == {}
    monkeypatch.setattr(inductor, "IS_KNOWN", False)
    assert compile_options() == {}
