"""Launches of the phase-1 kernels: on tensor cores where all that enters a product is bf16
(``group_dot``), else on plain ones (``group``). Forward and backward choose apart, since what is
saved has one layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops._triton.group import (
    group_coefficients_kernel,
    group_forward_kernel,
    group_gradients_kernel,
    group_scores_kernel,
)
from depthroute.ops._triton.group_dot import (
    group_logits_kernel,
    group_outputs_kernel,
    group_products_kernel,
    group_softmax_kernel,
    group_sources_kernel,
    group_weights_kernel,
)
from depthroute.ops._triton.sums import sum_rows


def uses_dots(tensors: Sequence[Tensor], heads: int, num_sources: int, num_queries: int) -> bool:
    """Whether everything that enters a product is bf16, and the tiles fit."""
    fits = num_sources <= layout.DOT_SOURCES and num_queries <= layout.DOT_QUERIES
    return fits and heads == 1 and all(t.dtype == torch.bfloat16 for t in tensors)


def group_forward(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    heads: int,
    slice_norm: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """outputs [G, N, D], lse [G, N, H], rstd [N, S, 1|H], logits [N, S, G, H]."""
    (tokens, width), num_sources = sources[0].shape, len(sources)
    num_queries = queries.shape[0]
    outputs = queries.new_empty(num_queries, tokens, width, dtype=out_dtype)
    lse = queries.new_empty(num_queries, tokens, heads)
    rstd = queries.new_empty(tokens, num_sources, heads if slice_norm else 1)
    logits = queries.new_empty(tokens, num_sources, num_queries, heads)
    if tokens == 0:
        return outputs, lse, rstd, logits
    sources = [layout.aligned(s) for s in sources]
    if uses_dots(sources, heads, num_sources, num_queries):
        _forward_dots(sources, layout.aligned(queries), eps, outputs, lse, rstd, logits)
        return outputs, lse, rstd, logits
    block = layout.tiles(width, heads)
    launch, at_once = layout.group_launch(block, num_sources, num_queries)
    programs = layout.num_programs(launch, tokens, queries.device)
    with layout.on_device(queries):
        (packed,) = layout.pack([sources], queries)
        group_forward_kernel[(programs * triton.cdiv(num_queries, at_once),)](
            packed,
            layout.aligned(queries),
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
        )
    return outputs, lse, rstd, logits


def _forward_dots(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    outputs: Tensor,
    lse: Tensor,
    rstd: Tensor,
    logits: Tensor,
) -> None:
    num_queries, tokens, width = outputs.shape
    sizes = tokens, len(sources), num_queries
    tile = layout.dots(len(sources), num_queries, width, 8192)
    at_once = 256 if not layout.INTERPRETED else 16
    with layout.on_device(queries):
        (packed,) = layout.pack([sources], queries)
        group_logits_kernel[(len(sources) * triton.cdiv(tokens, at_once),)](
            packed,
            queries,
            rstd,
            logits,
            *sizes,
            eps,
            D=width,
            GB=tile.queries,
            BT=at_once,
            BK=min(64, max(16, triton.next_power_of_2(width))),
            STAGES=3,
            num_warps=8,
        )
        terms = 2 if outputs.dtype == torch.bfloat16 else 3
        shape = tokens, len(sources), terms, tile.queries
        weights = outputs.new_empty(shape, dtype=torch.bfloat16)
        tiles = {"TERMS": terms, "GB": tile.queries, "SB": tile.sources}
        warps = max(1, tile.sources * tile.queries // 1024)
        group_softmax_kernel[(tokens,)](logits, lse, weights, *sizes, **tiles, num_warps=warps)
        column_tiles = triton.cdiv(width, tile.columns)
        # many, each of some tokens: they need not all fit at once to end together
        programs = layout.dot_programs(32, tokens, column_tiles, queries.device)
        group_outputs_kernel[(programs * column_tiles,)](
            packed,
            weights,
            outputs,
            *sizes,
            D=width,
            **tiles,
            BC=tile.columns,
            STAGES=3 if tile.sources <= 64 else 2,
            num_warps=4 if tile.sources <= 64 else 8,
        )


def _backward_dots(
    grad: Tensor,
    grad_lse: Tensor,
    carried: Sequence[Tensor],
    sources: Sequence[Tensor],
    dsources: Sequence[Tensor],
    queries: Tensor,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
) -> Tensor:
    """Writes ``dsources`` and returns the gradient of the queries."""
    num_queries, tokens, width = grad.shape
    sizes = tokens, len(sources), num_queries
    ranges = layout.chunks(len(sources))
    largest = max(last - first for first, last in ranges)
    long = layout.dots(largest, num_queries, width, 8192)
    # 128 columns; a program of two warps has fewer barriers to wait at
    short = layout.dots(largest, num_queries, width, 128 * long.sources)
    warps, stages = (2, 3) if short.sources <= 32 else (4, 2)
    every = layout.dots(len(sources), num_queries, width, 8192)
    u, pull = torch.empty_like(logits), torch.empty_like(rstd)
    weights = grad.new_empty(tokens, len(sources), 5, long.queries)
    column_tiles = triton.cdiv(width, short.columns)
    programs = layout.dot_programs(4, tokens, column_tiles, queries.device)
    partial = queries.new_empty(len(ranges), programs, num_queries, width)
    with layout.on_device(queries):
        lists = [sources, dsources, *([carried] if carried else [])]
        packed = layout.pack(lists, queries)
        for first, last in ranges:
            group_products_kernel[(tokens,)](
                packed[0],
                grad,
                u,
                *sizes,
                first,
                last,
                D=width,
                GB=long.queries,
                SB=long.sources,
                BK=long.columns,
                STAGES=3,
                num_warps=4,
            )
        group_weights_kernel[(tokens,)](
            logits,
            lse,
            grad_lse,
            rstd,
            u,
            weights,
            pull,
            *sizes,
            D=width,
            GB=every.queries,
            SB=every.sources,
            num_warps=max(1, every.sources * every.queries // 512),
        )
        for (first, last), of_chunk in zip(ranges, partial, strict=True):
            group_sources_kernel[(programs * column_tiles,)](
                packed[0],
                packed[1],
                packed[2] if carried else None,
                grad,
                queries,
                weights,
                pull,
                of_chunk,
                *sizes,
                first,
                last,
                D=width,
                HAS_CARRIED=len(carried) > 0,
                GB=short.queries,
                SB=short.sources,
                BC=short.columns,
                STAGES=stages,
                num_warps=warps,
            )
    return sum_rows(partial.flatten(0, 1))


def group_backward(
    grad: Tensor,
    grad_lse: Tensor,
    carried: Sequence[Tensor],
    sources: Sequence[Tensor],
    queries: Tensor,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    heads: int,
    slice_norm: bool,
) -> tuple[list[Tensor], Tensor]:
    num_queries, tokens, width = grad.shape
    num_sources, device = len(sources), queries.device
    sources = [layout.aligned(s) for s in sources]
    dsources = [torch.empty_like(s) for s in sources]
    if tokens == 0:
        return dsources, torch.zeros_like(queries)
    grad, grad_lse, queries = (layout.aligned(t) for t in (grad, grad_lse, queries))
    carried = [layout.aligned(c) for c in carried]
    if uses_dots([*sources, *carried, grad], heads, num_sources, num_queries):
        stats = rstd, logits, lse
        dqueries = _backward_dots(grad, grad_lse, carried, sources, dsources, queries, *stats)
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
        group_scores_kernel[(tokens * triton.cdiv(num_queries, at_once),)](
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
        )
        group_coefficients_kernel[(tokens,)](
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
        )
        columns, columns_launch = layout.columns_launch(width // heads, all_queries)
        column_tiles = heads * triton.cdiv(width // heads, columns)
        programs = layout.num_programs(columns_launch, tokens, device)
        programs = max(1, programs // column_tiles) if device.type == "cuda" else programs
        partial = queries.new_empty(programs, num_queries, width)
        group_gradients_kernel[(programs * column_tiles,)](
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
        )
    return dsources, sum_rows(partial)
