"""The torch backend's depth mix in two halves, for a stream that knows the queries ahead.

A source is scored once for every read to come (:func:`score`): one norm, and one product of
matrices. A read then only weights and adds (:func:`scored_mix`), so that in both directions it goes
over each source once, where a mix on its own goes three times; and it hands its sources on
(:mod:`depthroute.ops.mix`). Run eagerly alone: a compiler fuses the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops import _torch
from depthroute.ops.backends import RUNS
from depthroute.ops.mix import folded, unfolded
from depthroute.ops.private.transforms import no_derivative, refuse_batched


def score(
    source: Tensor, queries: Tensor, gains: Tensor, eps: float, heads: int, slice_norm: bool
) -> tuple[Tensor, ...]:
    """The logits [..., H] of ``source`` [..., D] for each of ``queries`` [G, D]."""
    logits: Any = Score.apply(eps, heads, slice_norm, queries, gains, source)
    return logits.unbind()


def scored_mix(
    logits: Sequence[Tensor],
    sources: Sequence[Tensor],
    residual: Tensor | None,
    offset: int,
    scale: float,
    hands_on: bool,
) -> tuple[Tensor, list[Tensor]]:
    """:func:`~depthroute.ops.depth_mix` of sources whose logits are known, and the sources to hand
    on."""
    RUNS["depth_mix", "torch"] += 1
    made: Any = ScoredMix.apply(offset, scale, hands_on, residual, *logits, *sources)
    x, *handed = made
    return x, handed


class Score(torch.autograd.Function):
    """Logits [G, ..., H], of queries, gains and a source."""

    @staticmethod
    def forward(ctx, eps, heads, slice_norm, queries, gains, source):
        q = folded(queries, gains, source.dtype)
        rstd, logits = _torch.score(source, q, eps, heads, slice_norm)
        ctx.save_for_backward(queries, gains, q, rstd, logits, source)
        return logits.view(-1, *source.shape[:-1], heads)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse((grad,))
        queries, gains, q, rstd, logits, source = ctx.saved_tensors
        dlogits = grad.reshape(logits.shape)
        dsource, dq = _torch.score_gradients(source, q, rstd, logits, dlogits)
        dgains, dqueries = unfolded(dq, queries, gains)
        return None, None, None, dqueries, dgains, dsource.to(source.dtype).view_as(source)


class ScoredMix(torch.autograd.Function):
    """x and the sources again, of a residual or None, the logits and the sources."""

    @staticmethod
    def forward(ctx, offset, scale, hands_on, residual, *rest):
        count = len(rest) // 2
        logits, sources = torch.stack(rest[:count]), rest[count:]
        x = _torch.weighted(logits, sources, residual, offset, scale)
        ctx.save_for_backward(logits, *sources)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.scale, ctx.hands_on = offset, scale, hands_on
        ctx.residual_dtype = None if residual is None else residual.dtype
        handed = [s.view_as(s) for s in sources] if hands_on else ()
        return x.to(sources[0].dtype), *handed

    @staticmethod
    def backward(ctx, grad, *carried):  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse((grad, *carried))
        logits, *sources = ctx.saved_tensors
        if not ctx.hands_on:
            carried = [None] * len(sources)
        if grad is None:
            return None, None, None, None, *[None] * len(sources), *carried
        RUNS["depth_mix_backward", "torch"] += 1
        dx = grad.to(logits.dtype)
        dx = dx if ctx.scale == 1.0 else dx * ctx.scale
        dsources, dlogits = _torch.weighted_gradients(dx, logits, sources, carried, ctx.offset)
        dresidual = None if ctx.residual_dtype is None else dx.to(ctx.residual_dtype)
        return None, None, None, dresidual, *dlogits, *dsources


def _refuse(grads: Sequence[Tensor | None]) -> None:
    refuse_batched("depth_mix", "torch", *grads)
    if torch.is_grad_enabled():
        no_derivative(None)
