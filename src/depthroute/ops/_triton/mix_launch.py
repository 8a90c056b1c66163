"""Launches of the depth-mix kernels: which one, allocation and arguments, no arithmetic.

Few sources go to the kernels that hold them in registers (``resident``), many to those that stream
them (``mix``). The streaming kernels know nothing of a sublayer's push: there it is done apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops import _triton_mix
from depthroute.ops._triton import layout
from depthroute.ops._triton.mix import mix_backward_kernel, mix_forward_kernel
from depthroute.ops._triton.resident import resident_backward_kernel, resident_forward_kernel


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else layout.aligned(tensor)


FEW_ELEMENTS = 6144
"""Of a token's sources up to which holding them beats streaming in a plain forward (5 of 1024).

Elsewhere streaming was faster by 2 to 7% forward, and by far slower backward."""


def _is_one_dtype(tensors: Sequence[Tensor], other: torch.dtype | None) -> bool:
    """Rows held together have one dtype."""
    return len({t.dtype for t in tensors} | ({other} - {None})) == 1


def _shape(width: int, heads: int, held: bool) -> tuple[layout.Tiles, dict[str, Any]]:
    block = (layout.resident_tiles if held else layout.tiles)(width, heads)
    return block, {
        "H": heads,
        "DH": width // heads,
        "HB": block.heads,
        "BC": block.columns,
        "NT": block.count,
        "GPU": not layout.INTERPRETED,
    }


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
    centered: bool,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    keeps_low: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x and y [N, D], rstd [N, S, 1|H], logits [N, S, H], lse [N, H], norm rstd [N], state, last
    and low bits [N, D]."""
    example = prior if prior is not None else output if output is not None else sources[0]
    (tokens, width), num_sources = example.shape, len(sources) + reads_last
    x = torch.empty(tokens, width, dtype=out_dtype, device=example.device)
    y = torch.empty_like(x) if norm_weight is not None else x.new_empty(0)
    rstd = query.new_empty(tokens, num_sources, heads if slice_norm else 1)
    logits = query.new_empty(tokens, num_sources, heads)
    lse = query.new_empty(tokens, heads)
    norm_rstd = query.new_empty(tokens if norm_weight is not None else 0)
    low = x.new_empty(x.shape if keeps_low else 0, dtype=torch.int16)
    state, last = x.new_empty(0), x.new_empty(0)
    read = [*sources, output] if reads_last and output is not None else list(sources)
    held = [*read, *(t for t in (residual, prior, partial) if t is not None)]
    is_boundary = output is not None or norm_weight is not None
    is_resident = (
        _triton_mix.resident(read, width)
        and _is_one_dtype(held, out_dtype)
        and (is_boundary or num_sources * width <= FEW_ELEMENTS)
    )
    if output is not None and (tokens == 0 or not is_resident):
        if partial is not None:
            last = (partial + output).contiguous()
        if residual is not None:
            state = residual = (residual + output).contiguous()
        if reads_last:
            sources = [*sources, output if partial is None else last]
        output = partial = None
    elif output is not None:
        # not empty_like, which keeps the strides of rows that are not in order
        state = state if residual is None else residual.new_empty(residual.shape)
        last = last if partial is None else partial.new_empty(partial.shape)
    results = x, y, rstd, logits, lse, norm_rstd, state, last, low
    if tokens == 0:
        return results
    sources = [layout.aligned(s) for s in sources]
    block, shape = _shape(width, heads, is_resident)
    shape |= {
        "HAS_RESIDUAL": residual is not None,
        "HAS_PRIOR": prior is not None,
        "HAS_NORM": norm_weight is not None,
        "CENTERED": centered,
        "SLICE_NORM": slice_norm,
    }
    given = [_optional(t) for t in (residual, prior, prior_lse, norm_weight)]
    with layout.on_device(example):
        if is_resident:
            launch = layout.resident_forward_launch(
                block, len(held), held[0].element_size(), is_boundary, residual is not None
            )
            resident_forward_kernel[(layout.num_programs(launch, tokens, example.device),)](
                tuple(sources),
                layout.aligned(query),
                _optional(output),
                _optional(partial),
                *given,
                x,
                y,
                state,
                last,
                rstd,
                logits,
                lse,
                norm_rstd,
                tokens,
                eps,
                scale,
                norm_eps,
                S=num_sources,
                DTYPE=layout.DTYPES[read[0].dtype],
                HAS_OUTPUT=output is not None,
                HAS_PARTIAL=partial is not None,
                READS_LAST=reads_last,
                STAGES=launch.stages,
                num_warps=launch.warps,
                **shape,
            )
            return results
        launch = layout.forward_launch(block, num_sources, held[0].element_size())
        (packed,) = layout.pack([sources], example)
        mix_forward_kernel[(layout.num_programs(launch, tokens, example.device),)](
            packed,
            layout.aligned(query),
            *given,
            x,
            low,
            y,
            rstd,
            logits,
            lse,
            norm_rstd,
            tokens,
            num_sources,
            eps,
            scale,
            norm_eps,
            DTYPE=layout.DTYPES[sources[0].dtype if sources else example.dtype],
            HAS_LOW=keeps_low,
            BS=launch.sources,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **shape,
        )
    return results


def mix_backward(
    grad: Tensor | None,
    grad_y: Tensor | None,
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
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    norm_rstd: Tensor | None,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    reads_last: bool,
    writes_output: bool,
    state_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sources, query, prior, prior_lse, norm weight, residual and output.

    ``carried`` are gradients of the sources from elsewhere, to be added; ``x`` is needed after a
    norm (``grad_y`` given), and with its ``low`` bits where delta is taken from it.
    """
    tokens, width = lse.shape[0], query.shape[0]
    num_sources, device = len(sources), lse.device

    def empty(dtype: torch.dtype | None = None) -> Tensor:
        return query.new_empty(0, dtype=dtype)

    sources = [layout.aligned(s) for s in sources]
    dsources = [torch.empty_like(s) for s in sources]
    dprior = empty() if prior is None else prior.new_empty(prior.shape)
    dprior_lse = empty() if prior_lse is None else prior_lse.new_empty(prior_lse.shape)
    has_norm, has_state = norm_weight is not None, state_dtype is not None
    dstate, doutput = empty(state_dtype), empty(state_dtype)
    if has_state:
        dstate = query.new_empty(tokens, width, dtype=state_dtype)
        doutput = torch.empty_like(dstate) if writes_output else doutput
    if tokens == 0:
        dnorm = torch.zeros_like(norm_weight) if norm_weight is not None else empty()
        return dsources, torch.zeros_like(query), dprior, dprior_lse, dnorm, dstate, doutput
    given = [*sources, *carried, prior, grad, grad_y, grad_state, grad_last]
    given = [t for t in given if t is not None]
    is_resident = _triton_mix.resident(sources, width) and _is_one_dtype(given, state_dtype)
    block, shape = _shape(width, heads, is_resident)
    itemsize = given[0].element_size()
    if is_resident:
        num_rows = len(given) + has_norm
        launch = layout.resident_backward_launch(block, num_sources, num_rows, itemsize)
    else:
        launch = layout.backward_launch(
            block, num_sources, itemsize, low is not None, len(carried) > 0
        )
    programs = layout.num_programs(launch, tokens, device)
    partial_dquery = query.new_empty(programs, width)
    partial_dnorm = query.new_empty(programs if has_norm else 0, width)
    shape |= {
        "HAS_GRAD": grad is not None,
        "HAS_PRIOR": prior is not None,
        "HAS_NORM": has_norm,
        "HAS_CARRIED": len(carried) > 0,
        "WRITES_STATE": has_state,
        "CENTERED": centered,
        "SLICE_NORM": slice_norm,
    }
    lists = [sources, dsources]
    if carried:
        lists.append([layout.aligned(c) for c in carried])
    optional = [_optional(t) for t in (prior, prior_lse, norm_weight)]
    stats = rstd, logits, lse, norm_rstd
    with layout.on_device(lse):
        if is_resident:
            resident_backward_kernel[(programs,)](
                tuple(sources),
                tuple(dsources),
                tuple(lists[2]) if carried else None,
                _optional(grad),
                _optional(grad_y),
                _optional(grad_state),
                _optional(grad_last),
                layout.aligned(query),
                _optional(x),
                *optional,
                *stats,
                dstate,
                doutput,
                dprior,
                dprior_lse,
                partial_dquery,
                partial_dnorm,
                tokens,
                scale,
                S=num_sources,
                DTYPE=layout.DTYPES[sources[0].dtype],
                HAS_GRAD_STATE=grad_state is not None,
                WRITES_OUTPUT=writes_output,
                READS_LAST=reads_last,
                STAGES=launch.stages,
                num_warps=launch.warps,
                **shape,
            )
        else:
            packed = layout.pack(lists, lse)
            mix_backward_kernel[(programs,)](
                packed[0],
                packed[1],
                packed[2] if carried else None,
                _optional(grad),
                _optional(grad_y),
                _optional(grad_state),
                layout.aligned(query),
                _optional(x),
                _optional(low),
                *optional,
                *stats,
                dstate,
                dprior,
                dprior_lse,
                partial_dquery,
                partial_dnorm,
                tokens,
                num_sources,
                scale,
                DTYPE=layout.DTYPES[sources[0].dtype if sources else query.dtype],
                HAS_GRAD_STATE=grad_state is not None,
                FROM_MIX=low is not None,
                BS=launch.sources,
                STAGES=launch.stages,
                num_warps=launch.warps,
                **shape,
            )
    if writes_output and not is_resident:
        added = dsources[-1] if reads_last else grad_last
        assert added is not None
        torch.add(dstate, added, out=doutput)
    dnorm = empty()
    if norm_weight is not None:
        dnorm = partial_dnorm.sum(0).to(norm_weight.dtype)
    return dsources, partial_dquery.sum(0), dprior, dprior_lse, dnorm, dstate, doutput


__all__ = ["mix_backward", "mix_forward"]
