"""Launches of the phase-1 kernels: on tensor cores where all that enters a product is bf16
(``dot_launch``), else on plain ones (``group``). Forward and backward choose apart, since what is
saved has one layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from depthroute.ops._record import Group, GroupBackward, GroupGradients, GroupResults
from depthroute.ops._triton import dot_launch, layout
from depthroute.ops._triton.group import (
    group_coefficients_kernel,
    group_forward_kernel,
    group_gradients_kernel,
    group_scores_kernel,
)
from depthroute.ops._triton.sums import sum_rows
from depthroute.ops.private.launcher import FUSED, aligned, by_triton


def uses_dots(tensors: Sequence[Tensor], heads: int, num_sources: int, num_queries: int) -> bool:
    """Whether everything that enters a product is bf16, and the tiles fit."""
    fits = num_sources <= layout.DOT_SOURCES and num_queries <= layout.DOT_QUERIES
    return fits and heads == 1 and all(t.dtype == torch.bfloat16 for t in tensors)


def group_forward(group: Group) -> GroupResults:
    sources, queries, eps, heads, slice_norm, out_dtype = group
    (tokens, width), num_sources = sources[0].shape, len(sources)
    num_queries = queries.shape[0]
    outputs = queries.new_empty(num_queries, tokens, width, dtype=out_dtype)
    lse = queries.new_empty(num_queries, tokens, heads)
    rstd = queries.new_empty(tokens, num_sources, heads if slice_norm else 1)
    logits = queries.new_empty(tokens, num_sources, num_queries, heads)
    if tokens == 0:
        return outputs, lse, rstd, logits
    sources = [aligned(s) for s in sources]
    if uses_dots(sources, heads, num_sources, num_queries):
        dot_launch.forward(sources, aligned(queries), eps, outputs, lse, rstd, logits)
        return outputs, lse, rstd, logits
    block = layout.tiles(width, heads)
    launch, at_once = layout.group_launch(block, num_sources, num_queries)
    programs = layout.num_programs(launch, tokens, queries.device)
    with layout.on_device(queries):
        (packed,) = layout.pack([sources], queries)
        by_triton(group_forward_kernel, programs * triton.cdiv(num_queries, at_once))(
            packed,
            aligned(queries),
            outputs,
            lse,
            rstd,
            logits,
            tokens,
            num_sources,
            num_queries,
            eps,
            H=heads,
            DH=width // heads,
            DTYPE=layout.DTYPES[sources[0].dtype],
            SLICE_NORM=slice_norm,
            BG=at_once,
            BS=launch.sources,
            HB=block.heads,
            BC=block.columns,
            NT=block.count,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **FUSED,
        )
    return outputs, lse, rstd, logits


def group_backward(back: GroupBackward) -> GroupGradients:
    grad, grad_lse, carried, sources, queries, rstd, logits, lse, heads, slice_norm = back
    num_queries, tokens, width = grad.shape
    num_sources, device = len(sources), queries.device
    sources = [aligned(s) for s in sources]
    dsources = [torch.empty_like(s) for s in sources]
    if tokens == 0:
        return dsources, torch.zeros_like(queries)
    grad, grad_lse, queries = (aligned(t) for t in (grad, grad_lse, queries))
    carried = [aligned(c) for c in carried]
    if uses_dots([*sources, *carried, grad], heads, num_sources, num_queries):
        stats = rstd, logits, lse
        dqueries = dot_launch.backward(grad, grad_lse, carried, sources, dsources, queries, *stats)
        return dsources, dqueries
    u, delta = torch.empty_like(logits), queries.new_empty(tokens, num_queries, heads)
    alpha, pull = torch.empty_like(logits), torch.empty_like(rstd)
    block = layout.tiles(width, heads)
    launch, at_once = layout.group_launch(block, num_sources, num_queries)
    shape = {"H": heads, "DH": width // heads}
    kind = {"DTYPE": layout.DTYPES[sources[0].dtype]}
    sizes = tokens, num_sources, num_queries
    all_queries = triton.next_power_of_2(num_queries)
    lists = [sources, dsources]
    if carried:
        lists.append(carried)
    with layout.on_device(queries):
        packed = layout.pack(lists, queries)
        by_triton(group_scores_kernel, tokens * triton.cdiv(num_queries, at_once))(
            packed[0],
            grad,
            grad_lse,
            logits,
            lse,
            u,
            delta,
            *sizes,
            **shape,
            **kind,
            BG=at_once,
            BS=launch.sources,
            HB=block.heads,
            BC=block.columns,
            NT=block.count,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **FUSED,
        )
        by_triton(group_coefficients_kernel, tokens)(
            logits,
            lse,
            rstd,
            u,
            delta,
            alpha,
            u,  # each element is read before the same program writes it
            pull,
            *sizes,
            **shape,
            SLICE_NORM=slice_norm,
            GB=all_queries,
            BS=max(1, min(64, 256 // (all_queries * block.heads))),
            HB=block.heads,
            num_warps=1,
            **FUSED,
        )
        columns, columns_launch = layout.columns_launch(width // heads, all_queries)
        column_tiles = heads * triton.cdiv(width // heads, columns)
        programs = layout.num_programs(columns_launch, tokens, device)
        programs = max(1, programs // column_tiles) if device.type == "cuda" else programs
        partial = queries.new_empty(programs, num_queries, width)
        by_triton(group_gradients_kernel, programs * column_tiles)(
            packed[0],
            packed[1],
            packed[2] if carried else None,
            grad,
            queries,
            alpha,
            u,
            pull,
            partial,
            *sizes,
            **shape,
            **kind,
            HAS_CARRIED=len(carried) > 0,
            SLICE_NORM=slice_norm,
            GB=all_queries,
            BS=columns_launch.sources,
            BC=columns,
            STAGES=columns_launch.stages,
            num_warps=columns_launch.warps,
            **FUSED,
        )
    return dsources, sum_rows(partial)
