"""The depth mix: one operator for whatever lies between two sublayers.

:func:`depth_boundary` is the whole of it, and the other functions are parts of it by name. All make
one record (:class:`~depthroute.ops._record.Mix`) and hand it to a backend: the definition
(:mod:`~depthroute.ops.reference`), torch or Triton. The latter two have the same two calls,
registered as ops of the ``depthroute`` namespace, and share one ``autograd.Function``, so that
``torch.compile(fullgraph=True)``, CUDA graphs, FSDP and activation checkpointing see one node.

**Handing sources on.** Of a source that L sites read autograd would keep L gradients and add them.
So a site also returns its sources, the same values, and later sites read those: in backward a
source's gradient travels from the last site to the first, and each kernel adds its share to what it
is handed (docs/kernels.md). Using a source from before a site is correct too, only slower.

    x, sources = depth_mix_carried(sources, query)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.ops import _record, _torch, reference
from depthroute.ops._checks import check_boundary, check_mix, weight_offset
from depthroute.ops._record import NUM_TENSORS, Mix, MixBackward, Mixed, MixGradients, MixResults
from depthroute.ops.backends import RUNS, choose, ran_by_definition
from depthroute.ops.private.dispatch import FromTriton, Op, applied
from depthroute.ops.private.transforms import refuse_batched

_forward, _launched = (Mix, MixResults), FromTriton("mix_launch", "mix_forward")
_backward = MixBackward, MixGradients, _record.fake_mix_backward
FORWARD = {
    "torch": Op("depth_mix", *_forward, _record.fake_mix, _torch.mix_forward),
    "triton": Op("depth_mix_triton", *_forward, _record.fake_mix_triton, _launched),
}
BACKWARD = {
    "torch": Op("depth_mix_backward", *_backward, _torch.mix_backward),
    "triton": Op("depth_mix_triton_backward", *_backward, FromTriton("mix_launch", "mix_backward")),
}


class Wants(NamedTuple):
    """Results of a boundary that somebody will use; a compiled graph makes a gradient of zeros for
    every other one, which the kernel then reads."""

    returns_x: bool = True
    """Beside y."""
    returns_last: bool = True
    hands_on: bool = True
    """The sources."""
    hands_state_on: bool = False
    """A residual that nothing is pushed onto, like a source."""


class Boundary(NamedTuple):
    """The results: of x, y and last those that were wanted, and the sources to hand on. Without an
    output, the state is the residual."""

    x: Tensor | None
    y: Tensor | None
    state: Tensor | None
    last: Tensor | None
    sources: list[Tensor]


def boundary(mix: Mix, key_weight: Tensor | None, wants: Wants, backend: str) -> Boundary:
    """:func:`depth_boundary` of a record whose query has not its gain yet, unchecked."""
    if backend != "triton":
        return _step_by_step(mix, key_weight, wants, backend)
    needs_grad, sources = _needs_grad(mix, key_weight), mix.sources
    mix = mix.keeping(needs_grad, wants.returns_x)
    if needs_grad:
        x, y, state, last, *handed = _differentiable(mix, key_weight, wants, backend)
        sources = handed if wants.hands_on else sources
    else:
        x, y, state, last = _wanted(mix, _call(backend, _folded(mix, key_weight)), wants)
    return Boundary(x, y, mix.residual if state is None else state, last, sources)


def _step_by_step(mix: Mix, key_weight: Tensor | None, wants: Wants, backend: str) -> Boundary:
    """The push before the mix and the norm after it are torch's own."""
    plain, last = mix.pushed()
    last = mix.output if last is None else last
    if mix.norm_weight is None:
        x, y = _mixed(plain, key_weight, backend), None
    else:
        x = _mixed(plain._replace(norm_weight=None), key_weight, backend)
        y = reference.rms_norm(x, mix.norm_weight, mix.norm_eps)
    x = x if wants.returns_x or y is None else None
    return Boundary(x, y, plain.residual, last if wants.returns_last else None, mix.sources)


def _mixed(mix: Mix, key_weight: Tensor | None, backend: str) -> Tensor:
    """x, of a mix without a push and a norm."""
    if backend == "reference":
        return _by_definition(mix, key_weight)
    if _needs_grad(mix, key_weight):
        wants = Wants(returns_last=False, hands_on=False)
        return _differentiable(mix, key_weight, wants, backend)[0]
    mix = _folded(mix, key_weight)
    if torch.compiler.is_compiling():  # it fuses the definition, and cannot see into an op
        return _by_definition(mix, None)
    if _torch.is_few(mix):
        RUNS["depth_mix", "torch"] += 1
        return _torch.few_forward(mix)
    _, (x,) = FORWARD[backend](mix)
    return x


def most_fused(backend: str, example: Tensor) -> int:
    """Most such sources of a boundary that is one kernel, so worth waiting for; 0 where none is."""
    most = _record.most_that_fit(example.shape[-1], example.element_size())
    return most if backend == "triton" else 0


def _needs_grad(mix: Mix, key_weight: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in (*mix.sources, key_weight, *mix.tensors):
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _folded(mix: Mix, key_weight: Tensor | None) -> Mix:
    query = folded(mix.query, key_weight, mix.example.dtype)
    return Mix._make((mix.sources, query, *mix[2:]))  # as _replace does, at a tenth of its time


def _call(backend: str, mix: Mix) -> Mixed:
    stats, others = FORWARD[backend](mix)
    made = iter(others)
    return Mixed(stats, *[next(made) if is_there else None for is_there in mix.results])


def _wanted(mix: Mix, made: Mixed, wants: Wants) -> tuple[Tensor | None, ...]:
    """x, y, state and last, as far as somebody uses them; what was given, as views."""
    x = made.x if wants.returns_x or made.y is None else None
    state, last, output = made.state, made.last, mix.output
    if output is None and wants.hands_state_on and mix.residual is not None:
        state = mix.residual.view_as(mix.residual)
    if not wants.returns_last:
        last = None
    elif output is not None and mix.partial is None:
        last = output.view_as(output)
    return x, made.y, state, last


def _differentiable(mix: Mix, key_weight: Tensor | None, wants: Wants, backend: str) -> Any:
    """The results of :class:`DepthMix`."""
    settings, tensors = mix[1 + NUM_TENSORS :], (key_weight, *mix.tensors, *mix.sources)
    return applied(DepthMix, backend, wants, settings, *tensors)


class DepthMix(torch.autograd.Function):
    """x, y, state, last and the sources again, of a mix's settings, its tensors and its sources.
    Folds the gain into the query, so that autograd does not have to."""

    @staticmethod
    def forward(ctx, backend, wants, settings, key_weight, query, *rest):
        tensors, sources = rest[: NUM_TENSORS - 1], list(rest[NUM_TENSORS - 1 :])
        mix = _folded(Mix(sources, query, *tensors, *settings), key_weight)
        made = _call(backend, mix)
        ctx.mixes_again = made.y is not None and made.x is None and not mix.keeps_y
        x = made.x if mix.sweeps_once or made.y is not None else None
        if mix.keeps_y:
            x = made.y
        elif ctx.mixes_again:
            x = mix.residual if mix.output is None else made.state
        kept = mix.query, mix.prior, mix.prior_lse, mix.norm_weight, x, made.low, made.stats
        last = mix.output if made.last is None else made.last
        read = [*sources, last] if mix.reads_last else sources
        ctx.save_for_backward(query, key_weight, *kept, *read)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.num_sources, ctx.hands_on = backend, len(sources), wants.hands_on
        ctx.settings = mix.heads, mix.slice_norm, mix.offset, mix.scale, mix.reads_last
        ctx.pushes, ctx.has_partial = mix.output is not None, mix.partial is not None
        ctx.from_y, ctx.sweeps_once, residual = mix.keeps_y, mix.sweeps_once, mix.residual
        ctx.state_dtype = None if residual is None else residual.dtype
        handed = [s.view_as(s) for s in sources] if wants.hands_on else []
        return *_wanted(mix, made, wants), *handed

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("depth_mix", ctx.backend, *grads)
        grad, grad_y, grad_state, grad_last, *carried = grads
        carried = carried if ctx.hands_on else [None] * ctx.num_sources
        if grad is None and grad_y is None:  # nothing but a push
            doutput = _sum(grad_state, grad_last) if ctx.pushes else None
            dpartial = grad_last if ctx.has_partial else None
            pushed = grad_state, None, None, None, doutput, dpartial
            return None, None, None, None, None, *pushed, *carried
        dsources, dweights, *rest = _gradients(ctx, (*grads[:4], *carried))
        return None, None, None, *dweights, *rest, *dsources


def _recorded(ctx: Any, saved: Sequence[Any], grads: Sequence[Any]) -> MixBackward:
    grad, grad_y, grad_state, grad_last, *carried = grads
    query, prior, prior_lse, norm_weight, x, low, stats, *sources = saved
    heads, slice_norm, offset, scale, reads_last = ctx.settings
    has_norm, has_state = grad_y is not None, ctx.state_dtype is not None
    if reads_last:
        carried, grad_last = [*carried, grad_last], None
    # without a norm or a push the residual's gradient is the incoming one, and costs nothing
    writes_state = has_state and (has_norm or ctx.pushes)
    writes_output = has_state and ctx.pushes and (reads_last or grad_last is not None)
    return MixBackward(
        *(grad, [grad_y] if has_norm else [], grad_state if writes_state else None, grad_last),
        *(gathered(carried, sources), sources, query, prior, prior_lse),
        *(norm_weight if has_norm else None, x, low, stats),
        *(heads, slice_norm, offset, scale, reads_last, writes_output, ctx.sweeps_once),
        *(ctx.mixes_again and has_norm, ctx.from_y, ctx.state_dtype if writes_state else None),
    )


def _gradients(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    """Of sources; gain and query; residual, prior, prior_lse, norm weight, output and partial."""
    query, key_weight, *saved = ctx.saved_tensors
    back = _recorded(ctx, saved, grads)
    grad, _, grad_state, dlast, *_ = grads
    op = BACKWARD[ctx.backend]
    # where a graph of this is wanted, the op raises on every way back through it
    dsources, dweights, others = op.dispatched(*back) if torch.is_grad_enabled() else op(back)
    rest = iter(others)
    dprior, dprior_lse = (None, None) if back.prior is None else (next(rest), next(rest))
    dstate = doutput = None
    if back.state_dtype is not None:
        dstate = next(rest)
    elif ctx.state_dtype is not None and grad is not None:
        dstate = grad
        if back.scale != 1.0:  # rounded once
            dstate = grad.to(torch.promote_types(grad.dtype, ctx.state_dtype)) * back.scale
        dstate = dstate.to(ctx.state_dtype)
        dstate = _sum(dstate, grad_state)
    if back.reads_last:
        *dsources, dlast = dsources
    if back.writes_output:
        doutput = next(rest)
    elif ctx.pushes:
        doutput = dlast if dstate is None else dstate
    dnorm = None if back.norm_weight is None else dweights[1].to(back.norm_weight.dtype)
    of_query = unfolded(dweights[0], query, key_weight)
    dpartial = dlast if ctx.has_partial else None
    return dsources, of_query, dstate, dprior, dprior_lse, dnorm, doutput, dpartial


def folded(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The query with the gain of its keys, at the precision of the statistics over such sources."""
    statistics = _torch.wide(torch.promote_types(query.dtype, dtype))
    q = query if query.dtype == statistics else query.to(statistics)
    return q if key_weight is None else q * key_weight.to(statistics)


def unfolded(dq: Tensor, query: Tensor, key_weight: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Gradients of a gain and its query from that of their product."""
    if key_weight is None:
        return None, dq.to(query.dtype)
    return (dq * query).to(key_weight.dtype), (dq * key_weight).to(query.dtype)


def gathered(carried: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor]:
    """What the kernel adds: nothing if no later site sent a gradient, else one per source."""
    if all(c is None for c in carried):
        return []
    return [torch.zeros_like(s) if c is None else c for c, s in zip(carried, sources, strict=True)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _by_definition(mix: Mix, key_weight: Tensor | None) -> Tensor:
    """The reference backend of a depth mix, or with a prior of its phase 2."""
    options: dict[str, Any] = {"eps": mix.eps, "heads": mix.heads, "dtype": mix.dtype}
    options |= {"head_norm": "slice" if mix.slice_norm else "full"}
    options |= {"residual": mix.residual, "scale": mix.scale}
    if mix.prior is None or mix.prior_lse is None:
        ran_by_definition("depth_mix")
        options |= {"centered": mix.offset < 0, "adds_sources": mix.offset > 0}
        return reference.depth_mix(mix.sources, mix.query, key_weight, **options)
    ran_by_definition("depth_mix_merge")
    finished = mix.prior, mix.prior_lse
    return reference.depth_mix_merge(*finished, mix.sources, mix.query, key_weight, **options)


class Options(NamedTuple):
    """What :func:`depth_boundary` and its parts may be told besides."""

    head_norm: str = "full"
    """``"full"`` normalises a key over its whole width, ``"slice"`` each head's part of it."""
    centered: bool = False
    adds_sources: bool = False
    scale: float = 1.0
    dtype: torch.dtype | None = None
    """Of x; left out, that of the sources."""
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    prior: Tensor | None = None
    """With prior_lse an output of :func:`~depthroute.ops.depth_mix_group`, before the sources."""
    prior_lse: Tensor | None = None
    reads_last: bool = False


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
    **options: Any,
) -> Boundary:
    """Everything between two sublayers, in one kernel forward and one backward.

        state = residual + output           last = partial + output
        x = scale * (state + depth mix of sources, and of last if reads_last)
        y = RMSNorm(x) * norm_weight

    Every part but the mix is optional: ``output=None`` pushes nothing, ``partial=None`` starts a
    block (last is the output), ``residual=None`` keeps no state, ``prior`` starts from a finished
    group. ``sources`` excludes ``last``. ``options`` are those of :class:`Options`, and of
    :class:`Wants`: who needs no x, no last, or has no further site to hand sources on to should say
    so.
    """
    wants = Wants(**{name: options.pop(name) for name in Wants._fields if name in options})
    extra = Options(**options)
    tensors = residual, extra.prior, extra.prior_lse, extra.norm_weight, output, partial
    check_mix(sources, query, key_weight, tensors, heads, extra.head_norm)
    offset = weight_offset(extra.centered, extra.adds_sources)
    check_boundary(sources, tensors, extra.reads_last, offset)
    rows = *sources, output, residual, extra.prior, partial, extra.prior_lse
    given = [t for t in rows if t is not None]
    mix = Mix(
        *(list(sources), query, *tensors, extra.reads_last, eps, heads),
        *(extra.head_norm == "slice", offset, extra.scale, extra.norm_eps),
        extra.dtype or given[0].dtype,
    )
    name = "depth_mix" if extra.prior is None else "depth_mix_merge"
    choice = choose(name, query.device.type, backend, widest_dtype(given), query.shape[0])
    return boundary(mix, key_weight, wants, choice.backend)


def depth_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """``x = scale * (residual + sum_n softmax_n(query . RMSNorm(s_n)) s_n)``.

    ``sources`` is a list of tensors ``[..., D]``; ``query`` and ``key_weight`` are ``[D]``.
    ``options`` are those of :class:`~depthroute.ops.mix.Options`: ``centered`` takes 1/S from every
    weight, ``adds_sources`` adds 1 to it, and with ``norm_weight`` [D] this returns ``x`` and
    ``RMSNorm(x) * norm_weight``, the sublayer's pre-norm. With ``return_weights=True`` also returns
    the softmax over depth, ``[S, ..., H]``. The definition is ``reference.depth_mix``.

    >>> a, b = torch.ones(2, 3, 8), torch.zeros(2, 3, 8)
    >>> depth_mix([a, b], torch.zeros(8)).unique().item()
    0.5
    """
    given = sources, query, key_weight
    options |= {"hands_on": False}
    mixed, _ = depth_mix_carried(*given, residual, eps, heads, backend, **options)
    if not return_weights:
        return mixed
    head_norm = options.get("head_norm", "full")
    logits = reference.depth_logits(*given, eps=eps, heads=heads, head_norm=head_norm)
    results = mixed if isinstance(mixed, tuple) else (mixed,)
    return *results, torch.softmax(logits, dim=0)


def depth_mix_merge(
    prior: Tensor,
    prior_lse: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Phase 2: one output of :func:`~depthroute.ops.depth_mix_group` merged with the sources made
    since. All other arguments are those of :func:`depth_mix`."""
    example = residual if residual is not None else sources[0] if sources else prior
    options |= {"dtype": options.get("dtype") or example.dtype}
    options |= {"prior": prior, "prior_lse": prior_lse}
    return depth_mix(sources, query, key_weight, residual, eps, heads, backend, **options)


def depth_mix_carried(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    **options: Any,
) -> tuple[Any, list[Tensor]]:
    """:func:`depth_mix` (with a ``prior``, :func:`depth_mix_merge`) and the sources to hand on."""
    made = depth_boundary(
        None, sources, query, key_weight, residual, None, eps, heads, backend, **options
    )
    return (made.x if made.y is None else (made.x, made.y)), made.sources


def widest_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Decides whether the kernels take these tensors."""
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
