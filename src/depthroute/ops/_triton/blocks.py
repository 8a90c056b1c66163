"""Device functions shared by the kernels.

A row of width D is seen as ``[H, D/H]`` and covered by ``NT`` column tiles ``[HB, BC]``, held as a
tuple, so that a width such as 7168 (7 tiles of 1024) wastes no lanes. ``BS`` sources are handled at
a time, so every loaded block is ``[BS, HB, BC]`` and statistics are ``[BS, HB, 1]``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointers(p_table, o_n, DTYPE: tl.constexpr):
    """Addresses [BS] of the sources ``o_n`` [BS], which must exist."""
    p = tl.load(p_table + o_n).to(tl.pointer_type(DTYPE), bitcast=True)
    return tl.multiple_of(p, [16])  # the launcher aligns every source


@triton.jit
def tile_mask(o_h, o_c, H: tl.constexpr, DH: tl.constexpr):
    return (o_h < H) & (o_c < DH)


@triton.jit
def load_tiles(
    p,
    m_n,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    POLICY: tl.constexpr,
):
    """NT blocks [BS, HB, BC] of the rows at ``p`` [BS, 1, 1]; ``m_n`` says which rows exist."""
    o_h = tl.arange(0, HB)[None, :, None]
    tiles = ()
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, :]
        m = m_n & tile_mask(o_h, o_c, H, DH)
        tiles = tiles + (tl.load(p + (o_h * DH + o_c), m, 0.0, eviction_policy=POLICY),)
    return tiles


@triton.jit
def hold(
    p,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
):
    """One row as NT blocks [1, HB, BC] of the dtype it is stored in."""
    o_h = tl.arange(0, HB)[None, :, None]
    tiles = ()
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, :]
        tiles = tiles + (tl.load(p + (o_h * DH + o_c), tile_mask(o_h, o_c, H, DH), 0.0),)
    return tiles


@triton.jit
def widen(held, NT: tl.constexpr):
    """A held row in fp32."""
    wide = ()
    for j in tl.static_range(NT):
        wide = wide + (held[j].to(tl.float32),)
    return wide


@triton.jit
def load_row(
    p,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
):
    """One row as NT fp32 blocks [1, HB, BC]."""
    return widen(hold(p, H, DH, HB, BC, NT), NT)


@triton.jit
def store_row(
    p,
    tiles,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
):
    o_h = tl.arange(0, HB)[None, :, None]
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, :]
        b = tiles[j].to(p.dtype.element_ty)
        tl.store(p + (o_h * DH + o_c), b, tile_mask(o_h, o_c, H, DH))


@triton.jit
def zero_row(HB: tl.constexpr, BC: tl.constexpr, NT: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(NT):
        tiles = tiles + (tl.zeros([1, HB, BC], tl.float32),)
    return tiles


@triton.jit
def dot_tiles(a, b, NT: tl.constexpr):
    """Per-head dot products [BS, HB, 1] of two tuples of tiles; one reduction for all tiles."""
    v = a[0].to(tl.float32) * b[0].to(tl.float32)
    for j in tl.static_range(1, NT):
        v += a[j].to(tl.float32) * b[j].to(tl.float32)
    return tl.sum(v, 2, keep_dims=True)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sum_two(v0, v1, GPU: tl.constexpr):
    """Sums over columns with one exchange between warps.

    The interpreter runs such reductions one element at a time, so it takes them apart.
    """
    if GPU:
        v0, v1 = tl.reduce((v0, v1), 2, _add_pairs, keep_dims=True)
    else:
        v0, v1 = tl.sum(v0, 2, keep_dims=True), tl.sum(v1, 2, keep_dims=True)
    return v0, v1


@triton.jit
def square_and_dot(s, q, NT: tl.constexpr, GPU: tl.constexpr):
    """sum s^2 and sum s q over columns, [BS, HB, 1] each."""
    b = s[0].to(tl.float32)
    v, w = b * b, b * q[0]
    for j in tl.static_range(1, NT):
        b = s[j].to(tl.float32)
        v += b * b
        w += b * q[j]
    return sum_two(v, w, GPU)


@triton.jit
def over_sources(x, BS: tl.constexpr):
    """Sum over the sources of a block: [BS, ...] to [1, ...]."""
    if BS > 1:
        x = tl.sum(x, 0, keep_dims=True)
    return x


@triton.jit
def over_norm_group(x, SLICE_NORM: tl.constexpr):
    """[BS, HB, 1] summed over heads, unless every head has its own statistics."""
    if not SLICE_NORM:
        x = tl.sum(x, 1, keep_dims=True)
    return x


@triton.jit
def _exponent(b):
    """2^e of |b| in [2^e, 2^(e+1)), and its inverse; tiny numbers count as 2^-63."""
    bits = b.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 64 << 23), 191 << 23)
    inverse = (254 << 23) - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def low_bits(b, DTYPE: tl.constexpr):
    """What rounding the fp32 ``b`` to DTYPE took away, in 2^-15 of half a last place."""
    UNIT: tl.constexpr = 32767.0 * (256.0 if tl.bfloat16 == DTYPE else 2048.0)
    b_kept = b.to(DTYPE).to(tl.float32)
    _, b_inverse = _exponent(b_kept)
    b_low = (b - b_kept) * b_inverse * UNIT
    b_low = tl.minimum(tl.maximum(b_low, -32767.0), 32767.0)
    return (b_low + tl.where(b_low < 0, -0.5, 0.5)).to(tl.int16)


@triton.jit
def with_low_bits(b_kept, b_low, DTYPE: tl.constexpr):
    """The inverse: ``b`` again, to 16 more bits."""
    UNIT: tl.constexpr = 32767.0 * (256.0 if tl.bfloat16 == DTYPE else 2048.0)
    b_power, _ = _exponent(b_kept)
    return b_kept + b_low.to(tl.float32) * (b_power / UNIT)


@triton.jit
def offset_weight(b_alpha, count, OFFSET: tl.constexpr):
    """What multiplies a source: alpha, alpha + 1 or, centred, alpha - 1/S."""
    if OFFSET == 1:
        b_alpha = b_alpha + 1.0
    elif OFFSET == -1:
        b_alpha = b_alpha - 1.0 / count
    return b_alpha


@triton.jit
def offset_sum(b_total, count, OFFSET: tl.constexpr):
    """What multiplies the plain sum before everything is divided by ``b_total``.

    Centred, total / S is exactly 1 at zero queries, so the difference there is exactly zero.
    """
    if OFFSET == 1:
        b_factor = b_total
    else:
        b_factor = -b_total / count
    return b_factor
