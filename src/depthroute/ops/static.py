"""The mix whose weights are parameters: S numbers, the same for every token.

A compiler fuses the definition. Run eagerly, the sources are read one after the other, by kernels
or by torch, and nothing as large as they is made but x; torch makes one wide sum besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import reference
from depthroute.ops._checks import check_sources, weight_offset
from depthroute.ops.backends import RUNS, choose, ran_by_definition
from depthroute.ops.mix import gathered
from depthroute.ops.private.dispatch import FromTriton, Op
from depthroute.ops.private.transforms import no_derivative, refuse_batched


def static_mix(
    sources: Sequence[Tensor],
    logits: Tensor,
    residual: Tensor | None = None,
    backend: str = "auto",
    *,
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x = scale * (residual + sum_n softmax_n(logits) s_n)``.

    ``sources`` is a list of tensors ``[..., D]`` and ``logits`` is ``[S]``. ``centered`` takes 1/S
    from every weight, ``adds_sources`` adds 1 to it. See
    :func:`depthroute.ops.reference.static_mix` for the definition.

    >>> a, b = torch.ones(2, 3, 8), torch.zeros(2, 3, 8)
    >>> static_mix([a, b], torch.zeros(2)).unique().item()
    0.5
    """
    options = {"centered": centered, "adds_sources": adds_sources, "scale": scale, "dtype": dtype}
    return static_mix_carried(sources, logits, residual, backend, hands_on=False, **options)[0]


def static_mix_carried(
    sources: Sequence[Tensor],
    logits: Tensor,
    residual: Tensor | None = None,
    backend: str = "auto",
    *,
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    hands_on: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """:func:`static_mix`, and the sources to be read by later sites, as
    :func:`~depthroute.ops.depth_mix_carried` has them; where no kernel runs, those that were
    given."""
    check_sources(sources, residual, {"logits": logits})
    if logits.shape != (len(sources),):
        raise DepthrouteError(
            f"logits has shape {tuple(logits.shape)}; {len(sources)} sources need [{len(sources)}]"
        )
    dtype = dtype or sources[0].dtype
    chosen = choose("static_mix", sources[0].device.type, backend, sources[0].dtype).backend
    if chosen == "reference" or torch.compiler.is_compiling():
        ran_by_definition("static_mix")
        options = {"centered": centered, "adds_sources": adds_sources, "scale": scale}
        x = reference.static_mix(sources, logits, residual=residual, dtype=dtype, **options)
        return x, list(sources)
    hands_on = hands_on and chosen == "triton"
    settings = chosen, hands_on, weight_offset(centered, adds_sources), scale, dtype
    x, *handed = StaticMix.apply(*settings, logits, residual, *sources)  # pyright: ignore
    return x, handed if hands_on else list(sources)


class StaticForward(NamedTuple):
    sources: list[Tensor]
    weights: Tensor
    """[S], with shift and scale."""
    residual: Tensor | None
    scale: float
    """Of the residual."""
    dtype: torch.dtype
    """Of x."""


class StaticBackward(NamedTuple):
    grad: Tensor
    sources: list[Tensor]
    carried: list[Tensor]
    """What later sites handed back of each, or nothing."""
    weights: Tensor


StaticGradients = tuple[list[Tensor], Tensor]
"""Of the sources and of their weights."""


def _forward(given: StaticForward) -> Tensor:
    (first, *others), weights = given.sources, given.weights
    # rows of one number: with none at all they would be narrowed to the sources' dtype
    total = first * weights[0:1]
    for n, source in enumerate(others, 1):
        total.addcmul_(source, weights[n : n + 1])
    if given.residual is not None:
        total.add_(given.residual, alpha=given.scale)
    return total.to(given.dtype)


def _backward(given: StaticBackward) -> StaticGradients:
    weights, wide = given.weights, given.grad.to(given.weights.dtype)
    dsources = [
        torch.mul(wide, weights[n : n + 1], out=torch.empty_like(source))
        for n, source in enumerate(given.sources)
    ]
    for dsource, carried in zip(dsources, given.carried, strict=False):
        dsource += carried
    return dsources, torch.stack([(wide * source).sum() for source in given.sources])


def _fake_forward(*arguments) -> Tensor:
    given = StaticForward(*arguments)
    return given.sources[0].new_empty(given.sources[0].shape, dtype=given.dtype)


def _fake_backward(*arguments) -> StaticGradients:
    given = StaticBackward(*arguments)
    return [s.new_empty(s.shape) for s in given.sources], given.weights.new_empty(
        given.weights.shape
    )


FORWARD = Op(
    *("static_mix_triton", StaticForward, Tensor, _fake_forward),
    FromTriton("static", "static_forward"),
)
BACKWARD = Op(
    *("static_mix_triton_backward", StaticBackward, StaticGradients, _fake_backward),
    FromTriton("static", "static_backward"),
)


class StaticMix(torch.autograd.Function):
    """x and the sources again, of the logits, a residual or None, and the sources."""

    @staticmethod
    def forward(ctx, backend, hands_on, offset, scale, dtype, logits, residual, *sources):
        alpha = reference.static_weights(logits, sources)
        shift = -1.0 / len(sources) if offset < 0 else float(offset)
        weights = (alpha + shift) * scale
        weights = weights.float() if backend == "triton" else weights
        given = StaticForward(list(sources), weights, residual, scale, dtype)
        if backend == "torch":
            RUNS["static_mix", backend] += 1
        x = FORWARD(given) if backend == "triton" else _forward(given)
        ctx.save_for_backward(logits, alpha, weights, *sources)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.hands_on, ctx.scale = backend, hands_on, scale
        ctx.residual_dtype = None if residual is None else residual.dtype
        return x, *([s.view_as(s) for s in sources] if hands_on else ())

    @staticmethod
    def backward(ctx, grad, *carried):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("static_mix", ctx.backend, grad, *carried)
        if torch.is_grad_enabled():
            no_derivative(ctx)
        logits, alpha, weights, *sources = ctx.saved_tensors
        nothing = None, None, None, None, None
        if grad is None:
            return *nothing, None, None, *(carried or [None] * len(sources))
        given = StaticBackward(grad, sources, gathered(carried, sources), weights)
        dsources, dweights = BACKWARD(given) if ctx.backend == "triton" else _backward(given)
        dalpha = dweights * ctx.scale
        dlogits = (alpha * (dalpha - (alpha * dalpha).sum())).to(logits.dtype)
        dresidual = None
        if ctx.residual_dtype is not None:
            wide = grad if ctx.scale == 1.0 else grad.to(weights.dtype) * ctx.scale
            dresidual = wide.to(ctx.residual_dtype)
        return *nothing, dlogits, dresidual, *dsources
