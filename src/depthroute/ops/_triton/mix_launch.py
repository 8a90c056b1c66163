"""Launches of the depth-mix kernels: allocation and arguments, no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops._triton.mix import mix_backward_kernel, mix_forward_kernel


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else layout.aligned(tensor)


def mix_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x and y [N, D], rstd [N, S, 1|H], logits [N, S, H], lse [N, H], norm rstd [N]."""
    example = prior if prior is not None else sources[0]
    (tokens, width), num_sources = example.shape, len(sources)
    x = torch.empty(tokens, width, dtype=out_dtype, device=example.device)
    y = torch.empty_like(x) if norm_weight is not None else x.new_empty(0)
    norms = heads if slice_norm else 1
    rstd = query.new_empty(tokens, num_sources, norms)
    logits = query.new_empty(tokens, num_sources, heads)
    lse = query.new_empty(tokens, heads)
    norm_rstd = query.new_empty(tokens if norm_weight is not None else 0)
    if tokens == 0:
        return x, y, rstd, logits, lse, norm_rstd
    sources = [layout.aligned(s) for s in sources]
    block = layout.tiles(width, heads)
    launch = layout.forward_launch(block, num_sources)
    with layout.on_device(example):
        (packed,), count = layout.pack([sources], example)
        mix_forward_kernel[(layout.num_programs(launch, tokens, example.device),)](
            packed,
            layout.aligned(query),
            _optional(residual),
            _optional(prior),
            _optional(prior_lse),
            _optional(norm_weight),
            x,
            y,
            rstd,
            logits,
            lse,
            norm_rstd,
            tokens,
            num_sources,
            eps,
            scale,
            norm_eps,
            H=heads,
            DH=width // heads,
            DTYPE=layout.DTYPES[sources[0].dtype if sources else example.dtype],
            COUNT=count,
            HAS_RESIDUAL=residual is not None,
            HAS_PRIOR=prior is not None,
            HAS_NORM=norm_weight is not None,
            CENTERED=centered,
            SLICE_NORM=slice_norm,
            BS=launch.sources,
            HB=block.heads,
            BC=block.columns,
            NT=block.count,
            STAGES=launch.stages,
            PAIRED=not layout.INTERPRETED,
            num_warps=launch.warps,
        )
    return x, y, rstd, logits, lse, norm_rstd


def mix_backward(
    grad: Tensor | None,
    grad_y: Tensor | None,
    carried: Sequence[Tensor],
    sources: Sequence[Tensor],
    query: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    x: Tensor | None,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    norm_rstd: Tensor | None,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    from_mix: bool,
    residual_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sources, query, prior, prior_lse, norm weight and, after a norm, residual.

    ``carried`` are gradients of the sources from elsewhere, to be added; ``x`` is needed after a
    norm (``grad_y`` given) or when delta is taken ``from_mix``.
    """
    tokens, width = lse.shape[0], query.shape[0]
    num_sources, device = len(sources), lse.device
    sources = [layout.aligned(s) for s in sources]
    dsources = [torch.empty_like(s) for s in sources]
    empty = query.new_empty(0)
    dprior = empty if prior is None else prior.new_empty(prior.shape)
    dprior_lse = empty.clone() if prior_lse is None else prior_lse.new_empty(prior_lse.shape)
    has_norm = norm_weight is not None
    dresidual = query.new_empty(0, dtype=residual_dtype)
    if residual_dtype is not None:
        dresidual = query.new_empty(tokens, width, dtype=residual_dtype)
    if tokens == 0:
        dnorm = torch.zeros_like(norm_weight) if norm_weight is not None else empty.clone()
        return dsources, torch.zeros_like(query), dprior, dprior_lse, dnorm, dresidual
    block = layout.tiles(width, heads)
    launch = layout.backward_launch(block, num_sources)
    programs = layout.num_programs(launch, tokens, device)
    partial_dquery = query.new_empty(programs, width)
    partial_dnorm = query.new_empty(programs if has_norm else 0, width)
    lists = [sources, dsources]
    if carried:
        lists.append([layout.aligned(c) for c in carried])
    with layout.on_device(lse):
        packed, count = layout.pack(lists, lse)
        mix_backward_kernel[(programs,)](
            packed[0],
            packed[1],
            packed[2] if carried else None,
            _optional(grad),
            _optional(grad_y),
            layout.aligned(query),
            _optional(x),
            _optional(prior),
            _optional(prior_lse),
            _optional(norm_weight),
            rstd,
            logits,
            lse,
            norm_rstd,
            dresidual if residual_dtype is not None else None,
            dprior,
            dprior_lse,
            partial_dquery,
            partial_dnorm,
            tokens,
            num_sources,
            scale,
            H=heads,
            DH=width // heads,
            DTYPE=layout.DTYPES[sources[0].dtype if sources else query.dtype],
            COUNT=count,
            HAS_GRAD=grad is not None,
            HAS_RESIDUAL=residual_dtype is not None,
            HAS_PRIOR=prior is not None,
            HAS_NORM=has_norm,
            HAS_CARRIED=len(carried) > 0,
            FROM_MIX=from_mix,
            CENTERED=centered,
            SLICE_NORM=slice_norm,
            BS=launch.sources,
            HB=block.heads,
            BC=block.columns,
            NT=block.count,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    dnorm = empty.clone()
    if norm_weight is not None:
        dnorm = partial_dnorm.sum(0).to(norm_weight.dtype)
    return dsources, partial_dquery.sum(0), dprior, dprior_lse, dnorm, dresidual


__all__ = ["mix_backward", "mix_forward"]
