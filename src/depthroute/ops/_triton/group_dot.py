"""Phase 1 on tensor cores: G queries over S sources of bf16, one head.

With ten queries a source element takes more multiply-adds than the plain cores have time for while
it arrives: 20 forward, where the memory of an H200 leaves time for 14. So every product is a matrix
product, and because operands there are bf16 while queries, weights and coefficients are fp32, those
are split into bf16 terms that add up to them.

    logits    [tokens, D] x [D, G]    a source at a time      S reads
    outputs   [G, S] x [S, D]         a token at a time       S reads, G writes
    scores    [S, D] x [D, G]         a token at a time       S + G reads
    gradients [S, 2G] x [2G, D]       a token at a time       S + G reads, S writes
    dqueries  [G, S] x [S, D]         in the same kernel

Tensor cores round sums towards zero. Over a long sum that is a bias, so a sum over columns or
tokens is only left to them for one tile and then added to the total by ordinary instructions
(:func:`_added`; written as ``+`` the compiler would fuse it into the product again).
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.blocks import pointers

# a size of 1 must not become a constant, nor each size a kernel
SIZES = ["N", "S", "G", "first", "last"]


@triton.jit
def _split(x):
    """Two bf16 terms: 16 bits of x."""
    b_high = x.to(tl.bfloat16)
    return b_high, (x - b_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split3(x):
    """Three bf16 terms: all 24 bits of x."""
    b_high = x.to(tl.bfloat16)
    b_rest = x - b_high.to(tl.float32)
    b_mid = b_rest.to(tl.bfloat16)
    return b_high, b_mid, (b_rest - b_mid.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _added(total, part):
    return tl.fma(part, 1.0, total)


@triton.jit(do_not_specialize=SIZES)
def group_logits_kernel(
    p_sources,
    p_queries,
    p_rstd,
    p_logits,
    N,
    S,
    G,
    eps,
    D: tl.constexpr,
    GB: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits [N, S, G] and 1/rms [N, S] of one source and BT tokens."""
    i_n = (tl.program_id(0) % S).to(tl.int64)
    i_t = (tl.program_id(0) // S).to(tl.int64) * BT + tl.arange(0, BT)
    o_g = tl.arange(0, GB)
    m_t, m_g = i_t < N, o_g < G
    p = tl.load(p_sources + i_n).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    p = tl.multiple_of(p, [16]) + i_t[:, None] * D
    b_dot = tl.zeros([BT, GB], tl.float32)
    b_square = tl.zeros([BT], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        o_k = k + tl.arange(0, BK)
        m_k = o_k < D
        b_x = tl.load(p + o_k[None, :], m_t[:, None] & m_k[None, :], 0.0)
        b_q = tl.load(p_queries + o_g[:, None] * D + o_k[None, :], m_g[:, None] & m_k[None, :], 0.0)
        b_high, b_mid, b_low = _split3(b_q)
        b_part = tl.dot(b_x, tl.trans(b_low))
        b_part = tl.dot(b_x, tl.trans(b_mid), b_part)
        b_part = tl.dot(b_x, tl.trans(b_high), b_part)
        b_dot = _added(b_dot, b_part)
        b_wide = b_x.to(tl.float32)
        b_square += tl.sum(b_wide * b_wide, 1)
    b_rstd = tl.rsqrt(b_square / D + eps)
    o_stat = i_t * S + i_n
    tl.store(p_rstd + o_stat, b_rstd, m_t)
    p = p_logits + o_stat[:, None] * G + o_g[None, :]
    tl.store(p, b_dot * b_rstd[:, None], m_t[:, None] & m_g[None, :])


@triton.jit(do_not_specialize=SIZES)
def group_softmax_kernel(
    p_logits,
    p_lse,
    p_weights,
    N,
    S,
    G,
    TERMS: tl.constexpr,
    GB: tl.constexpr,
    SB: tl.constexpr,
):
    """lse [G, N] of one token, and its weights in bf16 terms [N, S, TERMS, GB]."""
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, GB)[None, :]
    o_n = tl.arange(0, SB)[:, None]
    m_g, m_n = o_g < G, o_n < S
    p = p_logits + (i_row * S + o_n) * G + o_g
    b_logit = tl.load(p, m_n & m_g, float("-inf"))
    b_top = tl.max(tl.where(m_g, b_logit, 0.0), 0, keep_dims=True)
    b_weight = tl.where(m_g, tl.exp(b_logit - b_top), 0.0)
    b_total = tl.where(m_g, tl.sum(b_weight, 0, keep_dims=True), 1.0)
    tl.store(p_lse + o_g.to(tl.int64) * N + i_row, b_top + tl.log(b_total), m_g)
    b_high, b_mid, b_low = _split3(b_weight / b_total)
    p = p_weights + (i_row * S + o_n) * (TERMS * GB) + o_g
    tl.store(p, b_high, m_n & (o_g < GB))
    tl.store(p + GB, b_mid, m_n & (o_g < GB))
    if TERMS == 3:
        tl.store(p + 2 * GB, b_low, m_n & (o_g < GB))


@triton.jit(do_not_specialize=SIZES)
def group_outputs_kernel(
    p_sources,
    p_weights,
    p_outputs,
    N,
    S,
    G,
    D: tl.constexpr,
    TERMS: tl.constexpr,
    GB: tl.constexpr,
    SB: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BC columns of every output [G, N, D]."""
    TILES: tl.constexpr = (D + BC - 1) // BC
    i_tile = tl.program_id(0) % TILES
    i_program, num_programs = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    o_g = tl.arange(0, GB)
    o_n = tl.arange(0, SB)
    o_c = i_tile * BC + tl.arange(0, BC)[None, :]
    m_n, m_c = o_n < S, o_c < D
    m_w = m_n[:, None] & (o_g[None, :] < GB)
    p_rows = pointers(p_sources, tl.minimum(o_n, S - 1), tl.bfloat16)[:, None]
    p_row = p_weights + o_n[:, None] * (TERMS * GB) + o_g[None, :]
    for k in tl.range(0, (N - i_program + num_programs - 1) // num_programs, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        b_x = tl.load(p_rows + i_row * D + o_c, m_n[:, None] & m_c, 0.0)
        p = p_row + i_row * S * (TERMS * GB)
        b_high, b_mid = tl.load(p, m_w, 0.0), tl.load(p + GB, m_w, 0.0)
        if TERMS == 3:
            b_out = tl.dot(tl.trans(tl.load(p + 2 * GB, m_w, 0.0)), b_x)
            b_out = tl.dot(tl.trans(b_mid), b_x, b_out)
        else:
            b_out = tl.dot(tl.trans(b_mid), b_x)
        b_out = tl.dot(tl.trans(b_high), b_x, b_out)
        p = p_outputs + (o_g[:, None].to(tl.int64) * N + i_row) * D + o_c
        tl.store(p, b_out.to(p_outputs.dtype.element_ty), (o_g[:, None] < G) & m_c)


@triton.jit(do_not_specialize=SIZES)
def group_products_kernel(
    p_sources,
    p_grads,
    p_u,
    N,
    S,
    G,
    first,
    last,
    D: tl.constexpr,
    GB: tl.constexpr,
    SB: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """u = dx . s_n [N, S, G] of one token and the sources from ``first`` to ``last``."""
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, GB)
    o_n = first + tl.arange(0, SB)
    m_g, m_n = o_g < G, o_n < last
    p_rows = pointers(p_sources, tl.minimum(o_n, last - 1), tl.bfloat16)[:, None] + i_row * D
    p_rows_grad = pointers(p_grads, tl.minimum(o_g, G - 1), tl.bfloat16)[:, None] + i_row * D
    b_u = tl.zeros([SB, GB], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        o_k = k + tl.arange(0, BK)[None, :]
        m_k = o_k < D
        b_x = tl.load(p_rows + o_k, m_n[:, None] & m_k, 0.0)
        b_dx = tl.load(p_rows_grad + o_k, m_g[:, None] & m_k, 0.0)
        b_u = _added(b_u, tl.dot(b_x, tl.trans(b_dx)))
    p = p_u + (i_row * S + o_n[:, None]) * G + o_g[None, :]
    tl.store(p, b_u, m_n[:, None] & m_g[None, :])


@triton.jit(do_not_specialize=SIZES)
def group_weights_kernel(
    p_logits,
    p_lse,
    p_grad_lse,
    p_rstd,
    p_u,
    p_weights,
    p_pull,
    N,
    S,
    G,
    D: tl.constexpr,
    GB: tl.constexpr,
    SB: tl.constexpr,
):
    """alpha and ds r in two and three bf16 terms [N, S, 5, GB], and the sum over queries of
    ds logit r^2 / D [N, S]."""
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, GB)[None, :].to(tl.int64)
    o_n = tl.arange(0, SB)[:, None]
    m_g, m_n = o_g < G, o_n < S
    m = m_n & m_g
    o_stat = (i_row * S + o_n) * G + o_g
    b_logit = tl.load(p_logits + o_stat, m, 0.0)
    b_u = tl.load(p_u + o_stat, m, 0.0)
    b_rstd = tl.load(p_rstd + i_row * S + o_n, m_n, 0.0)
    b_lse = tl.load(p_lse + o_g * N + i_row, m_g, 0.0)
    b_alpha = tl.where(m, tl.exp(b_logit - b_lse), 0.0)
    b_delta = tl.sum(b_alpha * b_u, 0, keep_dims=True)
    b_delta -= tl.load(p_grad_lse + o_g * N + i_row, m_g, 0.0)
    b_ds = b_alpha * (b_u - b_delta)
    b_pull = tl.sum(b_ds * b_logit, 1, keep_dims=True) * b_rstd * b_rstd / D
    tl.store(p_pull + i_row * S + o_n, b_pull, m_n)
    p, m = p_weights + (i_row * S + o_n) * (5 * GB) + o_g, m_n & (o_g < GB)
    b_high, b_low = _split(b_alpha)
    tl.store(p, b_high, m)
    tl.store(p + GB, b_low, m)
    b_high, b_mid, b_low = _split3(b_ds * b_rstd)
    tl.store(p + 2 * GB, b_high, m)
    tl.store(p + 3 * GB, b_mid, m)
    tl.store(p + 4 * GB, b_low, m)


@triton.jit(do_not_specialize=SIZES)
def group_sources_kernel(
    p_sources,
    p_outputs,
    p_carried,
    p_grads,
    p_queries,
    p_weights,
    p_pull,
    p_dqueries,
    N,
    S,
    G,
    first,
    last,
    D: tl.constexpr,
    HAS_CARRIED: tl.constexpr,
    GB: tl.constexpr,
    SB: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BC columns of the source gradients from ``first`` to ``last``, and of what these sources add
    to the query gradients [P, G, D]."""
    TILES: tl.constexpr = (D + BC - 1) // BC
    i_tile = tl.program_id(0) % TILES
    i_program, num_programs = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    o_g = tl.arange(0, GB).to(tl.int64)
    o_n = first + tl.arange(0, SB)
    o_c = i_tile * BC + tl.arange(0, BC)[None, :]
    m_g, m_n, m_c = o_g < G, o_n < last, o_c < D
    m_x, m_q = m_n[:, None] & m_c, m_g[:, None] & m_c
    m_w = m_n[:, None] & (o_g[None, :] < GB)
    i_safe = tl.minimum(o_n, last - 1)
    p_rows = pointers(p_sources, i_safe, tl.bfloat16)[:, None] + o_c
    p_rows_out = pointers(p_outputs, i_safe, tl.bfloat16)[:, None] + o_c
    p_rows_grad = pointers(p_grads, tl.minimum(o_g, G - 1).to(tl.int32), tl.bfloat16)
    p_rows_grad = p_rows_grad[:, None] + o_c
    p_rows_carried = p_rows
    if HAS_CARRIED:
        p_rows_carried = pointers(p_carried, i_safe, tl.bfloat16)[:, None] + o_c
    p_row = p_weights + o_n[:, None] * (5 * GB) + o_g[None, :]
    b_q, b_q_low = _split(tl.load(p_queries + o_g[:, None] * D + o_c, m_q, 0.0))
    b_dq = tl.zeros([GB, BC], tl.float32)
    for k in tl.range(0, (N - i_program + num_programs - 1) // num_programs, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        b_x = tl.load(p_rows + i_row * D, m_x, 0.0)
        b_dx = tl.load(p_rows_grad + i_row * D, m_q, 0.0)
        p = p_row + i_row * S * (5 * GB)
        b_alpha, b_alpha_low = tl.load(p, m_w, 0.0), tl.load(p + GB, m_w, 0.0)
        b_through, b_mid = tl.load(p + 2 * GB, m_w, 0.0), tl.load(p + 3 * GB, m_w, 0.0)
        b_pull = tl.load(p_pull + i_row * S + o_n, m_n, 0.0)
        b_part = tl.dot(tl.trans(tl.load(p + 4 * GB, m_w, 0.0)), b_x)
        b_part = tl.dot(tl.trans(b_mid), b_x, b_part)
        b_part = tl.dot(tl.trans(b_through), b_x, b_part)
        b_dq = _added(b_dq, b_part)
        b_out = tl.dot(b_alpha_low, b_dx)
        b_out = tl.dot(b_through, b_q_low, b_out)
        b_out = tl.dot(b_mid, b_q, b_out)
        b_out = tl.dot(b_alpha, b_dx, b_out)
        b_out = tl.dot(b_through, b_q, b_out)
        b_out -= b_pull[:, None] * b_x.to(tl.float32)
        if HAS_CARRIED:
            b_out += tl.load(p_rows_carried + i_row * D, m_x, 0.0).to(tl.float32)
        tl.store(p_rows_out + i_row * D, b_out.to(tl.bfloat16), m_x)
    p = p_dqueries + (i_program.to(tl.int64) * G + o_g[:, None]) * D + o_c
    tl.store(p, b_dq, m_q)
