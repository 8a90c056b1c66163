"""Registered ops over the Triton depth-mix kernels. Imports Triton only when one runs.

``depth_mix_triton`` is the boundary between two sublayers: it adds the last sublayer's ``output``
to the residual state and to the current block's ``partial`` sum, mixes, and applies the next
pre-norm. Every part is optional; with none it is the plain depth mix. Tensors are [..., D] in any
shape, so that no graph holds views which only flatten.

What backward needs of a token is one row of ``stats`` [..., K]: S x H logits, S 1/rms (or S x H
with ``slice_norm``), H log-sum-exps and, if there is a norm, its 1/rms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.ops._register import kernel_op
from depthroute.ops._transforms import refuse_batched


def stats_width(count: int, heads: int, slice_norm: bool, has_norm: bool) -> int:
    return count * (heads + (heads if slice_norm else 1)) + heads + has_norm


@kernel_op("depth_mix_triton", "depth_mix", "mix_launch.mix_forward")
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
    offset: int,
    scale: float,
    norm_eps: float,
    dtype: torch.dtype,
    keeps_low: bool,
    keeps_x: bool,
) -> tuple[Tensor, list[Tensor]]:  # pyright: ignore[reportReturnType]
    """stats and, of x, y, state, last and the low bits of x, those there are.

    x and its low bits are there if they are kept; y needs a norm weight, state an output and a
    residual, last an output and a partial sum. With ``reads_last`` the last source is partial +
    output, or the output itself where a block starts.
    """


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
    offset,
    scale,
    norm_eps,
    dtype,
    keeps_low,
    keeps_x,
):
    example = prior if prior is not None else output if output is not None else sources[0]
    normed = norm_weight is not None
    x = example.new_empty(example.shape, dtype=dtype)
    stats_of_token = stats_width(len(sources) + reads_last, heads, slice_norm, normed)
    others = [x.new_empty(x.shape) for is_there in (keeps_x, normed) if is_there]
    if output is not None:
        others += [t.new_empty(t.shape) for t in (residual, partial) if t is not None]
    if keeps_low:
        others.append(x.new_empty(x.shape, dtype=torch.int16))
    return query.new_empty(*x.shape[:-1], stats_of_token), others


class Forward(NamedTuple):
    """What ``depth_mix_triton`` returned."""

    stats: Tensor
    x: Tensor | None
    y: Tensor | None
    state: Tensor | None
    last: Tensor | None
    low: Tensor | None


def named(inputs, stats: Tensor, others: Sequence[Tensor]) -> Forward:
    """Its results by name; ``inputs`` are its arguments."""
    made = iter(others)
    pushes, keeps_low, keeps_x = inputs[6] is not None, *inputs[16:]
    return Forward(
        stats,
        next(made) if keeps_x else None,
        next(made) if inputs[5] is not None else None,
        next(made) if pushes and inputs[2] is not None else None,
        next(made) if pushes and inputs[7] is not None else None,
        next(made) if keeps_low else None,
    )


@kernel_op("depth_mix_triton_backward", "depth_mix_backward", "mix_launch.mix_backward")
def _depth_mix_backward(
    grad: Tensor | None,
    grads_y: list[Tensor],
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
    offset: int,
    scale: float,
    reads_last: bool,
    writes_output: bool,
    mixes_again: bool,
    state_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:  # pyright: ignore[reportReturnType]
    """Gradients of the sources; of the query and, if given, the norm weight [1|2, D]; of prior and
    prior_lse, if given, the residual, if ``state_dtype`` is, and the output, if ``writes_output``.

    The gradient of y is the sum of ``grads_y``: one, or after :mod:`depthroute.ops.inductor` one
    for every projection that reads y. A norm needs ``x``, or ``mixes_again``, and then ``x`` is the
    state, if there is one.
    """


@_depth_mix_backward.register_fake
def _(
    grad,
    grads_y,
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
    offset,
    scale,
    reads_last,
    writes_output,
    mixes_again,
    state_dtype,
):
    others = [] if prior is None else [t.new_empty(t.shape) for t in (prior, prior_lse)]
    if state_dtype is not None:
        shape = *stats.shape[:-1], query.shape[0]
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
12 of 2048, 17 of 1024."""


def fits(rows: int, width: int, itemsize: int) -> bool:
    """Whether so many rows of a token fit one program, and are better off there.

    17 rows of 2048 do fit, and reached 0.78 of the copy speed; streamed they reach 0.89
    (docs/negative-results.md).
    """
    limit = RESIDENT_BYTES if rows <= 12 else RESIDENT_BYTES // 2
    return 0 < rows <= RESIDENT_SOURCES and rows * width * itemsize <= limit


def keeps_low_bits(rows: Sequence[Tensor], width: int, residual: bool, offset: bool) -> bool:
    """Whether backward will take delta from x, and so needs x to more bits than it is stored in.

    Where a token's rows fit in registers delta costs nothing, and where x is more than the mix
    (a residual, or weights with an offset) it cannot be had from x. In fp32 x is exact enough as
    it is, and rare enough to be swept twice.
    """
    if not rows or residual or offset or rows[0].element_size() == 4:
        return False
    return not fits(len(rows), width, rows[0].element_size())


def mixes_again(count: int, width: int, dtype: torch.dtype, rows: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of a boundary's norm can do without x, because both directions hold all
    of its ``count`` sources: then backward mixes them again, which costs no traffic.

    ``rows`` is everything as wide as x that the boundary reads.
    """
    alike = all(row is None or row.dtype == dtype for row in rows)
    return alike and fits(count, width, dtype.itemsize)


def save(ctx, inputs, made: Forward, *more: Tensor | None) -> None:
    """``more`` comes first in ``ctx.saved_tensors``."""
    sources, query, residual, prior, prior_lse, norm_weight, pushed, partial, reads_last = inputs[
        :9
    ]
    ctx.heads, ctx.slice_norm, ctx.offset, ctx.scale = inputs[10:14]
    read = list(sources)
    if reads_last:
        read.append(pushed if partial is None else made.last)
    kept = None
    if made.low is not None or made.y is not None:
        kept = made.x
    ctx.mixes_again = made.y is not None and made.x is None
    if ctx.mixes_again:
        kept = residual if pushed is None else made.state
    ctx.save_for_backward(
        *(*more, *read, query, prior, prior_lse, norm_weight),
        *(kept, made.low, made.stats),
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

    ``saved`` are ``ctx.saved_tensors``, which checkpointing lets a backward read only once, without
    ``more``.
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
        [] if grad_y is None else [grad_y],
        None if written is None else grad_state,
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
        ctx.offset,
        ctx.scale,
        ctx.reads_last,
        writes_output,
        ctx.mixes_again and norm_weight is not None,
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
        dstate = dstate if grad_state is None else dstate + grad_state
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
    made = named(inputs, *output)
    ctx.mark_non_differentiable(made.stats)
    ctx.set_materialize_grads(False)
    ctx.num_sources, ctx.num_inputs = len(inputs[0]), len(inputs)
    ctx.made = [t is not None for t in (made.x, made.y, made.state, made.last)]
    save(ctx, inputs, made)


def _backward(ctx, _stats, others):
    others = iter(others)
    grad, grad_y, grad_state, grad_last = [next(others) if made else None for made in ctx.made]
    refuse_batched("depth_mix", "triton", grad, grad_y, grad_state, grad_last)
    if grad is None and grad_y is None:
        return [None] * ctx.num_sources, *(None,) * (ctx.num_inputs - 1)
    saved = ctx.saved_tensors
    carried = []
    if ctx.reads_last and grad_last is not None:
        carried = [torch.zeros_like(s) for s in saved[: ctx.num_sources]] + [grad_last]
    found = gradients(ctx, saved, grad, grad_y, grad_state, grad_last, carried)
    return *found, *(None,) * (ctx.num_inputs - len(found))


_depth_mix.register_autograd(_backward, _setup)
