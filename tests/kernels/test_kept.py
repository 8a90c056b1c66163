"""What boundaries keep for backward: a sublayer's input, which it keeps itself, and no state.

In Triton's interpreter; started by test_kernels_interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthroute import RoutingConfig, nn, ops
from depthroute.plan import Plan

pytestmark = pytest.mark.interpreter
LAYERS, WIDTH, ROWS, EPS = 3, 32, (1, 2, 32), 1e-6
METHODS = {
    "block sums": {"num_blocks": 2},
    "a state": {"num_blocks": 2, "init": "complete"},
    "a source a sublayer": {},
    "two phases": {"evaluation": "two_phase", "group_size": 3},
}


class Stack(torch.nn.Module):
    """Sublayers of one matrix each, behind norms that the kernels apply, with a gain of zero."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan, self.sites = plan, nn.Sites(plan, WIDTH)
        count = plan.num_sublayers
        self.matrices = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(count))
        self.matrices.to(dtype)
        self.gains = torch.nn.ParameterList(torch.randn(WIDTH) for _ in range(count))
        self.embedding = torch.nn.Parameter(torch.randn(ROWS).to(dtype))
        with torch.no_grad():
            for parameter in self.sites.parameters():
                parameter.normal_()
            for gain in self.gains:
                gain[3] = 0.0

    def forward(
        self, seen: Callable[..., None] = lambda *_: None, recompute: bool = False
    ) -> Tensor:
        stream = nn.ResidualStream.start(self.embedding, self.plan, sites=self.sites)
        for index in range(0, self.plan.num_sublayers, 2):

            def layer(*tensors: Tensor, before=stream) -> tuple[Tensor, ...]:
                return tuple(self.layer(before.with_tensors(list(tensors)), seen).tensors())

            if recompute:
                after = checkpoint(layer, *stream.tensors(), use_reentrant=False)
                stream = stream.with_tensors(list(after), index + 2)  # pyright: ignore
            else:
                stream = self.layer(stream, seen)
        return stream.finish(self.sites.at(stream.index))

    def layer(self, stream: nn.ResidualStream, seen: Callable[..., None]) -> nn.ResidualStream:
        for _ in "am":
            index, gain = stream.index, self.gains[stream.index]
            norm = nn.PreNorm(lambda x, gain=gain: ops.reference.rms_norm(x, gain, EPS), gain, EPS)
            x, stream = stream.read(self.sites.at(index), norm)
            seen(x, stream)
            stream = stream.push(x @ self.matrices[index])
        return stream


def stack(name: str, dtype: torch.dtype = torch.bfloat16) -> Stack:
    return Stack(RoutingConfig("delta", **METHODS[name]).resolve(LAYERS, width=WIDTH), dtype)


class Seen:
    """What a stack is made of, as it runs: the tensors stay, so that no two share an address."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.sources: list[Tensor] = []
        """Of the mixes, finished groups among them."""
        self.sums: list[Tensor] = []

    def __call__(self, x: Tensor, stream: nn.ResidualStream) -> None:
        self.inputs.append(x)
        self.sources += [*stream.sources, *(output for output, _ in stream.priors)]
        partials = [] if stream.partial is None else [stream.partial]
        if stream.place.reads_unfinished:
            self.sources += partials
        self.sums += partials if stream.state is None else [stream.state, *partials]


def stored(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_stack_keeps_what_its_sublayers_and_mixes_read_and_no_state(name, dtype):
    model, seen, kept = stack(name, dtype), Seen(), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with ops.backend("triton"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(seen)
    read = stored(seen.inputs) | stored(seen.sources)
    assert len(stored(seen.sums) - read) >= LAYERS
    assert not stored(kept) & stored(seen.sums) - read, "a sum is kept that nobody reads"
    assert stored(seen.inputs) <= stored(kept)
    made = [x for x in seen.inputs if x.grad_fn.name() == "DepthMixBackward"]  # pyright: ignore
    assert len(made) >= LAYERS
    for x in made:
        rows = [t for t in x.grad_fn.saved_tensors if t is not None and t.shape == ROWS]  # pyright: ignore
        assert stored(rows) - stored(seen.sources) <= stored([x])


@pytest.mark.parametrize("name", [*METHODS][:3])
def test_a_compiled_stack_keeps_no_more(name):
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    model, seen, graphs, grads = stack(name), Seen(), [], []

    def compiler(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    partition = min_cut_rematerialization_partition  # as Inductor does
    backend = aot_autograd(fw_compiler=compiler, partition_fn=partition)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with ops.backend("triton"):
        for out in (compiled(), model(seen)):
            grads.append(torch.autograd.grad(out.float().sum(), [*model.parameters()]))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    _, *kept = graphs[0].find_nodes(op="output")[0].args[0]
    rows = {unviewed(node) for node in kept if node.meta["val"].shape.numel() == prod(ROWS)}
    assert len(rows) <= len(stored(seen.inputs) | stored(seen.sources))


def unviewed(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory it is."""
    aten = torch.ops.aten
    views = aten.view.default, aten._unsafe_view.default, aten.t.default
    return unviewed(node.all_input_nodes[0]) if node.target in views else node


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_definition_at_a_gain_of_zero_too(name, recompute):
    model, found = stack(name, torch.float32), {}
    for backend in ("triton", "reference"):
        with ops.backend(backend):
            out = model(recompute=recompute and backend == "triton")
            found[backend] = torch.autograd.grad(out.sin().sum(), [*model.parameters()])
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    of_gains = found["triton"][[n for n, _ in model.named_parameters()].index("gains.1")]
    assert of_gains[3].abs() > 1e-3


def test_a_gain_with_an_offset_may_cancel_it():
    """As where a family adds 1 to a stored weight."""
    torch.manual_seed(0)
    rows = [torch.randn(3, WIDTH, requires_grad=True) for _ in range(4)]
    query, weight = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH) / 4
    weight[5:8] = torch.tensor([-1.0, -1.0 + 2**-24, -1.5])
    weight.requires_grad_()
    grads = []
    for backend in ("triton", "reference"):
        done = ops.depth_boundary(
            rows[0], rows[1:3], query, None, rows[3], norm_weight=weight + 1.0, reads_last=True,
            returns_x=False, backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(done.y[:, 5], torch.zeros(3), rtol=0, atol=1e-16)
        grads.append(torch.autograd.grad(done.y.sin().sum(), [*rows, query, weight]))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_sublayer_that_writes_into_its_input_is_told():
    rows = [torch.randn(3, WIDTH, requires_grad=True) for _ in range(3)]
    query, weight = torch.randn(WIDTH), torch.rand(WIDTH)
    done = ops.depth_boundary(
        None, rows[:2], query, None, rows[2], norm_weight=weight, returns_x=False, backend="triton"
    )
    done.y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        done.y.sum().backward()
