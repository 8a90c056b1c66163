"""Depth-attention value mixing at KV resolution: one program mixes BR rows (token, KV head).

Forward reads the query heads once, each layer's key and value once, and writes the mixed value;
saved are the logits and their log-sum-exp. Backward writes every gradient once, with whatever came
for it from elsewhere added before it is rounded: attention over time reads the query, the key and
the mixed value too, and later layers the keys and values. Tensors keep their strides, so the
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

HELD_HEADS = tl.constexpr(8)
"""Gradients of query heads that a program has registers for."""
SIZES = ["rows", "T", "J"]  # a size of 1 must not become a constant, nor each size a kernel


@triton.jit
def _address(p_table, j, DTYPE: tl.constexpr):
    """Address [1, 1] of tensor ``j`` of a table."""
    return pointers(p_table, j + tl.arange(0, 1), DTYPE)[:, None]


@triton.jit
def _head(r, stride, FAR: tl.constexpr):
    """Offset of a KV head's query head ``r``, which 32 bits may not say where heads are ``FAR``."""
    return tl.full([], r, tl.int64) * stride if FAR else r * stride


@triton.jit
def _mean_query(
    p_query,
    o_query,
    o_d,
    m,
    stride_h,
    R: tl.constexpr,
    FAR: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    b_q = tl.zeros([BR, BD], tl.float32)
    for r in tl.static_range(R):
        b_q += tl.load(p_query + o_query + _head(r, stride_h, FAR) + o_d, m, 0.0).to(tl.float32)
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


@triton.jit
def _carried(p, o, m):
    """What came for a gradient from elsewhere; where nothing did, its address is 0."""
    return tl.load(p + o, m & (p.to(tl.int64) != 0), 0.0).to(tl.float32)


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
    FAR: tl.constexpr,
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
    b_q = _mean_query(p_query, o_query, o_d, m_d, q_h, R, FAR, BR, BD) * scaling
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
    p_ckeys,
    p_cvalues,
    p_query,
    p_grad,
    p_logits,
    p_lse,
    p_dquery,
    p_cquery,
    p_ckey,
    p_cmixed,
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
    cks_b,
    cks_h,
    cks_t,
    cvs_b,
    cvs_h,
    cvs_t,
    cq_b,
    cq_h,
    cq_t,
    ck_b,
    ck_h,
    ck_t,
    cm_b,
    cm_h,
    cm_t,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    FAR: tl.constexpr,
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
    b_q = _mean_query(p_query, o_query, o_d, m_d, q_h, R, FAR, BR, BD)
    o_key = i_batch * k_b + i_head * k_h + i_token * k_t + o_d
    o_value = i_batch * v_b + i_head * v_h + i_token * v_t + o_v
    o_dkey = i_batch * dk_b + i_head * dk_h + i_token * dk_t + o_d
    o_dvalue = i_batch * dv_b + i_head * dv_h + i_token * dv_t + o_v
    o_ckeys = i_batch * cks_b + i_head * cks_h + i_token * cks_t + o_d
    o_cvalues = i_batch * cvs_b + i_head * cvs_h + i_token * cvs_t + o_v
    o_cquery = i_batch * cq_b + i_head * R * cq_h + i_token * cq_t + o_d
    o_ckey = i_batch * ck_b + i_head * ck_h + i_token * ck_t + o_d
    o_grad = i_batch * g_b + i_head * g_h + i_token * g_t + o_v
    b_dx = tl.load(p_grad + o_grad, m_v, 0.0).to(tl.float32)
    if p_cmixed is not None:
        o_cmixed = i_batch * cm_b + i_head * cm_h + i_token * cm_t + o_v
        b_dx += tl.load(p_cmixed + o_cmixed, m_v, 0.0).to(tl.float32)
    b_lse = tl.load(p_lse + o_stat, m_row, 0.0)
    b_delta = tl.zeros([BR, 1], tl.float32)
    b_dq = tl.zeros([BR, BD], tl.float32)
    heads = ()  # before anything is stored: no load is to wait behind a store
    if p_cquery is not None and R <= HELD_HEADS:
        for r in tl.static_range(R):
            heads = heads + (tl.load(p_cquery + o_cquery + _head(r, cq_h, FAR), m_d, 0.0),)
    if COUNT > 0:
        us, alphas = (), ()
        for j in tl.static_range(COUNT):
            b_v = tl.load(p_values[j] + o_value, m_v, 0.0).to(tl.float32)
            b_logit = tl.load(p_logits + j * rows.to(tl.int64) + o_stat, m_row, 0.0)
            b_u = tl.sum(b_dx * b_v, 1, keep_dims=True)
            b_alpha = tl.exp(b_logit - b_lse)
            b_delta += b_alpha * b_u
            us, alphas = us + (b_u,), alphas + (b_alpha,)
        dkeys, dvalues = (), ()
        for j in tl.static_range(COUNT):
            b_ds = alphas[j] * (us[j] - b_delta) * scaling
            b_dq += b_ds * tl.load(p_keys[j] + o_key, m_d, 0.0).to(tl.float32)
            b_dk, b_dv = b_ds * b_q, alphas[j] * b_dx
            if p_ckeys is not None:
                b_dk += _carried(p_ckeys[j], o_ckeys, m_d)
            if p_cvalues is not None:
                b_dv += _carried(p_cvalues[j], o_cvalues, m_v)
            if p_ckey is not None and j == COUNT - 1:
                b_dk += tl.load(p_ckey + o_ckey, m_d, 0.0).to(tl.float32)
            dkeys, dvalues = dkeys + (b_dk.to(KEY_DTYPE),), dvalues + (b_dv.to(VALUE_DTYPE),)
        for j in tl.static_range(COUNT):
            tl.store(p_dvalues[j] + o_dvalue, dvalues[j], m_v)
            tl.store(p_dkeys[j] + o_dkey, dkeys[j], m_d)
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
            b_dk, b_dv = b_ds * b_q, b_alpha * b_dx
            if p_ckeys is not None:
                b_dk += _carried(_address(p_ckeys, j, KEY_DTYPE), o_ckeys, m_d)
            if p_cvalues is not None:
                b_dv += _carried(_address(p_cvalues, j, VALUE_DTYPE), o_cvalues, m_v)
            if p_ckey is not None:
                b_dk += tl.load(p_ckey + o_ckey, m_d & (i == 0), 0.0).to(tl.float32)
            p_dvalue = _address(p_dvalues, j, VALUE_DTYPE) + o_dvalue
            p_dkey = _address(p_dkeys, j, KEY_DTYPE) + o_dkey
            tl.store(p_dvalue, b_dv.to(VALUE_DTYPE), m_v)
            tl.store(p_dkey, b_dk.to(KEY_DTYPE), m_d)
    b_dq /= R  # the same for all query heads of a KV head
    o_dquery = i_batch * dq_b + i_head * R * dq_h + i_token * dq_t + o_d
    for r in tl.static_range(R):
        b_head = b_dq
        if p_cquery is not None:
            if R <= HELD_HEADS:
                b_head += heads[r].to(tl.float32)
            else:
                p = p_cquery + o_cquery + _head(r, cq_h, FAR)
                b_head += tl.load(p, m_d, 0.0).to(tl.float32)
        p = p_dquery + o_dquery + _head(r, dq_h, FAR)
        tl.store(p, b_head.to(p_dquery.dtype.element_ty), m_d)
