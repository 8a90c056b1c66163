"""Launches of the depth-mix kernels: which one, allocation and arguments, no arithmetic.

Few sources go to the kernels that hold them in registers (``resident``), many to those that stream
them (``mix``). The streaming kernels know nothing of a sublayer's push: there it is done apart.

Every microsecond here is paid some hundred times a step. What depends on types, flags and widths
alone is worked out once, in a plan: a function of its arguments and nothing else, so that its cache
cannot confuse two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import _record
from depthroute.ops._record import Mix, MixBackward, MixGradients, MixResults
from depthroute.ops._triton import layout
from depthroute.ops._triton.layout import sum_rows
from depthroute.ops._triton.mix import mix_backward_kernel, mix_forward_kernel
from depthroute.ops._triton.resident import resident_backward_kernel, resident_forward_kernel
from depthroute.ops.private.launcher import Prepared, aligned


class Plan(NamedTuple):
    is_resident: bool
    launch: layout.Launch
    run: Prepared
    stats_width: int


def _plan(
    kernel: Any,
    record: Mix | MixBackward,
    width: int,
    stats_width: int,
    block: layout.Tiles,
    launch: layout.Launch,
    constants: dict[str, Any],
) -> Plan:
    """``constants``: those that not all kernels have."""
    is_resident = kernel in (resident_forward_kernel, resident_backward_kernel)
    constants |= {"K": stats_width} if is_resident else {"BS": launch.sources}
    constants |= {"H": record.heads, "NORMS": _record.num_norms(record), "OFFSET": record.offset}
    constants |= {"D": width, "HB": block.heads, "BC": block.columns, "NT": block.count}
    run = Prepared(kernel, launch.warps, True, STAGES=launch.stages, **constants)
    return Plan(is_resident, launch, run, stats_width)


def _row_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """New rows in order; empty_like is the fastest way, but would keep another order."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return torch.empty_like(tensor)
    return tensor.new_empty(tensor.shape, dtype=dtype)


def _rows_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    if all(map(Tensor.is_contiguous, tensors)):
        return list(map(torch.empty_like, tensors))
    return [t.new_empty(t.shape) for t in tensors]


VERY_FEW, FEW, FEW_ELEMENTS, WIDE = 3, 6, 6144, 4096
"""Where holding a token's sources beats streaming them in a plain forward: three or less, a few
with few elements in all (5 of width 1024), or rows so wide that each takes several tiles.
Elsewhere streaming was faster by 2 to 10% forward, and by far slower backward."""


@cache
def forward_plan(forced: layout.Changes, width: int, dtypes: tuple) -> Plan:
    mix = Mix._make(dtypes)
    sources: Any = mix.sources
    rows = [*sources, mix.output] if mix.reads_last else [*sources]
    rows += [dtype for dtype in (mix.residual, mix.prior, mix.partial) if dtype is not None]
    count, heads, pushes, first = mix.num_read, mix.heads, mix.output is not None, rows[0]
    is_few = count <= VERY_FEW or (count <= FEW and count * width <= FEW_ELEMENTS)
    is_held = pushes or mix.norm_weight is not None or is_few or width > WIDE
    is_held = is_held and {*rows, mix.dtype} == {mix.dtype}
    constants: dict[str, Any] = {"DTYPE": layout.DTYPES[first]}
    if is_held and _record.fits(count, width, first.itemsize):
        kernel, num_loaded = resident_forward_kernel, len(rows) + (pushes and not mix.reads_last)
        block = layout.retiled(layout.resident_tiles(width, heads, False), width, heads, forced)
        holds_more = pushes or mix.norm_weight is not None
        launch = layout.resident_forward_launch(
            block, width, num_loaded, first.itemsize, holds_more
        )
        constants |= {"READS_LAST": mix.reads_last}
    else:
        kernel = mix_forward_kernel
        block = layout.retiled(layout.forward_tiles(width, heads), width, heads, forced)
        launch = layout.forward_launch(block, count, first.itemsize)
    launch = layout.changed(launch, forced)
    return _plan(kernel, mix, width, mix.stats_width, block, launch, constants)


def mix_forward(mix: Mix) -> MixResults:
    sources, query, residual, prior, prior_lse, norm_weight, output, partial = mix[:8]
    width, example, keeps_x = query.shape[0], mix.example, mix.keeps_x
    plan = forward_plan(layout.forced_changes("mix"), width, mix.dtypes())
    if (mix.keeps_y or not keeps_x) and not plan.is_resident:
        raise DepthrouteError("x can only be left out where its sources are held; keep it")
    rows = _row_like(example, mix.dtype)
    x = rows if keeps_x else None
    y = None if norm_weight is None else torch.empty_like(rows) if keeps_x else rows
    low = torch.empty_like(rows, dtype=torch.int16) if mix.keeps_low else None
    state = last = None
    if output is not None and plan.is_resident:
        state = None if residual is None else torch.empty_like(rows)
        last = None if partial is None else torch.empty_like(rows)
    elif output is not None:
        mix, last = mix.pushed()
        sources, residual = mix.sources, mix.residual
        state, last = (None if t is None else t.contiguous() for t in (residual, last))
    stats = query.new_empty(*example.shape[:-1], plan.stats_width)
    results = stats, [t for t in (x, y, state, last, low) if t is not None]
    if not (tokens := rows.numel() // width):
        return results
    programs = layout.num_programs(plan.launch, tokens, rows.device)
    read = residual, prior, prior_lse, norm_weight
    fractions = float(mix.eps), float(mix.scale), float(mix.norm_eps)
    if plan.is_resident:
        tensors = query, output, partial, *read, x, y, state, last, stats
        least_gain = _record.LEAST_GAIN if mix.keeps_y else 0.0
        plan.run(programs, (sources,), tensors, (tokens, *fractions, least_gain))
    else:
        sources = list(map(aligned, sources))  # a table does not keep what it points to
        tensors = *layout.pack([sources], query), query, *read, x, low, y, stats
        plan.run(programs, (), tensors, (tokens, len(sources), plan.stats_width, *fractions))
    return results


@cache
def backward_plan(forced: layout.Changes, width: int, stats_width: int, dtypes: tuple) -> Plan:
    back = MixBackward._make(dtypes)
    sources: Any = back.sources
    rows: list[Any] = [*sources, *back.carried, *back.grads_y]
    rows += [back.prior, back.grad, back.grad_state, back.grad_last]
    rows = [dtype for dtype in rows if dtype is not None]
    count, heads, first, state = len(sources), back.heads, rows[0], back.state_dtype
    has_carried, has_norm = len(back.carried) > 0, back.norm_weight is not None
    is_alike = {*rows, first if state is None else state} == {first}
    constants: dict[str, Any] = {"DTYPE": layout.DTYPES[sources[0] if sources else back.query]}
    if is_alike and _record.fits(count, width, first.itemsize):
        kernel, num_rows = resident_backward_kernel, len(rows) + (has_norm and back.x is not None)
        block = layout.resident_tiles(width, heads, has_norm or has_carried, count)
        block = layout.retiled(block, width, heads, forced)
        launch = layout.resident_backward_launch(
            block, width, count, num_rows, first.itemsize, has_carried
        )
        constants |= {"READS_LAST": back.reads_last}
        constants |= {"MIXES_AGAIN": back.mixes_again, "FROM_Y": back.from_y}
    else:
        kernel = mix_backward_kernel
        block = layout.retiled(layout.tiles(width, heads), width, heads, forced)
        once = back.sweeps_once
        launch = layout.backward_launch(block, count, first.itemsize, once, has_carried)
        constants |= {"ONCE": once}
    launch = layout.changed(launch, forced)
    return _plan(kernel, back, width, stats_width, block, launch, constants)


def mix_backward(back: MixBackward) -> MixGradients:
    grad, grads_y, grad_state, grad_last, carried, sources, query, *rest = back
    prior, prior_lse, norm_weight, x, low, stats, *_ = rest
    stats_width, width, count = stats.shape[-1], query.shape[0], len(sources)
    plan = backward_plan(layout.forced_changes("mix"), width, stats_width, back.dtypes())
    if (back.mixes_again or back.from_y) and not plan.is_resident:
        raise DepthrouteError("backward can only do without x where its sources are held; keep it")
    dsources, others = _rows_like(sources), []
    dpriors, dstate, doutput = (None, None), None, None
    if prior is not None:
        dpriors = _rows_like((prior, prior_lse))
        others += dpriors
    if back.state_dtype is not None:
        like = sources[0] if sources else query.expand(*stats.shape[:-1], width)
        dstate = _row_like(like, back.state_dtype)
        others.append(dstate)
    if back.writes_output:
        doutput = torch.empty_like(dstate)
        others.append(doutput)
    tokens, num_weights = stats.numel() // stats_width, 1 if norm_weight is None else 2
    if tokens == 0:
        return dsources, query.new_zeros(num_weights, width), others
    programs = layout.num_programs(plan.launch, tokens, stats.device)
    partial = query.new_empty(programs, num_weights, width)
    kept = prior, prior_lse, norm_weight, stats
    if plan.is_resident:
        lists = sources, dsources, carried or None, grads_y or None
        tensors = grad, grad_state, grad_last, query, x, *kept, dstate, doutput, *dpriors, partial
        plan.run(programs, lists, tensors, (tokens, float(back.scale), _record.LEAST_GAIN))
        return dsources, sum_rows(partial), others
    grad_y = sum(grads_y[1:], start=grads_y[0]) if grads_y else None
    lists = [list(map(aligned, sources)), dsources, list(map(aligned, carried))]
    tables = layout.pack(lists[: 2 + bool(carried)], stats)  # which do not keep them
    tensors = grad, grad_y, grad_state, query, x, low, *kept, dstate, *dpriors, partial
    tensors = *(*tables, None)[:3], *tensors
    plan.run(programs, (), tensors, (tokens, count, stats_width, float(back.scale)))
    if doutput is not None:  # the push is done apart
        torch.add(dstate, dsources[-1] if back.reads_last else grad_last, out=doutput)
    return dsources, sum_rows(partial), others
