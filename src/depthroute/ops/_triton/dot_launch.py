"""Launches of the phase-1 kernels on tensor cores: a function for each kernel, which looks up how
it is launched, and the two directions made of them.

``packed`` is a table of addresses; sizes are those of logits [N, S, G, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

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
from depthroute.ops._triton.sums import sum_rows
from depthroute.ops.private.launcher import FUSED, by_triton


def _chosen(kernel: str, launch: layout.DotLaunch) -> layout.DotLaunch:
    return layout.changed(launch, layout.forced_changes(kernel))


def run_logits(packed: Tensor, queries: Tensor, eps: float, rstd: Tensor, logits: Tensor) -> None:
    tokens, num_sources, num_queries, _ = logits.shape
    width = queries.shape[1]
    launch = _chosen("group_logits", layout.logits_launch(width))
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
        GB=layout.padded(num_queries),
        BT=launch.tokens,
        BK=launch.columns,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **FUSED,
    )


def run_softmax(logits: Tensor, lse: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Writes ``lse`` and returns the weights in as many bf16 terms as such an output needs."""
    tokens, num_sources, num_queries, _ = logits.shape
    launch = _chosen("group_softmax", layout.softmax_launch(num_sources, num_queries))
    terms, padded = 2 if out_dtype == torch.bfloat16 else 3, layout.padded(num_queries)
    weights = logits.new_empty(tokens, num_sources, terms, padded, dtype=torch.bfloat16)
    by_triton(group_softmax_kernel, tokens)(
        logits,
        lse,
        weights,
        tokens,
        num_sources,
        num_queries,
        TERMS=terms,
        GB=padded,
        SB=layout.padded(num_sources),
        num_warps=launch.warps,
        **FUSED,
    )
    return weights


def run_outputs(packed: Tensor, weights: Tensor, outputs: Tensor) -> None:
    num_queries, tokens, width = outputs.shape
    _, num_sources, terms, padded = weights.shape
    launch = _chosen("group_outputs", layout.outputs_launch(num_sources, width))
    column_tiles = triton.cdiv(width, launch.columns)
    programs = layout.dot_programs(launch.programs, tokens, column_tiles, outputs.device)
    by_triton(group_outputs_kernel, programs * column_tiles)(
        packed,
        weights,
        outputs,
        tokens,
        num_sources,
        num_queries,
        D=width,
        TERMS=terms,
        GB=padded,
        SB=layout.padded(num_sources),
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
    with layout.on_device(queries):
        (packed,) = layout.pack([sources], queries)
        run_logits(packed, queries, eps, rstd, logits)
        weights = run_softmax(logits, lse, outputs.dtype)
        run_outputs(packed, weights, outputs)


def run_products(packed: Tensor, grad: Tensor, u: Tensor) -> None:
    num_queries, tokens, width = grad.shape
    num_sources = u.shape[1]
    launch = _chosen("group_products", layout.products_launch(num_sources, width))
    largest = layout.largest_chunk(num_sources, launch.sources)
    for first, last in layout.chunks(num_sources, launch.sources):
        by_triton(group_products_kernel, tokens)(
            packed,
            grad,
            u,
            tokens,
            num_sources,
            num_queries,
            first,
            last,
            D=width,
            GB=layout.padded(num_queries),
            SB=layout.padded(largest),
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
    launch = _chosen("group_weights", layout.weights_launch(num_sources, num_queries))
    padded, pull = layout.padded(num_queries), torch.empty_like(rstd)
    weights = logits.new_empty(tokens, num_sources, 5, padded, dtype=torch.bfloat16)
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
        GB=padded,
        SB=layout.padded(num_sources),
        num_warps=launch.warps,
        **FUSED,
    )
    return weights, pull


def run_sources(
    packed: Sequence[Tensor], grad: Tensor, queries: Tensor, weights: Tensor, pull: Tensor
) -> Tensor:
    """Writes the sources' gradients, and returns those of the queries by program [.., G, D].

    ``packed``: the sources, their gradients and, if there are any, those handed on.
    """
    num_queries, tokens, width = grad.shape
    num_sources = weights.shape[1]
    launch = _chosen("group_sources", layout.sources_launch(num_sources, width))
    ranges = layout.chunks(num_sources, launch.sources)
    largest = layout.largest_chunk(num_sources, launch.sources)
    column_tiles = triton.cdiv(width, launch.columns)
    programs = layout.dot_programs(launch.programs, tokens, column_tiles, queries.device)
    partial = queries.new_empty(len(ranges), programs, num_queries, width)
    for (first, last), of_chunk in zip(ranges, partial, strict=True):
        by_triton(group_sources_kernel, programs * column_tiles)(
            *(*packed, None)[:3],
            grad,
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
            SB=layout.padded(largest),
            BC=launch.columns,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **FUSED,
        )
    return partial.flatten(0, 1)


def backward(
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
    with layout.on_device(queries):
        lists = [sources, dsources, *([carried] if carried else [])]
        packed, u = layout.pack(lists, queries), torch.empty_like(logits)
        run_products(packed[0], grad, u)
        weights, pull = run_weights(logits, lse, grad_lse, rstd, u, queries.shape[1])
        partial = run_sources(packed, grad, queries, weights, pull)
    return sum_rows(partial)
