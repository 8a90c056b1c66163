"""Registered ops over the Triton depth-mix kernels. Imports Triton only when one runs.

``depth_mix_triton`` is the boundary between two sublayers: it adds the last sublayer's ``output``
to the residual state and to the current block's ``partial`` sum, mixes, and applies the next
pre-norm. Every part is optional; with none it is the plain depth mix.

What backward needs of a token is one row of ``stats`` [N, K]: S x H logits, S 1/rms (or S x H with
``slice_norm``), H log-sum-exps and, if there is a norm, its 1/rms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from depthroute.ops._register import kernel_op
from depthroute.ops.backends import ran


@cache
def _launch() -> ModuleType:
    from depthroute.ops._triton import mix_launch

    return mix_launch


def stats_width(count: int, heads: int, slice_norm: bool, has_norm: bool) -> int:
    return count * (heads + (heads if slice_norm else 1)) + heads + has_norm


@kernel_op("depth_mix_triton")
def _depth_mix(
    sources: list[Tensor],
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
    dtype: torch.dtype,
    keeps_low: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, y, stats, state, last and the low bits of x.

    ``last`` is partial + output, or output itself where a block starts; with ``reads_last`` it is
    the last source. What was not asked for is empty.
    """
    ran("depth_mix", "triton")
    return _launch().mix_forward(
        sources,
        query,
        residual,
        prior,
        prior_lse,
        norm_weight,
        output,
        partial,
        reads_last,
        eps,
        heads,
        slice_norm,
        centered,
        scale,
        norm_eps,
        dtype,
        keeps_low,
    )


@_depth_mix.register_fake
def _(
    sources,
    query,
    residual,
    prior,
    prior_lse,
    norm_weight,
    output,
    partial,
    reads_last,
    eps,
    heads,
    slice_norm,
    centered,
    scale,
    norm_eps,
    dtype,
    keeps_low,
):
    example = prior if prior is not None else output if output is not None else sources[0]
    tokens, width = example.shape
    count = len(sources) + reads_last
    x = example.new_empty(tokens, width, dtype=dtype)
    normed = norm_weight is not None
    state = x.new_empty(0)
    if residual is not None and output is not None:
        state = residual.new_empty(residual.shape)
    return (
        x,
        x.new_empty(x.shape) if normed else x.new_empty(0),
        query.new_empty(tokens, stats_width(count, heads, slice_norm, normed)),
        state,
        x.new_empty(0) if partial is None else partial.new_empty(partial.shape),
        x.new_empty(x.shape if keeps_low else 0, dtype=torch.int16),
    )


@kernel_op("depth_mix_triton_backward")
def _depth_mix_backward(
    grad: Tensor | None,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    grad_last: Tensor | None,
    carried: list[Tensor],
    sources: list[Tensor],
    query: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    x: Tensor | None,
    low: Tensor | None,
    stats: Tensor,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    reads_last: bool,
    writes_output: bool,
    state_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Gradients of the sources; of the query and, if given, the norm weight [1|2, D]; of prior and
    prior_lse, if given, the residual, if ``state_dtype`` is, and the output, if ``writes_output``.
    """
    ran("depth_mix_backward", "triton")
    return _launch().mix_backward(
        grad,
        grad_y,
        grad_state,
        grad_last,
        carried,
        sources,
        query,
        prior,
        prior_lse,
        norm_weight,
        x,
        low,
        stats,
        heads,
        slice_norm,
        centered,
        scale,
        reads_last,
        writes_output,
        state_dtype,
    )


@_depth_mix_backward.register_fake
def _(
    grad,
    grad_y,
    grad_state,
    grad_last,
    carried,
    sources,
    query,
    prior,
    prior_lse,
    norm_weight,
    x,
    low,
    stats,
    heads,
    slice_norm,
    centered,
    scale,
    reads_last,
    writes_output,
    state_dtype,
):
    others = [] if prior is None else [t.new_empty(t.shape) for t in (prior, prior_lse)]
    if state_dtype is not None:
        shape = stats.shape[0], query.shape[0]
        others += [query.new_empty(shape, dtype=state_dtype) for _ in range(1 + writes_output)]
    return (
        [s.new_empty(s.shape) for s in sources],
        query.new_empty(1 if norm_weight is None else 2, query.shape[0]),
        others,
    )


_depth_mix_backward.register_autograd()


RESIDENT_SOURCES = 17
RESIDENT_BYTES = 73 * 1024
"""Of the rows of a token that one program holds in registers: 5 of width 7168 in bf16, 9 of 4096,
17 of 2048."""


def fits(rows: int, width: int, itemsize: int) -> bool:
    """Whether so many rows of a token fit one program."""
    return 0 < rows <= RESIDENT_SOURCES and rows * width * itemsize <= RESIDENT_BYTES


def keeps_low_bits(rows: Sequence[Tensor], width: int, residual: bool, centered: bool) -> bool:
    """Whether backward will take delta from x, and so needs x to more bits than it is stored in.

    Where a token's rows fit in registers delta costs nothing, and where x is more than the mix
    (a residual, or a centred mix) it cannot be had from x. In fp32 x is exact enough as it is, and
    rare enough to be swept twice.
    """
    if not rows or residual or centered or rows[0].element_size() == 4:
        return False
    return not fits(len(rows), width, rows[0].element_size())


def save(ctx, inputs, output) -> None:
    sources, query, residual, prior, prior_lse, norm_weight, pushed, partial, reads_last = inputs[
        :9
    ]
    ctx.heads, ctx.slice_norm, ctx.centered, ctx.scale = inputs[10:14]
    keeps_low = inputs[16]
    x, _, stats, _, last, low = output
    read = list(sources)
    if reads_last:
        read.append(pushed if partial is None else last)
    has_norm = norm_weight is not None
    ctx.save_for_backward(
        *read,
        query,
        prior,
        prior_lse,
        norm_weight,
        x if keeps_low or has_norm else None,
        low if keeps_low else None,
        stats,
    )
    ctx.state_dtype = None if residual is None else residual.dtype
    ctx.pushes, ctx.has_partial, ctx.reads_last = (
        pushed is not None,
        partial is not None,
        reads_last,
    )


def gradients(
    ctx,
    saved,
    grad: Tensor | None,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    grad_last: Tensor | None,
    carried: list[Tensor],
):
    """Of sources, query, residual, prior, prior_lse, norm weight, output and partial.

    ``saved`` is ``ctx.saved_tensors``, which checkpointing lets a backward read only once.
    ``carried`` holds one tensor per source read, the last among them, or nothing.
    """
    *sources, query, prior, prior_lse, norm_weight, x, low, stats = saved
    if norm_weight is None:
        grad_y = None
    elif grad_y is None:
        norm_weight = None
    has_state = ctx.state_dtype is not None
    # without a norm or a push the residual's gradient is the incoming one, and costs nothing
    written = ctx.state_dtype if grad_y is not None or ctx.pushes else None
    writes_output = ctx.pushes and has_state and (ctx.reads_last or grad_last is not None)
    dsources, dweights, others = torch.ops.depthroute.depth_mix_triton_backward.default(
        grad,
        grad_y,
        grad_state if has_state else None,
        None if ctx.reads_last else grad_last,
        carried,
        sources,
        query,
        prior,
        prior_lse,
        norm_weight,
        x,
        low,
        stats,
        ctx.heads,
        ctx.slice_norm,
        ctx.centered,
        ctx.scale,
        ctx.reads_last,
        writes_output,
        written,
    )
    others = iter(others)
    dprior = dprior_lse = dstate = doutput = dnorm = None
    if prior is not None:
        dprior, dprior_lse = next(others), next(others)
    if written is not None:
        dstate = next(others)
        doutput = next(others) if writes_output else None
    elif has_state:
        assert grad is not None
        dstate = (grad if ctx.scale == 1.0 else grad * ctx.scale).to(ctx.state_dtype)
    dquery = dweights[0]
    if norm_weight is not None:
        dnorm = dweights[1].to(norm_weight.dtype)
    dlast = grad_last
    if ctx.reads_last:
        *dsources, dlast = dsources
    if ctx.pushes and not writes_output:
        doutput = dstate if has_state else dlast
    return (
        dsources,
        dquery,
        dstate,
        dprior,
        dprior_lse,
        dnorm,
        doutput,
        dlast if ctx.has_partial else None,
    )


def _setup(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[2], output[5])
    ctx.set_materialize_grads(False)
    ctx.num_sources, ctx.num_inputs = len(inputs[0]), len(inputs)
    save(ctx, inputs, output)


def _backward(ctx, grad, grad_y, _stats, grad_state, grad_last, _low):
    if grad is None and grad_y is None:
        return [None] * ctx.num_sources, *(None,) * (ctx.num_inputs - 1)
    saved = ctx.saved_tensors
    carried = []
    if ctx.reads_last and grad_last is not None:
        carried = [torch.zeros_like(s) for s in saved[: ctx.num_sources]] + [grad_last]
    found = gradients(ctx, saved, grad, grad_y, grad_state, grad_last, carried)
    return *found, *(None,) * (ctx.num_inputs - len(found))


_depth_mix.register_autograd(_backward, _setup)
