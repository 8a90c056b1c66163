"""Depth mix over many sources, streamed: one query over S sources, given as separate tensors.

Forward fuses RMS statistics, logits, the online softmax, the weighted sum, the residual and, if
asked for, the next sublayer's RMSNorm: S + 1 passes (+1 each for a residual, a prior and the normed
output). Saved: per token, source and head a logit, per token and source 1/rms, per token and head
the log-sum-exp.

Backward needs delta = dx . mix before it can write any source's gradient. Where x is the mix, delta
comes from x and one sweep is enough (ONCE). x rounded to bf16 is not good enough for that: the
error of delta, coherent over a row, exceeded the error budget. So forward also keeps the next 16
bits of x (low): S + 2 passes, and 2S + 3 in backward. x in fp32 has them itself. Elsewhere the
sources are swept twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton import blocks

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
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMS: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_norm = tl.arange(0, HB if NORMS > 1 else 1)[None, :, None]
    places = blocks.places_of_row(H, D, HB, BC, NT)
    b_q = blocks.load_row(p_query, places)
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        b_acc = blocks.zeros(b_q)
        b_plain = blocks.zeros(b_q)
        b_top = tl.full([1, HB, 1], float("-inf"), tl.float32)
        b_total = tl.zeros([1, HB, 1], tl.float32)
        count = S + 1 if p_prior is not None else S
        if p_prior is not None:
            b_acc = blocks.load_row(p_prior + o_row, places)
            b_plain = b_acc
            b_top = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_total += 1.0
        for n in tl.range(0, S, BS, num_stages=STAGES):
            o_n = n + tl.arange(0, BS)
            m_n = (o_n < S)[:, None, None]
            p = blocks.pointers(p_sources, tl.minimum(o_n, S - 1), DTYPE)[:, None, None]
            b_s = blocks.hold(p + o_row, places, m_n, "evict_first")
            b_square, b_dot = blocks.squares_and_dots((b_s,), b_q)
            b_rstd = blocks.reciprocal_rms(b_square, m_h, eps, D, NORMS)
            b_logit = b_dot * b_rstd  # [BS, HB, 1]
            o_stat = o_n[:, None, None]
            tl.store(p_stat + o_stat * H + o_h, b_logit, m_n & m_h)
            tl.store(p_stat + S * H + o_stat * NORMS + o_norm, b_rstd, m_n & (o_norm < NORMS))
            b_logit = tl.where(m_n, b_logit, float("-inf"))
            b_new = tl.maximum(b_top, tl.max(b_logit, 0, keep_dims=True))
            b_keep = tl.exp(b_top - b_new)
            b_weight = tl.exp(b_logit - b_new)
            b_total = b_total * b_keep + blocks.over_sources(b_weight, BS)
            b_top = b_new
            b_acc = blocks.plus_sources(blocks.times(b_acc, b_keep), b_weight, b_s, BS)
            if OFFSET != 0:
                b_plain = blocks.plus_sources(b_plain, 1.0, b_s, BS)
        tl.store(p_stat + S * (H + NORMS) + o_h, b_top + tl.log(b_total), m_h)
        if OFFSET != 0:
            b_acc = blocks.axpy(blocks.offset_sum(b_total, count, OFFSET), b_plain, b_acc)
        # scale / total first: weights are exactly 1 at zero queries when scale is S
        b_x = blocks.times(b_acc, tl.where(m_h, scale / b_total, 0.0))
        if p_residual is not None:
            b_x = blocks.axpy(scale, blocks.load_row(p_residual + o_row, places), b_x)
        blocks.store_row(p_x + o_row, b_x, places)
        if p_low is not None:
            blocks.store_row(p_low + o_row, blocks.low_bits(b_x, p_x.dtype.element_ty), places)
        if p_norm_weight is not None:
            rounded = blocks.widen(blocks.narrow(b_x, p_x.dtype.element_ty))
            b_y, b_r = blocks.normed(rounded, blocks.load_row(p_norm_weight, places), D, norm_eps)
            blocks.store_row(p_y + o_row, b_y, places)
            tl.store(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32), b_r)


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
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMS: tl.constexpr,
    ONCE: tl.constexpr,
    BS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_norm = tl.arange(0, HB if NORMS > 1 else 1)[None, :, None]
    places = blocks.places_of_row(H, D, HB, BC, NT)
    b_q = blocks.load_row(p_query, places)
    b_dq, b_dw = blocks.zeros(b_q), blocks.zeros(b_q)
    for k in range((N - i_program + num_programs - 1) // num_programs):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        b_delta = tl.zeros([1, HB, 1], tl.float32)
        b_dx = blocks.zeros(b_q) if p_grad is None else blocks.load_row(p_grad + o_row, places)
        if p_x is not None:
            b_x = blocks.load_row(p_x + o_row, places)
        if p_norm_weight is not None:
            # y = x r w:  dx += r (gw - xhat mean(gw xhat)),  dw += gy xhat
            b_gy = blocks.load_row(p_grad_y + o_row, places)
            b_w = blocks.load_row(p_norm_weight, places)
            b_r = tl.load(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32))
            b_xhat = blocks.times(b_x, b_r)
            b_v = blocks.dot_tiles(blocks.multiply(b_gy, b_w), b_x)
            b_mean = tl.sum(b_v, 1, keep_dims=True) * b_r / D
            b_dx = blocks.plus(b_dx, blocks.norm_gradient(b_gy, b_w, b_xhat, b_r, b_mean))
            b_dw = blocks.plus(b_dw, blocks.multiply(b_gy, b_xhat))
        b_scaled = blocks.times(b_dx, scale)
        if ONCE:
            # x = scale * mix, so the unscaled gradient times x is delta
            x = b_x
            if p_low is not None:
                b_low = blocks.hold(p_low + o_row, places)
                x = blocks.with_low_bits(x, b_low, p_x.dtype.element_ty)
            b_delta = blocks.dot_tiles(b_dx, x)
        b_dx = b_scaled
        if p_dstate is not None:
            b_dstate = b_dx
            if p_grad_state is not None:
                b_dstate = blocks.plus(b_dx, blocks.load_row(p_grad_state + o_row, places))
            blocks.store_row(p_dstate + o_row, b_dstate, places)
        b_lse = tl.load(p_stat + S * (H + NORMS) + o_h, m_h, 0.0)
        count = S + 1 if p_prior is not None else S
        if p_prior is not None:
            b_prior = blocks.load_row(p_prior + o_row, places)
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_prior_alpha = tl.exp(b_prior_lse - b_lse)
            b_prior_u = blocks.dot_tiles(b_dx, b_prior)
        if not ONCE:
            if p_prior is not None:
                b_delta += b_prior_alpha * b_prior_u
            for n in tl.range(0, S, BS, num_stages=STAGES):
                o_n = n + tl.arange(0, BS)
                m_n = (o_n < S)[:, None, None]
                p = blocks.pointers(p_sources, tl.minimum(o_n, S - 1), DTYPE)[:, None, None]
                b_s = blocks.hold(p + o_row, places, m_n, "evict_last")
                o_stat = o_n[:, None, None] * H + o_h
                b_logit = tl.load(p_stat + o_stat, m_n & m_h, float("-inf"))
                b_u = blocks.dot_tiles(b_s, b_dx)
                b_delta += blocks.over_sources(tl.exp(b_logit - b_lse) * b_u, BS)
        num_blocks = (S + BS - 1) // BS
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            o_n = (num_blocks - 1 - i) * BS + tl.arange(0, BS)  # newest in the cache first
            m_n = (o_n < S)[:, None, None]
            i_n = tl.minimum(o_n, S - 1)
            p = blocks.pointers(p_sources, i_n, DTYPE)[:, None, None]
            b_s = blocks.hold(p + o_row, places, m_n, "evict_first")
            o_stat = o_n[:, None, None]
            b_logit = tl.load(p_stat + o_stat * H + o_h, m_n & m_h, 0.0)
            b_rstd = tl.load(p_stat + S * H + o_stat * NORMS + o_norm, m_n & (o_norm < NORMS), 0.0)
            b_u = blocks.dot_tiles(b_s, b_dx)
            b_alpha = tl.where(m_n & m_h, tl.exp(b_logit - b_lse), 0.0)
            # a single source has weight 1 and no gradient: exactly none, whatever the rounding
            b_ds = tl.where(count > 1, b_alpha * (b_u - b_delta), 0.0)
            b_through, b_pull = blocks.through_norm(b_ds, b_logit, b_rstd, D, NORMS)
            b_weight = blocks.offset_weight(b_alpha, count, OFFSET)
            if p_carried is not None:
                p = blocks.pointers(p_carried, i_n, DTYPE)[:, None, None]
                b_carried = blocks.hold(p + o_row, places, m_n, "evict_first")
            p = blocks.pointers(p_outputs, i_n, DTYPE)[:, None, None] + o_row
            dq = ()
            for j in tl.static_range(NT):  # the whole row at once was 1% slower at 9 x 7168
                s, dx, q = (b_s[j],), (b_dx[j],), (b_q[j],)
                b_out = blocks.source_gradient(b_weight, dx, b_through, q, b_pull, s)
                if p_carried is not None:
                    b_out = blocks.plus(b_out, blocks.widen((b_carried[j],)))
                blocks.store_row(p, b_out, (places[j],), m_n)
                dq = dq + blocks.plus_sources((b_dq[j],), b_through, s, BS)
            b_dq = dq
        if p_prior is not None:
            b_weight = blocks.offset_weight(b_prior_alpha, count, OFFSET)
            blocks.store_row(p_dprior + o_row, blocks.times(b_dx, b_weight), places)
            b_dlse = b_prior_alpha * (b_prior_u - b_delta)
            tl.store(p_dprior_lse + i_row * H + o_h, b_dlse, m_h)
    p_dweight = p_dweights + i_program.to(tl.int64) * (2 * D if p_norm_weight is not None else D)
    blocks.store_row(p_dweight, b_dq, places)
    if p_norm_weight is not None:
        blocks.store_row(p_dweight + D, b_dw, places)
