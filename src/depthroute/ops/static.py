"""The mix whose weights are parameters: S numbers, the same for every token.

A compiler fuses the definition, so there is no kernel of its own. Run eagerly, the sources
are read one after the other and nothing but x and one wide sum is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import reference
from depthroute.ops._checks import check_sources, weight_offset
from depthroute.ops.backends import RUNS, choose, ran_by_definition
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
    check_sources(sources, residual, {"logits": logits})
    if logits.shape != (len(sources),):
        raise DepthrouteError(
            f"logits has shape {tuple(logits.shape)}; {len(sources)} sources need [{len(sources)}]"
        )
    offset = weight_offset(centered, adds_sources)
    dtype = dtype or sources[0].dtype
    chosen = choose("static_mix", sources[0].device.type, backend).backend
    if chosen == "reference" or torch.compiler.is_compiling():
        ran_by_definition("static_mix")
        options = {"centered": centered, "adds_sources": adds_sources, "scale": scale}
        return reference.static_mix(sources, logits, residual=residual, dtype=dtype, **options)
    RUNS["static_mix", chosen] += 1
    return StaticMix.apply(offset, scale, dtype, logits, residual, *sources)  # pyright: ignore


class StaticMix(torch.autograd.Function):
    """x, of the logits, a residual or None, and the sources."""

    @staticmethod
    def forward(ctx, offset, scale, dtype, logits, residual, *sources):
        alpha, used = _weights(logits, sources, offset, scale)
        # rows of one number: with none at all they would be narrowed to the sources' dtype
        total = sources[0] * used[0:1]
        for n, source in enumerate(sources[1:], 1):
            total.addcmul_(source, used[n : n + 1])
        if residual is not None:
            total.add_(residual, alpha=scale)
        ctx.save_for_backward(logits, alpha, used, *sources)
        ctx.scale, ctx.residual_dtype = scale, None if residual is None else residual.dtype
        return total.to(dtype)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("static_mix", "torch", grad)
        if torch.is_grad_enabled():
            no_derivative(ctx)
        logits, alpha, used, *sources = ctx.saved_tensors
        wide = grad.to(used.dtype)
        needs = ctx.needs_input_grad[5:]
        dsources = [
            torch.mul(wide, used[n : n + 1], out=torch.empty_like(source)) if needs[n] else None
            for n, source in enumerate(sources)
        ]
        dlogits = None
        if ctx.needs_input_grad[3]:
            dalpha = torch.stack([(wide * source).sum() for source in sources]) * ctx.scale
            dlogits = (alpha * (dalpha - (alpha * dalpha).sum())).to(logits.dtype)
        dresidual = None
        if ctx.residual_dtype is not None:
            dresidual = (grad if ctx.scale == 1.0 else wide * ctx.scale).to(ctx.residual_dtype)
        return None, None, None, dlogits, dresidual, *dsources


def _weights(
    logits: Tensor, sources: Sequence[Tensor], offset: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax, and what the sources are multiplied by."""
    alpha = reference.static_weights(logits, sources)
    shift = -1.0 / len(sources) if offset < 0 else float(offset)
    return alpha, (alpha + shift) * scale
