"""Reading sources that many sites share, with one gradient for all of them.

When S sources are read by L sites in the ordinary way, autograd keeps L gradients per source and
adds them: three passes per source and site beyond writing them. Here a site also returns its
sources, and later sites read those. In backward a source's gradient then travels the other way,
last site first, and each site's kernel adds its share to what it was handed: one read instead.

    x, sources = depth_mix_carried(sources, query)

The returned sources are the same values (views, nothing is copied). Nothing is mutated and no state
is kept outside the graph, so activation checkpointing may run a site twice, and a source that is
also used elsewhere gets the right sum. Using a source from before a site instead of the returned
one is correct too, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import _triton_group, _triton_mix, reference
from depthroute.ops._transforms import refuse_batched
from depthroute.ops.backends import choose
from depthroute.ops.mix import (
    _check_gains,
    _check_sources,
    _flat,
    _fold,
    _widest,
    depth_mix_group,
    mix_by_definition,
    weight_offset,
)


class _CarriedMix(torch.autograd.Function):
    """x, y, state, last and the sources again; see :func:`depth_boundary`.

    Folds the gain into the query, so that autograd does not have to. The torch backend takes
    [N, D] and has no norm and no push: :func:`depth_boundary` does them around it.
    """

    @staticmethod
    def forward(ctx, triton, query, key_weight, residual, prior, prior_lse, norm_weight, *rest):
        output, partial, wanted, options, *sources = rest
        returns_x, returns_last, hands_on, hands_state_on = wanted
        ctx.set_materialize_grads(False)
        ctx.triton, ctx.num_sources, ctx.hands_on = triton, len(sources), hands_on
        handed = [s.view_as(s) for s in sources] if hands_on else []
        example = prior if prior is not None else output if output is not None else sources[0]
        q = _fold(query, key_weight, example.dtype)
        if triton:
            inputs = sources, q, residual, prior, prior_lse, norm_weight, output, partial, *options
            results = torch.ops.depthroute.depth_mix_triton.default(*inputs)
            made = _triton_mix.named(inputs, *results)
            _triton_mix.save(ctx, inputs, made, query, key_weight)
            state, last = made.state, made.last
            if output is None and residual is not None and hands_state_on:
                state = residual.view_as(residual)
            if not returns_last:
                last = None
            elif output is not None and partial is None:
                last = output.view_as(output)
            return made.x if returns_x else None, made.y, state, last, *handed
        _, eps, heads, slice_norm, offset, scale, _, dtype, _, _ = options
        x, rstd, logits, lse = torch.ops.depthroute.depth_mix(
            sources, q, residual, prior, prior_lse, eps, heads, slice_norm, offset, scale, dtype
        )
        stats = rstd, logits, lse
        ctx.save_for_backward(query, key_weight, *sources, q, prior, prior_lse, *stats)
        ctx.options = heads, offset, scale
        ctx.residual_dtype = None if residual is None else residual.dtype
        return x, None, None, None, *handed

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("depth_mix", "triton" if ctx.triton else "torch", *grads)
        grad, grad_y, grad_state, grad_last, *carried = grads
        if not ctx.hands_on:
            carried = [None] * ctx.num_sources
        if ctx.triton:
            if grad is None and grad_y is None:  # nothing but a push
                dlast = grad_last if ctx.has_partial else None
                doutput = _sum(grad_state, grad_last) if ctx.pushes else None
                grads = *(None,) * 3, grad_state, *(None,) * 3, doutput, dlast
                return *grads, None, None, *carried
            query, key_weight, *saved = ctx.saved_tensors
            if ctx.reads_last:
                carried = [*carried, grad_last]
            gathered = _gathered(carried, saved[: len(carried)])
            pushed = grad_state, grad_last
            found = _triton_mix.gradients(ctx, saved, grad, grad_y, *pushed, gathered)
            dsources, dq, *rest = found
            return None, *_unfold(dq, query, key_weight), *rest, None, None, *dsources
        if grad is None:
            return *(None,) * 11, *carried
        query, key_weight, *sources, q, prior, prior_lse, rstd, logits, lse = ctx.saved_tensors
        dsources, dq, dprior, dprior_lse = torch.ops.depthroute.depth_mix_backward(
            grad, sources, q, prior, prior_lse, rstd, logits, lse, *ctx.options
        )
        dresidual = None
        if ctx.residual_dtype is not None:
            dresidual = (grad * ctx.options[2]).to(ctx.residual_dtype)
        if prior is None:
            dprior = dprior_lse = None
        dsources = _added(dsources, carried)
        leading = *_unfold(dq, query, key_weight), dresidual, dprior, dprior_lse
        return None, *leading, *(None,) * 5, *dsources


class _CarriedGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, triton, queries, options, *sources):
        eps, heads, slice_norm, dtype = options
        listed = list(sources)
        ctx.triton = triton
        ctx.set_materialize_grads(False)
        if triton:
            inputs = listed, queries, eps, heads, slice_norm, dtype
            output = torch.ops.depthroute.depth_mix_group_triton(*inputs)
            _triton_group.save(ctx, inputs, output)
            outputs, lse = output[0], output[1]
        else:
            outputs, lse, rstd, logits = torch.ops.depthroute.depth_mix_group(
                listed, queries, eps, heads, slice_norm
            )
            ctx.save_for_backward(*sources, queries, rstd, logits, lse)
            ctx.heads = heads
            if outputs.dtype != dtype:
                # only then: torch 2.11 compiles no gradient for a .to() that does nothing
                outputs = outputs.to(dtype)
        return outputs, lse, *(s.view_as(s) for s in sources)

    @staticmethod
    def backward(ctx, *grads):
        refuse_batched("depth_mix_group", "triton" if ctx.triton else "torch", *grads)
        grad, grad_lse, *carried = grads
        if grad is None and grad_lse is None:
            return None, None, None, *carried
        saved = ctx.saved_tensors
        *sources, queries, rstd, logits, lse = saved
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse)
        if grad is None:
            grad = lse.new_zeros(*lse.shape[:2], queries.shape[1])
        if ctx.triton:
            gathered = _gathered(carried, sources)
            dsources, dqueries = _triton_group.gradients(ctx, saved, grad, grad_lse, gathered)
        else:
            dsources, dqueries = torch.ops.depthroute.depth_mix_group_backward(
                grad.to(queries.dtype), grad_lse, sources, queries, rstd, logits, lse, ctx.heads
            )
            dsources = _added(dsources, carried)
        return None, dqueries, None, *dsources


def _unfold(dq: Tensor, query: Tensor, key_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of a query and its gain from that of their product."""
    if key_weight is None:
        return dq.to(query.dtype), None
    return (dq * key_weight).to(query.dtype), (dq * query).to(key_weight.dtype)


def _gathered(carried: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor]:
    """What the kernel adds: nothing if no later site sent a gradient, else one per source."""
    if all(c is None for c in carried):
        return []
    return [torch.zeros_like(s) if c is None else c for c, s in zip(carried, sources, strict=True)]


def _apart(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """No tensor twice, which Dynamo refuses: a stream starts with state and source the same."""
    apart: list[Tensor | None] = []
    for t in tensors:
        is_twice = t is not None and any(t is other for other in apart)
        apart.append(t.view_as(t) if is_twice and t is not None else t)
    return apart


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _added(own: Sequence[Tensor], carried: Sequence[Tensor | None]) -> list[Tensor]:
    return [d if c is None else d + c for d, c in zip(own, carried, strict=True)]


class Boundary(NamedTuple):
    x: Tensor | None
    """What was mixed, before the norm; None if only y was wanted."""
    y: Tensor | None
    """RMSNorm(x), if a norm weight was given."""
    state: Tensor | None
    """residual + output; without an output, the residual."""
    last: Tensor | None
    """partial + output, or output where a block starts; None if it was not wanted."""
    sources: list[Tensor]
    """The sources to hand on."""


def fuses_boundary(example: Tensor, num_sources: int) -> bool:
    """Whether :func:`depth_boundary` over such sources is one kernel, and so worth waiting for."""
    width = example.shape[-1]
    if choose("depth_mix", example.device.type, "auto", example.dtype, width).backend != "triton":
        return False
    return _triton_mix.fits(num_sources, width, example.element_size())


def depth_boundary(
    output: Tensor | None,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    partial: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    reads_last: bool = False,
    prior: Tensor | None = None,
    prior_lse: Tensor | None = None,
    head_norm: str = "full",
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    returns_x: bool = True,
    returns_last: bool = True,
    hands_on: bool = True,
    hands_state_on: bool = False,
) -> Boundary:
    """Everything between two sublayers, in one kernel forward and one backward.

        state = residual + output           last = partial + output
        x = scale * (state + depth mix of sources, and of last if reads_last)
        y = RMSNorm(x) * norm_weight

    Every part but the mix is optional: ``output=None`` pushes nothing, ``partial=None`` starts a
    block (last is the output), ``residual=None`` keeps no state, ``prior`` starts from a finished
    group. ``sources`` excludes ``last``. Whoever needs no ``last``, with a norm no ``x``, or has no
    further site to hand sources on to (``hands_on=False`` returns them as they came) should say so:
    a compiled graph makes a gradient of zeros for every result that nobody uses, which the kernel
    then reads. For that reason a residual that nothing is pushed onto is handed on like a source
    only with ``hands_state_on``.
    """
    given = [t for t in (*sources, output, partial) if t is not None]
    _check_sources(given, query, key_weight, residual, heads, head_norm, prior)
    given += [] if prior is None else [prior]
    if output is None and (partial is not None or reads_last):
        raise DepthrouteError(
            "partial and reads_last describe where an output goes; pass the output as well, or "
            "list the block's sum among the sources"
        )
    if not sources and not reads_last and prior is None:
        raise DepthrouteError(
            "there is nothing to mix: sources is empty, and the output that is pushed is only read "
            "with reads_last=True"
        )
    name = "depth_mix" if prior is None else "depth_mix_merge"
    width, widest = query.shape[0], _widest(given, residual)
    choice = choose(name, query.device.type, backend, widest, width)
    example = prior if prior is not None else output if output is not None else sources[0]
    if dtype is None:
        dtype = next(
            (t.dtype for t in (*sources, output, residual) if t is not None),
            prior.dtype if prior is not None else None,
        )
    assert dtype is not None
    triton = choice.backend == "triton"
    listed, state, last = list(sources), residual, output
    offset = weight_offset(centered, adds_sources)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, query))
    read = [*sources, output] if reads_last and output is not None else list(sources)
    keeps_low = triton and needs_grad
    keeps_low = keeps_low and _triton_mix.keeps_low_bits(
        read, width, residual is not None, offset != 0
    )
    returns_x = returns_x or norm_weight is None
    keeps_x = returns_x or not _triton_mix.mixes_again(len(read), width, dtype, [*given, residual])
    settings = reads_last, eps, heads, head_norm == "slice", offset, scale, norm_eps, dtype
    options = *settings, keeps_low, keeps_x
    weights = query, key_weight
    if triton:
        tensors = *weights, residual, prior, prior_lse, norm_weight, output, partial, *sources
        if torch.compiler.is_compiling():
            tensors = _apart(tensors)
        x, y, state, last, *handed = _CarriedMix.apply(
            *(triton, *tensors[:8], (returns_x, returns_last, hands_on, hands_state_on), options),
            *tensors[8:],
        )
        handed = list(handed if hands_on else sources)
        return Boundary(x, y, residual if state is None else state, last, handed)
    if output is not None:
        state = None if residual is None else residual + output
        last = output if partial is None else partial + output
        listed += [last] if reads_last else []
    if choice.backend == "reference":
        tensors = listed, *weights, state, prior, prior_lse
        x = mix_by_definition(*tensors, eps, heads, head_norm, offset, scale, dtype)
        handed = listed
    else:
        x, _, _, _, *handed = _CarriedMix.apply(
            triton,
            *weights,
            *(None if t is None else _flat(t) for t in (state, prior, prior_lse)),
            *(None, None, None),
            (True, True, True, False),
            options,
            *(_flat(s) for s in listed),
        )
        shape = example.shape
        x, handed = x.view(shape), [h.view(shape) for h in handed]
    if output is not None and reads_last:
        *handed, last = handed
    last = last if returns_last else None
    handed = handed if hands_on else list(sources)
    if norm_weight is None:
        return Boundary(x, None, state, last, handed)
    y = reference.rms_norm(x, norm_weight, norm_eps)
    return Boundary(x if returns_x else None, y, state, last, handed)


def depth_mix_carried(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    norm_weight: Tensor | None = None,
    **options: Any,
) -> tuple[Any, list[Tensor]]:
    """:func:`depth_mix` (or, with a prior, :func:`depth_mix_merge`) and the sources to hand on."""
    done = depth_boundary(
        None,
        sources,
        query,
        key_weight,
        residual,
        None,
        eps,
        heads,
        backend,
        norm_weight=norm_weight,
        **options,
    )
    return (done.x if norm_weight is None else (done.x, done.y)), done.sources


def depth_mix_group_carried(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    head_norm: str = "full",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """:func:`depth_mix_group` and the sources to hand on."""
    _check_sources(sources, queries[0], None, None, heads, head_norm)
    _check_gains(queries, key_weights)
    shape = sources[0].shape
    widest = _widest(sources, None)
    choice = choose("depth_mix_group", queries.device.type, backend, widest, shape[-1])
    if choice.backend == "reference":
        arguments = sources, queries, key_weights, eps, heads, "reference"
        out, lse = depth_mix_group(*arguments, head_norm=head_norm, dtype=dtype)
        return out, lse, list(sources)
    q = _fold(queries, key_weights, sources[0].dtype)
    out, lse, *handed = _CarriedGroup.apply(
        choice.backend == "triton",
        q,
        (eps, heads, head_norm == "slice", dtype or q.dtype),
        *(_flat(s) for s in sources),
    )
    count = queries.shape[0]
    return (
        out.view(count, *shape),
        lse.view(count, *shape[:-1], heads),
        [h.view(shape) for h in handed],
    )
