"""Launches of the depth-attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from depthroute.ops._triton import layout
from depthroute.ops._triton.attention import attention_backward_kernel, attention_forward_kernel


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    b, h, t, _ = tensor.stride()
    return b, h, t


def _readable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The list with one set of strides and aligned rows; copied only where it has to be."""
    first = tensors[0]
    element = 16 // first.element_size()
    in_place = first.stride(-1) == 1 and all(
        t.stride() == first.stride() and t.data_ptr() % 16 == 0 for t in tensors
    )
    if in_place and all(s % element == 0 for s in first.stride()[:3]):
        return list(tensors)
    return [layout.aligned(t) for t in tensors]


MAX_ARGUMENTS = 8
"""Layers whose tensors are kernel arguments, each in its turn of an unrolled loop."""


def _pack(lists: Sequence[Sequence[Tensor]], like: Tensor) -> tuple[list[Any], int]:
    """What the kernels take as each list of tensors, and the number of arguments (0: a table)."""
    length = len(lists[0])
    if length > MAX_ARGUMENTS:
        return list(layout.pack(lists, like)), 0
    return [tuple(tensors) for tensors in lists], length


def _shared(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], count: int
) -> dict[str, Any]:
    heads, width = keys[0].shape[1], max(keys[0].shape[-1], values[0].shape[-1])
    block = triton.next_power_of_2(width)
    return {
        "HEADS": heads,
        "R": query.shape[1] // heads,
        "DK": keys[0].shape[-1],
        "DV": values[0].shape[-1],
        "KEY_DTYPE": layout.DTYPES[keys[0].dtype],
        "VALUE_DTYPE": layout.DTYPES[values[0].dtype],
        "COUNT": count,
        "BR": max(1, 2048 // block),
        "BD": triton.next_power_of_2(keys[0].shape[-1]),
        "BV": triton.next_power_of_2(values[0].shape[-1]),
        "num_warps": 4,
    }


def attention_forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed values [B, Hkv, T, dv], logits [J, B, Hkv, T], lse [B, Hkv, T]."""
    batch, heads, length, _ = keys[0].shape
    mixed = torch.empty_like(values[-1])
    logits = query.new_empty(len(keys), batch, heads, length, dtype=torch.float32)
    lse = logits.new_empty(batch, heads, length)
    rows = batch * heads * length
    if rows == 0:
        return mixed, logits, lse
    (query,), keys, values = _readable([query]), _readable(keys), _readable(values)
    with layout.on_device(query):
        (p_keys, p_values), count = _pack([keys, values], query)
        options = _shared(query, keys, values, count)
        attention_forward_kernel[(triton.cdiv(rows, options["BR"]),)](
            query,
            p_keys,
            p_values,
            mixed,
            logits,
            lse,
            rows,
            length,
            len(keys),
            scaling,
            *_strides(query),
            *_strides(keys[0]),
            *_strides(values[0]),
            *_strides(mixed),
            **options,
        )
    return mixed, logits, lse


def attention_backward(
    grad: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    logits: Tensor,
    lse: Tensor,
    scaling: float,
    keep_strides: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """``keep_strides``: gradients of keys and values laid out like them, if those are all alike."""
    made = torch.empty_like if keep_strides else lambda t: t.new_empty(t.shape)
    dquery = torch.empty_like(query)
    dkeys, dvalues = [made(k) for k in keys], [made(v) for v in values]
    if lse.numel() == 0:
        return dquery, dkeys, dvalues
    (query,), keys, values = _readable([query]), _readable(keys), _readable(values)
    (grad,) = _readable([grad])
    with layout.on_device(query):
        lists = [keys, values, dkeys, dvalues]
        (p_keys, p_values, p_dkeys, p_dvalues), count = _pack(lists, query)
        options = _shared(query, keys, values, count)
        attention_backward_kernel[(triton.cdiv(lse.numel(), options["BR"]),)](
            query,
            p_keys,
            p_values,
            grad,
            logits,
            lse,
            dquery,
            p_dkeys,
            p_dvalues,
            lse.numel(),
            keys[0].shape[2],
            len(keys),
            scaling,
            *_strides(query),
            *_strides(keys[0]),
            *_strides(values[0]),
            *_strides(grad),
            *_strides(dquery),
            *_strides(dkeys[0]),
            *_strides(dvalues[0]),
            **options,
        )
    return dquery, dkeys, dvalues
