"""The second stage of sums over tokens: every program left a row, and these add up the rows."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops.private.launcher import Prepared

# interpreted: few programs, and a loop that repeats although there are three rows
ROWS, COLUMNS = (2, 512) if layout.INTERPRETED else (128, 16)


@triton.jit(do_not_specialize=["P"])
def sum_rows_kernel(p_rows, p_sum, P, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """BC of the C sums; always in the same order."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    o_p = tl.arange(0, BP)[:, None].to(tl.int64)
    b_sum = tl.zeros([BP, BC], tl.float32)
    for i in tl.range(0, P, BP, num_stages=4):
        b_sum += tl.load(p_rows + (i + o_p) * C + o_c, (i + o_p < P) & (o_c < C), 0.0)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(p_sum + o_c, tl.sum(b_sum, 0), o_c < C)


@cache
def _sum_rows(columns: int) -> Prepared:
    return Prepared(sum_rows_kernel, 4, C=columns, BP=ROWS, BC=COLUMNS)


def sum_rows(rows: Tensor) -> Tensor:
    """The sum over the first axis of a contiguous fp32 tensor; a program takes a few columns, so
    that many share a sum that is long and narrow."""
    count, *shape = rows.shape
    total = rows.new_empty(*shape)  # at a third of the time that one shape takes
    columns = total.numel()
    _sum_rows(columns)(-(-columns // COLUMNS), (), (rows, total), (count,))
    return total
