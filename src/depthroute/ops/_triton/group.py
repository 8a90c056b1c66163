"""Phase 1 without tensor cores: G queries over the finished sources, each source read once.

For what ``group_dot`` does not take: fp32, fp16, several heads, gradients of another dtype.

Forward is the depth mix with a leading axis of BG queries; programs of one token with different
queries run side by side, so device memory sees a source once: S reads, G writes. Saved: logits
[N, S, G, H], 1/rms [N, S, 1|H], lse [G, N, H].

Backward splits what needs whole rows from what does not. ``group_scores`` reads sources and output
gradients for the dot products u and their softmax mean; ``group_coefficients`` turns those scalars
into weights; ``group_gradients`` then works on column tiles, where every query's gradient and
partial query gradient fit in registers: 2S reads, S writes, 2G reads of output gradients for all G
queries together, against G (2S + 1) for G separate sites.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.blocks import over_sources, pointers

SIZES = ["N", "S", "G"]  # a size of 1 must not become a constant, nor each size a kernel


@triton.jit
def _load_queries(
    p,
    m_g,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
):
    """NT fp32 blocks [BG, 1, HB, BC] of the rows at ``p`` [BG, 1, 1, 1]."""
    o_h = tl.arange(0, HB)[None, None, :, None]
    tiles = ()
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, None, :]
        m = m_g & (o_h < H) & (o_c < DH)
        tiles = tiles + (tl.load(p + (o_h * DH + o_c), m, 0.0).to(tl.float32),)
    return tiles


@triton.jit
def _load_sources(
    p,
    m_n,
    H: tl.constexpr,
    DH: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
):
    """NT blocks [1, BS, HB, BC] of the rows at ``p`` [1, BS, 1, 1]."""
    o_h = tl.arange(0, HB)[None, None, :, None]
    tiles = ()
    for j in tl.static_range(NT):
        o_c = j * BC + tl.arange(0, BC)[None, None, None, :]
        tiles = tiles + (tl.load(p + (o_h * DH + o_c), m_n & (o_h < H) & (o_c < DH), 0.0),)
    return tiles


@triton.jit
def _dots(s, q, NT: tl.constexpr):
    """[BG, BS, HB, 1]: every query with every source, per head."""
    v = s[0].to(tl.float32) * q[0]
    for j in tl.static_range(1, NT):
        v += s[j].to(tl.float32) * q[j]
    return tl.sum(v, 3, keep_dims=True)


@triton.jit(do_not_specialize=SIZES)
def group_forward_kernel(
    p_sources,
    p_queries,
    p_outputs,
    p_lse,
    p_rstd,
    p_logits,
    N,
    S,
    G,
    eps,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    D: tl.constexpr = H * DH
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    num_chunks = (G + BG - 1) // BG
    i_chunk = tl.program_id(0) % num_chunks
    i_program = tl.program_id(0) // num_chunks
    num_programs = tl.num_programs(0) // num_chunks
    o_g = i_chunk * BG + tl.arange(0, BG)[:, None, None, None].to(tl.int64)
    o_h = tl.arange(0, HB)[None, None, :, None]
    m_g, m_h = o_g < G, o_h < H
    b_q = _load_queries(p_queries + o_g * D, m_g, H, DH, HB, BC, NT)
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        b_acc = ()
        for _ in tl.static_range(NT):
            b_acc = b_acc + (tl.zeros([BG, 1, HB, BC], tl.float32),)
        b_top = tl.full([BG, 1, HB, 1], float("-inf"), tl.float32)
        b_total = tl.zeros([BG, 1, HB, 1], tl.float32)
        for n in tl.range(0, S, BS, num_stages=STAGES):
            i_n = n + tl.arange(0, BS)
            o_n = i_n[None, :, None, None]
            m_n = o_n < S
            p = pointers(p_sources, tl.minimum(i_n, S - 1), DTYPE)[None, :, None, None]
            b_s = _load_sources(p + i_row * D, m_n, H, DH, HB, BC, NT)
            b_v = b_s[0].to(tl.float32) * b_s[0].to(tl.float32)
            for j in tl.static_range(1, NT):
                b_v += b_s[j].to(tl.float32) * b_s[j].to(tl.float32)
            b_square = tl.sum(b_v, 3, keep_dims=True)  # [1, BS, HB, 1]
            if not SLICE_NORM:
                b_square = tl.sum(b_square, 2, keep_dims=True)
            b_rstd = tl.rsqrt(b_square / (D // NORMS) + eps)
            b_logit = _dots(b_s, b_q, NT) * b_rstd  # [BG, BS, HB, 1]
            o_stat = i_row * S + o_n
            tl.store(p_logits + (o_stat * G + o_g) * H + o_h, b_logit, m_n & m_g & m_h)
            if i_chunk == 0:
                if SLICE_NORM:
                    tl.store(p_rstd + o_stat * H + o_h, b_rstd, m_n & m_h)
                else:
                    tl.store(p_rstd + o_stat, b_rstd, m_n)
            b_logit = tl.where(m_n, b_logit, float("-inf"))
            b_new = tl.maximum(b_top, tl.max(b_logit, 1, keep_dims=True))
            b_keep, b_weight = tl.exp(b_top - b_new), tl.exp(b_logit - b_new)
            b_total = b_total * b_keep + tl.sum(b_weight, 1, keep_dims=True)
            b_top = b_new
            acc = ()
            for j in tl.static_range(NT):
                b_term = tl.sum(b_weight * b_s[j].to(tl.float32), 1, keep_dims=True)
                acc = acc + (b_acc[j] * b_keep + b_term,)
            b_acc = acc
        tl.store(p_lse + (o_g * N + i_row) * H + o_h, b_top + tl.log(b_total), m_g & m_h)
        for j in tl.static_range(NT):
            o_c = j * BC + tl.arange(0, BC)[None, None, None, :]
            b_out = (b_acc[j] / b_total).to(p_outputs.dtype.element_ty)
            p = p_outputs + (o_g * N + i_row) * D + (o_h * DH + o_c)
            tl.store(p, b_out, m_g & m_h & (o_c < DH))


@triton.jit(do_not_specialize=SIZES)
def group_scores_kernel(
    p_sources,
    p_grads,
    p_grad_lse,
    p_logits,
    p_lse,
    p_u,
    p_delta,
    N,
    S,
    G,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """u = dx . s_n [N, S, G, H] and delta = sum alpha_n u_n - dlse [N, G, H]."""
    D: tl.constexpr = H * DH
    num_chunks = (G + BG - 1) // BG
    i_chunk = tl.program_id(0) % num_chunks
    i_row = (tl.program_id(0) // num_chunks).to(tl.int64)
    i_g = i_chunk * BG + tl.arange(0, BG)
    o_g = i_g[:, None, None, None].to(tl.int64)
    o_h = tl.arange(0, HB)[None, None, :, None]
    m = (o_g < G) & (o_h < H)
    p_rows = pointers(p_grads, tl.minimum(i_g, G - 1), GRAD_DTYPE)[:, None, None, None]
    b_dx = _load_queries(p_rows + i_row * D, o_g < G, H, DH, HB, BC, NT)
    b_lse = tl.load(p_lse + (o_g * N + i_row) * H + o_h, m, 0.0)
    b_delta = -tl.load(p_grad_lse + (o_g * N + i_row) * H + o_h, m, 0.0)
    for n in tl.range(0, S, BS, num_stages=STAGES):
        i_n = n + tl.arange(0, BS)
        o_n = i_n[None, :, None, None]
        m_n = o_n < S
        p = pointers(p_sources, tl.minimum(i_n, S - 1), DTYPE)[None, :, None, None]
        b_s = _load_sources(p + i_row * D, m_n, H, DH, HB, BC, NT)
        b_u = _dots(b_s, b_dx, NT)  # [BG, BS, HB, 1]
        o_stat = ((i_row * S + o_n) * G + o_g) * H + o_h
        b_logit = tl.load(p_logits + o_stat, m & m_n, float("-inf"))
        tl.store(p_u + o_stat, b_u, m & m_n)
        b_delta += tl.sum(tl.exp(b_logit - b_lse) * b_u, 1, keep_dims=True)
    tl.store(p_delta + (i_row * G + o_g) * H + o_h, b_delta, m)


@triton.jit(do_not_specialize=SIZES)
def group_coefficients_kernel(
    p_logits,
    p_lse,
    p_rstd,
    p_u,
    p_delta,
    p_alpha,
    p_through,
    p_pull,
    N,
    S,
    G,
    H: tl.constexpr,
    DH: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    GB: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
):
    """alpha and ds r [N, S, G, H] and sum over queries of ds logit r^2 / D [N, S, 1|H]."""
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, GB)[None, :, None].to(tl.int64)
    o_h = tl.arange(0, HB)[None, None, :]
    m = (o_g < G) & (o_h < H)
    b_lse = tl.load(p_lse + (o_g * N + i_row) * H + o_h, m, 0.0)
    b_delta = tl.load(p_delta + (i_row * G + o_g) * H + o_h, m, 0.0)
    for n in tl.range(0, S, BS):
        o_n = n + tl.arange(0, BS)[:, None, None]
        m_n = o_n < S
        o_stat = ((i_row * S + o_n) * G + o_g) * H + o_h
        b_logit = tl.load(p_logits + o_stat, m & m_n, 0.0)
        b_u = tl.load(p_u + o_stat, m & m_n, 0.0)
        o_norm = i_row * S + o_n
        if SLICE_NORM:
            o_norm = o_norm * H + o_h
        m_norm = m_n & (o_h < H) if SLICE_NORM else m_n
        b_rstd = tl.load(p_rstd + o_norm, m_norm, 0.0)
        b_alpha = tl.where(m & m_n, tl.exp(b_logit - b_lse), 0.0)
        b_ds = b_alpha * (b_u - b_delta)
        b_pull = tl.sum(b_ds * b_logit, 1, keep_dims=True)
        if not SLICE_NORM:
            b_pull = tl.sum(b_pull, 2, keep_dims=True)
        tl.store(p_alpha + o_stat, b_alpha, m & m_n)
        tl.store(p_through + o_stat, b_ds * b_rstd, m & m_n)
        tl.store(p_pull + o_norm, b_pull * b_rstd * b_rstd / (H * DH // NORMS), m_norm)


@triton.jit(do_not_specialize=SIZES)
def group_gradients_kernel(
    p_sources,
    p_outputs,
    p_carried,
    p_grads,
    p_queries,
    p_alpha,
    p_through,
    p_pull,
    p_dqueries,
    N,
    S,
    G,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    HAS_CARRIED: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    GB: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One head's columns [BC] of every source gradient, and partial query gradients [P, G, D]."""
    D: tl.constexpr = H * DH
    TILES: tl.constexpr = (DH + BC - 1) // BC
    i_tile = tl.program_id(0) % TILES
    i_head = tl.program_id(0) // TILES % H
    i_program = tl.program_id(0) // (TILES * H)
    num_programs = tl.num_programs(0) // (TILES * H)
    i_g = tl.arange(0, GB)
    o_g = i_g[:, None, None].to(tl.int64)
    m_g = o_g < G
    i_c = i_tile * BC + tl.arange(0, BC)[None, None, :]
    m_c = i_c < DH
    o_c = i_head * DH + i_c
    b_q = tl.load(p_queries + o_g * D + o_c, m_g & m_c, 0.0)  # [GB, 1, BC]
    b_dq = tl.zeros([GB, 1, BC], tl.float32)
    p_rows = pointers(p_grads, tl.minimum(i_g, G - 1), GRAD_DTYPE)[:, None, None] + o_c
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        b_dx = tl.load(p_rows + i_row * D, m_g & m_c, 0.0).to(tl.float32)
        for n in tl.range(0, S, BS, num_stages=STAGES):
            i_n = n + tl.arange(0, BS)
            o_n = i_n[None, :, None]
            m_n = o_n < S
            i_safe = tl.minimum(i_n, S - 1)
            o_row = i_row * D + o_c
            p = pointers(p_sources, i_safe, DTYPE)[None, :, None]
            b_s = tl.load(p + o_row, m_n & m_c, 0.0).to(tl.float32)  # [1, BS, BC]
            o_stat = ((i_row * S + o_n) * G + o_g) * H + i_head
            b_alpha = tl.load(p_alpha + o_stat, m_n & m_g, 0.0)  # [GB, BS, 1]
            b_through = tl.load(p_through + o_stat, m_n & m_g, 0.0)
            o_norm = i_row * S + o_n
            if SLICE_NORM:
                o_norm = o_norm * H + i_head
            b_pull = tl.load(p_pull + o_norm, m_n, 0.0)
            b_out = over_sources(b_alpha * b_dx + b_through * b_q, GB) - b_pull * b_s
            if HAS_CARRIED:
                p = pointers(p_carried, i_safe, DTYPE)[None, :, None]
                b_out += tl.load(p + o_row, m_n & m_c, 0.0).to(tl.float32)
            p = pointers(p_outputs, i_safe, DTYPE)[None, :, None]
            tl.store(p + o_row, b_out.to(DTYPE), m_n & m_c)
            b_dq += tl.sum(b_through * b_s, 1, keep_dims=True)
    tl.store(p_dqueries + (i_program.to(tl.int64) * G + o_g) * D + o_c, b_dq, m_g & m_c)
