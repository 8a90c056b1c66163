"""Depth-attention value mixing at KV resolution: one program mixes BR rows (token, KV head).

Forward reads the query heads once, each layer's key and value once, and writes the mixed value;
saved are the logits and their log-sum-exp. Backward writes every gradient once, that of the R query
heads of a KV head, which is the same for all of them, as one. Tensors keep their strides, so the
transposed views that attention modules make are read in place.

A few layers (COUNT of them) come as kernel arguments and the loop over them is unrolled: their
loads are all under way at once, decoding needs no other launch, and backward reads every value
once. More come as tables of addresses (COUNT = 0), and backward reads values twice, the second time
from cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthroute.ops._triton.blocks import pointers

SIZES = ["rows", "T", "J"]  # a size of 1 must not become a constant, nor each size a kernel


@triton.jit
def _address(p_table, j, DTYPE: tl.constexpr):
    """Address [1, 1] of tensor ``j`` of a table."""
    return pointers(p_table, j + tl.arange(0, 1), DTYPE)[:, None]


@triton.jit
def _mean_query(
    p_query,
    o_query,
    o_d,
    m,
    stride_h,
    R: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    b_q = tl.zeros([BR, BD], tl.float32)
    for r in tl.static_range(R):
        b_q += tl.load(p_query + o_query + r * stride_h + o_d, m, 0.0).to(tl.float32)
    return b_q / R


@triton.jit
def _mixed(b_q, b_k, b_v, b_acc, b_top, b_total, p_logit, m_row):
    """One layer more in the online softmax."""
    b_logit = tl.sum(b_q * b_k.to(tl.float32), 1, keep_dims=True)
    tl.store(p_logit, b_logit, m_row)
    b_new = tl.maximum(b_top, b_logit)
    b_keep, b_weight = tl.exp(b_top - b_new), tl.exp(b_logit - b_new)
    b_acc = b_acc * b_keep + b_weight * b_v.to(tl.float32)
    return b_acc, b_new, b_total * b_keep + b_weight


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    p_keys,
    p_values,
    p_query,
    p_mixed,
    p_logits,
    p_lse,
    rows,
    T,
    J,
    scaling,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    m_row = i_row < rows
    i_head = i_row % HEADS
    i_token = i_row // HEADS % T
    i_batch = i_row // HEADS // T
    o_stat = (i_batch * HEADS + i_head) * T + i_token
    o_d, o_v = tl.arange(0, BD)[None, :], tl.arange(0, BV)[None, :]
    m_d, m_v = m_row & (o_d < DK), m_row & (o_v < DV)
    o_query = i_batch * q_b + i_head * R * q_h + i_token * q_t
    b_q = _mean_query(p_query, o_query, o_d, m_d, q_h, R, BR, BD) * scaling
    o_key = i_batch * k_b + i_head * k_h + i_token * k_t + o_d
    o_value = i_batch * v_b + i_head * v_h + i_token * v_t + o_v
    b_acc = tl.zeros([BR, BV], tl.float32)
    b_top = tl.full([BR, 1], float("-inf"), tl.float32)
    b_total = tl.zeros([BR, 1], tl.float32)
    if COUNT > 0:
        for j in tl.static_range(COUNT):
            b_k = tl.load(p_keys[j] + o_key, m_d, 0.0)
            b_v = tl.load(p_values[j] + o_value, m_v, 0.0)
            p_logit = p_logits + j * rows.to(tl.int64) + o_stat
            b_acc, b_top, b_total = _mixed(b_q, b_k, b_v, b_acc, b_top, b_total, p_logit, m_row)
    else:
        for j in range(J):
            b_k = tl.load(_address(p_keys, j, KEY_DTYPE) + o_key, m_d, 0.0)
            b_v = tl.load(_address(p_values, j, VALUE_DTYPE) + o_value, m_v, 0.0)
            p_logit = p_logits + j * rows.to(tl.int64) + o_stat
            b_acc, b_top, b_total = _mixed(b_q, b_k, b_v, b_acc, b_top, b_total, p_logit, m_row)
    tl.store(p_lse + o_stat, b_top + tl.log(b_total), m_row)
    o_out = i_batch * o_b + i_head * o_h + i_token * o_t + o_v
    tl.store(p_mixed + o_out, (b_acc / b_total).to(VALUE_DTYPE), m_v)


@triton.jit(do_not_specialize=SIZES)
def attention_backward_kernel(
    p_keys,
    p_values,
    p_dkeys,
    p_dvalues,
    p_query,
    p_grad,
    p_logits,
    p_lse,
    p_dquery,
    rows,
    T,
    J,
    scaling,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    g_b,
    g_h,
    g_t,
    dq_b,
    dq_h,
    dq_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    m_row = i_row < rows
    i_head = i_row % HEADS
    i_token = i_row // HEADS % T
    i_batch = i_row // HEADS // T
    o_stat = (i_batch * HEADS + i_head) * T + i_token
    o_d, o_v = tl.arange(0, BD)[None, :], tl.arange(0, BV)[None, :]
    m_d, m_v = m_row & (o_d < DK), m_row & (o_v < DV)
    o_query = i_batch * q_b + i_head * R * q_h + i_token * q_t
    b_q = _mean_query(p_query, o_query, o_d, m_d, q_h, R, BR, BD)
    o_key = i_batch * k_b + i_head * k_h + i_token * k_t + o_d
    o_value = i_batch * v_b + i_head * v_h + i_token * v_t + o_v
    o_dkey = i_batch * dk_b + i_head * dk_h + i_token * dk_t + o_d
    o_dvalue = i_batch * dv_b + i_head * dv_h + i_token * dv_t + o_v
    o_grad = i_batch * g_b + i_head * g_h + i_token * g_t + o_v
    b_dx = tl.load(p_grad + o_grad, m_v, 0.0).to(tl.float32)
    b_lse = tl.load(p_lse + o_stat, m_row, 0.0)
    b_delta = tl.zeros([BR, 1], tl.float32)
    b_dq = tl.zeros([BR, BD], tl.float32)
    if COUNT > 0:
        us, alphas = (), ()
        for j in tl.static_range(COUNT):
            b_v = tl.load(p_values[j] + o_value, m_v, 0.0).to(tl.float32)
            b_logit = tl.load(p_logits + j * rows.to(tl.int64) + o_stat, m_row, 0.0)
            b_u = tl.sum(b_dx * b_v, 1, keep_dims=True)
            b_alpha = tl.exp(b_logit - b_lse)
            b_delta += b_alpha * b_u
            us, alphas = us + (b_u,), alphas + (b_alpha,)
        for j in tl.static_range(COUNT):
            b_ds = alphas[j] * (us[j] - b_delta) * scaling
            b_dq += b_ds * tl.load(p_keys[j] + o_key, m_d, 0.0).to(tl.float32)
            tl.store(p_dvalues[j] + o_dvalue, (alphas[j] * b_dx).to(VALUE_DTYPE), m_v)
            tl.store(p_dkeys[j] + o_dkey, (b_ds * b_q).to(KEY_DTYPE), m_d)
    else:
        for j in range(J):
            b_v = tl.load(_address(p_values, j, VALUE_DTYPE) + o_value, m_v, 0.0)
            b_logit = tl.load(p_logits + j * rows.to(tl.int64) + o_stat, m_row, 0.0)
            b_u = tl.sum(b_dx * b_v.to(tl.float32), 1, keep_dims=True)
            b_delta += tl.exp(b_logit - b_lse) * b_u
        for i in range(J):
            j = J - 1 - i  # newest in the cache first
            b_v = tl.load(_address(p_values, j, VALUE_DTYPE) + o_value, m_v, 0.0)
            b_k = tl.load(_address(p_keys, j, KEY_DTYPE) + o_key, m_d, 0.0)
            b_logit = tl.load(p_logits + j * rows.to(tl.int64) + o_stat, m_row, 0.0)
            b_u = tl.sum(b_dx * b_v.to(tl.float32), 1, keep_dims=True)
            b_alpha = tl.exp(b_logit - b_lse)
            b_ds = b_alpha * (b_u - b_delta) * scaling
            b_dq += b_ds * b_k.to(tl.float32)
            p_dvalue = _address(p_dvalues, j, VALUE_DTYPE) + o_dvalue
            p_dkey = _address(p_dkeys, j, KEY_DTYPE) + o_dkey
            tl.store(p_dvalue, (b_alpha * b_dx).to(VALUE_DTYPE), m_v)
            tl.store(p_dkey, (b_ds * b_q).to(KEY_DTYPE), m_d)
    o_dquery = i_batch * dq_b + i_head * dq_h + i_token * dq_t
    tl.store(p_dquery + o_dquery + o_d, (b_dq / R).to(p_dquery.dtype.element_ty), m_d)
