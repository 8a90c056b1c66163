"""Mixing values over layers: depth attention, and the first layer's beside each own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
from depthroute.ops.private.dispatch import Op, applied, from_triton
from depthroute.ops.private.transforms import refuse_batched

_forward = AttentionMix, AttentionResults
_backward = AttentionBackward, AttentionGradients
FORWARD = {
    "torch": Op("depth_attention_mix", *_forward, _record.fake_attention, _torch.attention_forward),
    "triton": Op(
        "depth_attention_mix_triton",
        *_forward,
        _record.fake_attention_triton,
        from_triton("attention_launch", "attention_forward"),
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
        from_triton("attention_launch", "attention_backward"),
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
    check_attention(query, keys, values)
    scaling = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    widest = torch.promote_types(query.dtype, values[-1].dtype)
    width = max(query.shape[-1], values[-1].shape[-1])
    choice = choose("depth_attention_mix", query.device.type, backend, widest, width)
    if choice.backend == "reference":
        ran_by_definition("depth_attention_mix")
        return reference.depth_attention_mix(
            query, keys, values, scaling=scaling, return_weights=return_weights
        )
    given = query, *keys, *values
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        mixed, *kept = applied(DepthAttentionMix, choice.backend, scaling, *given)
    else:
        record = AttentionMix(query, list(keys), list(values), scaling)
        mixed, kept = FORWARD[choice.backend](record)
    if not return_weights:
        return mixed
    return mixed, kept[0] if choice.backend == "torch" else (kept[0] - kept[1]).exp()


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
    """Mixed values, and what gives the weights."""

    @staticmethod
    def forward(ctx, backend, scaling, query, *pairs):
        half = len(pairs) // 2
        record = AttentionMix(query, list(pairs[:half]), list(pairs[half:]), scaling)
        mixed, kept = FORWARD[backend](record)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, *pairs, *kept)
        ctx.backend, ctx.scaling, ctx.half = backend, scaling, half
        return mixed, *kept

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, half = grads[0], ctx.half
        if grad is None:
            return None, None, None, *(None,) * (2 * half)
        refuse_batched("depth_attention_mix", ctx.backend, grad)
        query, *pairs = ctx.saved_tensors
        keys, values, kept = pairs[:half], pairs[half : 2 * half], pairs[2 * half :]
        record = AttentionBackward(grad, query, keys, values, kept, ctx.scaling)
        op = BACKWARD[ctx.backend]
        results = op.dispatched(*record) if torch.is_grad_enabled() else op(record)
        dquery, dkeys, dvalues = results
        repeats = query.shape[1] // dquery.shape[1]
        if repeats > 1:  # a compiler fuses it into whatever reads it; rows lie as the query's do
            dquery = dquery.transpose(1, 2).repeat_interleave(repeats, 2).transpose(1, 2)
        return None, None, dquery, *dkeys, *dvalues
