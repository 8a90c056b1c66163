"""Mixing values over layers: depth attention, and the first layer's beside each own.

**Handing on.** What depth attention reads is read again: query and key by attention over time, keys
and mixed values by later layers. As in :mod:`depthroute.ops.mix` it therefore returns them too, and
in backward adds what comes back to its own share, so that every gradient is written once and
autograd adds none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import _record, _torch, reference
from depthroute.ops._checks import check_attention
from depthroute.ops._record import (
    AttentionBackward,
    AttentionGradients,
    AttentionMix,
    AttentionResults,
)
from depthroute.ops.backends import choose, ran_by_definition
from depthroute.ops.private.dispatch import FromTriton, Op, applied
from depthroute.ops.private.transforms import refuse_batched

_forward = AttentionMix, AttentionResults
_backward = AttentionBackward, AttentionGradients
FORWARD = {
    "torch": Op("depth_attention_mix", *_forward, _record.fake_attention, _torch.attention_forward),
    "triton": Op(
        "depth_attention_mix_triton",
        *_forward,
        _record.fake_attention_triton,
        FromTriton("attention_launch", "attention_forward"),
    ),
}
BACKWARD = {
    "torch": Op(
        "depth_attention_mix_backward",
        *_backward,
        _record.fake_attention_backward,
        _torch.attention_backward,
    ),
    "triton": Op(
        "depth_attention_mix_triton_backward",
        *_backward,
        _record.fake_attention_triton_backward,
        FromTriton("attention_launch", "attention_backward"),
    ),
}


def depth_attention_mix(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    backend: str = "auto",
    *,
    scaling: float | None = None,
    return_weights: bool = False,
) -> Any:
    """``vt = sum_j softmax_j(mean(query) . k_j / sqrt(d)) v_j`` per token and KV head.

    ``query`` is ``[B, Hq, T, d]``; ``keys`` and ``values`` are lists over the layers read, self
    last, of ``[B, Hkv, T, d]`` and ``[B, Hkv, T, dv]``. Query and key sit at the same token, so
    rotated and un-rotated ones give the same weights.
    """
    mix = AttentionMix(query, list(keys), list(values), _scaling(query, scaling))
    chosen = _chosen(mix, backend)
    if chosen == "reference":
        return reference.depth_attention_mix(
            *mix[:3], scaling=scaling, return_weights=return_weights
        )
    if _needs_grad(mix):
        mixed, *kept = _applied(chosen, mix, (), keeps=False)
    else:
        mixed, kept = FORWARD[chosen](mix)
    if not return_weights:
        return mixed
    return mixed, kept[0] if chosen == "torch" else (kept[0] - kept[1]).exp()


class CarriedAttention(NamedTuple):
    """Mixed values, and what was given to be read from here on: the same numbers."""

    mixed: Tensor
    query: Tensor
    """For attention over time, like ``mixed`` and ``key``."""
    key: Tensor
    keys: list[Tensor]
    """For later layers, self last."""
    values: list[Tensor]
    """For later layers; that of self is mixed."""


def depth_attention_carried(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    kept: Sequence[bool],
    backend: str = "auto",
    *,
    scaling: float | None = None,
    attends: bool = True,
    keeps_mixed: bool = True,
) -> CarriedAttention:
    """:func:`depth_attention_mix`, with what is read again handed on.

    ``kept`` says of every layer, self last, whether later ones will read it. ``attends``: whether
    attention over time reads query and key as they are; ``keeps_mixed``: whether later layers read
    the mixed value as it is. What is handed on and not read costs a gradient of zeros in a compiled
    graph.
    """
    mix = AttentionMix(query, list(keys), list(values), _scaling(query, scaling))
    chosen, count, given = _chosen(mix, backend), len(keys), [query, *keys, *values]
    if chosen == "reference" or not _needs_grad(mix):
        if chosen == "reference":
            mixed = reference.depth_attention_mix(*mix[:3], scaling=scaling)
        else:
            mixed, _ = FORWARD[chosen](mix)
        return CarriedAttention(mixed, query, keys[-1], mix.keys, [*values[:-1], mixed])
    read = [p for p in (0, count) if attends and given[p].requires_grad]
    later = [p for j in range(count) if kept[j] for p in (1 + j, 1 + count + j)]
    later = [p for p in later if p < 2 * count and given[p].requires_grad]
    again = keeps_mixed and kept[-1]
    mixed, *results = _applied(chosen, mix, (*read, *later), keeps=again)
    given[-1] = results.pop() if again else mixed
    handed, now = iter(results[len(results) - len(read) - len(later) :]), list(given)
    for place in read:
        now[place] = next(handed)
    for place in later:
        given[place] = next(handed)
    return CarriedAttention(mixed, now[0], now[count], given[1 : 1 + count], given[1 + count :])


def _scaling(query: Tensor, scaling: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling


def _chosen(mix: AttentionMix, backend: str) -> str:
    query, keys, values, _ = mix
    check_attention(query, keys, values)
    widest = torch.promote_types(query.dtype, values[-1].dtype)
    width = max(query.shape[-1], values[-1].shape[-1])
    chosen = choose("depth_attention_mix", query.device.type, backend, widest, width).backend
    if chosen == "reference":
        ran_by_definition("depth_attention_mix")
    return chosen


def _needs_grad(mix: AttentionMix) -> bool:
    given = mix.query, *mix.keys, *mix.values
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def _applied(chosen: str, mix: AttentionMix, places: tuple[int, ...], *, keeps: bool) -> Any:
    query, keys, values, scaling = mix
    return applied(DepthAttentionMix, chosen, scaling, places, keeps, query, *keys, *values)


def value_residual(value: Tensor, first: Tensor, weight: Tensor, first_weight: Tensor) -> Tensor:
    """``weight * value + first_weight * first``: a layer's own values and the first layer's.

    Two products and a sum, which a compiler fuses; so it is the definition and has no kernel.
    """
    if value.shape != first.shape:
        raise DepthrouteError(
            f"a layer's values are {tuple(value.shape)} and the first layer's "
            f"{tuple(first.shape)}; a value residual needs layers with the same KV heads and head "
            "sizes. Use method='attnres' or 'delta', which mix before the projections"
        )
    return reference.value_residual(value, first, weight, first_weight)


class DepthAttentionMix(torch.autograd.Function):
    """Mixed values, what gives the weights, what is at ``places`` of query, keys and values, to be
    handed on, and the mixed values again if it ``keeps`` them.

    No result is None: beside results without a gradient, Dynamo would lose that of another.
    """

    @staticmethod
    def forward(ctx, backend, scaling, places, keeps, query, *pairs):
        half, given = len(pairs) // 2, (query, *pairs)
        record = AttentionMix(query, list(pairs[:half]), list(pairs[half:]), scaling)
        mixed, kept = FORWARD[backend](record)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, *pairs, *kept)
        ctx.backend, ctx.scaling, ctx.half = backend, scaling, half
        ctx.places, ctx.keeps = places, keeps
        handed = [given[place].view_as(given[place]) for place in places]
        return mixed, *kept, *handed, *([mixed.view_as(mixed)] if keeps else ())

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("depth_attention_mix", ctx.backend, *grads)
        half, places = ctx.half, ctx.places
        query, *pairs = ctx.saved_tensors
        end = len(grads) - ctx.keeps
        of_mixed = [grad for grad in (grads[0], *grads[end:]) if grad is not None]
        handed = grads[end - len(places) : end]
        carried = [(place, g) for place, g in zip(places, handed, strict=True) if g is not None]
        record = AttentionBackward(
            of_mixed,
            [grad for _, grad in carried],
            [place for place, _ in carried],
            query,
            pairs[:half],
            pairs[half : 2 * half],
            pairs[2 * half :],
            ctx.scaling,
        )
        if not of_mixed:
            passed = (sum(came[1:], came[0]) if came else None for came in record.arrived())
            return None, None, None, None, *passed
        op = BACKWARD[ctx.backend]
        results = op.dispatched(*record) if torch.is_grad_enabled() else op(record)
        dquery, dkeys, dvalues = results
        return None, None, None, None, dquery, *dkeys, *dvalues
