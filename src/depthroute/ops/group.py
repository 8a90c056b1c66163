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
    options: dict[str, Any] = {"head_norm": head_norm, "dtype": dtype, "hands_on": False}
    return _group(sources, queries, key_weights, eps, heads, backend, **options)[:2]


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
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """:func:`depth_mix_group` and the sources to hand on (see :mod:`depthroute.ops.mix`)."""
    options: dict[str, Any] = {"head_norm": head_norm, "dtype": dtype, "hands_on": True}
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
    hands_on: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
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
        return out.to(dtype or out.dtype), lse, list(sources)
    q = folded(queries, key_weights, sources[0].dtype)
    flat = [s.reshape(-1, shape[-1]) for s in sources]
    options = eps, heads, head_norm == "slice", dtype or q.dtype
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*flat, q)):
        hands_on = hands_on and choice.backend == "triton"  # autograd adds as well on a CPU
        out, lse, *handed = applied(DepthMixGroup, choice.backend, hands_on, q, options, *flat)
    else:
        out, lse, *_ = FORWARD[choice.backend](Group(flat, q, *options))
        handed = []
    return (
        out.view(count, *shape),
        lse.view(count, *shape[:-1], heads),
        [h.view(shape) for h in handed] or list(sources),
    )


class DepthMixGroup(torch.autograd.Function):
    """Outputs, log-sum-exps and, if they are to be handed on, the sources again."""

    @staticmethod
    def forward(ctx, backend, hands_on, queries, options, *sources):
        group = Group(list(sources), queries, *options)
        outputs, lse, rstd, logits = FORWARD[backend](group)
        ctx.save_for_backward(queries, rstd, logits, lse, *sources)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.hands_on = backend, hands_on
        ctx.heads, ctx.slice_norm = group.heads, group.slice_norm
        return outputs, lse, *((s.view_as(s) for s in sources) if hands_on else ())

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("depth_mix_group", ctx.backend, *grads)
        grad, grad_lse, *carried = grads
        queries, rstd, logits, lse, *sources = ctx.saved_tensors
        if not ctx.hands_on:
            carried = [None] * len(sources)
        if grad is None and grad_lse is None:
            return None, None, None, None, *carried
        record = GroupBackward(
            lse.new_zeros(*lse.shape[:2], queries.shape[1]) if grad is None else grad,
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
