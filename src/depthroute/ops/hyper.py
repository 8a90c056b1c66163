"""Several residual streams (mHC): what a sublayer reads of them, and what becomes of them.

Torch's own operations. Compiled, a compiler fuses them; run eagerly, nothing as large as a stream
is kept for backward but the arguments, and the rest is computed again. The twenty normalisations of
small matrices are an op in either case, with a kernel: a graph of them would be longer than the
model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from depthroute.errors import DepthrouteError
from depthroute.ops import reference
from depthroute.ops._checks import check_sources
from depthroute.ops._torch import unrounded
from depthroute.ops.backends import RUNS, choose, ran_by_definition
from depthroute.ops.private.dispatch import FromTriton, Op, applied
from depthroute.ops.private.transforms import no_derivative, refuse_batched


def hyper_read(
    streams: Tensor,
    projection: Tensor,
    bias: Tensor,
    factors: Tensor,
    backend: str = "auto",
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a sublayer reads of ``streams`` ``[..., n, D]``, and the two weights that
    :func:`hyper_write` is to be given: ``post`` ``[..., n]`` and ``res`` ``[..., n, n]``.

    ``projection`` is ``[2n + n*n, n*D]``, ``bias`` ``[2n + n*n]`` and ``factors`` ``[3]``, each for
    pre, post and res in this order. See :func:`depthroute.ops.reference.hyper_read` for the
    definition.

    >>> streams, n = torch.ones(5, 2, 8), 2
    >>> x, post, res = hyper_read(streams, torch.zeros(8, 16), torch.zeros(8), torch.ones(3))
    >>> x.unique().item(), post.unique().item(), res.unique().item()
    (1.0, 1.0, 0.5)
    """
    check_sources([streams], None, {"projection": projection, "bias": bias, "factors": factors})
    _check_sizes(streams, projection, bias, factors)
    given = streams, projection, bias, factors
    if _runs_definition("hyper_read", streams, backend):
        return reference.hyper_read(*given, eps=eps)

    def read(streams: Tensor, projection: Tensor, bias: Tensor, factors: Tensor) -> Any:
        return _read(streams, projection, bias, factors, eps)

    x, post, logits = _run("hyper_read", read, given)
    return x, post, doubly_stochastic(logits, backend)


def hyper_write(
    streams: Tensor, output: Tensor, post: Tensor, res: Tensor, backend: str = "auto"
) -> Tensor:
    """``res @ streams + post * output``: the streams after a sublayer put out ``[..., D]``."""
    check_sources([streams], None, {"output": output, "post": post, "res": res})
    expected = {"output": (*streams.shape[:-2], streams.shape[-1]), "post": streams.shape[:-1]}
    expected["res"] = *streams.shape[:-1], streams.shape[-2]
    for name, tensor in (("output", output), ("post", post), ("res", res)):
        if tensor.shape != expected[name]:
            raise DepthrouteError(
                f"{name} has shape {tuple(tensor.shape)}; streams of {tuple(streams.shape)} need "
                f"{tuple(expected[name])}"
            )
    given = streams, output, post, res
    if _runs_definition("hyper_write", streams, backend):
        return reference.hyper_write(*given)
    return _run("hyper_write", _write, given)


def doubly_stochastic(logits: Tensor, backend: str = "auto") -> Tensor:
    """``exp(logits)`` ``[..., n, n]`` with columns and rows brought to the sum one in turns."""
    kind = logits.device.type, backend, logits.dtype, logits.shape[-1] ** 2
    chosen = choose("doubly_stochastic", *kind).backend
    if chosen == "reference":
        ran_by_definition("doubly_stochastic")
        return reference.doubly_stochastic(logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        return applied(DoublyStochastic, chosen, logits)
    return FORWARD[chosen](Projected(logits))


def _check_sizes(streams: Tensor, projection: Tensor, bias: Tensor, factors: Tensor) -> None:
    if streams.ndim < 2:
        raise DepthrouteError(f"streams has shape {tuple(streams.shape)}; give [..., n, D]")
    count, width = streams.shape[-2:]
    size = 2 * count + count * count
    expected = {"projection": (size, count * width), "bias": (size,), "factors": (3,)}
    for name, tensor in (("projection", projection), ("bias", bias), ("factors", factors)):
        if tensor.shape != expected[name]:
            raise DepthrouteError(
                f"{name} has shape {tuple(tensor.shape)}; {count} streams of width {width} need "
                f"{list(expected[name])}"
            )


def _runs_definition(op: str, example: Tensor, backend: str) -> bool:
    is_definition = choose(op, example.device.type, backend).backend == "reference"
    if is_definition:
        ran_by_definition(op)
    return is_definition


def _run(op: str, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
    if torch.compiler.is_compiling():
        return function(*tensors)
    RUNS[op, "torch"] += 1
    return Recomputed.apply(op, function, *tensors)


class Recomputed(torch.autograd.Function):
    """``function(*tensors)``, of which nothing but the tensors is kept for backward."""

    @staticmethod
    def forward(ctx, op, function, *tensors):
        ctx.op, ctx.function = op, function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched(ctx.op, "torch", *grads)
        if torch.is_grad_enabled():
            no_derivative(ctx)
        needs = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needs, strict=True)
        tensors = [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]
        with torch.enable_grad():
            results = ctx.function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, grads))
        return None, None, *(next(found) if needed else None for needed in needs)


def _read(
    streams: Tensor, projection: Tensor, bias: Tensor, factors: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All but the rounds that make the last one, logits here, doubly stochastic."""
    with unrounded(streams.device.type):
        wide = reference.widen(streams)
        flat, count = wide.flatten(-2), streams.shape[-2]
        rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        # the norm is a factor of each token, so it may follow the projection
        projected = functional.linear(flat, projection.to(wide.dtype)) * rstd
        pre, post, res = reference.hyper_logits(projected, bias, factors, count)
        x = (torch.sigmoid(pre).unsqueeze(-1) * wide).sum(-2)
        return x.to(streams.dtype), 2 * torch.sigmoid(post), res


def _write(streams: Tensor, output: Tensor, post: Tensor, res: Tensor) -> Tensor:
    with unrounded(streams.device.type):
        mixed = _weighted(res, streams.to(res.dtype))
        written = torch.addcmul(mixed, post.unsqueeze(-1), output.to(res.dtype).unsqueeze(-2))
        return written.to(streams.dtype)


def _weighted(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows``; a compiler fuses the sum of products, and not a product of matrices."""
    if torch.compiler.is_compiling():
        return (weights.unsqueeze(-1) * rows.unsqueeze(-3)).sum(-2)
    return weights @ rows


class Projected(NamedTuple):
    logits: Tensor


class ProjectedBackward(NamedTuple):
    grad: Tensor
    logits: Tensor


def _steps(logits: Tensor) -> list[tuple[Tensor, Tensor, int]]:
    """Every matrix on the way with the sums that it was divided by and their dimension.

    Tokens come last: sums over the few rows and columns are then additions of long vectors.
    """
    first = torch.log_softmax(logits.movedim((-2, -1), (0, 1)), 0)
    matrix = torch.softmax(first, 1)
    steps = [(first, matrix, -1)]
    for _ in range(reference.SINKHORN_ITERATIONS - 1):
        for dim in (0, 1):
            total = matrix.sum(dim, keepdim=True)
            matrix = matrix / total
            steps.append((total, matrix, dim))
    return steps


def _project(record: Projected) -> Tensor:
    *_, (_, matrix, _) = _steps(record.logits)
    return matrix.movedim((0, 1), (-2, -1)).contiguous()


def _project_backward(record: ProjectedBackward) -> Tensor:
    (first, start, _), *steps = _steps(record.logits)
    grad = record.grad.movedim((-2, -1), (0, 1)).contiguous()
    for total, matrix, dim in reversed(steps):
        grad = (grad - (grad * matrix).sum(dim, keepdim=True)) / total
    grad = start * (grad - (grad * start).sum(1, keepdim=True))
    grad = grad - first.exp() * grad.sum(0, keepdim=True)
    return grad.movedim((0, 1), (-2, -1)).contiguous()


def _fake(*tensors: Tensor) -> Tensor:
    return tensors[-1].new_empty(tensors[-1].shape)


FORWARD = {
    "torch": Op("doubly_stochastic", Projected, Tensor, _fake, _project),
    "triton": Op(
        "doubly_stochastic_triton", Projected, Tensor, _fake, FromTriton("sinkhorn", "project")
    ),
}
_backward = ProjectedBackward, Tensor, _fake
_launched = FromTriton("sinkhorn", "project_backward")
BACKWARD = {
    "torch": Op("doubly_stochastic_backward", *_backward, _project_backward),
    "triton": Op("doubly_stochastic_triton_backward", *_backward, _launched),
}


class DoublyStochastic(torch.autograd.Function):
    """Keeps the logits and does the steps again, which are many and small."""

    @staticmethod
    def forward(ctx, backend, logits):
        ctx.save_for_backward(logits)
        ctx.backend = backend
        return FORWARD[backend](Projected(logits))

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("doubly_stochastic", ctx.backend, grad)
        record, op = ProjectedBackward(grad, *ctx.saved_tensors), BACKWARD[ctx.backend]
        return None, op.dispatched(*record) if torch.is_grad_enabled() else op(record)
