"""Arithmetic on rows of NT tiles [1, HB, BC], which the kernels that hold rows are written in.

*Held* rows have the dtype they are stored in, *wide* rows are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def again(held, NT: tl.constexpr, GPU: tl.constexpr):
    """A held row in fp32, for the second time.

    Hides the row from the optimiser, which would otherwise keep the first wide row, and with it
    twice the registers.
    """
    wide = ()
    for j in tl.static_range(NT):
        b = held[j]
        if GPU and b.dtype.primitive_bitwidth == 16:
            b = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [b], dtype=b.dtype, is_pure=False, pack=2
            )
        wide = wide + (b.to(tl.float32),)
    return wide


@triton.jit
def narrow(wide, DTYPE: tl.constexpr, NT: tl.constexpr):
    """Rounded to DTYPE."""
    held = ()
    for j in tl.static_range(NT):
        held = held + (wide[j].to(DTYPE),)
    return held


@triton.jit
def axpy(a, x, y, NT: tl.constexpr):
    """a x + y."""
    tiles = ()
    for j in tl.static_range(NT):
        tiles = tiles + (a * x[j] + y[j],)
    return tiles


@triton.jit
def plus(a, b, NT: tl.constexpr):
    tiles = ()
    for j in tl.static_range(NT):
        tiles = tiles + (a[j] + b[j],)
    return tiles


@triton.jit
def times(a, b, NT: tl.constexpr):
    """a [or each of its tiles] times the scalar b."""
    tiles = ()
    for j in tl.static_range(NT):
        tiles = tiles + (a[j] * b,)
    return tiles


@triton.jit
def product(a, b, NT: tl.constexpr):
    """Elementwise products summed over tiles, before the sum over columns."""
    v = a[0] * b[0]
    for j in tl.static_range(1, NT):
        v += a[j] * b[j]
    return v


@triton.jit
def over(a, b, NT: tl.constexpr):
    tiles = ()
    for j in tl.static_range(NT):
        tiles = tiles + (a[j] / b[j],)
    return tiles


@triton.jit
def off_zero(a, least, NT: tl.constexpr):
    """With ``least`` for what is nearer to zero."""
    tiles = ()
    for j in tl.static_range(NT):
        tiles = tiles + (tl.where(tl.abs(a[j]) < least, least, a[j]),)
    return tiles


@triton.jit
def _add_fours(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sum_four(v0, v1, v2, v3, GPU: tl.constexpr):
    if GPU:
        v0, v1, v2, v3 = tl.reduce((v0, v1, v2, v3), 2, _add_fours, keep_dims=True)
    else:
        v0, v1 = tl.sum(v0, 2, keep_dims=True), tl.sum(v1, 2, keep_dims=True)
        v2, v3 = tl.sum(v2, 2, keep_dims=True), tl.sum(v3, 2, keep_dims=True)
    return v0, v1, v2, v3
