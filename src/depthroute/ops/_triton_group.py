"""Registered ops over the Triton phase-1 kernels. Imports Triton only when one runs."""

from __future__ import annotations

import torch
from torch import Tensor

from depthroute.ops._register import kernel_op
from depthroute.ops._transforms import refuse_batched
from depthroute.ops.backends import ran


@kernel_op("depth_mix_group_triton")
def _depth_mix_group(
    sources: list[Tensor],
    queries: Tensor,
    eps: float,
    heads: int,
    slice_norm: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops._triton.group_launch import group_forward

    ran("depth_mix_group", "triton")
    return group_forward(sources, queries, eps, heads, slice_norm, dtype)


@_depth_mix_group.register_fake
def _(sources, queries, eps, heads, slice_norm, dtype):
    (tokens, width), count = sources[0].shape, queries.shape[0]
    return (
        queries.new_empty(count, tokens, width, dtype=dtype),
        queries.new_empty(count, tokens, heads),
        queries.new_empty(tokens, len(sources), heads if slice_norm else 1),
        queries.new_empty(tokens, len(sources), count, heads),
    )


@kernel_op("depth_mix_group_triton_backward")
def _depth_mix_group_backward(
    grad: Tensor,
    grad_lse: Tensor,
    carried: list[Tensor],
    sources: list[Tensor],
    queries: Tensor,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    heads: int,
    slice_norm: bool,
) -> tuple[list[Tensor], Tensor]:
    from depthroute.ops._triton.group_launch import group_backward

    ran("depth_mix_group_backward", "triton")
    return group_backward(
        grad, grad_lse, carried, sources, queries, rstd, logits, lse, heads, slice_norm
    )


@_depth_mix_group_backward.register_fake
def _(grad, grad_lse, carried, sources, queries, rstd, logits, lse, heads, slice_norm):
    return [s.new_empty(s.shape) for s in sources], queries.new_empty(queries.shape)


def save(ctx, inputs, output) -> None:
    sources, queries, _, heads, slice_norm, _ = inputs
    _, lse, rstd, logits = output
    ctx.save_for_backward(*sources, queries, rstd, logits, lse)
    ctx.heads, ctx.slice_norm = heads, slice_norm


def gradients(ctx, saved, grad: Tensor, grad_lse: Tensor, carried: list[Tensor]):
    """Of the sources and the queries."""
    *sources, queries, rstd, logits, lse = saved
    return torch.ops.depthroute.depth_mix_group_triton_backward(
        grad,
        grad_lse,
        carried,
        sources,
        queries,
        rstd,
        logits,
        lse,
        ctx.heads,
        ctx.slice_norm,
    )


def _setup(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*output[2:])
    save(ctx, inputs, output)


def _backward(ctx, grad, grad_lse, *_):
    refuse_batched("depth_mix_group", "triton", grad, grad_lse)
    return *gradients(ctx, ctx.saved_tensors, grad, grad_lse, []), *(None,) * 4


_depth_mix_group.register_autograd(_backward, _setup)
_depth_mix_group_backward.register_autograd()
