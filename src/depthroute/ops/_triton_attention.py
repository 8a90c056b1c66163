"""Registered ops over the Triton depth-attention kernels. Imports Triton only when one runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops._register import kernel_op
from depthroute.ops._transforms import refuse_batched


@kernel_op(
    "depth_attention_mix_triton", "depth_attention_mix", "attention_launch.attention_forward"
)
def _attention_mix(
    query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportReturnType]
    """Mixed values [B, Hkv, T, dv], logits [J, B, Hkv, T] and their log-sum-exp [B, Hkv, T]."""


@_attention_mix.register_fake
def _(query, keys, values, scaling):
    shape = keys[0].shape[:3]
    return (
        rows_like(values[-1]),
        query.new_empty(len(keys), *shape, dtype=torch.float32),
        query.new_empty(*shape, dtype=torch.float32),
    )


@kernel_op(
    "depth_attention_mix_triton_backward",
    "depth_attention_mix_backward",
    "attention_launch.attention_backward",
)
def _attention_mix_backward(
    grad: Tensor,
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    logits: Tensor,
    lse: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # pyright: ignore[reportReturnType]
    """Of query, keys and values; the latter laid out like those, if they are all alike.

    All query heads of a KV head have the same gradient, which is returned once [B, Hkv, T, d].
    """


@_attention_mix_backward.register_fake
def _(grad, query, keys, values, logits, lse, scaling):
    is_alike = alike(keys) and alike(values)
    made = rows_like if is_alike else lambda t: t.new_empty(t.shape)
    dkeys = [made(k) for k in keys]
    return torch.empty_like(dkeys[-1], dtype=query.dtype), dkeys, [made(v) for v in values]


def rows_like(tensor: Tensor) -> Tensor:
    """New rows in the same order; the kernels write the elements of a row side by side."""
    return torch.empty_like(tensor) if tensor.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def alike(tensors: Sequence[Tensor]) -> bool:
    strides = tensors[0].stride()
    return all(t.stride() == strides for t in tensors)


def _setup(ctx, inputs, output) -> None:
    query, keys, values, scaling = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, *keys, *values, *output[1:])
    ctx.scaling = scaling


def _backward(ctx, grad, *_):
    refuse_batched("depth_attention_mix", "triton", grad)
    query, *pairs, logits, lse = ctx.saved_tensors
    keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    dquery, dkeys, dvalues = torch.ops.depthroute.depth_attention_mix_triton_backward(
        grad, query, keys, values, logits, lse, ctx.scaling
    )
    repeats = query.shape[1] // dquery.shape[1]
    if repeats > 1:  # which a compiler fuses into whatever reads it
        dquery = dquery.repeat_interleave(repeats, 1)
    return dquery, dkeys, dvalues, None


_attention_mix.register_autograd(_backward, _setup)
_attention_mix_backward.register_autograd()
