"""Launches of the depth-attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from depthroute.ops.private.launcher import MAX_INT32, Prepared, aligned, kinds


@dataclass(frozen=True)
class AttentionLaunch:
    rows: int
    """Of one program."""
    warps: int


def attention_launch(key_width: int, value_width: int) -> AttentionLaunch:
    rows = max(1, 1024 // triton.next_power_of_2(max(key_width, value_width)))
    return AttentionLaunch(rows, 4)


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    found: list[int] = []
    for tensor in tensors:
        found += (0, 0, 0) if tensor is None else tensor.stride()[:3]
    return tuple(found)


def _readable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The list with one set of strides and aligned rows; copied only where it has to be."""
    strides = a, b, c, last = tensors[0].stride()
    vector = 16 // tensors[0].element_size()
    if last == 1 and not (a | b | c) & (vector - 1):
        for tensor in tensors:
            if tensor.data_ptr() & 15 or tensor.stride() != strides:
                break
        else:
            return tensors
    return [aligned(t) for t in tensors]


def _readable_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first, if there is any."""
    return _readable(tensors[:1])[0] if tensors else None


def _carried(
    arrived: Sequence[Sequence[Tensor]], like: Tensor
) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """The first of each, with an empty tensor, which is at address 0, where there is none; and one
    that has their strides. None if none came at all."""
    came = [grads[0] for grads in arrived if grads]
    if not came:
        return None, None
    came, nothing = _readable(came), like.new_empty(0)
    found = iter(came)
    return [next(found) if grads else nothing for grads in arrived], came[0]


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
    others: tuple[torch.dtype | None, ...],
    strides: tuple[int, ...],
    is_far: bool,
) -> Plan:
    """``count`` layers as arguments, or 0 for tables; ``others`` are the dtypes of further tensors
    and lists, as far as they are there, ``strides`` their :func:`kinds`; ``is_far`` if the query
    heads of one KV head are further apart than 32 bits say."""
    launch = layout.changed(attention_launch(key_width, value_width), forced)
    run = Prepared(
        attention_backward_kernel if is_backward else attention_forward_kernel,
        launch.warps,
        HEADS=heads,
        R=query_heads // heads,
        FAR=is_far,
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
    lists: Sequence[Sequence[Tensor] | None],
    query: Tensor,
    tensors: Sequence[Tensor | None],
    sizes: tuple[int, int, int],
    scaling: float,
    strides: tuple[int, ...],
) -> None:
    """``lists``: keys, values and, in backward, their gradients and what was carried."""
    keys, values, *further = lists
    assert keys is not None and values is not None
    key, value, num_layers = keys[0], values[0], len(keys)
    (_, heads, _, key_width), value_width = key.shape, value.shape[-1]
    is_few = num_layers <= MAX_ARGUMENTS
    others = [None if t is None else t.dtype for t in tensors]
    for listed in further:
        others.append(None if listed is None else listed[0].dtype)
    found = plan(
        layout.forced_changes("attention"),
        bool(further),
        num_layers if is_few else 0,
        heads,
        query.shape[1],
        key_width,
        value_width,
        query.dtype,
        key.dtype,
        value.dtype,
        tuple(others),
        kinds(strides),
        query.shape[1] // heads * max(strides[1::3]) > MAX_INT32,
    )
    first: Any = ()
    if not is_few:
        tables = iter(layout.pack([t for t in lists if t is not None], query))
        first = [None if t is None else next(tables) for t in lists]
    found.run(
        -(-sizes[0] // found.rows),
        lists if is_few else (),
        (*first, query, *tensors),
        (*sizes, float(scaling), *strides),
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
    query, keys, values, (logits, lse), scaling = back[3:]
    dquery, dkeys, dvalues = attention_gradients(back)
    if lse.numel() == 0:
        return dquery, dkeys, dvalues
    (query,), keys, values = _readable([query]), _readable(keys), _readable(values)
    (grad,), of_mixed = _readable(back.grads[:1]), _readable_one(back.grads[1:])
    count = len(keys)
    of_query = of_key = of_keys = of_values = keys_like = values_like = None
    if back.carried:
        arrived = back.arrived()
        # that of the own key comes from attention over time, in whatever order that writes
        of_query, of_key = _readable_one(arrived[0]), _readable_one(arrived[count])
        of_keys, keys_like = _carried([*arrived[1:count], arrived[count][1:]], keys[0])
        of_values, values_like = _carried(arrived[1 + count :], values[0])
    _launch(
        (keys, values, dkeys, dvalues, of_keys, of_values),
        query,
        (grad, logits, lse, dquery, of_query, of_key, of_mixed),
        (lse.numel(), keys[0].shape[2], count),
        scaling,
        _strides(
            *(query, keys[0], values[0], grad, dquery, dkeys[0], dvalues[0]),
            *(keys_like, values_like, of_query, of_key, of_mixed),
        ),
    )
    return dquery, dkeys, dvalues
