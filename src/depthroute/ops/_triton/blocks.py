"""Device functions shared by the kernels.

A row of width D is seen as ``[H, D/H]`` and covered by ``NT`` column tiles ``[HB, BC]``, held as a
tuple, so that a width such as 7168 (7 tiles of 1024) wastes no lanes. ``BS`` sources are handled at
a time, so every loaded block is ``[BS, HB, BC]`` and statistics are ``[BS, HB, 1]``. *Held* rows
have the dtype they are stored in, *wide* rows are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.layout import INTERPRETED

# only as defaults of arguments: Triton's keys of kernels that use such constants themselves depend
# on which of them is compiled first
ON_GPU, NO_POLICY = tl.constexpr(not INTERPRETED), tl.constexpr("")


@triton.jit
def pointers(p_table, o_n, DTYPE: tl.constexpr):
    """Addresses [BS] of the sources ``o_n`` [BS], which must exist."""
    p = tl.load(p_table + o_n).to(tl.pointer_type(DTYPE), bitcast=True)
    return tl.multiple_of(p, [16])  # the launcher aligns every source


@triton.jit
def places_of_row(
    H: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr, NT: tl.constexpr
):
    """Of each of its tiles the offsets [1, HB, BC] into a row and the mask of those it has."""
    DH: tl.constexpr = D // H
    o_h = tl.arange(0, HB)[None, :, None]
    places = ()
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, :]
        places = places + ((o_h * DH + o_c, (o_h < H) & (o_c < DH)),)
    return places


@triton.jit
def hold(p, places, m_n=True, POLICY: tl.constexpr = NO_POLICY):
    """The row at ``p``, as blocks [1, HB, BC] of the dtype it is stored in; or rows at ``p``
    [BS, 1, 1], as blocks [BS, HB, BC], of which ``m_n`` says which exist."""
    return [tl.load(p + at[0], m_n & at[1], 0, eviction_policy=POLICY) for at in places]


@triton.jit
def load_row(p, places):
    """One row as fp32 blocks [1, HB, BC]."""
    return widen(hold(p, places))


@triton.jit
def store_row(p, tiles, places, m_n=True):
    """The inverse of :func:`hold`. An eviction policy made it slower."""
    for j in tl.static_range(len(tiles)):
        at = places[j]
        tl.store(p + at[0], tiles[j].to(p.dtype.element_ty), m_n & at[1])


@triton.jit
def widen(held):
    """A held row in fp32."""
    return narrow(held, tl.float32)


@triton.jit
def narrow(wide, DTYPE: tl.constexpr):
    """Rounded to DTYPE."""
    return [b.to(DTYPE) for b in wide]


@triton.jit
def again(held, GPU: tl.constexpr = ON_GPU):
    """A held row in fp32, for the second time.

    Hides the row from the optimiser, which would otherwise keep the first wide row, and with it
    twice the registers.
    """
    wide = ()
    for j in tl.static_range(len(held)):
        b = held[j]
        if GPU and b.dtype.primitive_bitwidth == 16 and b.numel > 1:  # it takes two at a time
            b = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [b], dtype=b.dtype, is_pure=False, pack=2
            )
        wide = wide + (b.to(tl.float32),)
    return wide


@triton.jit
def zeros(wide):
    """As many as ``wide`` has."""
    return [tl.zeros_like(b) for b in wide]


@triton.jit
def axpy(a, x, y):
    """a x + y."""
    tiles = ()
    for j in tl.static_range(len(x)):
        tiles = tiles + (a * x[j] + y[j],)
    return tiles


@triton.jit
def plus(a, b):
    return axpy(1.0, a, b)


@triton.jit
def times(a, factor):
    return [tile * factor for tile in a]


@triton.jit
def multiply(a, b):
    tiles = ()
    for j in tl.static_range(len(a)):
        tiles = tiles + (a[j] * b[j],)
    return tiles


@triton.jit
def over(a, b):
    tiles = ()
    for j in tl.static_range(len(a)):
        tiles = tiles + (a[j] / b[j],)
    return tiles


@triton.jit
def off_zero(a, least):
    """With ``least`` for what is nearer to zero."""
    return [tl.where(tl.abs(b) < least, least, b) for b in a]


@triton.jit
def product(a, b):
    """Elementwise products in fp32 summed over tiles, before the sum over columns."""
    v = a[0].to(tl.float32) * b[0].to(tl.float32)
    for j in tl.static_range(1, len(a)):
        v += a[j].to(tl.float32) * b[j].to(tl.float32)
    return v


@triton.jit
def dot_tiles(a, b):
    """Per-head dot products [BS, HB, 1] of two tuples of tiles; one reduction for all tiles."""
    return tl.sum(product(a, b), 2, keep_dims=True)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_fours(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sum_columns(tiles, GPU: tl.constexpr = ON_GPU):
    """Sums over columns of one, two or four tiles with one exchange between warps.

    The interpreter runs such reductions one element at a time, so it takes them apart.
    """
    if len(tiles) == 1 or not GPU:
        sums = [tl.sum(b, 2, keep_dims=True) for b in tiles]
    elif len(tiles) == 2:
        sums = tl.reduce(tiles, 2, _add_pairs, keep_dims=True)
    else:
        sums = tl.reduce(tiles, 2, _add_fours, keep_dims=True)
    return sums


@triton.jit
def squares_and_dots(rows, q):
    """sum s^2 and sum s q over columns, [BS, HB, 1] each, of every row (or block of rows) in turn;
    those of two rows with one exchange."""
    FIRST: tl.constexpr = 2 if len(rows) > 1 else 1
    tiles = ()
    for n in tl.static_range(FIRST):
        tiles = tiles + (product(rows[n], rows[n]), product(rows[n], q))
    sums = sum_columns(tiles)
    return sums + squares_and_dots(rows[FIRST:], q) if len(rows) > FIRST else sums


@triton.jit
def dots(rows, b):
    """Dot products [1, HB, 1] of every held row and a wide one."""
    FIRST: tl.constexpr = 4 if len(rows) > 3 else 2 if len(rows) > 1 else 1
    sums = sum_columns([product(again(row), b) for row in rows[:FIRST]])
    return sums + dots(rows[FIRST:], b) if len(rows) > FIRST else sums


@triton.jit
def over_sources(x, BS: tl.constexpr):
    """Sum over the sources of a block: [BS, ...] to [1, ...]."""
    return tl.sum(x, 0, keep_dims=True) if BS > 1 else x


@triton.jit
def plus_sources(total, b_weight, s, BS: tl.constexpr):
    """The row ``total`` and every source of a block times its weight."""
    tiles = ()
    for j in tl.static_range(len(s)):
        tiles = tiles + (total[j] + over_sources(b_weight * s[j].to(tl.float32), BS),)
    return tiles


@triton.jit
def source_gradient(b_weight, b_dx, b_through, b_q, b_pull, s):
    """Through a source's weight in the mix, and through its score and that one's norm."""
    tiles = ()
    for j in tl.static_range(len(s)):
        b_direct = b_weight * b_dx[j] + b_through * b_q[j]
        tiles = tiles + (b_direct - b_pull * s[j].to(tl.float32),)
    return tiles


@triton.jit
def normed(b_x, b_w, D: tl.constexpr, eps):
    """y = x r w, and r = 1/rms(x)."""
    b_r = tl.rsqrt(tl.sum(dot_tiles(b_x, b_x), 1, keep_dims=True) / D + eps)
    return multiply(times(b_x, b_r), b_w), b_r


@triton.jit
def norm_gradient(b_gy, b_w, b_xhat, b_r, b_mean):
    """What y hands on to x: r (gw - xhat mean(gw xhat))."""
    tiles = ()
    for j in tl.static_range(len(b_gy)):
        tiles = tiles + ((b_gy[j] * b_w[j] - b_xhat[j] * b_mean) * b_r,)
    return tiles


@triton.jit
def over_norm_group(x, NORMS: tl.constexpr):
    """[BS, HB, 1] summed over heads, unless every head has its own statistics."""
    return tl.sum(x, 1, keep_dims=True) if NORMS == 1 else x


@triton.jit
def reciprocal_rms(b_square, m_h, eps, D: tl.constexpr, NORMS: tl.constexpr):
    """1/rms of what has its own statistics, of sums of squares [BS, HB, 1]."""
    b_mean = over_norm_group(b_square, NORMS) / (D // NORMS) + eps
    if NORMS > 1 and b_square.shape[1] > NORMS:
        b_mean = tl.where(m_h, b_mean, 1.0)  # lanes that are no heads: 0/0 if there is no eps
    return tl.rsqrt(b_mean)


@triton.jit
def through_norm(b_ds, b_logit, b_rstd, D: tl.constexpr, NORMS: tl.constexpr):
    """What multiplies q and s in the gradient of a source through its score: r ds, and
    (sum_h ds logit) r^2 / D."""
    b_through = b_ds * b_rstd
    b_sum = over_norm_group(b_ds * b_logit, NORMS)
    return b_through, b_sum * b_rstd * b_rstd / (D // NORMS)


@triton.jit
def _exponent(b, DTYPE: tl.constexpr):
    """2^e of |b| in [2^e, 2^(e+1)), and its inverse; tiny numbers count as 2^-63, and in fp16 as
    2^-14, below which its numbers are no closer to each other."""
    LEAST: tl.constexpr = 64 if tl.bfloat16 == DTYPE else 113
    bits = b.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, LEAST << 23), 191 << 23)
    inverse = (254 << 23) - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def low_bits(wide, DTYPE: tl.constexpr):
    """What rounding a wide row to DTYPE took away, in 2^-15 of half a last place."""
    UNIT: tl.constexpr = 32767.0 * (256.0 if tl.bfloat16 == DTYPE else 2048.0)
    tiles = ()
    for j in tl.static_range(len(wide)):
        b_kept = wide[j].to(DTYPE).to(tl.float32)
        _, b_inverse = _exponent(b_kept, DTYPE)
        b_low = (wide[j] - b_kept) * b_inverse * UNIT
        b_low = tl.minimum(tl.maximum(b_low, -32767.0), 32767.0)
        tiles = tiles + ((b_low + tl.where(b_low < 0, -0.5, 0.5)).to(tl.int16),)
    return tiles


@triton.jit
def with_low_bits(kept, low, DTYPE: tl.constexpr):
    """The inverse: the row again, to 16 more bits."""
    UNIT: tl.constexpr = 32767.0 * (256.0 if tl.bfloat16 == DTYPE else 2048.0)
    tiles = ()
    for j in tl.static_range(len(kept)):
        b_power, _ = _exponent(kept[j], DTYPE)
        tiles = tiles + (kept[j] + low[j].to(tl.float32) * (b_power / UNIT),)
    return tiles


@triton.jit
def offset_weight(b_alpha, count, OFFSET: tl.constexpr):
    """What multiplies a source: alpha, alpha + 1 or, centred, alpha - 1/S."""
    shifted = b_alpha + 1.0 if OFFSET > 0 else b_alpha - 1.0 / count
    return shifted if OFFSET != 0 else b_alpha


@triton.jit
def offset_sum(b_total, count, OFFSET: tl.constexpr):
    """What multiplies the plain sum before everything is divided by ``b_total``. Centred, total / S
    is exactly 1 at zero queries, so the difference there is exactly zero."""
    return b_total if OFFSET == 1 else -b_total / count
