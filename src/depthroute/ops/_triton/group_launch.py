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
from depthroute.ops.private.launcher import FUSED, aligned, by_triton, on_device


def group_launch(
    block: layout.Tiles, num_sources: int, num_queries: int
) -> tuple[layout.Launch, int]:
    """Also the queries that one program takes; their rows share its registers."""
    at_once = min(4, triton.next_power_of_2(num_queries))
    while at_once > 1 and block.elements * at_once > 16384:  # 64 a thread of 8 warps
        at_once //= 2
    warps = min(8, layout.warps_for(block.elements * at_once, 32))
    return layout.Launch(1, warps, layout.stages_for(3, block.elements * 4), 0), at_once


def columns_launch(slice_width: int, all_queries: int) -> tuple[int, layout.Launch]:
    """Columns of a tile on which all queries' gradients stay in registers, and the launch."""
    per_thread = max(2, min(8, 32 // all_queries))
    columns = min(triton.next_power_of_2(slice_width), 128 * per_thread)
    # few programs fit, since each holds every query's gradient; so each looks far ahead
    return columns, layout.Launch(1, max(1, min(4, columns // (32 * per_thread))), 5, 16)


def uses_dots(tensors: Sequence[Tensor], heads: int, num_sources: int, num_queries: int) -> bool:
    """Whether everything that enters a product is bf16, and the tiles fit."""
    fits = num_sources <= dot_launch.DOT_SOURCES and num_queries <= dot_launch.DOT_QUERIES
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
    launch, at_once = group_launch(block, num_sources, num_queries)
    programs = layout.num_programs(launch, tokens, queries.device)
    with on_device(queries):
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
    grads, grad_lse, carried, sources, queries, rstd, logits, lse, heads, slice_norm = back
    (num_queries, width), tokens = queries.shape, rstd.shape[0]
    num_sources, device = len(sources), queries.device
    sources = [aligned(s) for s in sources]
    dsources = [torch.empty_like(s) for s in sources]
    if tokens == 0:
        return dsources, torch.zeros_like(queries)
    grads, carried = ([aligned(t) for t in tensors] for tensors in (grads, carried))
    grad_lse, queries = aligned(grad_lse), aligned(queries)
    if uses_dots([*sources, *carried, *grads], heads, num_sources, num_queries):
        stats = rstd, logits, lse
        dqueries = dot_launch.backward(grads, grad_lse, carried, sources, dsources, queries, *stats)
        return dsources, dqueries
    u, delta = torch.empty_like(logits), queries.new_empty(tokens, num_queries, heads)
    alpha, pull = torch.empty_like(logits), torch.empty_like(rstd)
    block = layout.tiles(width, heads)
    launch, at_once = group_launch(block, num_sources, num_queries)
    shape = {"H": heads, "DH": width // heads}
    dtypes = layout.DTYPES[sources[0].dtype], layout.DTYPES[grads[0].dtype]
    kinds = dict(zip(("DTYPE", "GRAD_DTYPE"), dtypes, strict=True))
    sizes = tokens, num_sources, num_queries
    all_queries = triton.next_power_of_2(num_queries)
    lists = [grads, sources, dsources, *([carried] if carried else [])]
    with on_device(queries):
        packed_grads, *packed = layout.pack(lists, queries)
        by_triton(group_scores_kernel, tokens * triton.cdiv(num_queries, at_once))(
            packed[0],
            packed_grads,
            grad_lse,
            logits,
            lse,
            u,
            delta,
            *sizes,
            **shape,
            **kinds,
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
        columns, by_columns = columns_launch(width // heads, all_queries)
        column_tiles = heads * triton.cdiv(width // heads, columns)
        programs = layout.num_programs(by_columns, tokens, device)
        programs = max(1, programs // column_tiles) if device.type == "cuda" else programs
        partial = queries.new_empty(programs, num_queries, width)
        by_triton(group_gradients_kernel, programs * column_tiles)(
            packed[0],
            packed[1],
            packed[2] if carried else None,
            packed_grads,
            queries,
            alpha,
            u,
            pull,
            partial,
            *sizes,
            **shape,
            **kinds,
            HAS_CARRIED=len(carried) > 0,
            SLICE_NORM=slice_norm,
            GB=all_queries,
            BS=by_columns.sources,
            BC=columns,
            STAGES=by_columns.stages,
            num_warps=by_columns.warps,
            **FUSED,
        )
    return dsources, layout.sum_rows(partial)
