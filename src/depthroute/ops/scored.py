"""The torch backend's depth mix in two halves, for a stream that knows the queries ahead.

A source is scored once for every read to come. Reads that see the same sources are then mixed
together, each source fetched once for all of them in both directions, where a mix on its own
fetches it three times. Run eagerly alone: a compiler fuses the definition.
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
) -> Tensor:
    """The logits [G, ..., H] of ``source`` [..., D] for ``queries`` [G, D]."""
    return Score.apply(eps, heads, slice_norm, queries, gains, source)  # pyright: ignore


def scored_mix(
    logits: Sequence[Tensor], sources: Sequence[Tensor], offset: int, scale: float
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The mixes of G reads, unrounded and without a residual, of sources that have the ``logits``
    [G, ..., H]; and the sources to hand on."""
    count = len(logits[0])
    RUNS["depth_mix", "torch"] += count
    made: Any = ScoredMix.apply(offset, scale, *logits, *sources)
    return made[:count], made[count:]


class Score(torch.autograd.Function):
    """Logits, of queries, gains and a source."""

    @staticmethod
    def forward(ctx, eps, heads, slice_norm, queries, gains, source):
        q, rows = folded(queries, gains, source.dtype), _torch.as_rows(source)
        rstd = q.new_empty(1, rows.shape[0], heads if slice_norm else 1)
        logits = q.new_empty(1, q.shape[0], rows.shape[0], heads)
        with _torch.unrounded(source.device.type):
            _torch.write_scores([rows], q, eps, rstd, logits)
        ctx.save_for_backward(queries, gains, q, rstd[0], logits[0], source)
        return logits.view(len(q), *source.shape[:-1], heads)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse((grad,))
        queries, gains, q, rstd, logits, source = ctx.saved_tensors
        dsource, dq = _torch.score_gradients(source, q, rstd, logits, grad.reshape(logits.shape))
        dgains, dqueries = unfolded(dq, queries, gains)
        return None, None, None, dqueries, dgains, dsource.to(source.dtype).view_as(source)


class ScoredMix(torch.autograd.Function):
    """Mixes and the sources again, of logits and sources."""

    @staticmethod
    def forward(ctx, offset, scale, *rest):
        count = len(rest) // 2
        logits, sources = torch.stack(rest[:count]), rest[count:]
        weights = _torch.used_weights(logits, offset, scale)
        mixes = [_torch.weighted_sum(of_read, sources) for of_read in weights.unbind(1)]
        ctx.save_for_backward(logits, *sources)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.scale = offset, scale
        return *mixes, *[source.view_as(source) for source in sources]

    @staticmethod
    def backward(ctx, *given):  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse(given)
        logits, *sources = ctx.saved_tensors
        count = logits.shape[1]
        grads, carried = given[:count], given[count:]
        if all(grad is None for grad in grads):
            return None, None, *[None] * len(sources), *carried
        RUNS["depth_mix_backward", "torch"] += count
        none = next(grad for grad in grads if grad is not None)
        grads = [torch.zeros_like(none) if grad is None else grad for grad in grads]
        if ctx.scale != 1.0:
            grads = [grad * ctx.scale for grad in grads]
        with _torch.unrounded(logits.device.type):
            weights, dlogits = _torch.weight_gradients(grads, logits, sources, ctx.offset)
        dsources = []
        for source, of_source, more in zip(sources, weights.unbind(), carried, strict=True):
            start = None if more is None else more.to(logits.dtype)
            dsources.append(_torch.weighted_sum(of_source, grads, start).to(source.dtype))
        return None, None, *dlogits.unbind(), *dsources


def _refuse(grads: Sequence[Tensor | None]) -> None:
    refuse_batched("depth_mix", "torch", *grads)
    if torch.is_grad_enabled():
        no_derivative(None)
