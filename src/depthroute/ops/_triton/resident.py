"""Depth mix over few sources: all rows of a token held in registers, forward and backward.

With few sources (block methods, or the newer sources of a two-phase group) a token's rows fit one
program's registers. Every load is issued before the first result is needed, the softmax needs no
rescaling, and backward knows delta exactly after one sweep: device memory sees each source once.

These kernels are also the whole boundary between two sublayers:

    state   = state + output                        (where the method keeps the residual state)
    partial = partial + output                      (where the block goes on)
    x       = scale * (state + sum_n alpha_n s_n)
    y       = RMSNorm(x)                            (the next sublayer's pre-norm)

Backward returns dstate, and the gradient of ``output``, which is dstate plus that of the last
source. Query and norm-weight gradients are summed per program, written as one row each, and then
over programs. What forward keeps of a token is a row of K numbers; see ``Mix.stats_width``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.blocks import (
    hold,
    load_row,
    offset_sum,
    offset_weight,
    over_norm_group,
    store_row,
    sum_two,
    widen,
    zero_row,
)
from depthroute.ops._triton.rows import (
    again,
    axpy,
    narrow,
    off_zero,
    over,
    plus,
    product,
    sum_four,
    times,
)

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
    S: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    READS_LAST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WRITES_X: tl.constexpr,
    OFFSET: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
    GPU: tl.constexpr,
):
    """``READS_LAST``: the last of the S sources is partial + output, or output, not in the list.
    ``least_gain``: what gains nearer to zero count as, which may be 0."""
    D: tl.constexpr = H * DH
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    LOADED: tl.constexpr = S - 1 if READS_LAST else S
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_one = tl.zeros([1, 1, 1], tl.int32)
    b_q = load_row(p_query, H, DH, HB, BC, NT)
    if HAS_NORM:
        b_w = load_row(p_norm_weight, H, DH, HB, BC, NT)
        b_w = off_zero(b_w, least_gain, NT)
    num_rows = (N - i_program + num_programs - 1) // num_programs
    for k in tl.range(0, num_rows, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        rows = ()
        for n in tl.static_range(LOADED):
            rows = rows + (hold(p_sources[n] + o_row, H, DH, HB, BC, NT),)
        if HAS_PRIOR:
            b_prior = hold(p_prior + o_row, H, DH, HB, BC, NT)
        if HAS_RESIDUAL:
            b_state = hold(p_residual + o_row, H, DH, HB, BC, NT)
        if HAS_OUTPUT:
            b_output = hold(p_output + o_row, H, DH, HB, BC, NT)
            if HAS_PARTIAL:
                b_last = hold(p_partial + o_row, H, DH, HB, BC, NT)
            b_wide = widen(b_output, NT)
            if HAS_RESIDUAL:
                b_sum = plus(widen(b_state, NT), b_wide, NT)
                b_state = narrow(b_sum, DTYPE, NT)
                store_row(p_state + o_row, b_state, H, DH, HB, BC, NT)
            if HAS_PARTIAL:
                b_sum = plus(widen(b_last, NT), b_wide, NT)
                b_last = narrow(b_sum, DTYPE, NT)
                store_row(p_last + o_row, b_last, H, DH, HB, BC, NT)
            else:
                b_last = b_output
            if READS_LAST:
                rows = rows + (b_last,)
        squares, dots = (), ()
        for n in tl.static_range(0, S - 1, 2):
            a = widen(rows[n], NT)
            b = widen(rows[n + 1], NT)
            s0, d0, s1, d1 = sum_four(
                product(a, a, NT), product(a, b_q, NT), product(b, b, NT), product(b, b_q, NT), GPU
            )
            squares, dots = squares + (s0, s1), dots + (d0, d1)
        if S % 2 == 1:
            a = widen(rows[S - 1], NT)
            s0, d0 = sum_two(product(a, a, NT), product(a, b_q, NT), GPU)
            squares, dots = squares + (s0,), dots + (d0,)
        b_top = tl.full([1, HB, 1], float("-inf"), tl.float32)
        count = S
        if HAS_PRIOR:
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_top = b_prior_lse
            count = S + 1
        logits = ()
        for n in tl.static_range(S):
            b_rstd = tl.rsqrt(over_norm_group(squares[n], SLICE_NORM) / (D // NORMS) + eps)
            b_logit = dots[n] * b_rstd
            tl.store(p_stat + n * H + o_h, b_logit, m_h)
            if SLICE_NORM:
                tl.store(p_stat + (S + n) * H + o_h, b_rstd, m_h)
            else:
                tl.store(p_stat + S * H + n + o_one, b_rstd)
            b_top = tl.maximum(b_top, b_logit)
            logits = logits + (b_logit,)
        b_total = tl.zeros([1, HB, 1], tl.float32)
        b_mix = zero_row(HB, BC, NT)
        b_plain = zero_row(HB, BC, NT)
        if HAS_PRIOR:
            b_weight = tl.exp(b_prior_lse - b_top)
            b_total += b_weight
            b_plain = widen(b_prior, NT)
            b_mix = times(b_plain, b_weight, NT)
        for n in tl.static_range(S):
            b_weight = tl.exp(logits[n] - b_top)
            b_total += b_weight
            b = again(rows[n], NT, GPU)
            b_mix = axpy(b_weight, b, b_mix, NT)
            if OFFSET != 0:
                b_plain = plus(b_plain, b, NT)
        tl.store(p_stat + S * (H + NORMS) + o_h, b_top + tl.log(b_total), m_h)
        if OFFSET != 0:
            b_mix = axpy(offset_sum(b_total, count, OFFSET), b_plain, b_mix, NT)
        # scale / total first: weights are exactly 1 at zero queries when scale is S
        b_x = times(b_mix, tl.where(m_h, scale / b_total, 0.0), NT)
        if HAS_RESIDUAL:
            b_x = axpy(scale, again(b_state, NT, GPU), b_x, NT)
        b_held = narrow(b_x, DTYPE, NT)
        if WRITES_X:
            store_row(p_x + o_row, b_held, H, DH, HB, BC, NT)
        if HAS_NORM:
            b_x = again(b_held, NT, GPU)
            b_square = tl.sum(product(b_x, b_x, NT), 2, keep_dims=True)
            b_r = tl.rsqrt(tl.sum(b_square, 1, keep_dims=True) / D + norm_eps)
            b_y = ()
            for j in tl.static_range(NT):
                b_y = b_y + (b_x[j] * b_r * b_w[j],)
            store_row(p_y + o_row, narrow(b_y, DTYPE, NT), H, DH, HB, BC, NT)
            tl.store(p_stat + K - 1 + o_one, b_r)


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
    S: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_GRAD_STATE: tl.constexpr,
    HAS_CARRIED: tl.constexpr,
    GRADS_Y: tl.constexpr,
    WRITES_STATE: tl.constexpr,
    WRITES_OUTPUT: tl.constexpr,
    READS_LAST: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_X: tl.constexpr,
    MIXES_AGAIN: tl.constexpr,
    FROM_Y: tl.constexpr,
    OFFSET: tl.constexpr,
    SLICE_NORM: tl.constexpr,
    HB: tl.constexpr,
    BC: tl.constexpr,
    NT: tl.constexpr,
    STAGES: tl.constexpr,
    GPU: tl.constexpr,
):
    """``carried`` gradients are added to the sources', and y's may come in several parts;
    ``grad_last`` is that of a last block sum which this place does not read. A norm needs x. With
    ``FROM_Y`` what is passed as x is y, which the gains make x again; with ``MIXES_AGAIN`` x is
    mixed once more, and what is passed is the state it was added to, if there is one."""
    D: tl.constexpr = H * DH
    NORMS: tl.constexpr = H if SLICE_NORM else 1
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    o_h = tl.arange(0, HB)[None, :, None]
    m_h = o_h < H
    o_one = tl.zeros([1, 1, 1], tl.int32)
    b_q = load_row(p_query, H, DH, HB, BC, NT)
    if HAS_NORM:
        b_w = load_row(p_norm_weight, H, DH, HB, BC, NT)
        if FROM_Y:
            b_w = off_zero(b_w, least_gain, NT)
    b_dq = zero_row(HB, BC, NT)
    b_dw = zero_row(HB, BC, NT)
    num_rows = (N - i_program + num_programs - 1) // num_programs
    for k in tl.range(0, num_rows, num_stages=STAGES):
        i_row = i_program.to(tl.int64) + k * num_programs.to(tl.int64)
        o_row = i_row * D
        p_stat = p_stats + i_row * K
        if HAS_NORM:
            b_gy = hold(p_grads_y[0] + o_row, H, DH, HB, BC, NT)
            if GRADS_Y > 1:
                b_g = widen(b_gy, NT)
                for n in tl.static_range(1, GRADS_Y):
                    b_gy = hold(p_grads_y[n] + o_row, H, DH, HB, BC, NT)
                    b_g = plus(b_g, widen(b_gy, NT), NT)
                b_gy = narrow(b_g, DTYPE, NT)
            if HAS_X:
                b_x = hold(p_x + o_row, H, DH, HB, BC, NT)  # or the state, or y
            b_r = tl.load(p_stat + K - 1 + o_one)
        if HAS_GRAD:
            b_grad = hold(p_grad + o_row, H, DH, HB, BC, NT)
        if HAS_GRAD_STATE:
            b_dstate = hold(p_grad_state + o_row, H, DH, HB, BC, NT)
        rows = ()
        for n in tl.static_range(S):
            rows = rows + (hold(p_sources[n] + o_row, H, DH, HB, BC, NT),)
        b_lse = tl.load(p_stat + S * (H + NORMS) + o_h, m_h, 0.0)
        count = S
        if HAS_PRIOR:
            count = S + 1
            b_prior = hold(p_prior + o_row, H, DH, HB, BC, NT)
            b_prior_lse = tl.load(p_prior_lse + i_row * H + o_h, m_h, 0.0).to(tl.float32)
            b_prior_alpha = tl.exp(b_prior_lse - b_lse)
        alphas, logits = (), ()
        for n in tl.static_range(S):
            b_logit = tl.load(p_stat + n * H + o_h, m_h, 0.0)
            b_alpha = tl.where(m_h, tl.exp(b_logit - b_lse), 0.0)
            alphas, logits = alphas + (b_alpha,), logits + (b_logit,)
        if MIXES_AGAIN:
            b_mix = zero_row(HB, BC, NT)
            if HAS_X:
                b_mix = widen(b_x, NT)
            for n in tl.static_range(S):
                b_weight = offset_weight(alphas[n], count, OFFSET)
                b_mix = axpy(b_weight, widen(rows[n], NT), b_mix, NT)
            if HAS_PRIOR:
                b_weight = offset_weight(b_prior_alpha, count, OFFSET)
                b_mix = axpy(b_weight, widen(b_prior, NT), b_mix, NT)
            b_x = narrow(times(b_mix, scale, NT), DTYPE, NT)
        if HAS_NORM:
            # y = x r w:  dx = r (gw - xhat mean(gw xhat)),  dw += gy xhat
            b_g = widen(b_gy, NT)
            if FROM_Y:
                v = product(b_g, widen(b_x, NT), NT)
            else:
                b_xhat = times(again(b_x, NT, GPU), b_r, NT)
                v = b_g[0] * b_w[0] * b_xhat[0]
                for j in tl.static_range(1, NT):
                    v += b_g[j] * b_w[j] * b_xhat[j]
            b_mean = tl.sum(tl.sum(v, 2, keep_dims=True), 1, keep_dims=True) / D
            b_g = again(b_gy, NT, GPU)
            if FROM_Y:
                b_xhat = over(again(b_x, NT, GPU), b_w, NT)
            else:
                b_xhat = times(again(b_x, NT, GPU), b_r, NT)
            dx, dw = (), ()
            for j in tl.static_range(NT):
                dx = dx + ((b_g[j] * b_w[j] - b_xhat[j] * b_mean) * b_r,)
                dw = dw + (b_dw[j] + b_g[j] * b_xhat[j],)
            b_dx, b_dw = dx, dw
            if HAS_GRAD:
                b_dx = plus(b_dx, widen(b_grad, NT), NT)
        else:
            b_dx = widen(b_grad, NT)
        b_dx = times(b_dx, scale, NT)
        if WRITES_STATE:
            if HAS_GRAD_STATE:
                b_dstate = narrow(plus(b_dx, widen(b_dstate, NT), NT), DTYPE, NT)
            else:
                b_dstate = narrow(b_dx, DTYPE, NT)
            store_row(p_dstate + o_row, b_dstate, H, DH, HB, BC, NT)
        us = ()
        for n in tl.static_range(0, S - 3, 4):
            us = us + sum_four(
                product(again(rows[n], NT, GPU), b_dx, NT),
                product(again(rows[n + 1], NT, GPU), b_dx, NT),
                product(again(rows[n + 2], NT, GPU), b_dx, NT),
                product(again(rows[n + 3], NT, GPU), b_dx, NT),
                GPU,
            )
        if S % 4 >= 2:
            us = us + sum_two(
                product(again(rows[S // 4 * 4], NT, GPU), b_dx, NT),
                product(again(rows[S // 4 * 4 + 1], NT, GPU), b_dx, NT),
                GPU,
            )
        if S % 2 == 1:
            v = product(again(rows[S - 1], NT, GPU), b_dx, NT)
            us = us + (tl.sum(v, 2, keep_dims=True),)
        b_delta = tl.zeros([1, HB, 1], tl.float32)
        if HAS_PRIOR:
            b_prior_u = tl.sum(product(again(b_prior, NT, GPU), b_dx, NT), 2, keep_dims=True)
            b_delta += b_prior_alpha * b_prior_u
        for n in tl.static_range(S):
            b_delta += alphas[n] * us[n]
        for n in tl.static_range(S):
            if SLICE_NORM:
                b_rstd = tl.load(p_stat + (S + n) * H + o_h, m_h, 0.0)
            else:
                b_rstd = tl.load(p_stat + S * H + n + o_one)
            b_ds = alphas[n] * (us[n] - b_delta)
            if S == 1 and not HAS_PRIOR:
                b_ds = b_ds * 0.0  # a single source has weight 1 and no gradient through it
            b_through = b_ds * b_rstd
            b_pull = over_norm_group(b_ds * logits[n], SLICE_NORM) * b_rstd * b_rstd / (D // NORMS)
            b_weight = offset_weight(alphas[n], count, OFFSET)
            b = again(rows[n], NT, GPU)
            out = ()
            for j in tl.static_range(NT):
                out = out + (b_weight * b_dx[j] + b_through * b_q[j] - b_pull * b[j],)
            b_dq = axpy(b_through, b, b_dq, NT)
            if HAS_CARRIED:
                # fetched with the others, but read from shared memory only now: fewer registers
                b_carried = hold(p_carried[n] + o_row, H, DH, HB, BC, NT)
                out = plus(out, widen(b_carried, NT), NT)
            b_held = narrow(out, DTYPE, NT)
            store_row(p_dsources[n] + o_row, b_held, H, DH, HB, BC, NT)
            if WRITES_OUTPUT and READS_LAST and n == S - 1:
                out = plus(out, again(b_dstate, NT, GPU), NT)
                store_row(p_doutput + o_row, narrow(out, DTYPE, NT), H, DH, HB, BC, NT)
        if WRITES_OUTPUT and not READS_LAST:
            b_last = widen(hold(p_grad_last + o_row, H, DH, HB, BC, NT), NT)
            out = plus(b_last, again(b_dstate, NT, GPU), NT)
            store_row(p_doutput + o_row, narrow(out, DTYPE, NT), H, DH, HB, BC, NT)
        if HAS_PRIOR:
            b_weight = offset_weight(b_prior_alpha, count, OFFSET)
            b_held = narrow(times(b_dx, b_weight, NT), DTYPE, NT)
            store_row(p_dprior + o_row, b_held, H, DH, HB, BC, NT)
            tl.store(p_dprior_lse + i_row * H + o_h, b_prior_alpha * (b_prior_u - b_delta), m_h)
    p_dweight = p_dweights + i_program.to(tl.int64) * (2 * D if HAS_NORM else D)
    store_row(p_dweight, b_dq, H, DH, HB, BC, NT)
    if HAS_NORM:
        store_row(p_dweight + D, b_dw, H, DH, HB, BC, NT)
