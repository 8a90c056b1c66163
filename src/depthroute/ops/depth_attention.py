"""Public depth-attention value mixing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import (
    _torch,
    _triton_attention,  # noqa: F401 registers the ops over the kernels
    reference,
)
from depthroute.ops._transforms import no_second_derivative, refuse_batched
from depthroute.ops.backends import choose, ran, ran_by_definition


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
    _check(query, keys, values)
    scaling = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    choice = choose("depth_attention_mix", query.device.type, backend, *_limits(query, values))
    if choice.backend == "reference":
        ran_by_definition("depth_attention_mix")
        return reference.depth_attention_mix(
            query, keys, values, scaling=scaling, return_weights=return_weights
        )
    keys, values = list(keys), list(values)
    if choice.backend == "triton":
        mixed, logits, lse = torch.ops.depthroute.depth_attention_mix_triton(
            query, keys, values, scaling
        )
        return (mixed, (logits - lse).exp()) if return_weights else mixed
    if torch.compiler.is_compiling():
        mixed, weights = torch.ops.depthroute.depth_attention_mix(query, keys, values, scaling)
    else:
        mixed, weights = _EagerAttentionMix.apply(scaling, query, *keys, *values)
    return (mixed, weights) if return_weights else mixed


def _limits(query: Tensor, values: Sequence[Tensor]) -> tuple[torch.dtype, int]:
    """The widest dtype and width, which decide whether the kernels take them."""
    dtype = torch.promote_types(query.dtype, values[-1].dtype)
    return dtype, max(query.shape[-1], values[-1].shape[-1])


def _check(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if not keys or len(keys) != len(values):
        raise DepthrouteError(
            f"{len(keys)} keys and {len(values)} values; give one of each per layer, self last"
        )
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key.shape != keys[0].shape or value.shape != values[0].shape:
            raise DepthrouteError(
                f"keys[{n}] {tuple(key.shape)} and values[{n}] {tuple(value.shape)} differ from "
                f"the first, {tuple(keys[0].shape)} and {tuple(values[0].shape)}"
            )
    key, value = keys[0], values[0]
    same = query.shape[0::2] == key.shape[0::2] and query.shape[-1] == key.shape[-1]
    if not same or query.shape[1] % key.shape[1]:
        raise DepthrouteError(
            f"query {tuple(query.shape)} does not fit keys {tuple(key.shape)}: batch, tokens and "
            "head sizes must be equal and the KV heads must divide the query heads"
        )
    if value.shape[:3] != key.shape[:3]:
        raise DepthrouteError(
            f"values {tuple(value.shape)} do not fit keys {tuple(key.shape)}: batch, KV heads and "
            "tokens must be equal"
        )


class _EagerAttentionMix(torch.autograd.Function):
    """``depthroute::depth_attention_mix`` without the dispatcher, as ``_EagerMix`` is."""

    @staticmethod
    def forward(ctx, scaling, query, *pairs):
        ran("depth_attention_mix", "torch")
        half = len(pairs) // 2
        mixed, weights = _torch.attention_mix_forward(
            query, list(pairs[:half]), list(pairs[half:]), scaling
        )
        ctx.mark_non_differentiable(weights)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, *pairs, weights)
        ctx.scaling = scaling
        return mixed, weights

    @staticmethod
    def backward(ctx, *grads):
        query, *pairs, weights = ctx.saved_tensors
        if grads[0] is None:
            return None, None, *(None for _ in pairs)
        keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        refuse_batched("depth_attention_mix", "torch", *grads)
        # the op raises if a graph of this is wanted
        differentiate = _attention_mix_backward if torch.is_grad_enabled() else _gradients
        dquery, dkeys, dvalues = differentiate(grads[0], query, keys, values, weights, ctx.scaling)
        return None, dquery, *dkeys, *dvalues


def _gradients(
    grad: Tensor,
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    weights: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    ran("depth_attention_mix_backward", "torch")
    return _torch.attention_mix_backward(grad, query, keys, values, weights, scaling)


@torch.library.custom_op("depthroute::depth_attention_mix", mutates_args=())
def _attention_mix(
    query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float
) -> tuple[Tensor, Tensor]:
    ran("depth_attention_mix", "torch")
    return _torch.attention_mix_forward(query, keys, values, scaling)


@_attention_mix.register_fake
def _(query, keys, values, scaling):
    dtype = _torch.wide(query.dtype)
    weights = query.new_empty(len(keys), *keys[0].shape[:3], dtype=dtype)
    return values[-1].new_empty(values[-1].shape), weights


@torch.library.custom_op("depthroute::depth_attention_mix_backward", mutates_args=())
def _attention_mix_backward(
    grad: Tensor,
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    weights: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _gradients(grad, query, keys, values, weights, scaling)


@_attention_mix_backward.register_fake
def _(grad, query, keys, values, weights, scaling):
    return (
        query.new_empty(query.shape),
        [k.new_empty(k.shape) for k in keys],
        [v.new_empty(v.shape) for v in values],
    )


_attention_mix_backward.register_autograd(no_second_derivative)


def _setup(ctx, inputs, output) -> None:
    query, keys, values, scaling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, *keys, *values, output[1])
    ctx.scaling = scaling


def _backward(ctx, grad, _):
    query, *pairs, weights = ctx.saved_tensors
    keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    dquery, dkeys, dvalues = torch.ops.depthroute.depth_attention_mix_backward(
        grad, query, keys, values, weights, ctx.scaling
    )
    return dquery, dkeys, dvalues, None


torch.library.register_autograd("depthroute::depth_attention_mix", _backward, setup_context=_setup)
