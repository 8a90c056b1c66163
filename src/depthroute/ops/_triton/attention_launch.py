"""Launches of the depth-attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from depthroute.ops._record import (
    AttentionBackward,
    AttentionGradients,
    AttentionMix,
    AttentionResults,
    attention_gradients,
    rows_like,
)
from depthroute.ops._triton import layout
from depthroute.ops._triton.attention import attention_backward_kernel, attention_forward_kernel
from depthroute.ops.private.launcher import Prepared, kinds


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for tensor in tensors for s in tensor.stride()[:3])


def _readable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The list with one set of strides and aligned rows; copied only where it has to be."""
    strides = tensors[0].stride()
    element = 16 // tensors[0].element_size()
    if strides[-1] == 1 and not any(s % element for s in strides[:3]):
        for tensor in tensors:
            if tensor.data_ptr() % 16 or tensor.stride() != strides:
                break
        else:
            return tensors
    return [layout.aligned(t) for t in tensors]


MAX_ARGUMENTS = 8
"""Layers whose tensors are kernel arguments, each in its turn of an unrolled loop."""


class Plan(NamedTuple):
    rows: int
    """Of one program."""
    run: Prepared


@cache
def plan(
    forced: layout.Changes,
    is_backward: bool,
    count: int,
    heads: int,
    query_heads: int,
    key_width: int,
    value_width: int,
    query: torch.dtype,
    key: torch.dtype,
    value: torch.dtype,
    others: tuple[torch.dtype, ...],
    strides: tuple[int, ...],
) -> Plan:
    """``count`` layers as arguments, or 0 for tables; ``others`` are the dtypes of the gradient and
    of what forward kept, ``strides`` their :func:`kinds`."""
    launch = layout.changed(layout.attention_launch(key_width, value_width), forced)
    run = Prepared(
        attention_backward_kernel if is_backward else attention_forward_kernel,
        launch.warps,
        HEADS=heads,
        R=query_heads // heads,
        DK=key_width,
        DV=value_width,
        KEY_DTYPE=layout.DTYPES[key],
        VALUE_DTYPE=layout.DTYPES[value],
        COUNT=count,
        BR=launch.rows,
        BD=triton.next_power_of_2(key_width),
        BV=triton.next_power_of_2(value_width),
    )
    return Plan(launch.rows, run)


def _launch(
    lists: Sequence[Sequence[Tensor]],
    query: Tensor,
    tensors: Sequence[Tensor],
    sizes: tuple[int, int, int],
    scaling: float,
    strides: tuple[int, ...],
) -> None:
    """``lists``: keys, values and, in backward, their gradients."""
    key, value, num_layers = lists[0][0], lists[1][0], len(lists[0])
    (_, heads, _, key_width), value_width = key.shape, value.shape[-1]
    is_few = num_layers <= MAX_ARGUMENTS
    found = plan(
        layout.forced_changes("attention"),
        len(lists) > 2,
        num_layers if is_few else 0,
        heads,
        query.shape[1],
        key_width,
        value_width,
        query.dtype,
        key.dtype,
        value.dtype,
        tuple([t.dtype for t in tensors]),
        kinds(strides),
    )
    first: Any = () if is_few else layout.pack(lists, query)
    found.run(
        -(-sizes[0] // found.rows),
        lists if is_few else (),
        (*first, query, *tensors),
        (*sizes, scaling, *strides),
    )


def attention_forward(mix: AttentionMix) -> AttentionResults:
    query, keys, values, scaling = mix
    batch, heads, length, _ = keys[0].shape
    mixed = rows_like(values[-1])
    logits = query.new_empty(len(keys), batch, heads, length, dtype=torch.float32)
    lse = logits.new_empty(batch, heads, length)
    rows = batch * heads * length
    if rows == 0:
        return mixed, [logits, lse]
    (query,), keys, values = _readable([query]), _readable(keys), _readable(values)
    _launch(
        (keys, values),
        query,
        (mixed, logits, lse),
        (rows, length, len(keys)),
        scaling,
        _strides(query, keys[0], values[0], mixed),
    )
    return mixed, [logits, lse]


def attention_backward(back: AttentionBackward) -> AttentionGradients:
    grad, query, keys, values, (logits, lse), scaling = back
    dquery, dkeys, dvalues = attention_gradients(back)
    if lse.numel() == 0:
        return dquery, dkeys, dvalues
    (query,), keys, values = _readable([query]), _readable(keys), _readable(values)
    (grad,) = _readable([grad])
    _launch(
        (keys, values, dkeys, dvalues),
        query,
        (grad, logits, lse, dquery),
        (lse.numel(), keys[0].shape[2], len(keys)),
        scaling,
        _strides(query, keys[0], values[0], grad, dquery, dkeys[0], dvalues[0]),
    )
    return dquery, dkeys, dvalues
