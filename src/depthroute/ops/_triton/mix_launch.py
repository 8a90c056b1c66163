"""Launches of the depth-mix kernels: which one, allocation and arguments, no arithmetic.

Few sources go to the kernels that hold them in registers (``resident``), many to those that stream
them (``mix``). The streaming kernels know nothing of a sublayer's push: there it is done apart.

A model calls these once a sublayer and direction, so every microsecond here is paid some hundred
times a step. What depends on types, flags and widths alone is worked out once, in a plan. A plan is
a function of its arguments and nothing else, so that its cache cannot confuse two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import _triton_mix
from depthroute.ops._triton import layout
from depthroute.ops._triton.launcher import Prepared, are_aligned, dtype_of
from depthroute.ops._triton.mix import mix_backward_kernel, mix_forward_kernel
from depthroute.ops._triton.resident import resident_backward_kernel, resident_forward_kernel
from depthroute.ops._triton.sums import sum_rows

Dtype = torch.dtype | None


class Plan(NamedTuple):
    is_resident: bool
    launch: layout.Launch
    run: Prepared


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else layout.aligned(tensor)


def _rows_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """New rows in order; empty_like is the fastest way, but would keep another order."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return torch.empty_like(tensor)
    return tensor.new_empty(tensor.shape, dtype=dtype)


FEW_ELEMENTS, WIDE = 6144, 4096
"""Where holding a token's sources beats streaming them in a plain forward: few elements in all (5
sources of width 1024), or a row so wide that it takes several tiles (5 of 7168).

Elsewhere streaming was faster by 2 to 10% forward, and by far slower backward."""


def _shape(
    width: int, heads: int, held: bool, holds_more: bool, forced: layout.Changes
) -> tuple[layout.Tiles, dict[str, Any]]:
    block = layout.tiles(width, heads)
    if held:
        block = layout.resident_tiles(width, heads, holds_more)
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
def forward_plan(
    fits: bool,
    forced: layout.Changes,
    width: int,
    heads: int,
    slice_norm: bool,
    offset: int,
    reads_last: bool,
    keeps_low: bool,
    keeps_x: bool,
    out: torch.dtype,
    sources: tuple[torch.dtype, ...],
    query: torch.dtype,
    residual: Dtype,
    prior: Dtype,
    prior_lse: Dtype,
    norm_weight: Dtype,
    output: Dtype,
    partial: Dtype,
) -> Plan:
    """All tensors by their dtypes. ``fits``: the rows of a token do one program's registers."""
    count = len(sources) + reads_last
    held = [*sources, output] if reads_last else [*sources]
    held += [dtype for dtype in (residual, prior, partial) if dtype is not None]
    is_boundary = output is not None or norm_weight is not None
    is_held = is_boundary or count * width <= FEW_ELEMENTS or width > WIDE
    is_resident = fits and is_held and {*held, out} == {out}
    block, shape = _shape(width, heads, is_resident, False, forced)
    itemsize = held[0].itemsize  # pyright: ignore[reportOptionalMemberAccess]
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_PRIOR": prior is not None,
        "HAS_NORM": norm_weight is not None,
        "OFFSET": offset,
        "SLICE_NORM": slice_norm,
    }
    if is_resident:
        loaded = len(held) + (output is not None and not reads_last)
        launch = layout.resident_forward_launch(block, loaded, itemsize)
        launch = layout.changed(launch, forced)
        run = Prepared(
            resident_forward_kernel,
            launch.warps,
            S=count,
            K=_triton_mix.stats_width(count, heads, slice_norm, norm_weight is not None),
            DTYPE=layout.DTYPES[out],
            HAS_OUTPUT=output is not None,
            HAS_PARTIAL=partial is not None,
            READS_LAST=reads_last,
            WRITES_X=keeps_x,
            STAGES=launch.stages,
            **flags,
            **shape,
        )
        return Plan(True, launch, run)
    launch = layout.changed(layout.forward_launch(block, count, itemsize), forced)
    run = Prepared(
        mix_forward_kernel,
        launch.warps,
        DTYPE=layout.DTYPES[held[0]],  # pyright: ignore[reportArgumentType]
        HAS_LOW=keeps_low,
        BS=launch.sources,
        STAGES=launch.stages,
        **flags,
        **shape,
    )
    return Plan(False, launch, run)


def mix_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    output: Tensor | None,
    partial: Tensor | None,
    reads_last: bool,
    eps: float,
    heads: int,
    slice_norm: bool,
    offset: int,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    keeps_low: bool,
    keeps_x: bool,
) -> tuple[Tensor, list[Tensor]]:
    """stats [..., K] and those there are of x, y, state, last and low bits [..., D]."""
    example = prior if prior is not None else output if output is not None else sources[0]
    shape, width, count = example.shape, query.shape[0], len(sources) + reads_last
    tokens = example.numel() // width
    tensors = query, residual, prior, prior_lse, norm_weight, output, partial
    plan = forward_plan(
        _triton_mix.fits(count, width, (sources[0] if sources else example).element_size()),
        layout.forced_changes("mix"),
        width,
        heads,
        slice_norm,
        offset,
        reads_last,
        keeps_low,
        keeps_x,
        out_dtype,
        tuple(map(dtype_of, sources)),
        *[None if t is None else t.dtype for t in tensors],
    )
    has_norm = norm_weight is not None
    if not keeps_x and not plan.is_resident:
        raise DepthrouteError("x can only be left out where its sources are held; keep it")
    rows = _rows_like(example, out_dtype)
    x = rows if keeps_x else None
    y = (torch.empty_like(rows) if keeps_x else rows) if has_norm else None
    stats_width = _triton_mix.stats_width(count, heads, slice_norm, has_norm)
    stats = query.new_empty(*shape[:-1], stats_width)
    low = rows.new_empty(shape, dtype=torch.int16) if keeps_low else None
    state = last = None
    if plan.is_resident and tokens:
        given = [*sources, *[t for t in tensors if t is not None]]
        if not are_aligned(given):
            sources = [layout.aligned(s) for s in sources]
            tensors = [_optional(t) for t in tensors]
            query, residual, prior, prior_lse, norm_weight, output, partial = tensors
        if output is not None:
            state = None if residual is None else torch.empty_like(rows)
            last = None if partial is None else torch.empty_like(rows)
        plan.run(
            layout.num_programs(plan.launch, tokens, rows.device),
            (sources,),
            (
                *(query, output, partial, residual, prior, prior_lse, norm_weight),
                *(x, y, state, last, stats),
            ),
            (tokens, eps, scale, norm_eps),
        )
    else:
        if output is not None:
            if partial is not None:
                last = (partial + output).contiguous()
            if residual is not None:
                state = residual = (residual + output).contiguous()
            if reads_last:
                sources = [*sources, output if last is None else last]
        if tokens:
            sources = [layout.aligned(s) for s in sources]
            (packed,) = layout.pack([sources], rows)
            optional = [_optional(t) for t in (residual, prior, prior_lse, norm_weight)]
            plan.run(
                layout.num_programs(plan.launch, tokens, rows.device),
                (),
                (packed, layout.aligned(query), *optional, x, low, y, stats),
                (tokens, count, stats_width, eps, scale, norm_eps),
            )
    return stats, [t for t in (x, y, state, last, low) if t is not None]


@cache
def backward_plan(
    fits: bool,
    forced: layout.Changes,
    width: int,
    heads: int,
    slice_norm: bool,
    offset: int,
    reads_last: bool,
    writes_output: bool,
    mixes_again: bool,
    stats_width: int,
    state: Dtype,
    sources: tuple[torch.dtype, ...],
    carried: tuple[torch.dtype, ...],
    grads_y: tuple[torch.dtype, ...],
    grad: Dtype,
    grad_state: Dtype,
    grad_last: Dtype,
    query: torch.dtype,
    x: Dtype,
    prior: Dtype,
    prior_lse: Dtype,
    norm_weight: Dtype,
    low: Dtype,
    stats: torch.dtype,
) -> Plan:
    count = len(sources)
    rows = [*sources, *carried, *grads_y, prior, grad, grad_state, grad_last]
    rows = [dtype for dtype in rows if dtype is not None]
    is_resident = fits and {*rows, rows[0] if state is None else state} == {rows[0]}
    holds_more = norm_weight is not None or len(carried) > 0
    block, shape = _shape(width, heads, is_resident, holds_more, forced)
    itemsize = rows[0].itemsize
    flags = {
        "HAS_GRAD": grad is not None,
        "HAS_GRAD_STATE": grad_state is not None,
        "HAS_PRIOR": prior is not None,
        "HAS_NORM": norm_weight is not None,
        "HAS_CARRIED": len(carried) > 0,
        "WRITES_STATE": state is not None,
        "OFFSET": offset,
        "SLICE_NORM": slice_norm,
    }
    if is_resident:
        num_rows = len(rows) + (norm_weight is not None and x is not None)
        launch = layout.resident_backward_launch(block, count, num_rows, itemsize, len(carried) > 0)
        launch = layout.changed(launch, forced)
        run = Prepared(
            resident_backward_kernel,
            launch.warps,
            S=count,
            K=stats_width,
            DTYPE=layout.DTYPES[rows[0]],
            GRADS_Y=len(grads_y),
            WRITES_OUTPUT=writes_output,
            HAS_X=x is not None,
            MIXES_AGAIN=mixes_again,
            READS_LAST=reads_last,
            STAGES=launch.stages,
            **flags,
            **shape,
        )
        return Plan(True, launch, run)
    from_mix = low is not None
    launch = layout.backward_launch(block, count, itemsize, from_mix, len(carried) > 0)
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
    return Plan(False, launch, run)


def mix_backward(
    grad: Tensor | None,
    grads_y: Sequence[Tensor],
    grad_state: Tensor | None,
    grad_last: Tensor | None,
    carried: Sequence[Tensor],
    sources: Sequence[Tensor],
    query: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    x: Tensor | None,
    low: Tensor | None,
    stats: Tensor,
    heads: int,
    slice_norm: bool,
    offset: int,
    scale: float,
    reads_last: bool,
    writes_output: bool,
    mixes_again: bool,
    state_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Gradients of the sources; of query and norm weight [1|2, D]; and of prior, prior_lse,
    residual and output, as far as there are any.

    ``carried`` are gradients of the sources from elsewhere, to be added; the gradient of y is the
    sum of ``grads_y``. Where there is one ``x`` is needed, and its ``low`` bits where delta is
    taken from it. Where it ``mixes_again``, ``x`` is the state that the mix is added to, if there
    is one.
    """
    (*leading, stats_width), width, count = stats.shape, query.shape[0], len(sources)
    tokens = stats.numel() // stats_width
    tensors = grad, grad_state, grad_last, query, x, prior, prior_lse, norm_weight, low
    plan = backward_plan(
        count > 0 and _triton_mix.fits(count, width, sources[0].element_size()),
        layout.forced_changes("mix"),
        width,
        heads,
        slice_norm,
        offset,
        reads_last,
        writes_output,
        mixes_again,
        stats_width,
        state_dtype,
        tuple(map(dtype_of, sources)),
        tuple(map(dtype_of, carried)),
        tuple(map(dtype_of, grads_y)),
        *[None if t is None else t.dtype for t in tensors],
        stats.dtype,
    )
    if mixes_again and not plan.is_resident:
        raise DepthrouteError("x can only be mixed again where its sources are held; keep it")
    given = [*sources, *carried, *grads_y, *[t for t in tensors if t is not None], stats]
    if not are_aligned(given):
        sources = [layout.aligned(s) for s in sources]
        carried = [layout.aligned(c) for c in carried]
        grads_y = [layout.aligned(g) for g in grads_y]
        tensors = [_optional(t) for t in tensors]
        stats = layout.aligned(stats)
    grad, grad_state, grad_last, query, x, prior, prior_lse, norm_weight, low = tensors
    dsources = list(map(torch.empty_like, sources))
    dprior = dprior_lse = dstate = doutput = None
    if prior is not None:
        dprior, dprior_lse = torch.empty_like(prior), torch.empty_like(prior_lse)
    if state_dtype is not None:
        like = sources[0] if sources else query.expand(*leading, width)
        dstate = _rows_like(like, state_dtype)
        doutput = torch.empty_like(dstate) if writes_output else None
    others = [t for t in (dprior, dprior_lse, dstate, doutput) if t is not None]
    num_weights = 1 if norm_weight is None else 2
    if tokens == 0:
        return dsources, query.new_zeros(num_weights, width), others
    programs = layout.num_programs(plan.launch, tokens, stats.device)
    partial = query.new_empty(programs, num_weights, width)
    if plan.is_resident:
        plan.run(
            programs,
            (sources, dsources, carried or None, grads_y or None),
            (
                *(grad, grad_state, grad_last, query, x, prior, prior_lse, norm_weight),
                *(stats, dstate, doutput, dprior, dprior_lse, partial),
            ),
            (tokens, scale),
        )
    else:
        grad_y = sum(grads_y[1:], start=grads_y[0]) if grads_y else None
        lists = [sources, dsources, carried] if carried else [sources, dsources]
        tables = layout.pack(lists, stats)
        plan.run(
            programs,
            (),
            (
                *(*tables, None)[:3],
                *(grad, grad_y, grad_state, query, x, low, prior, prior_lse, norm_weight),
                *(stats, dstate, dprior, dprior_lse, partial),
            ),
            (tokens, count, stats_width, scale),
        )
        if doutput is not None:
            added = dsources[-1] if reads_last else grad_last
            torch.add(dstate, added, out=doutput)
    return dsources, sum_rows(partial), others


__all__ = ["mix_backward", "mix_forward"]
