"""The rows of :mod:`depthroute.ops.cross_entropy`: losses, and gradients in the place of logits.

One program takes a row and goes over it twice: log-sum-exp, then gradient. Bytes of a logit in
bf16: 2 + 2 read, 2 written; without a gradient 2 read.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops.cross_entropy import HeadLoss, HeadLossResults, by_chunks
from depthroute.ops.private.launcher import Prepared

# interpreted: a loop that repeats although vocabularies are small
COLUMNS, WARPS = (32, 1) if layout.INTERPRETED else (4096, 8)
"""Of a row at a time: 16 numbers a thread, two loads of 16 bytes."""
STAGES = tl.constexpr(3)
LOWEST = tl.constexpr(-1e30)
"""Where the maximum of a lane starts: from -inf, lanes beyond the row would make NaN of it."""


@triton.jit
def _tanh_and_slope(x):
    """tanh x and 1 - tanh^2 x, neither by a difference of nearly equal numbers."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    s = x * x
    near = a * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    b_tanh = tl.where(a < 0.1, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -b_tanh, b_tanh), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _mapped(b_logits, m_c, scale, softcap, CAPPED: tl.constexpr):
    """z as the loss sees it, -inf where ``m_c`` is false, and dz / dlogit."""
    b_z = tl.where(m_c, b_logits.to(tl.float32), 0.0) * scale
    b_slope = scale
    if CAPPED:
        b_tanh, b_slope = _tanh_and_slope(b_z / softcap)
        b_z = b_tanh * softcap
        b_slope *= scale
    return tl.where(m_c, b_z, -float("inf")), b_slope


@triton.jit(do_not_specialize=["ignored"])
def row_losses_kernel(
    p_logits,
    p_targets,
    p_losses,
    ignored,
    scale,
    softcap,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPPED: tl.constexpr,
    WANTS: tl.constexpr,
    BC: tl.constexpr,
):
    """Rows are STRIDE long in memory, of which V are logits: whole vectors are read and written."""
    i_row = tl.program_id(0).to(tl.int64)
    b_target = tl.load(p_targets + i_row)
    p_row = p_logits + i_row * STRIDE
    o_c = tl.arange(0, BC)
    if b_target == ignored:
        tl.store(p_losses + i_row, 0.0)
        if WANTS:
            for i in tl.range(0, STRIDE, BC):
                tl.store(p_row + i + o_c, tl.zeros([BC], tl.float32), i + o_c < STRIDE)
    else:
        m_target = (b_target >= 0) & (b_target < V)
        b_chosen = tl.load(p_row + b_target, m_target, 0.0)
        b_chosen, _ = _mapped(b_chosen, m_target, scale, softcap, CAPPED)
        b_max = tl.full([BC], LOWEST, tl.float32)
        b_sum = tl.zeros([BC], tl.float32)
        for i in tl.range(0, STRIDE, BC, num_stages=STAGES):
            b_logits = tl.load(p_row + i + o_c, i + o_c < STRIDE)
            b_z, b_slope = _mapped(b_logits, i + o_c < V, scale, softcap, CAPPED)
            b_higher = tl.maximum(b_max, b_z)
            b_sum = b_sum * tl.exp(b_max - b_higher) + tl.exp(b_z - b_higher)
            b_max = b_higher
        b_top = tl.max(b_max, 0)
        b_lse = b_top + tl.log(tl.sum(b_sum * tl.exp(b_max - b_top), 0))
        # a target that is no column has no loss, and a NaN is seen
        tl.store(p_losses + i_row, tl.where(m_target, b_lse - b_chosen, float("nan")))
        if WANTS:
            for i in tl.range(0, STRIDE, BC, num_stages=STAGES):
                b_logits = tl.load(p_row + i + o_c, i + o_c < STRIDE)
                b_z, b_slope = _mapped(b_logits, i + o_c < V, scale, softcap, CAPPED)
                b_grad = tl.exp(b_z - b_lse) - tl.where(i + o_c == b_target, 1.0, 0.0)
                tl.store(p_row + i + o_c, b_grad * b_slope, i + o_c < STRIDE)


@cache
def _prepared(
    dtype: torch.dtype, vocabulary: int, stride: int, is_capped: bool, wants: bool
) -> Prepared:
    """``dtype`` of the logits is a key of the cache: a kernel is prepared for one."""
    return Prepared(
        row_losses_kernel,
        WARPS,
        V=vocabulary,
        STRIDE=stride,
        CAPPED=is_capped,
        WANTS=wants,
        BC=COLUMNS,
    )


def _row_losses(logits: Tensor, targets: Tensor, given: HeadLoss) -> Tensor:
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    run = _prepared(
        logits.dtype, logits.shape[1], logits.stride(0), given.softcap > 0, any(given.wants)
    )
    numbers = given.ignore_index, float(given.scale), float(given.softcap)
    run(len(logits), (), (logits, targets, losses), numbers)
    return losses


def head_loss(given: HeadLoss) -> HeadLossResults:
    return by_chunks(given, _row_losses)
