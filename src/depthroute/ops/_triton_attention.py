"""Registered ops over the Triton depth-attention kernels. Imports Triton only when one runs."""

from __future__ import annotations

import torch
from torch import Tensor

from depthroute.ops._register import kernel_op
from depthroute.ops.backends import ran


@kernel_op("depth_attention_mix_triton")
def _attention_mix(
    query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    from depthroute.ops._triton.attention_launch import attention_forward

    ran("depth_attention_mix", "triton")
    return attention_forward(query, keys, values, scaling)


@_attention_mix.register_fake
def _(query, keys, values, scaling):
    shape = keys[0].shape[:3]
    return (
        torch.empty_like(values[-1]),
        query.new_empty(len(keys), *shape, dtype=torch.float32),
        query.new_empty(*shape, dtype=torch.float32),
    )


@kernel_op("depth_attention_mix_triton_backward")
def _attention_mix_backward(
    grad: Tensor,
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    logits: Tensor,
    lse: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    from depthroute.ops._triton.attention_launch import attention_backward

    ran("depth_attention_mix_backward", "triton")
    alike = _alike(keys) and _alike(values)
    return attention_backward(grad, query, keys, values, logits, lse, scaling, alike)


@_attention_mix_backward.register_fake
def _(grad, query, keys, values, logits, lse, scaling):
    alike = _alike(keys) and _alike(values)
    made = torch.empty_like if alike else lambda t: t.new_empty(t.shape)
    return torch.empty_like(query), [made(k) for k in keys], [made(v) for v in values]


def _alike(tensors: list[Tensor]) -> bool:
    return all(t.stride() == tensors[0].stride() for t in tensors)


def _setup(ctx, inputs, output) -> None:
    query, keys, values, scaling = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, *keys, *values, *output[1:])
    ctx.scaling = scaling


def _backward(ctx, grad, *_):
    query, *pairs, logits, lse = ctx.saved_tensors
    keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    dquery, dkeys, dvalues = torch.ops.depthroute.depth_attention_mix_triton_backward(
        grad, query, keys, values, logits, lse, ctx.scaling
    )
    return dquery, dkeys, dvalues, None


_attention_mix.register_autograd(_backward, _setup)
_attention_mix_backward.register_autograd()
