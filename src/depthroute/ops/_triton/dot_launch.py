"""Launches of the phase-1 kernels on tensor cores: a function for each kernel, which looks up how
it is launched, and the two directions made of them.

``packed`` is a table of addresses; sizes are those of logits [N, S, G, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops._triton.group_dot import (
    group_logits_kernel,
    group_outputs_kernel,
    group_products_kernel,
    group_softmax_kernel,
    group_sources_kernel,
    group_weights_kernel,
)
from depthroute.ops.private.launcher import FUSED, by_triton, on_device


@dataclass(frozen=True)
class DotLaunch:
    """How a phase-1 kernel on tensor cores (``group_dot``) is launched; what a kernel has no use
    for is left as it is here."""

    warps: int
    stages: int = 1
    columns: int = 0
    """Of a tile (BC or BK)."""
    programs: int = 0
    """Per multiprocessor, those of all column tiles together."""
    tokens: int = 1
    """Of one program (BT)."""
    sources: int = 0
    """Of one launch, at most."""


DOT_SOURCES, DOT_QUERIES = 256, 32
"""Beyond which the weights of a token do not fit one program."""
DOT_CHUNK = 64
"""Sources whose gradients fit one program."""


def padded(count: int) -> int:
    """Rows or columns of an operand of tensor cores: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(count))


def _dot_columns(rows: int, width: int, elements: int) -> int:
    """Of a tile of about ``elements`` elements, so many ``rows`` at a time."""
    return min(padded(width), max(32, min(256, elements // rows)))


def logits_launch(width: int) -> DotLaunch:
    tokens = 256 if not layout.INTERPRETED else 16
    return DotLaunch(8, 3, columns=min(64, padded(width)), tokens=tokens)


def softmax_launch(num_sources: int, num_queries: int) -> DotLaunch:
    return DotLaunch(max(1, padded(num_sources) * padded(num_queries) // 1024))


def outputs_launch(num_sources: int, width: int) -> DotLaunch:
    """Many programs, each of some tokens: they need not all fit at once to end together."""
    rows = padded(num_sources)
    warps, stages = (4, 3) if rows <= 64 else (8, 2)
    return DotLaunch(warps, stages, _dot_columns(rows, width, 8192), programs=32)


def products_launch(num_sources: int, width: int) -> DotLaunch:
    """A warp for every 16 rows: 10 sources of 768 reach 0.99 of the copy speed, and 0.73 with 4."""
    rows = padded(largest_chunk(num_sources, DOT_CHUNK))
    return DotLaunch(rows // 16, 3, _dot_columns(rows, width, 128 * rows), sources=DOT_CHUNK)


def weights_launch(num_sources: int, num_queries: int) -> DotLaunch:
    return DotLaunch(max(1, padded(num_sources) * padded(num_queries) // 512))


def sources_launch(num_sources: int, width: int) -> DotLaunch:
    """A program of two warps has fewer barriers to wait at."""
    rows = padded(largest_chunk(num_sources, DOT_CHUNK))
    warps, stages = (2, 3) if rows <= 32 else (4, 2)
    columns = _dot_columns(rows, width, 128 * rows)
    return DotLaunch(warps, stages, columns, programs=4, sources=DOT_CHUNK)


def chunks(num_sources: int, most: int) -> list[tuple[int, int]]:
    """Ranges of at most so many sources, as even as possible."""
    count = triton.cdiv(num_sources, most)
    ends = [num_sources * i // count for i in range(count + 1)]
    return list(itertools.pairwise(ends))


def largest_chunk(num_sources: int, most: int) -> int:
    return max(last - first for first, last in chunks(num_sources, most))


def dot_programs(per_sm: int, tokens: int, column_tiles: int, device: torch.device) -> int:
    """For each column tile, so that all of them together make ``per_sm`` programs an SM."""
    available = layout.num_multiprocessors(device)
    if available == 0:
        return min(tokens, 3)
    return min(tokens, max(1, per_sm * available // column_tiles))


def _chosen(kernel: str, launch: DotLaunch) -> DotLaunch:
    return layout.changed(launch, layout.forced_changes(kernel))


def run_logits(packed: Tensor, queries: Tensor, eps: float, rstd: Tensor, logits: Tensor) -> None:
    tokens, num_sources, num_queries, _ = logits.shape
    width = queries.shape[1]
    launch = _chosen("group_logits", logits_launch(width))
    by_triton(group_logits_kernel, num_sources * triton.cdiv(tokens, launch.tokens))(
        packed,
        queries,
        rstd,
        logits,
        tokens,
        num_sources,
        num_queries,
        eps,
        D=width,
        GB=padded(num_queries),
        BT=launch.tokens,
        BK=launch.columns,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **FUSED,
    )


def run_softmax(logits: Tensor, lse: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Writes ``lse`` and returns the weights in as many bf16 terms as such an output needs."""
    tokens, num_sources, num_queries, _ = logits.shape
    launch = _chosen("group_softmax", softmax_launch(num_sources, num_queries))
    terms, padded_queries = 2 if out_dtype == torch.bfloat16 else 3, padded(num_queries)
    weights = logits.new_empty(tokens, num_sources, terms, padded_queries, dtype=torch.bfloat16)
    by_triton(group_softmax_kernel, tokens)(
        logits,
        lse,
        weights,
        tokens,
        num_sources,
        num_queries,
        TERMS=terms,
        GB=padded_queries,
        SB=padded(num_sources),
        num_warps=launch.warps,
        **FUSED,
    )
    return weights


def run_outputs(packed: Tensor, weights: Tensor, outputs: Tensor) -> None:
    num_queries, tokens, width = outputs.shape
    _, num_sources, terms, padded_queries = weights.shape
    launch = _chosen("group_outputs", outputs_launch(num_sources, width))
    column_tiles = triton.cdiv(width, launch.columns)
    programs = dot_programs(launch.programs, tokens, column_tiles, outputs.device)
    by_triton(group_outputs_kernel, programs * column_tiles)(
        packed,
        weights,
        outputs,
        tokens,
        num_sources,
        num_queries,
        D=width,
        TERMS=terms,
        GB=padded_queries,
        SB=padded(num_sources),
        BC=launch.columns,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **FUSED,
    )


def forward(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    outputs: Tensor,
    lse: Tensor,
    rstd: Tensor,
    logits: Tensor,
) -> None:
    with on_device(queries):
        (packed,) = layout.pack([sources], queries)
        run_logits(packed, queries, eps, rstd, logits)
        weights = run_softmax(logits, lse, outputs.dtype)
        run_outputs(packed, weights, outputs)


def run_products(packed: Tensor, grads: Tensor, width: int, u: Tensor) -> None:
    tokens, num_sources, num_queries, _ = u.shape
    launch = _chosen("group_products", products_launch(num_sources, width))
    largest = largest_chunk(num_sources, launch.sources)
    for first, last in chunks(num_sources, launch.sources):
        by_triton(group_products_kernel, tokens)(
            packed,
            grads,
            u,
            tokens,
            num_sources,
            num_queries,
            first,
            last,
            D=width,
            GB=padded(num_queries),
            SB=padded(largest),
            BK=launch.columns,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **FUSED,
        )


def run_weights(
    logits: Tensor, lse: Tensor, grad_lse: Tensor, rstd: Tensor, u: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Coefficients in bf16 terms [N, S, 5, GB], and what is taken of each source [N, S, 1]."""
    tokens, num_sources, num_queries, _ = logits.shape
    launch = _chosen("group_weights", weights_launch(num_sources, num_queries))
    padded_queries, pull = padded(num_queries), torch.empty_like(rstd)
    weights = logits.new_empty(tokens, num_sources, 5, padded_queries, dtype=torch.bfloat16)
    by_triton(group_weights_kernel, tokens)(
        logits,
        lse,
        grad_lse,
        rstd,
        u,
        weights,
        pull,
        tokens,
        num_sources,
        num_queries,
        D=width,
        GB=padded_queries,
        SB=padded(num_sources),
        num_warps=launch.warps,
        **FUSED,
    )
    return weights, pull


def run_sources(
    packed: Sequence[Tensor], grads: Tensor, queries: Tensor, weights: Tensor, pull: Tensor
) -> Tensor:
    """Writes the sources' gradients, and returns those of the queries by program [.., G, D].

    ``packed``: the sources, their gradients and, if there are any, those handed on.
    """
    (num_queries, width), (tokens, num_sources) = queries.shape, weights.shape[:2]
    launch = _chosen("group_sources", sources_launch(num_sources, width))
    ranges = chunks(num_sources, launch.sources)
    largest = largest_chunk(num_sources, launch.sources)
    column_tiles = triton.cdiv(width, launch.columns)
    programs = dot_programs(launch.programs, tokens, column_tiles, queries.device)
    partial = queries.new_empty(len(ranges), programs, num_queries, width)
    for (first, last), of_chunk in zip(ranges, partial, strict=True):
        by_triton(group_sources_kernel, programs * column_tiles)(
            *(*packed, None)[:3],
            grads,
            queries,
            weights,
            pull,
            of_chunk,
            tokens,
            num_sources,
            num_queries,
            first,
            last,
            D=width,
            HAS_CARRIED=len(packed) == 3,
            GB=weights.shape[3],
            SB=padded(largest),
            BC=launch.columns,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **FUSED,
        )
    return partial.flatten(0, 1)


def backward(
    grads: Sequence[Tensor],
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
    with on_device(queries):
        lists = [grads, sources, dsources, *([carried] if carried else [])]
        (packed_grads, *packed), u = layout.pack(lists, queries), torch.empty_like(logits)
        run_products(packed[0], packed_grads, queries.shape[1], u)
        weights, pull = run_weights(logits, lse, grad_lse, rstd, u, queries.shape[1])
        partial = run_sources(packed, packed_grads, queries, weights, pull)
    return layout.sum_rows(partial)
