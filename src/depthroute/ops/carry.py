"""Reading sources that many sites share, with one gradient for all of them.

When S sources are read by L sites in the ordinary way, autograd keeps L gradients per source and
adds them: three passes per source and site beyond writing them. Here a site also returns its
sources, and later sites read those. In backward a source's gradient then travels the other way,
last site first, and each site's kernel adds its share to what it was handed: one read instead.

    x, sources = depth_mix_carried(sources, query)

The returned sources are the same values (views, nothing is copied). Nothing is mutated and no state
is kept outside the graph, so activation checkpointing may run a site twice, and a source that is
also used elsewhere gets the right sum. Using a source from before a site instead of the returned
one is correct too, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops import _triton_group, _triton_mix, reference
from depthroute.ops.backends import choose
from depthroute.ops.mix import _check_gains, _check_sources, _flat, _fold, _widest


class _CarriedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, triton, query, residual, prior, prior_lse, norm_weight, options, *sources):
        eps, heads, slice_norm, centered, scale, norm_eps, dtype = options
        listed = list(sources)
        tensors = listed, query, residual, prior, prior_lse
        ctx.set_materialize_grads(False)
        ctx.triton = triton
        if triton:
            inputs = *tensors, norm_weight, eps, heads, slice_norm, centered, scale
            output = torch.ops.depthroute.depth_mix_triton(*inputs, norm_eps, dtype)
            _triton_mix.save(ctx, inputs, output)
            x, y = output[0], output[1]
        else:
            x, rstd, logits, lse = torch.ops.depthroute.depth_mix(
                *tensors, eps, heads, slice_norm, centered, scale, dtype
            )
            ctx.save_for_backward(*sources, query, prior, prior_lse, rstd, logits, lse)
            ctx.options = heads, centered, scale
            ctx.residual_dtype = None if residual is None else residual.dtype
            y = x.new_empty(0)
        return x, y, *(s.view_as(s) for s in sources)

    @staticmethod
    def backward(ctx, *grads):
        grad, grad_y, *carried = grads
        if grad is None and grad_y is None:
            return *(None,) * 7, *carried
        saved = ctx.saved_tensors
        if ctx.triton:
            gathered = _gathered(carried, saved[: len(carried)])
            gradients = _triton_mix.gradients(ctx, saved, grad, grad_y, gathered)
            dsources, dquery, dresidual, dprior, dprior_lse, dnorm = gradients
        else:
            *sources, query, prior, prior_lse, rstd, logits, lse = saved
            dsources, dquery, dprior, dprior_lse = torch.ops.depthroute.depth_mix_backward(
                grad, sources, query, prior, prior_lse, rstd, logits, lse, *ctx.options
            )
            dsources = _added(dsources, carried)
            dnorm = dresidual = None
            if ctx.residual_dtype is not None:
                dresidual = (grad * ctx.options[2]).to(ctx.residual_dtype)
            if prior is None:
                dprior = dprior_lse = None
        return None, dquery, dresidual, dprior, dprior_lse, dnorm, None, *dsources


class _CarriedGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, triton, queries, options, *sources):
        eps, heads, slice_norm, dtype = options
        listed = list(sources)
        ctx.triton = triton
        ctx.set_materialize_grads(False)
        if triton:
            inputs = listed, queries, eps, heads, slice_norm, dtype
            output = torch.ops.depthroute.depth_mix_group_triton(*inputs)
            _triton_group.save(ctx, inputs, output)
            outputs, lse = output[0], output[1]
        else:
            outputs, lse, rstd, logits = torch.ops.depthroute.depth_mix_group(
                listed, queries, eps, heads, slice_norm
            )
            ctx.save_for_backward(*sources, queries, rstd, logits, lse)
            ctx.heads = heads
            outputs = outputs.to(dtype)
        return outputs, lse, *(s.view_as(s) for s in sources)

    @staticmethod
    def backward(ctx, *grads):
        grad, grad_lse, *carried = grads
        if grad is None and grad_lse is None:
            return None, None, None, *carried
        saved = ctx.saved_tensors
        *sources, queries, rstd, logits, lse = saved
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse)
        if grad is None:
            grad = lse.new_zeros(*lse.shape[:2], queries.shape[1])
        if ctx.triton:
            gathered = _gathered(carried, sources)
            dsources, dqueries = _triton_group.gradients(ctx, saved, grad, grad_lse, gathered)
        else:
            dsources, dqueries = torch.ops.depthroute.depth_mix_group_backward(
                grad.to(queries.dtype), grad_lse, sources, queries, rstd, logits, lse, ctx.heads
            )
            dsources = _added(dsources, carried)
        return None, dqueries, None, *dsources


def _gathered(carried: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor]:
    """What the kernel adds: nothing if no later site sent a gradient, else one per source."""
    if all(c is None for c in carried):
        return []
    return [torch.zeros_like(s) if c is None else c for c, s in zip(carried, sources, strict=True)]


def _added(own: Sequence[Tensor], carried: Sequence[Tensor | None]) -> list[Tensor]:
    return [d if c is None else d + c for d, c in zip(own, carried, strict=True)]


def depth_mix_carried(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    prior: Tensor | None = None,
    prior_lse: Tensor | None = None,
    head_norm: str = "full",
    centered: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Any, list[Tensor]]:
    """:func:`depth_mix` (or, with a prior, :func:`depth_mix_merge`) and the sources to hand on."""
    given = [*sources] if prior is None else [*sources, prior]
    _check_sources(given, query, key_weight, residual, heads, head_norm, same_dtype=prior is None)
    name = "depth_mix" if prior is None else "depth_mix_merge"
    widest = _widest(given, residual)
    choice = choose(name, query.device.type, backend, widest, query.shape[0])
    example = sources[0] if prior is None else prior
    dtype = (
        dtype or (sources[0] if sources else residual if residual is not None else example).dtype
    )
    x, y, *handed = _CarriedMix.apply(
        choice.backend == "triton",
        _fold(query, key_weight, example.dtype),
        None if residual is None else _flat(residual),
        None if prior is None else _flat(prior),
        None if prior_lse is None else _flat(prior_lse),
        norm_weight,
        (eps, heads, head_norm == "slice", centered, scale, norm_eps, dtype),
        *(_flat(s) for s in sources),
    )
    x = x.view(example.shape)
    handed = [h.view(example.shape) for h in handed]
    if norm_weight is None:
        return x, handed
    if choice.backend == "triton":
        return (x, y.view(example.shape)), handed
    return (x, reference.rms_norm(x, norm_weight, norm_eps)), handed


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
    """:func:`depth_mix_group` and the sources to hand on."""
    _check_sources(sources, queries[0], None, None, heads, head_norm)
    _check_gains(queries, key_weights)
    shape = sources[0].shape
    widest = _widest(sources, None)
    choice = choose("depth_mix_group", queries.device.type, backend, widest, shape[-1])
    q = _fold(queries, key_weights, sources[0].dtype)
    out, lse, *handed = _CarriedGroup.apply(
        choice.backend == "triton",
        q,
        (eps, heads, head_norm == "slice", dtype or q.dtype),
        *(_flat(s) for s in sources),
    )
    count = queries.shape[0]
    return (
        out.view(count, *shape),
        lse.view(count, *shape[:-1], heads),
        [h.view(shape) for h in handed],
    )
