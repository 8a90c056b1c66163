"""The rounds of :func:`depthroute.ops.hyper.doubly_stochastic`, all in one kernel each way.

A program holds the matrices of a few tokens. Torch would launch two kernels a round and as many
again in backward, some hundred a site, for matrices of a few numbers.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops.hyper import Projected, ProjectedBackward
from depthroute.ops.private.launcher import Prepared
from depthroute.ops.reference import SINKHORN_ITERATIONS

ELEMENTS, WARPS = (64, 1) if layout.INTERPRETED else (512, 4)
"""Numbers that a program holds: 4 a thread."""
LOWEST = tl.constexpr(-1e30)
"""In place of -inf where nothing is: a row of it has a maximum that it may be less by."""


@triton.jit
def _start(p_logits, T, N: tl.constexpr, NB: tl.constexpr, BT: tl.constexpr):
    """The logs of columns that sum to one, then rows that do, and where in memory they lie."""
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None, None]
    o_i, o_j = tl.arange(0, NB)[None, :, None], tl.arange(0, NB)[None, None, :]
    m = (o_i < N) & (o_j < N) & (o_t < T)
    o = o_t * N * N + o_i * N + o_j
    b_x = tl.load(p_logits + o, m, LOWEST)
    b_x -= tl.max(b_x, 1, keep_dims=True)
    b_x -= tl.log(_sums(tl.where(m, tl.exp(b_x), 0.0), m, 1))
    b_x = tl.where(m, b_x, LOWEST)
    b_matrix = tl.where(m, tl.exp(b_x - tl.max(b_x, 2, keep_dims=True)), 0.0)
    return b_x, b_matrix / _sums(b_matrix, m, 2), o, m


@triton.jit
def _sums(b_matrix, m, AXIS: tl.constexpr):
    """Over ``AXIS``; 1 where there is nothing."""
    is_there = tl.max(m.to(tl.int32), AXIS, keep_dims=True) > 0
    return tl.where(is_there, tl.sum(b_matrix, AXIS, keep_dims=True), 1.0)


@triton.jit(do_not_specialize=["T"])
def sinkhorn_forward_kernel(
    p_logits, p_out, T, N: tl.constexpr, ROUNDS: tl.constexpr, NB: tl.constexpr, BT: tl.constexpr
):
    _, b_matrix, o, m = _start(p_logits, T, N, NB, BT)
    for _ in range(ROUNDS):
        b_matrix /= _sums(b_matrix, m, 1)
        b_matrix /= _sums(b_matrix, m, 2)
    tl.store(p_out + o, b_matrix, m)


@triton.jit(do_not_specialize=["T"])
def sinkhorn_backward_kernel(
    p_grad,
    p_logits,
    p_sums,
    p_out,
    T,
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
    NB: tl.constexpr,
    BT: tl.constexpr,
):
    """The rounds again, whose sums are kept: a matrix is the next one times its sums."""
    b_first, b_matrix, o, m = _start(p_logits, T, N, NB, BT)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None, None]
    o_column, o_row = tl.arange(0, NB)[None, None, :], tl.arange(0, NB)[None, :, None]
    p_columns, m_columns = p_sums + o_t * 2 * ROUNDS * N + o_column, (o_t < T) & (o_column < N)
    p_rows, m_rows = p_sums + o_t * 2 * ROUNDS * N + N + o_row, (o_t < T) & (o_row < N)
    for i in range(ROUNDS):
        b_sums = _sums(b_matrix, m, 1)
        tl.store(p_columns + 2 * i * N, b_sums, m_columns)
        b_matrix /= b_sums
        b_sums = _sums(b_matrix, m, 2)
        tl.store(p_rows + 2 * i * N, b_sums, m_rows)
        b_matrix /= b_sums
    b_grad = tl.load(p_grad + o, m, 0.0)
    tl.debug_barrier()  # another thread may read what one has stored
    for j in range(ROUNDS):
        i = ROUNDS - 1 - j
        b_sums = tl.load(p_rows + 2 * i * N, m_rows, 1.0)
        b_grad = (b_grad - tl.sum(b_grad * b_matrix, 2, keep_dims=True)) / b_sums
        b_matrix *= b_sums
        b_sums = tl.load(p_columns + 2 * i * N, m_columns, 1.0)
        b_grad = (b_grad - tl.sum(b_grad * b_matrix, 1, keep_dims=True)) / b_sums
        b_matrix *= b_sums
    b_grad = b_matrix * (b_grad - tl.sum(b_grad * b_matrix, 2, keep_dims=True))
    b_grad -= tl.exp(b_first) * tl.sum(b_grad, 1, keep_dims=True)
    tl.store(p_out + o, b_grad, m)


@cache
def _prepared(kernel: object, count: int) -> tuple[Prepared, int]:
    """And how many tokens a program takes."""
    size = triton.next_power_of_2(count)
    tokens = max(1, ELEMENTS // size**2)
    constants = {"N": count, "ROUNDS": SINKHORN_ITERATIONS - 1, "NB": size, "BT": tokens}
    return Prepared(kernel, WARPS, True, **constants), tokens


def _run(kernel: object, tensors: tuple[Tensor, ...]) -> Tensor:
    """``tensors`` to read; what is written is as the last of the matrices."""
    logits = tensors[-1]
    count = logits.shape[-1]
    num_tokens = logits.numel() // count**2
    out = logits.new_empty(logits.shape)
    if num_tokens:
        if kernel is sinkhorn_backward_kernel:
            rounds = 2 * (SINKHORN_ITERATIONS - 1)
            tensors += (logits.new_empty(num_tokens, rounds, count),)
        run, tokens = _prepared(kernel, count)
        run(triton.cdiv(num_tokens, tokens), (), (*tensors, out), (num_tokens,))
    return out


def project(record: Projected) -> Tensor:
    return _run(sinkhorn_forward_kernel, (record.logits,))


def project_backward(record: ProjectedBackward) -> Tensor:
    return _run(sinkhorn_backward_kernel, (record.grad, record.logits))
