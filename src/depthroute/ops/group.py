"""Phase 1 of a two-phase read: the queries of a group of sites over the sources they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops import _record, _torch, reference
from depthroute.ops._checks import check_gains, check_mix
from depthroute.ops._record import Group, GroupBackward, GroupGradients, GroupResults
from depthroute.ops.backends import choose, ran_by_definition
from depthroute.ops.mix import folded, gathered, widest_dtype
from depthroute.ops.private.dispatch import FromTriton, Op, applied
from depthroute.ops.private.transforms import refuse_batched

_forward = Group, GroupResults, _record.fake_group
_backward = GroupBackward, GroupGradients, _record.fake_group_backward
FORWARD = {
    "torch": Op("depth_mix_group", *_forward, _torch.group_forward),
    "triton": Op("depth_mix_group_triton", *_forward, FromTriton("group_launch", "group_forward")),
}
BACKWARD = {
    "torch": Op("depth_mix_group_backward", *_backward, _torch.group_backward),
    "triton": Op(
        "depth_mix_group_triton_backward", *_backward, FromTriton("group_launch", "group_backward")
    ),
}


def depth_mix_group(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    head_norm: str = "full",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``queries`` [G, D] over ``sources``; outputs [G, ..., D] and lse [G, ..., H].

    Outputs are not rounded unless a ``dtype`` is given: the sources' dtype halves what phase 2
    reads, for one more rounding.
    """
    options: dict[str, Any] = {"head_norm": head_norm, "dtype": dtype, "is_carried": False}
    outputs, lse, _ = _group(sources, queries, key_weights, eps, heads, backend, **options)
    return outputs[0], lse


def depth_mix_group_carried(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    head_norm: str = "full",
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """:func:`depth_mix_group` and the sources to hand on (see :mod:`depthroute.ops.mix`).

    Every query's output is a tensor of its own: each is read at another place, and its gradient is
    taken where it lies.
    """
    options: dict[str, Any] = {"head_norm": head_norm, "dtype": dtype, "is_carried": True}
    return _group(sources, queries, key_weights, eps, heads, backend, **options)


def _group(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    eps: float,
    heads: int,
    backend: str,
    *,
    head_norm: str,
    dtype: torch.dtype | None,
    is_carried: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The outputs are one tensor [G, ..., D] unless they are carried."""
    check_mix(sources, queries[0], None, (None,) * 6, heads, head_norm)
    check_gains(queries, key_weights)
    shape, count = sources[0].shape, queries.shape[0]
    device = queries.device.type
    choice = choose("depth_mix_group", device, backend, widest_dtype(sources), shape[-1])
    if choice.backend == "reference":
        ran_by_definition("depth_mix_group")
        out, lse = reference.depth_mix_group(
            sources, queries, key_weights, eps=eps, heads=heads, head_norm=head_norm
        )
        out = out.to(dtype or out.dtype)
        return [*out.unbind()] if is_carried else [out], lse, list(sources)
    q = folded(queries, key_weights, sources[0].dtype)
    flat = [s.reshape(-1, shape[-1]) for s in sources]
    options = eps, heads, head_norm == "slice", dtype or q.dtype
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*flat, q)):
        hands_on = is_carried and choice.backend == "triton"  # autograd adds as well on a CPU
        flags = is_carried, hands_on
        lse, *made = applied(DepthMixGroup, choice.backend, flags, q, options, *flat)
    else:
        out, lse, *_ = FORWARD[choice.backend](Group(flat, q, *options))
        made = [*out.unbind()] if is_carried else [out]
    num_outputs = count if is_carried else 1
    return (
        [out.view(*out.shape[:-2], *shape) for out in made[:num_outputs]],
        lse.view(count, *shape[:-1], heads),
        [handed.view(shape) for handed in made[num_outputs:]] or list(sources),
    )


class DepthMixGroup(torch.autograd.Function):
    """Log-sum-exps, outputs (together or apart) and, if they are to be handed on, the sources
    again."""

    @staticmethod
    def forward(ctx, backend, flags, queries, options, *sources):
        group = Group(list(sources), queries, *options)
        outputs, lse, rstd, logits = FORWARD[backend](group)
        ctx.save_for_backward(queries, rstd, logits, lse, *sources)
        ctx.set_materialize_grads(False)
        ctx.backend, (ctx.is_apart, ctx.hands_on) = backend, flags
        ctx.heads, ctx.slice_norm, ctx.dtype = group.heads, group.slice_norm, group.dtype
        made = outputs.unbind() if ctx.is_apart else (outputs,)
        return lse, *made, *((s.view_as(s) for s in sources) if ctx.hands_on else ())

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("depth_mix_group", ctx.backend, *grads)
        queries, rstd, logits, lse, *sources = ctx.saved_tensors
        count, num_outputs = len(queries), len(queries) if ctx.is_apart else 1
        grad_lse, grads, carried = grads[0], grads[1 : 1 + num_outputs], grads[1 + num_outputs :]
        if not ctx.hands_on:
            carried = [None] * len(sources)
        if grad_lse is None and not any(grad is not None for grad in grads):
            return None, None, None, None, *carried
        if not ctx.is_apart:
            grads = [None] * count if grads[0] is None else grads[0].unbind()
        record = GroupBackward(
            [torch.zeros_like(sources[0], dtype=ctx.dtype) if g is None else g for g in grads],
            torch.zeros_like(lse) if grad_lse is None else grad_lse,
            gathered(carried, sources),
            sources,
            queries,
            rstd,
            logits,
            lse,
            ctx.heads,
            ctx.slice_norm,
        )
        op = BACKWARD[ctx.backend]
        dsources, dqueries = op.dispatched(*record) if torch.is_grad_enabled() else op(record)
        return None, None, dqueries, None, *dsources
