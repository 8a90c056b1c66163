"""The ops as PyTorch sees them: schema, fake, autograd, compilation."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from depthroute import ops
from depthroute.ops import _record, _torch, mix
from depthroute.ops._record import Group, GroupResults, Mix, MixBackward
from depthroute.ops.private import dispatch


def normal(*shape: int, dtype=torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def mix_arguments(case: str):
    sources = [normal(5, 8) for _ in range(3)]
    dtype = torch.float32
    if case == "bfloat16":
        dtype = torch.bfloat16
        sources = [normal(5, 8, dtype=dtype) for _ in range(3)]
    residual = prior = lse = None
    heads, slice_norm, offset, scale = 1, False, 0, 1.0
    if case == "residual":
        residual, scale = normal(5, 8), 0.75
    if case == "heads":
        heads, slice_norm, offset = 2, True, -1
    if case == "prior":
        prior, lse, heads, sources = normal(5, 8), normal(5, 2), 2, sources[:1]
    if case == "prior_alone":
        prior, lse, sources = normal(5, 8), normal(5, 1), []
    nothing_pushed = None, None, None, False
    return Mix(
        *(sources, normal(8), residual, prior, lse, *nothing_pushed),
        *(1e-6, heads, slice_norm, offset, scale, 1e-6, dtype),
    )


@pytest.mark.parametrize("case", ["plain", "bfloat16", "residual", "heads", "prior", "prior_alone"])
def test_depth_mix_passes_opcheck(case):
    opcheck(torch.ops.depthroute.depth_mix.default, tuple(mix_arguments(case)))


@pytest.mark.parametrize(("heads", "slice_norm"), [(1, False), (2, False), (2, True)])
def test_depth_mix_group_passes_opcheck(heads, slice_norm):
    sources = [normal(5, 8) for _ in range(3)]
    arguments = (sources, normal(4, 8), 1e-6, heads, slice_norm, torch.bfloat16)
    opcheck(torch.ops.depthroute.depth_mix_group.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depth_attention_mix_passes_opcheck(dtype):
    keys = [normal(2, 2, 3, 4, dtype=dtype) for _ in range(3)]
    values = [normal(2, 2, 3, 5, dtype=dtype) for _ in range(3)]
    arguments = (normal(2, 4, 3, 4, dtype=dtype), keys, values, 0.5)
    opcheck(torch.ops.depthroute.depth_attention_mix.default, arguments)


def test_the_backward_ops_pass_opcheck_for_schema_and_fake():
    utilities = ("test_schema", "test_faketensor")
    for case in ("plain", "heads", "prior", "prior_alone"):
        given = mix_arguments(case)
        stats, _ = torch.ops.depthroute.depth_mix(*given)
        back = MixBackward(
            *(
                normal(5, 8),
                [],
                None,
                None,
                [],
                given.sources,
                given.query,
                given.prior,
                given.prior_lse,
            ),
            *(None, None, None, stats, given.heads, given.slice_norm, given.offset, given.scale),
            *(False, False, False, False, False, None),
        )
        op = torch.ops.depthroute.depth_mix_backward.default
        opcheck(op, tuple(back), test_utils=utilities)

    sources, queries = [normal(5, 8) for _ in range(3)], normal(4, 8)
    settings = 1e-6, 2, True, torch.float32
    out, lse, rstd, logits = torch.ops.depthroute.depth_mix_group(sources, queries, *settings)
    grads = [*torch.ones_like(out)], torch.ones_like(lse), []
    arguments = (*grads, sources, queries, rstd, logits, lse, 2, True)
    op = torch.ops.depthroute.depth_mix_group_backward.default
    opcheck(op, arguments, test_utils=utilities)

    query, pairs = normal(2, 4, 3, 4), [normal(2, 2, 3, 4) for _ in range(4)]
    out, kept = torch.ops.depthroute.depth_attention_mix(query, pairs[:2], pairs[2:], 0.5)
    op = torch.ops.depthroute.depth_attention_mix_backward.default
    for carried, places in (([], []), ([normal(2, 4, 3, 4), *pairs[:3]], [0, 2, 1, 2])):
        arguments = ([out, out], carried, places, query, pairs[:2], pairs[2:], kept, 0.5)
        opcheck(op, arguments, test_utils=utilities)


def test_the_ops_compile_without_a_graph_break_and_give_the_same_gradients():
    def step(query, gain, residual, *sources):
        outputs, lses = ops.depth_mix_group(sources[:2], query[None], gain[None], heads=2)
        merged = ops.depth_mix_merge(
            outputs[0], lses[0], sources[2:], query, gain, residual=residual, heads=2
        )
        x = ops.depth_mix([*sources, merged], query, gain, residual, scale=0.8)
        split = [t.view(2, 3, 2, 4).transpose(1, 2) for t in (x, *sources)]
        return ops.depth_attention_mix(split[0], split[1:], split[1:])

    def results(function):
        torch.manual_seed(0)
        tensors = [normal(8), normal(8), *(normal(2, 3, 8) for _ in range(4))]
        tensors = [t.requires_grad_() for t in tensors]
        out = function(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    compiled = results(torch.compile(step, fullgraph=True))
    for actual, expected in zip(compiled, results(step), strict=True):
        assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_an_undefined_gradient_passes_through():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    sources, query = [normal(5, 8) for _ in range(3)], normal(8)
    for tensor in (*sources, query):
        tensor.requires_grad_()
    x = Stop.apply(ops.depth_mix(sources, query))
    x.sum().backward()
    assert all(t.grad is None or not t.grad.any() for t in (*sources, query))


def test_an_op_of_a_torch_that_is_not_known_takes_the_ordinary_route(monkeypatch):
    monkeypatch.setattr(dispatch, "IS_KNOWN", False)
    group = Group([normal(5, 8) for _ in range(3)], normal(4, 8), 1e-6, 1, False, torch.float32)
    op = dispatch.Op(
        "depth_mix_group_unknown", Group, GroupResults, _record.fake_group, _torch.group_forward
    )
    expected = _torch.group_forward(group)
    for actual in (op(group), op.dispatched(*group)):
        for mine, other in zip(actual, expected, strict=True):
            assert_close(mine, other)
    opcheck(op.dispatched, tuple(group))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_launch_is_dispatched_for_whoever_sees_or_replaces_tensors():
    """And for nobody else: the function here notes what reaches it."""
    reached = []

    def function(group):
        reached.append(group)
        return _torch.group_forward(group)

    op = dispatch.Op(
        "depth_mix_group_triton_noted", Group, GroupResults, _record.fake_group, function
    )
    group = Group([normal(5, 8) for _ in range(3)], normal(4, 8), 1e-6, 1, False, torch.float32)
    op(group)
    assert reached.pop() is group, "dispatched for nothing"

    with Seen() as seen:
        op(group)
    assert "depthroute.depth_mix_group_triton_noted.default" in seen.names
    assert reached.pop() is not group

    with torch.profiler.profile(acc_events=True) as profile:
        op(group)
    names = {event.key for event in profile.key_averages()}
    assert "depthroute::depth_mix_group_triton_noted" in names
    reached.clear()

    for replace in (FakeTensorMode().from_tensor, lambda tensor: tensor.to("meta")):
        replaced = Group([*map(replace, group.sources)], replace(group.queries), *group[2:])
        made = op(replaced)
        assert made[0].shape == (4, 5, 8)
        assert not reached, "a tensor without memory reached the kernel"


def test_the_fields_of_a_record_are_the_arguments_of_its_op():
    for op in (*mix.FORWARD.values(), *mix.BACKWARD.values()):
        declared = [argument.name for argument in op.dispatched._schema.arguments]
        assert declared == [*op.record._fields]


@pytest.mark.parametrize("case", ["plain", "bfloat16", "residual", "heads", "prior", "prior_alone"])
def test_gradients_of_a_traced_mix_are_those_of_the_eager_one(case):
    """What opcheck cannot see, since the ops leave gradients to the function that calls them."""
    given = mix_arguments(case)
    tensors = [t for t in (*given.sources, *given.tensors) if t is not None]
    for tensor in tensors:
        tensor.requires_grad_()

    def run():
        return ops.boundary(given, None, ops.Wants(), "torch").x

    traced = torch.compile(run, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(
        (traced(), *torch.autograd.grad(traced().float().square().sum(), tensors)),
        (run(), *torch.autograd.grad(run().float().square().sum(), tensors)),
        strict=True,
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(8,), (1, 1, 8), (1, 3, 8), (16, 8)])
@pytest.mark.parametrize(("scale", "has_residual"), [(1.0, False), (5.0, False), (0.5, True)])
def test_few_tokens_without_a_gradient_are_mixed_as_many_are(shape, dtype, scale, has_residual):
    sources, query = [normal(*shape, dtype=dtype) for _ in range(5)], normal(8, dtype=dtype)
    residual = normal(*shape, dtype=dtype) if has_residual else None
    settings = {"residual": residual, "scale": scale}
    given = Mix(sources, query, residual, *[None] * 5, False, 1e-6, 1, False, 0, scale, 0.0, dtype)
    assert _torch.is_few(given)
    more = given._replace(sources=[normal(17, 8, dtype=dtype)])
    assert not _torch.is_few(more)
    expected = ops.reference.depth_mix(sources, query, **settings)
    assert_close(ops.depth_mix(sources, query, backend="torch", **settings), expected)


@pytest.mark.parametrize("case", ["plain", "bfloat16", "residual", "heads", "prior", "prior_alone"])
def test_a_compiler_sees_into_a_mix_that_keeps_nothing_for_backward(case):
    """It fuses the arithmetic with what is around it, where a call of ours would cost more."""
    given, graphs = mix_arguments(case), []

    def run(record):
        return mix.boundary(record, None, mix.Wants(returns_last=False, hands_on=False), "torch").x

    def captured(graph, _):
        graphs.append(graph.code)
        return graph

    with torch.no_grad():
        traced = torch.compile(run, backend=captured, fullgraph=True)(given)
        assert_close(traced, run(given))
    assert len(graphs) == 1 and "depthroute" not in graphs[0]
