"""Depth mix over many sources, streamed: one query over S sources, given as separate tensors.

Forward fuses RMS statistics, logits, the online softmax, the weighted sum, the residual and, if
asked for, the next sublayer's RMSNorm. It reads each source once and writes x: S + 1 passes (+1 for
a residual or a prior, +1 for the normed output). Saved: per token, source and head a logit, per
token and source 1/rms, per token and head the log-sum-exp.

Backward needs delta = dx . mix before it can write any source's gradient. Where x is the mix, delta
comes from x (FROM_MIX) and one sweep is enough. x rounded to bf16 is not good enough for that: the
error of delta, coherent over a row, exceeded the error budget. So forward also keeps the next 16
bits of x: S + 2 passes, and 2S + 3 in backward. Elsewhere the sources are swept twice, the
second time backwards while the row may still be in L2. Query gradients are summed per program in
registers and over programs in a second stage.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.blocks import (
    dot_tiles,
    load_row,
    load_tiles,
    low_bits,
    offset_sum,
    offset_weight,
    over_norm_group,
    over_sources,
    pointers,
    square_and_dot,
    store_row,
    tile_mask,
    with_low_bits,
    zero_row,
)

SIZES = ["N", "S", "K"]  # a size of 1 must not become a constant, nor each size a kernel


@triton.jit(do_not_specialize=SIZES)
def mix_forward_kernel(
    p_sources,
    p_query,
    p_residual,
    p_prior,
    p_prior_lse,
    p_norm_weight,
    p_x,
    p_low,
    p_y,
    p_stats,
    N,
    S,
    K,
    eps,
    scale,
    norm_eps,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_LOW: tl.constexpr,
    OFFSET: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
    GPU: tl.constexpr,
):
    D: tl.constexpr = H * DH
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    b_q = load_row(p_query, H, DH, HB, BC, NT)
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        p_stat = p_stats + i_row * K
        b_acc = zero_row(HB, BC, NT)
        b_plain = zero_row(HB, BC, NT)
        b_top = tl.full([1, HB, 1], float("-inf"), tl.float32)
        b_total = tl.zeros([1, HB, 1], tl.float32)
        count = S
        if HAS_PRIOR:
            b_acc = load_row(p_prior + i_row * D, H, DH, HB, BC, NT)
            b_plain = b_acc
            b_top = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_total += 1.0
            count = S + 1
        for n in tl.range(0, S, BS, num_stages=STAGES):
            o_n = n + tl.arange(0, BS)
            m_n = (o_n < S)[:, None, None]
            p = pointers(p_sources, tl.minimum(o_n, S - 1), DTYPE)[:, None, None]
            b_s = load_tiles(p + i_row * D, m_n, H, DH, HB, BC, NT, "evict_first")
            b_square, b_dot = square_and_dot(b_s, b_q, NT, GPU)
            b_rstd = tl.rsqrt(over_norm_group(b_square, SLICE_NORM) / (D // NORMS) + eps)
            b_logit = b_dot * b_rstd  # [BS, HB, 1]
            o_stat = o_n[:, None, None]
            tl.store(p_stat + o_stat * H + o_h, b_logit, m_n & m_h)
            if SLICE_NORM:
                tl.store(p_stat + (S + o_stat) * H + o_h, b_rstd, m_n & m_h)
            else:
                tl.store(p_stat + S * H + o_stat, b_rstd, m_n)
            b_logit = tl.where(m_n, b_logit, float("-inf"))
            b_new = tl.maximum(b_top, tl.max(b_logit, 0, keep_dims=True))
            b_keep = tl.exp(b_top - b_new)
            b_weight = tl.exp(b_logit - b_new)
            b_total = b_total * b_keep + over_sources(b_weight, BS)
            b_top = b_new
            acc = ()
            for j in tl.static_range(NT):
                b_term = over_sources(b_weight * b_s[j].to(tl.float32), BS)
                acc = acc + (b_acc[j] * b_keep + b_term,)
            b_acc = acc
            if OFFSET != 0:
                plain = ()
                for j in tl.static_range(NT):
                    plain = plain + (b_plain[j] + over_sources(b_s[j].to(tl.float32), BS),)
                b_plain = plain
        tl.store(p_stat + S * (H + NORMS) + o_h, b_top + tl.log(b_total), m_h)
        # scale / total first: weights are exactly 1 at zero queries when scale is S
        b_scale = tl.where(m_h, scale / b_total, 0.0)
        b_x = ()
        for j in tl.static_range(NT):
            if OFFSET != 0:
                b_sum = b_plain[j] * offset_sum(b_total, count, OFFSET)
                b_x = b_x + ((b_acc[j] + b_sum) * b_scale,)
            else:
                b_x = b_x + (b_acc[j] * b_scale,)
        if HAS_RESIDUAL:
            b_residual = load_row(p_residual + i_row * D, H, DH, HB, BC, NT)
            x = ()
            for j in tl.static_range(NT):
                x = x + (b_residual[j] * scale + b_x[j],)
            b_x = x
        store_row(p_x + i_row * D, b_x, H, DH, HB, BC, NT)
        if HAS_LOW:
            low = ()
            for j in tl.static_range(NT):
                low = low + (low_bits(b_x[j], p_x.dtype.element_ty),)
            store_row(p_low + i_row * D, low, H, DH, HB, BC, NT)
        if HAS_NORM:
            rounded = ()
            for j in tl.static_range(NT):
                rounded = rounded + (b_x[j].to(p_x.dtype.element_ty).to(tl.float32),)
            b_norm = tl.rsqrt(
                tl.sum(dot_tiles(rounded, rounded, NT), 1, keep_dims=True) / D + norm_eps
            )
            b_weight = load_row(p_norm_weight, H, DH, HB, BC, NT)
            b_y = ()
            for j in tl.static_range(NT):
                b_y = b_y + (rounded[j] * b_norm * b_weight[j],)
            store_row(p_y + i_row * D, b_y, H, DH, HB, BC, NT)
            tl.store(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32), b_norm)


@triton.jit(do_not_specialize=SIZES)
def mix_backward_kernel(
    p_sources,
    p_outputs,
    p_carried,
    p_grad,
    p_grad_y,
    p_grad_state,
    p_query,
    p_x,
    p_low,
    p_prior,
    p_prior_lse,
    p_norm_weight,
    p_stats,
    p_dstate,
    p_dprior,
    p_dprior_lse,
    p_dweights,
    N,
    S,
    K,
    scale,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_GRAD_STATE: tl.constexpr,
    WRITES_STATE: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CARRIED: tl.constexpr,
    FROM_MIX: tl.constexpr,
    OFFSET: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
    GPU: tl.constexpr,
):
    D: tl.constexpr = H * DH
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    b_q = load_row(p_query, H, DH, HB, BC, NT)
    b_dq = zero_row(HB, BC, NT)
    b_dw = zero_row(HB, BC, NT)
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        p_stat = p_stats + i_row * K
        b_delta = tl.zeros([1, HB, 1], tl.float32)
        if HAS_GRAD:
            b_dx = load_row(p_grad + i_row * D, H, DH, HB, BC, NT)
        else:
            b_dx = zero_row(HB, BC, NT)
        if HAS_NORM:
            # y = x r w:  dx += r (gw - xhat mean(gw xhat)),  dw += gy xhat
            b_x = load_row(p_x + i_row * D, H, DH, HB, BC, NT)
            b_gy = load_row(p_grad_y + i_row * D, H, DH, HB, BC, NT)
            b_w = load_row(p_norm_weight, H, DH, HB, BC, NT)
            b_r = tl.load(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32))
            b_v = b_gy[0] * b_w[0] * b_x[0]
            for j in tl.static_range(1, NT):
                b_v += b_gy[j] * b_w[j] * b_x[j]
            b_mean = tl.sum(tl.sum(b_v, 2, keep_dims=True), 1, keep_dims=True) * b_r / D
            dx, dw = (), ()
            for j in tl.static_range(NT):
                b_xhat = b_x[j] * b_r
                dx = dx + (b_dx[j] + b_r * (b_gy[j] * b_w[j] - b_xhat * b_mean),)
                dw = dw + (b_dw[j] + b_gy[j] * b_xhat,)
            b_dx, b_dw = dx, dw
        dx = ()
        for j in tl.static_range(NT):
            dx = dx + (b_dx[j] * scale,)
        if FROM_MIX:
            # x = scale * mix, so the unscaled gradient times x is delta
            if not HAS_NORM:
                b_x = load_row(p_x + i_row * D, H, DH, HB, BC, NT)
            x = ()
            for j in tl.static_range(NT):
                o_c = j * BC + tl.arange(0, BC)[None, None, :]
                m_c = tile_mask(o_h, o_c, H, DH)
                b_low = tl.load(p_low + i_row * D + (o_h * DH + o_c), m_c, 0)
                x = x + (with_low_bits(b_x[j], b_low, p_x.dtype.element_ty),)
            b_delta = dot_tiles(b_dx, x, NT)
        b_dx = dx
        if WRITES_STATE:
            b_dstate = b_dx
            if HAS_GRAD_STATE:
                b_g = load_row(p_grad_state + i_row * D, H, DH, HB, BC, NT)
                dstate = ()
                for j in tl.static_range(NT):
                    dstate = dstate + (b_dx[j] + b_g[j],)
                b_dstate = dstate
            store_row(p_dstate + i_row * D, b_dstate, H, DH, HB, BC, NT)
        b_lse = tl.load(p_stat + S * (H + NORMS) + o_h, m_h, 0.0)
        count = S
        if HAS_PRIOR:
            count = S + 1
            b_prior = load_row(p_prior + i_row * D, H, DH, HB, BC, NT)
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_prior_alpha = tl.exp(b_prior_lse - b_lse)
            b_prior_u = dot_tiles(b_dx, b_prior, NT)
        if not FROM_MIX:
            if HAS_PRIOR:
                b_delta += b_prior_alpha * b_prior_u
            for n in tl.range(0, S, BS, num_stages=STAGES):
                o_n = n + tl.arange(0, BS)
                m_n = (o_n < S)[:, None, None]
                p = pointers(p_sources, tl.minimum(o_n, S - 1), DTYPE)[:, None, None]
                b_s = load_tiles(p + i_row * D, m_n, H, DH, HB, BC, NT, "evict_last")
                o_stat = o_n[:, None, None] * H + o_h
                b_logit = tl.load(p_stat + o_stat, m_n & m_h, float("-inf"))
                b_u = dot_tiles(b_s, b_dx, NT)
                b_delta += over_sources(tl.exp(b_logit - b_lse) * b_u, BS)
        num_blocks = (S + BS - 1) // BS
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            o_n = (num_blocks - 1 - i) * BS + tl.arange(0, BS)  # newest in the cache first
            m_n = (o_n < S)[:, None, None]
            i_n = tl.minimum(o_n, S - 1)
            p = pointers(p_sources, i_n, DTYPE)[:, None, None]
            b_s = load_tiles(p + i_row * D, m_n, H, DH, HB, BC, NT, "evict_first")
            o_stat = o_n[:, None, None]
            b_logit = tl.load(p_stat + o_stat * H + o_h, m_n & m_h, 0.0)
            if SLICE_NORM:
                b_rstd = tl.load(p_stat + (S + o_stat) * H + o_h, m_n & m_h, 0.0)
            else:
                b_rstd = tl.load(p_stat + S * H + o_stat, m_n, 0.0)
            b_u = dot_tiles(b_s, b_dx, NT)
            b_alpha = tl.where(m_n & m_h, tl.exp(b_logit - b_lse), 0.0)
            # a single source has weight 1 and no gradient: exactly none, whatever the rounding
            b_ds = tl.where(count > 1, b_alpha * (b_u - b_delta), 0.0)
            b_through = b_ds * b_rstd
            b_pull = over_norm_group(b_ds * b_logit, SLICE_NORM) * b_rstd * b_rstd / (D // NORMS)
            b_weight = offset_weight(b_alpha, count, OFFSET)
            p = pointers(p_outputs, i_n, DTYPE)[:, None, None] + i_row * D
            if HAS_CARRIED:
                p_c = pointers(p_carried, i_n, DTYPE)[:, None, None] + i_row * D
                b_c = load_tiles(p_c, m_n, H, DH, HB, BC, NT, "evict_first")
            dq = ()
            for j in tl.static_range(NT):
                o_c = j * BC + tl.arange(0, BC)[None, None, :]
                b = b_s[j].to(tl.float32)
                b_out = b_weight * b_dx[j] + b_through * b_q[j] - b_pull * b
                if HAS_CARRIED:
                    b_out += b_c[j].to(tl.float32)
                m = m_n & tile_mask(o_h, o_c, H, DH)
                o = o_h * DH + o_c
                tl.store(p + o, b_out.to(DTYPE), m)  # a policy made it slower
                dq = dq + (b_dq[j] + over_sources(b_through * b, BS),)
            b_dq = dq
        if HAS_PRIOR:
            b_weight = offset_weight(b_prior_alpha, count, OFFSET)
            dprior = ()
            for j in tl.static_range(NT):
                dprior = dprior + (b_weight * b_dx[j],)
            store_row(p_dprior + i_row * D, dprior, H, DH, HB, BC, NT)
            b_dlse = b_prior_alpha * (b_prior_u - b_delta)
            tl.store(p_dprior_lse + i_row * H + o_h, b_dlse, m_h)
    p_dweight = p_dweights + i_program.to(tl.int64) * (2 * D if HAS_NORM else D)
    store_row(p_dweight, b_dq, H, DH, HB, BC, NT)
    if HAS_NORM:
        store_row(p_dweight + D, b_dw, H, DH, HB, BC, NT)
