"""Depth mix over few sources: all rows of a token held in registers, forward and backward.

With few sources (block methods, or the newer sources of a two-phase group) a token's rows fit one
program's registers. Every load is issued before the first result is needed, the softmax needs no
rescaling, and backward knows delta exactly after one sweep: device memory sees each source once.

These kernels are also the whole boundary between two sublayers; what there is of it they see by the
pointers that they are given. The gradient of ``output`` is dstate plus that of the last source.
Query and norm-weight gradients are summed per program, written as one row each, and then over
programs. What forward keeps of a token is a row of K numbers; see ``Mix.stats_width``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton import blocks

SIZES = ["N"]  # a size of 1 must not become a constant


@triton.jit(do_not_specialize=SIZES)
def resident_forward_kernel(
    p_sources,
    p_query,
    p_output,
    p_partial,
    p_residual,
    p_prior,
    p_prior_lse,
    p_norm_weight,
    p_x,
    p_y,
    p_state,
    p_last,
    p_stats,
    N,
    eps,
    scale,
    norm_eps,
    least_gain,
    K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    READS_LAST: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``READS_LAST``: the last of the S sources is partial + output, or output, not in the list.
    ``least_gain``: what gains nearer to zero count as, which may be 0."""
    S: tl.constexpr = len(p_sources) + 1 if READS_LAST else len(p_sources)
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_norm = tl.arange(0, HB if NORMS > 1 else 1)[None, :, None]
    places = blocks.places_of_row(H, D, HB, BC, NT)
    b_q = blocks.load_row(p_query, places)
    if p_norm_weight is not None:
        b_w = blocks.off_zero(blocks.load_row(p_norm_weight, places), least_gain)
    num_rows = (N - i_program + num_programs - 1) // num_programs
    for k in tl.range(0, num_rows, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        rows = [blocks.hold(p_source + o_row, places) for p_source in p_sources]
        if p_prior is not None:
            b_prior = blocks.hold(p_prior + o_row, places)
        if p_residual is not None:
            b_state = blocks.hold(p_residual + o_row, places)
        if p_output is not None:
            b_last = blocks.hold(p_output + o_row, places)
            b_wide = blocks.widen(b_last)
            if p_partial is not None:
                b_last = blocks.hold(p_partial + o_row, places)
            if p_residual is not None:
                b_state = blocks.narrow(blocks.plus(blocks.widen(b_state), b_wide), DTYPE)
                blocks.store_row(p_state + o_row, b_state, places)
            if p_partial is not None:
                b_last = blocks.narrow(blocks.plus(blocks.widen(b_last), b_wide), DTYPE)
                blocks.store_row(p_last + o_row, b_last, places)
            if READS_LAST:
                rows = rows + [b_last]
        sums = blocks.squares_and_dots(rows, b_q)
        b_top = tl.full([1, HB, 1], float("-inf"), tl.float32)
        count = S + 1 if p_prior is not None else S
        if p_prior is not None:
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_top = b_prior_lse
        logits = ()
        for n in tl.static_range(S):
            b_rstd = blocks.reciprocal_rms(sums[2 * n], m_h, eps, D, NORMS)
            b_logit = sums[2 * n + 1] * b_rstd
            tl.store(p_stat + n * H + o_h, b_logit, m_h)
            tl.store(p_stat + S * H + n * NORMS + o_norm, b_rstd, o_norm < NORMS)
            b_top = tl.maximum(b_top, b_logit)
            logits = logits + (b_logit,)
        b_total = tl.zeros([1, HB, 1], tl.float32)
        b_mix = blocks.zeros(b_q)
        b_plain = blocks.zeros(b_q)
        if p_prior is not None:
            b_weight = tl.exp(b_prior_lse - b_top)
            b_total += b_weight
            b_plain = blocks.widen(b_prior)
            b_mix = blocks.times(b_plain, b_weight)
        for n in tl.static_range(S):
            b_weight = tl.exp(logits[n] - b_top)
            b_total += b_weight
            b = blocks.again(rows[n])
            b_mix = blocks.axpy(b_weight, b, b_mix)
            if OFFSET != 0:
                b_plain = blocks.plus(b_plain, b)
        tl.store(p_stat + S * (H + NORMS) + o_h, b_top + tl.log(b_total), m_h)
        if OFFSET != 0:
            b_mix = blocks.axpy(blocks.offset_sum(b_total, count, OFFSET), b_plain, b_mix)
        # scale / total first: weights are exactly 1 at zero queries when scale is S
        b_x = blocks.times(b_mix, tl.where(m_h, scale / b_total, 0.0))
        if p_residual is not None:
            b_x = blocks.axpy(scale, blocks.again(b_state), b_x)
        b_held = blocks.narrow(b_x, DTYPE)
        if p_x is not None:
            blocks.store_row(p_x + o_row, b_held, places)
        if p_norm_weight is not None:
            b_y, b_r = blocks.normed(blocks.again(b_held), b_w, D, norm_eps)
            blocks.store_row(p_y + o_row, b_y, places)
            tl.store(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32), b_r)


@triton.jit(do_not_specialize=SIZES)
def resident_backward_kernel(
    p_sources,
    p_dsources,
    p_carried,
    p_grads_y,
    p_grad,
    p_grad_state,
    p_grad_last,
    p_query,
    p_x,
    p_prior,
    p_prior_lse,
    p_norm_weight,
    p_stats,
    p_dstate,
    p_doutput,
    p_dprior,
    p_dprior_lse,
    p_dweights,
    N,
    scale,
    least_gain,
    K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    READS_LAST: tl.constexpr,
    MIXES_AGAIN: tl.constexpr,
    FROM_Y: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMS: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``carried`` gradients are added to the sources', and y's may come in several parts;
    ``grad_last`` is that of a last block sum which this place does not read. A norm needs x. With
    ``FROM_Y`` what is passed as x is y, which the gains make x again; with ``MIXES_AGAIN`` x is
    mixed once more, and what is passed is the state it was added to, if there is one."""
    S: tl.constexpr = len(p_sources)
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_norm = tl.arange(0, HB if NORMS > 1 else 1)[None, :, None]
    places = blocks.places_of_row(H, D, HB, BC, NT)
    b_q = blocks.load_row(p_query, places)
    if p_norm_weight is not None:
        b_w = blocks.load_row(p_norm_weight, places)
        b_w = blocks.off_zero(b_w, least_gain) if FROM_Y else b_w
    b_dq, b_dw = blocks.zeros(b_q), blocks.zeros(b_q)
    num_rows = (N - i_program + num_programs - 1) // num_programs
    for k in tl.range(0, num_rows, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        if p_norm_weight is not None:
            b_gy = blocks.hold(p_grads_y[0] + o_row, places)
            if len(p_grads_y) > 1:
                b_g = blocks.widen(b_gy)
                for n in tl.static_range(1, len(p_grads_y)):
                    b_g = blocks.plus(b_g, blocks.load_row(p_grads_y[n] + o_row, places))
                b_gy = blocks.narrow(b_g, DTYPE)
            if p_x is not None:
                b_x = blocks.hold(p_x + o_row, places)  # or the state, or y
            b_r = tl.load(p_stat + K - 1 + tl.zeros([1, 1, 1], tl.int32))
        if p_grad is not None:
            b_grad = blocks.hold(p_grad + o_row, places)
        if p_grad_state is not None:
            b_dstate = blocks.hold(p_grad_state + o_row, places)
        rows = [blocks.hold(p_source + o_row, places) for p_source in p_sources]
        b_lse = tl.load(p_stat + S * (H + NORMS) + o_h, m_h, 0.0)
        count = S + 1 if p_prior is not None else S
        if p_prior is not None:
            b_prior = blocks.hold(p_prior + o_row, places)
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_prior_alpha = tl.exp(b_prior_lse - b_lse)
        alphas, logits = (), ()
        for n in tl.static_range(S):
            b_logit = tl.load(p_stat + n * H + o_h, m_h, 0.0)
            b_alpha = tl.where(m_h, tl.exp(b_logit - b_lse), 0.0)
            alphas, logits = alphas + (b_alpha,), logits + (b_logit,)
        if MIXES_AGAIN:
            b_mix = blocks.zeros(b_q) if p_x is None else blocks.widen(b_x)
            for n in tl.static_range(S):
                b_weight = blocks.offset_weight(alphas[n], count, OFFSET)
                b_mix = blocks.axpy(b_weight, blocks.widen(rows[n]), b_mix)
            if p_prior is not None:
                b_weight = blocks.offset_weight(b_prior_alpha, count, OFFSET)
                b_mix = blocks.axpy(b_weight, blocks.widen(b_prior), b_mix)
            b_x = blocks.narrow(blocks.times(b_mix, scale), DTYPE)
        if p_norm_weight is not None:
            # y = x r w:  dx = r (gw - xhat mean(gw xhat)),  dw += gy xhat
            b_g = blocks.widen(b_gy)
            if FROM_Y:
                v = blocks.product(b_g, blocks.widen(b_x))
            else:
                v = blocks.product(blocks.multiply(b_g, b_w), blocks.times(blocks.again(b_x), b_r))
            b_mean = tl.sum(tl.sum(v, 2, keep_dims=True), 1, keep_dims=True) / D
            b_g = blocks.again(b_gy)
            if FROM_Y:
                b_xhat = blocks.over(blocks.again(b_x), b_w)
            else:
                b_xhat = blocks.times(blocks.again(b_x), b_r)
            b_dx = blocks.norm_gradient(b_g, b_w, b_xhat, b_r, b_mean)
            b_dw = blocks.plus(b_dw, blocks.multiply(b_g, b_xhat))
            if p_grad is not None:
                b_dx = blocks.plus(b_dx, blocks.widen(b_grad))
        else:
            b_dx = blocks.widen(b_grad)
        b_dx = blocks.times(b_dx, scale)
        if p_dstate is not None:
            b_sum = b_dx if p_grad_state is None else blocks.plus(b_dx, blocks.widen(b_dstate))
            b_dstate = blocks.narrow(b_sum, DTYPE)
            blocks.store_row(p_dstate + o_row, b_dstate, places)
        us = blocks.dots(rows, b_dx)
        b_delta = tl.zeros([1, HB, 1], tl.float32)
        if p_prior is not None:
            b_prior_u = blocks.dot_tiles(blocks.again(b_prior), b_dx)
            b_delta += b_prior_alpha * b_prior_u
        for n in tl.static_range(S):
            b_delta += alphas[n] * us[n]
        for n in tl.static_range(S):
            b_rstd = tl.load(p_stat + S * H + n * NORMS + o_norm, o_norm < NORMS, 0.0)
            b_ds = alphas[n] * (us[n] - b_delta)
            if S == 1 and p_prior is None:
                b_ds = b_ds * 0.0  # a single source has weight 1 and no gradient through it
            b_through, b_pull = blocks.through_norm(b_ds, logits[n], b_rstd, D, NORMS)
            b_weight = blocks.offset_weight(alphas[n], count, OFFSET)
            b = blocks.again(rows[n])
            out = blocks.source_gradient(b_weight, b_dx, b_through, b_q, b_pull, b)
            b_dq = blocks.axpy(b_through, b, b_dq)
            if p_carried is not None:
                # fetched with the others, but read from shared memory only now: fewer registers
                out = blocks.plus(out, blocks.load_row(p_carried[n] + o_row, places))
            blocks.store_row(p_dsources[n] + o_row, out, places)
        if p_doutput is not None:
            b_last = out if READS_LAST else blocks.load_row(p_grad_last + o_row, places)
            b_sum = blocks.plus(b_last, blocks.again(b_dstate))
            blocks.store_row(p_doutput + o_row, b_sum, places)
        if p_prior is not None:
            b_weight = blocks.offset_weight(b_prior_alpha, count, OFFSET)
            blocks.store_row(p_dprior + o_row, blocks.times(b_dx, b_weight), places)
            tl.store(p_dprior_lse + i_row * H + o_h, b_prior_alpha * (b_prior_u - b_delta), m_h)
    p_dweight = p_dweights + i_program.to(tl.int64) * (2 * D if p_norm_weight is not None else D)
    blocks.store_row(p_dweight, b_dq, places)
    if p_norm_weight is not None:
        blocks.store_row(p_dweight + D, b_dw, places)
