"""Sums with S weights that all tokens share (:mod:`depthroute.ops.static`): S + 1 passes forward,
2S + 1 backward and S more with what later sites handed back.

A token means nothing here: a program takes a stretch of the activation from every source in turn,
through a table of addresses. What the gradient of a weight sums over all of it is left by every
program as a row and added up after.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops._triton import blocks, layout
from depthroute.ops.private.launcher import Prepared, aligned, kinds
from depthroute.ops.static import StaticBackward, StaticForward, StaticGradients

LENGTH, WARPS, STAGES = (64, 1, 2) if layout.INTERPRETED else (4096, 8, 3)
"""Numbers of a stretch: 16 a thread, two loads of 16 bytes."""


@triton.jit
def _stretch(E, LENGTH: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * LENGTH + tl.arange(0, LENGTH)
    return o, o < E


@triton.jit(do_not_specialize=["S"])
def static_forward_kernel(
    p_sources,
    p_weights,
    p_residual,
    p_x,
    E,
    S,
    scale,
    DTYPE: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    o, m = _stretch(E, LENGTH)
    b_x = tl.zeros([LENGTH], tl.float32)
    for n in tl.range(0, S, num_stages=STAGES):
        p = blocks.pointers(p_sources, n + tl.arange(0, 1), DTYPE)
        b_x += tl.load(p_weights + n) * tl.load(p + o, m, 0.0).to(tl.float32)
    if p_residual is not None:
        b_x += scale * tl.load(p_residual + o, m, 0.0).to(tl.float32)
    tl.store(p_x + o, b_x, m)


@triton.jit(do_not_specialize=["S"])
def static_backward_kernel(
    p_sources,
    p_dsources,
    p_carried,
    p_grad,
    p_weights,
    p_rows,
    E,
    S,
    DTYPE: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    o, m = _stretch(E, LENGTH)
    b_grad = tl.load(p_grad + o, m, 0.0).to(tl.float32)
    for n in tl.range(0, S, num_stages=STAGES):
        o_n = n + tl.arange(0, 1)
        b_s = tl.load(blocks.pointers(p_sources, o_n, DTYPE) + o, m, 0.0).to(tl.float32)
        b_d = tl.load(p_weights + n) * b_grad
        if p_carried is not None:
            b_d += tl.load(blocks.pointers(p_carried, o_n, DTYPE) + o, m, 0.0).to(tl.float32)
        tl.store(blocks.pointers(p_dsources, o_n, DTYPE) + o, b_d, m)
        tl.store(p_rows + tl.program_id(0) * S + n, tl.sum(b_grad * b_s, 0))


@cache
def _prepared(kernel: object, kind: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...]):
    """``kind`` of the number of elements, and ``dtypes`` of all tensors, the sources' first."""
    constants = {"DTYPE": layout.DTYPES[dtypes[0]], "LENGTH": LENGTH, "STAGES": STAGES}  # pyright: ignore
    return Prepared(kernel, WARPS, True, **constants)


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def static_forward(given: StaticForward) -> Tensor:
    sources, weights, residual, scale, dtype = given
    x = sources[0].new_empty(sources[0].shape, dtype=dtype)
    if not (count := x.numel()):
        return x
    sources = list(map(aligned, sources))  # a table does not keep what it points to
    (table,) = layout.pack([sources], weights)
    kind = kinds((count,)), _dtypes(sources[0], weights, residual, x)
    run = _prepared(static_forward_kernel, *kind)
    sizes = count, len(sources), float(scale)
    run(triton.cdiv(count, LENGTH), (), (table, weights, residual, x), sizes)
    return x


def static_backward(given: StaticBackward) -> StaticGradients:
    grad, sources, carried, weights = given
    dsources = [source.new_empty(source.shape) for source in sources]
    if not (count := grad.numel()):
        return dsources, weights.new_zeros(len(sources))
    lists = [list(map(aligned, sources)), dsources, list(map(aligned, carried))]
    tables = layout.pack(lists[: 2 + bool(carried)], weights)
    rows = weights.new_empty(triton.cdiv(count, LENGTH), len(sources))
    kind = kinds((count,)), _dtypes(sources[0], grad, tables[-1] if carried else None)
    run = _prepared(static_backward_kernel, *kind)
    tensors = *(*tables, None)[:3], grad, weights, rows
    run(len(rows), (), tensors, (count, len(sources)))
    return dsources, layout.sum_rows(rows)
