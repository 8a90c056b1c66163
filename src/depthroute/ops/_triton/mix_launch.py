"""Launches of the depth-mix kernels: which one, allocation and arguments, no arithmetic.

Few sources go to the kernels that hold them in registers (``resident``), many to those that stream
them (``mix``). The streaming kernels know nothing of a sublayer's push: there it is done apart.

A model calls these once a sublayer and direction, so every microsecond here is paid some hundred
times a step. What depends on types, flags and widths alone is worked out once, in a plan. A plan is
a function of its arguments and nothing else, so that its cache cannot confuse two kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import _record
from depthroute.ops._record import Mix, MixBackward, MixGradients, MixResults
from depthroute.ops._triton import layout
from depthroute.ops._triton.mix import mix_backward_kernel, mix_forward_kernel
from depthroute.ops._triton.resident import resident_backward_kernel, resident_forward_kernel
from depthroute.ops._triton.sums import sum_rows
from depthroute.ops.private.launcher import Prepared, are_aligned


class Plan(NamedTuple):
    is_resident: bool
    launch: layout.Launch
    run: Prepared
    stats_width: int


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else layout.aligned(tensor)


def _rows_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """New rows in order; empty_like is the fastest way, but would keep another order."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return torch.empty_like(tensor)
    return tensor.new_empty(tensor.shape, dtype=dtype)


VERY_FEW, FEW, FEW_ELEMENTS, WIDE = 3, 6, 6144, 4096
"""Where holding a token's sources beats streaming them in a plain forward: three or less, a few
with few elements in all (5 of width 1024), or rows so wide that each takes several tiles.

Elsewhere streaming was faster by 2 to 10% forward, and by far slower backward."""


def _shape(
    width: int, heads: int, block: layout.Tiles, forced: layout.Changes
) -> tuple[layout.Tiles, dict[str, Any]]:
    block = layout.retiled(block, width // heads, forced)
    return block, {
        "H": heads,
        "DH": width // heads,
        "HB": block.heads,
        "BC": block.columns,
        "NT": block.count,
        "GPU": not layout.INTERPRETED,
    }


@cache
def forward_plan(fits: bool, forced: layout.Changes, width: int, mix: Mix) -> Plan:
    """``mix`` by its dtypes. ``fits``: the rows of a token do one program's registers."""
    sources: Any = mix.sources
    held = [*sources, mix.output] if mix.reads_last else [*sources]
    held += [dtype for dtype in (mix.residual, mix.prior, mix.partial) if dtype is not None]
    is_boundary = mix.output is not None or mix.norm_weight is not None
    count = mix.num_read
    is_few = count <= VERY_FEW or (count <= FEW and count * width <= FEW_ELEMENTS)
    is_held = is_boundary or is_few or width > WIDE
    is_resident = fits and is_held and {*held, mix.dtype} == {mix.dtype}
    block = layout.tiles(width, mix.heads)
    if is_resident:
        block = layout.resident_tiles(width, mix.heads, False)
    block, shape = _shape(width, mix.heads, block, forced)
    flags = {
        "HAS_RESIDUAL": mix.residual is not None,
        "HAS_PRIOR": mix.prior is not None,
        "HAS_NORM": mix.norm_weight is not None,
        "OFFSET": mix.offset,
        "SLICE_NORM": mix.slice_norm,
    }
    if is_resident:
        loaded = len(held) + (mix.output is not None and not mix.reads_last)
        launch = layout.resident_forward_launch(block, width, loaded, held[0].itemsize)
        launch = layout.changed(launch, forced)
        run = Prepared(
            resident_forward_kernel,
            launch.warps,
            S=mix.num_read,
            K=mix.stats_width,
            DTYPE=layout.DTYPES[mix.dtype],
            HAS_OUTPUT=mix.output is not None,
            HAS_PARTIAL=mix.partial is not None,
            READS_LAST=mix.reads_last,
            WRITES_X=mix.keeps_x,
            STAGES=launch.stages,
            **flags,
            **shape,
        )
        return Plan(True, launch, run, mix.stats_width)
    launch = layout.forward_launch(block, mix.num_read, held[0].itemsize)
    launch = layout.changed(launch, forced)
    run = Prepared(
        mix_forward_kernel,
        launch.warps,
        DTYPE=layout.DTYPES[held[0]],
        HAS_LOW=mix.keeps_low,
        BS=launch.sources,
        STAGES=launch.stages,
        **flags,
        **shape,
    )
    return Plan(False, launch, run, mix.stats_width)


def mix_forward(mix: Mix) -> MixResults:
    sources, query, norm_weight, keeps_x = mix.sources, mix.query, mix.norm_weight, mix.keeps_x
    example, width, count = mix.example, query.shape[0], len(sources) + mix.reads_last
    fits = _record.fits(count, width, (sources[0] if sources else example).element_size())
    plan = forward_plan(fits, layout.forced_changes("mix"), width, mix.dtypes())
    if (mix.keeps_y or not keeps_x) and not plan.is_resident:
        raise DepthrouteError("x can only be left out where its sources are held; keep it")
    rows = _rows_like(example, mix.dtype)
    x, y = rows if keeps_x else None, None
    if norm_weight is not None:
        y = torch.empty_like(rows) if keeps_x else rows
    stats = query.new_empty(*example.shape[:-1], plan.stats_width)
    tokens = rows.numel() // width
    run = _held_forward if plan.is_resident and tokens else _streamed_forward
    return stats, run(plan, mix, tokens, x, y, stats)


def _held_forward(
    plan: Plan, mix: Mix, tokens: int, x: Tensor | None, y: Tensor | None, stats: Tensor
) -> list[Tensor]:
    """Writes x, y and stats, and returns what there is of x, y, state and last."""
    sources, tensors = mix.sources, mix.tensors
    if not are_aligned([*sources, *[t for t in tensors if t is not None]]):
        sources, tensors = [layout.aligned(s) for s in sources], [_optional(t) for t in tensors]
    query, residual, prior, prior_lse, norm_weight, output, partial = tensors
    state = last = None
    if output is not None:
        rows: Any = y if x is None else x
        state = None if residual is None else torch.empty_like(rows)
        last = None if partial is None else torch.empty_like(rows)
    given = query, output, partial, residual, prior, prior_lse, norm_weight
    plan.run(
        layout.num_programs(plan.launch, tokens, stats.device),
        (sources,),
        (*given, x, y, state, last, stats),
        (tokens, mix.eps, mix.scale, mix.norm_eps, _record.LEAST_GAIN if mix.keeps_y else 0.0),
    )
    return [t for t in (x, y, state, last) if t is not None]


def _streamed_forward(
    plan: Plan, mix: Mix, tokens: int, x: Tensor | None, y: Tensor | None, stats: Tensor
) -> list[Tensor]:
    """The same, and the low bits; the push is done apart."""
    sources, residual, output = mix.sources, mix.residual, mix.output
    state = last = low = None
    rows = y if x is None else x
    assert rows is not None
    if output is not None:
        if mix.partial is not None:
            last = (mix.partial + output).contiguous()
        if residual is not None:
            state = residual = (residual + output).contiguous()
        if mix.reads_last:
            sources = [*sources, output if last is None else last]
    if mix.keeps_low:
        low = torch.empty_like(rows, dtype=torch.int16)
    if tokens:
        sources = [layout.aligned(s) for s in sources]  # held until the launch: a table does not
        (packed,) = layout.pack([sources], rows)
        optional = [_optional(t) for t in (residual, mix.prior, mix.prior_lse, mix.norm_weight)]
        plan.run(
            layout.num_programs(plan.launch, tokens, rows.device),
            (),
            (packed, layout.aligned(mix.query), *optional, x, low, y, stats),
            (tokens, mix.num_read, stats.shape[-1], mix.eps, mix.scale, mix.norm_eps),
        )
    return [t for t in (x, y, state, last, low) if t is not None]


@cache
def backward_plan(
    fits: bool, forced: layout.Changes, width: int, stats_width: int, back: MixBackward
) -> Plan:
    """``back`` by its dtypes."""
    sources: Any = back.sources
    count, state, has_carried = len(sources), back.state_dtype, len(back.carried) > 0
    rows: list[Any] = [*sources, *back.carried, *back.grads_y]
    rows += [back.prior, back.grad, back.grad_state, back.grad_last]
    rows = [dtype for dtype in rows if dtype is not None]
    is_resident = fits and {*rows, rows[0] if state is None else state} == {rows[0]}
    has_norm = back.norm_weight is not None
    block, itemsize = layout.tiles(width, back.heads), rows[0].itemsize
    if is_resident:
        block = layout.backward_tiles(width, back.heads, count, has_norm or has_carried)
    block, shape = _shape(width, back.heads, block, forced)
    flags = {
        "HAS_GRAD": back.grad is not None,
        "HAS_GRAD_STATE": back.grad_state is not None,
        "HAS_PRIOR": back.prior is not None,
        "HAS_NORM": has_norm,
        "HAS_CARRIED": has_carried,
        "WRITES_STATE": state is not None,
        "OFFSET": back.offset,
        "SLICE_NORM": back.slice_norm,
    }
    if is_resident:
        num_rows = len(rows) + (has_norm and back.x is not None)
        launch = layout.resident_backward_launch(
            block, width, count, num_rows, itemsize, has_carried
        )
        launch = layout.changed(launch, forced)
        run = Prepared(
            resident_backward_kernel,
            launch.warps,
            S=count,
            K=stats_width,
            DTYPE=layout.DTYPES[rows[0]],
            GRADS_Y=len(back.grads_y),
            WRITES_OUTPUT=back.writes_output,
            HAS_X=back.x is not None,
            MIXES_AGAIN=back.mixes_again,
            FROM_Y=back.from_y,
            READS_LAST=back.reads_last,
            STAGES=launch.stages,
            **flags,
            **shape,
        )
        return Plan(True, launch, run, stats_width)
    from_mix, query = back.low is not None, back.query
    launch = layout.backward_launch(block, count, itemsize, from_mix, has_carried)
    launch = layout.changed(launch, forced)
    run = Prepared(
        mix_backward_kernel,
        launch.warps,
        DTYPE=layout.DTYPES[sources[0] if sources else query],
        FROM_MIX=from_mix,
        BS=launch.sources,
        STAGES=launch.stages,
        **flags,
        **shape,
    )
    return Plan(False, launch, run, stats_width)


class Written(NamedTuple):
    """What a backward kernel writes, where it is wanted."""

    dsources: list[Tensor]
    dprior: Tensor | None
    dprior_lse: Tensor | None
    dstate: Tensor | None
    doutput: Tensor | None


def _written(back: MixBackward) -> Written:
    sources, prior, prior_lse, dtype = back.sources, back.prior, back.prior_lse, back.state_dtype
    dprior = dprior_lse = dstate = doutput = None
    if prior is not None and prior_lse is not None:
        dprior, dprior_lse = torch.empty_like(prior), torch.empty_like(prior_lse)
    if dtype is not None:
        leading, width = back.stats.shape[:-1], back.query.shape[0]
        like = sources[0] if sources else back.query.expand(*leading, width)
        dstate = _rows_like(like, dtype)
        doutput = torch.empty_like(dstate) if back.writes_output else None
    return Written(list(map(torch.empty_like, sources)), dprior, dprior_lse, dstate, doutput)


def mix_backward(back: MixBackward) -> MixGradients:
    sources, query, stats = back.sources, back.query, back.stats
    stats_width, width, count = stats.shape[-1], query.shape[0], len(sources)
    tokens = stats.numel() // stats_width
    fits = count > 0 and _record.fits(count, width, sources[0].element_size())
    changes = layout.forced_changes("mix")
    plan = backward_plan(fits, changes, width, stats_width, back.dtypes())
    if (back.mixes_again or back.from_y) and not plan.is_resident:
        raise DepthrouteError("backward can only do without x where its sources are held; keep it")
    given = [t for t in back.tensors if t is not None]
    if not are_aligned([*sources, *back.carried, *back.grads_y, *given]):
        grads_y, carried, sources = (
            list(map(layout.aligned, t)) for t in (back.grads_y, back.carried, sources)
        )
        back = back.with_tensors(grads_y, carried, sources, [_optional(t) for t in back.tensors])
    written = _written(back)
    others = [t for t in written[1:] if t is not None]
    num_weights = 1 if back.norm_weight is None else 2
    if tokens == 0:
        return written.dsources, query.new_zeros(num_weights, width), others
    programs = layout.num_programs(plan.launch, tokens, stats.device)
    partial = query.new_empty(programs, num_weights, width)
    run = _held_backward if plan.is_resident else _streamed_backward
    run(plan, programs, tokens, back, written, partial)
    return written.dsources, sum_rows(partial), others


def _held_backward(
    plan: Plan, programs: int, tokens: int, back: MixBackward, written: Written, partial: Tensor
) -> None:
    grad, grad_state, grad_last, query, prior, prior_lse, norm_weight, x, _, stats = back.tensors
    dsources, dprior, dprior_lse, dstate, doutput = written
    plan.run(
        programs,
        (back.sources, dsources, back.carried or None, back.grads_y or None),
        (
            *(grad, grad_state, grad_last, query, x, prior, prior_lse, norm_weight, stats),
            *(dstate, doutput, dprior, dprior_lse, partial),
        ),
        (tokens, back.scale, _record.LEAST_GAIN),
    )


def _streamed_backward(
    plan: Plan, programs: int, tokens: int, back: MixBackward, written: Written, partial: Tensor
) -> None:
    grad, grad_state, grad_last, query, prior, prior_lse, norm_weight, x, low, stats = back.tensors
    dsources, dprior, dprior_lse, dstate, doutput = written
    terms = back.grads_y
    grad_y = sum(terms[1:], start=terms[0]) if terms else None
    lists = [back.sources, dsources, back.carried] if back.carried else [back.sources, dsources]
    tables = layout.pack(lists, back.stats)
    plan.run(
        programs,
        (),
        (
            *(*tables, None)[:3],
            *(grad, grad_y, grad_state, query, x, low, prior, prior_lse, norm_weight, stats),
            *(dstate, dprior, dprior_lse, partial),
        ),
        (tokens, len(back.sources), plan.stats_width, back.scale),
    )
    if doutput is not None:
        added = dsources[-1] if back.reads_last else grad_last
        assert dstate is not None and added is not None
        torch.add(dstate, added, out=doutput)
