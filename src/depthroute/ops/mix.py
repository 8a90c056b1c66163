"""Public depth-mix operators: checked arguments, registered ops, exact gradients.

Each public function flattens tokens, folds ``q = gain * query`` and calls an op of the
``depthroute`` namespace that has a fake (meta) implementation and an autograd formula, so
``torch.compile(fullgraph=True)``, CUDA graphs, FSDP and activation checkpointing see one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError, unknown
from depthroute.ops import (
    _torch,
    _triton_group,  # noqa: F401 registers the ops over the kernels
    _triton_mix,
    reference,
)
from depthroute.ops._transforms import no_second_derivative, refuse_batched
from depthroute.ops.backends import choose, ran, ran_by_definition


def depth_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    head_norm: str = "full",
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    return_weights: bool = False,
) -> Any:
    """``x = scale * (residual + sum_n softmax_n(query . RMSNorm(s_n)) s_n)``.

    ``centered`` takes 1/S from every weight, ``adds_sources`` adds 1 to it.

    ``sources`` is a list of tensors ``[..., D]``; ``query`` and ``key_weight`` are ``[D]``. With
    ``norm_weight`` [D] returns ``x`` and ``RMSNorm(x) * norm_weight``, the sublayer's pre-norm.
    With ``return_weights=True`` also returns the softmax over depth, ``[S, ..., H]``. See
    :func:`depthroute.ops.reference.depth_mix` for the definition.

    >>> a, b = torch.ones(2, 3, 8), torch.zeros(2, 3, 8)
    >>> depth_mix([a, b], torch.zeros(8)).unique().item()
    0.5
    """
    _check_sources(sources, query, key_weight, residual, heads, head_norm)
    backend = choose(
        "depth_mix", query.device.type, backend, _widest(sources, residual), query.shape[0]
    ).backend
    x = _call(
        sources,
        query,
        key_weight,
        residual,
        None,
        None,
        norm_weight,
        eps,
        heads,
        head_norm,
        weight_offset(centered, adds_sources),
        scale,
        norm_eps,
        None,
        backend,
    )
    if not return_weights:
        return x
    logits = reference.depth_logits(
        sources, query, key_weight, eps=eps, heads=heads, head_norm=head_norm
    )
    weights = torch.softmax(logits, dim=0)
    return (x, weights) if norm_weight is None else (*x, weights)


def depth_mix_group(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: str = "auto",
    *,
    head_norm: str = "full",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase 1: ``queries`` [G, D] over ``sources``; outputs [G, ..., D] and lse [G, ..., H].

    Outputs are not rounded unless a ``dtype`` is given: the sources' dtype halves what phase 2
    reads, for one more rounding.
    """
    _check_sources(sources, queries[0], None, None, heads, head_norm)
    _check_gains(queries, key_weights)
    shape = sources[0].shape
    backend = choose(
        "depth_mix_group", queries.device.type, backend, _widest(sources, None), shape[-1]
    ).backend
    if backend == "reference":
        ran_by_definition("depth_mix_group")
        out, lse = reference.depth_mix_group(
            sources, queries, key_weights, eps=eps, heads=heads, head_norm=head_norm
        )
        return out.to(dtype or out.dtype), lse
    q = _fold(queries, key_weights, sources[0].dtype)
    flat = [_flat(s) for s in sources]
    options = eps, heads, head_norm == "slice"
    if backend == "triton":
        out, lse, *_ = torch.ops.depthroute.depth_mix_group_triton(
            flat, q, *options, dtype or q.dtype
        )
    else:
        out, lse, *_ = torch.ops.depthroute.depth_mix_group(flat, q, *options)
        out = out.to(dtype or out.dtype)
    count = queries.shape[0]
    return out.view(count, *shape), lse.view(count, *shape[:-1], heads)


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
    *,
    head_norm: str = "full",
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """Phase 2: one output of :func:`depth_mix_group` merged with the sources made since."""
    _check_sources(sources, query, key_weight, residual, heads, head_norm, prior)
    widest = _widest([*sources, prior, prior_lse], residual)
    backend = choose("depth_mix_merge", query.device.type, backend, widest, query.shape[0]).backend
    example = residual if residual is not None else (sources[0] if sources else prior)
    return _call(
        sources,
        query,
        key_weight,
        residual,
        prior,
        prior_lse,
        norm_weight,
        eps,
        heads,
        head_norm,
        0,
        scale,
        norm_eps,
        dtype or example.dtype,
        backend,
    )


def _call(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    heads: int,
    head_norm: str,
    offset: int,
    scale: float,
    norm_eps: float,
    dtype: torch.dtype | None,
    backend: str,
) -> Any:
    example = sources[0] if prior is None else prior
    options = eps, heads, head_norm == "slice", offset, scale
    dtype = dtype or example.dtype
    if backend == "reference":
        given = query, key_weight, residual, prior, prior_lse
        x = mix_by_definition(sources, *given, eps, heads, head_norm, offset, scale, dtype)
        return x if norm_weight is None else (x, reference.rms_norm(x, norm_weight, norm_eps))
    if backend == "torch" and not torch.compiler.is_compiling():
        given = query, key_weight, residual, prior, prior_lse
        x = _EagerMix.apply((*options, dtype), *given, *sources)
        return x if norm_weight is None else (x, reference.rms_norm(x, norm_weight, norm_eps))
    q = _fold(query, key_weight, example.dtype)
    if backend == "torch":
        flat = [_flat(s) for s in sources]
        others = [_flat_or_none(t) for t in (residual, prior, prior_lse)]
        x = torch.ops.depthroute.depth_mix(flat, q, *others, *options, dtype)[0]
        x = x.view(example.shape)
        return x if norm_weight is None else (x, reference.rms_norm(x, norm_weight, norm_eps))
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (*sources, query, *(() if prior is None else (prior,)))
    )
    keeps_low = needs_grad and _triton_mix.keeps_low_bits(
        sources, query.shape[0], residual is not None, offset != 0
    )
    tensors = list(sources), q, residual, prior, prior_lse, norm_weight
    nothing_pushed = None, None, False
    _, (x, *others) = torch.ops.depthroute.depth_mix_triton.default(
        *tensors, *nothing_pushed, *options, norm_eps, dtype, keeps_low, True
    )
    return x if norm_weight is None else (x, others[0])


def mix_by_definition(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    eps: float,
    heads: int,
    head_norm: str,
    offset: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The reference backend of a depth mix, or with a prior of its phase 2."""
    ran_by_definition("depth_mix" if prior is None else "depth_mix_merge")
    options: dict[str, Any] = {"eps": eps, "heads": heads, "head_norm": head_norm}
    options |= {"residual": residual, "scale": scale, "dtype": dtype}
    if prior is None:
        options |= {"centered": offset < 0, "adds_sources": offset > 0}
        return reference.depth_mix(sources, query, key_weight, **options)
    if offset:
        raise DepthrouteError(
            "centered and adds_sources are defined for one pass over all sources, and a prior was "
            "given; leave them out, or mix every source at once"
        )
    assert prior_lse is not None
    return reference.depth_mix_merge(prior, prior_lse, sources, query, key_weight, **options)


def weight_offset(centered: bool, adds_sources: bool) -> int:
    """What is added to every weight, as the registered ops take it: -1 for -1/S, 1 for 1."""
    if centered and adds_sources:
        raise DepthrouteError(
            "centered takes 1/S from every weight and adds_sources adds 1 to it; choose one"
        )
    return -1 if centered else int(adds_sources)


def _widest(tensors: Sequence[Tensor], residual: Tensor | None) -> torch.dtype:
    """The dtype that decides whether the kernels take these tensors."""
    dtype = tensors[0].dtype if residual is None else residual.dtype
    for tensor in tensors:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _flat_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _flat(x)


def _fold(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    statistics = _torch.wide(torch.promote_types(query.dtype, dtype))
    q = query.to(statistics)
    return q if key_weight is None else q * key_weight.to(statistics)


def _check_gains(queries: Tensor, key_weights: Tensor | None) -> None:
    if key_weights is not None and key_weights.shape != queries.shape:
        raise DepthrouteError(
            f"key_weights has shape {tuple(key_weights.shape)} and queries "
            f"{tuple(queries.shape)}; give one gain per query"
        )


def _check_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    residual: Tensor | None,
    heads: int,
    head_norm: str,
    prior: Tensor | None = None,
) -> None:
    """``prior`` may have a dtype of its own."""
    every = [*sources] if prior is None else [*sources, prior]
    if len(every) == 0:
        raise DepthrouteError("sources is empty; depth_mix needs at least one tensor [..., D]")
    if head_norm not in ("full", "slice"):
        raise unknown("head_norm", head_norm, ("full", "slice"))
    first = every[0]
    if first.ndim == 0:
        raise DepthrouteError("sources[0] is a single number; sources are [..., D]")
    for n, source in enumerate(every):
        if source.shape != first.shape:
            raise DepthrouteError(
                f"sources[{n}] has shape {tuple(source.shape)} and sources[0] "
                f"{tuple(first.shape)}; all sources must have one shape [..., D]"
            )
        if n < len(sources) and source.dtype != first.dtype:
            raise DepthrouteError(
                f"sources[{n}] is {source.dtype} and sources[0] {first.dtype}; "
                "cast them to one dtype"
            )
        if source.device != first.device:
            raise DepthrouteError(
                f"sources[{n}] is on {source.device} and sources[0] on {first.device}; "
                "move them to one device"
            )
    width = first.shape[-1]
    if residual is not None and residual.shape != first.shape:
        raise DepthrouteError(
            f"residual has shape {tuple(residual.shape)} and the sources {tuple(first.shape)}; "
            "they must be equal"
        )
    for name, tensor in (("query", query), ("key_weight", key_weight)):
        if tensor is not None and tensor.shape != (width,):
            raise DepthrouteError(
                f"{name} has shape {tuple(tensor.shape)}; sources of width {width} need [{width}]"
            )
    named = {"sources[0]": first, "query": query, "key_weight": key_weight, "residual": residual}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise DepthrouteError(
                f"{name} is {tensor.dtype}, and a mix of such numbers would be cut off; cast it to "
                "a floating dtype"
            )
        if tensor.device != first.device:
            raise DepthrouteError(
                f"{name} is on {tensor.device} and the sources on {first.device}; move them to one "
                "device"
            )
    if heads < 1 or width % heads:
        raise DepthrouteError(
            f"heads={heads} does not divide the width {width}; choose a divisor of {width}"
        )


class _EagerMix(torch.autograd.Function):
    """``depthroute::depth_mix`` without the dispatcher, and with flattening and gain inside.

    A registered op costs about 1 ms a call, forward and backward, on a CPU, more than the mix
    itself for a narrow model. Only a compiler needs the registration.
    """

    @staticmethod
    def forward(ctx, options, query, key_weight, residual, prior, prior_lse, *sources):
        ran("depth_mix", "torch")
        _, heads, _, offset, scale, _ = options
        example = sources[0] if prior is None else prior
        q = _fold(query, key_weight, example.dtype)
        flat = [_flat(s) for s in sources]
        x, rstd, logits, lse = _torch.mix_forward(
            flat, q, _flat_or_none(residual), _flat_or_none(prior), _flat_or_none(prior_lse),
            *options, needs_lse=False,
        )  # fmt: skip
        ctx.save_for_backward(*sources, query, key_weight, prior, prior_lse, rstd, logits, lse)
        ctx.options = heads, offset, scale
        ctx.residual_dtype = None if residual is None else residual.dtype
        return x.view(example.shape)

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        *sources, query, key_weight, prior, prior_lse, rstd, logits, lse = ctx.saved_tensors
        refuse_batched("depth_mix", "torch", grad)
        # when a graph of this is wanted, the op raises on every way back through it;
        # once_differentiable does on none that torch.autograd.grad takes
        differentiate = _depth_mix_backward if torch.is_grad_enabled() else _mix_gradients
        shape, scale = grad.shape, ctx.options[2]
        flat = [_flat(s) for s in sources]
        q = _fold(query, key_weight, (sources[0] if prior is None else prior).dtype)
        stats = rstd, logits, lse
        dsources, dq, dprior, dprior_lse = differentiate(
            _flat(grad), flat, q, _flat_or_none(prior), _flat_or_none(prior_lse), *stats,
            *ctx.options,
        )  # fmt: skip
        dresidual = dkey_weight = None
        if ctx.residual_dtype is not None:
            dresidual = (grad if scale == 1.0 else grad * scale).to(ctx.residual_dtype)
        dquery = dq
        if key_weight is not None:
            dquery, dkey_weight = dq * key_weight, (dq * query).to(key_weight.dtype)
        if prior is None or prior_lse is None:
            dprior = dprior_lse = None
        else:
            dprior, dprior_lse = dprior.view(prior.shape), dprior_lse.view(prior_lse.shape)
        leading = dquery.to(query.dtype), dkey_weight, dresidual, dprior, dprior_lse
        return None, *leading, *(d.view(shape) for d in dsources)


@torch.library.custom_op("depthroute::depth_mix", mutates_args=())
def _depth_mix(
    sources: list[Tensor],
    query: Tensor,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    eps: float,
    heads: int,
    slice_norm: bool,
    offset: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ran("depth_mix", "torch")
    return _torch.mix_forward(
        sources, query, residual, prior, prior_lse, eps, heads, slice_norm, offset, scale, dtype
    )


@_depth_mix.register_fake
def _(sources, query, residual, prior, prior_lse, eps, heads, slice_norm, offset, scale, dtype):
    example = sources[0] if prior is None else prior
    tokens, width = example.shape
    return (
        example.new_empty(tokens, width, dtype=dtype),
        query.new_empty(len(sources), tokens, heads if slice_norm else 1),
        query.new_empty(len(sources), tokens, heads),
        query.new_empty(tokens, heads),
    )


def _mix_gradients(
    grad: Tensor,
    sources: list[Tensor],
    query: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    heads: int,
    offset: int,
    scale: float,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    ran("depth_mix_backward", "torch")
    return _torch.mix_backward(
        grad, sources, query, prior, prior_lse, rstd, logits, lse, heads, offset, scale
    )


_depth_mix_backward = torch.library.custom_op(
    "depthroute::depth_mix_backward", _mix_gradients, mutates_args=()
)


@_depth_mix_backward.register_fake
def _(grad, sources, query, prior, prior_lse, rstd, logits, lse, heads, offset, scale):
    empty = query.new_empty(0)
    return (
        [s.new_empty(s.shape) for s in sources],
        query.new_empty(query.shape),
        empty if prior is None else prior.new_empty(prior.shape),
        empty.clone() if prior_lse is None else prior_lse.new_empty(prior_lse.shape),
    )


_depth_mix_backward.register_autograd(no_second_derivative)


def _mix_setup(ctx, inputs, output) -> None:
    sources, query, residual, prior, prior_lse, _, heads, _, offset, scale, _ = inputs
    _, rstd, logits, lse = output
    ctx.mark_non_differentiable(rstd, logits, lse)
    ctx.save_for_backward(*sources, query, prior, prior_lse, rstd, logits, lse)
    ctx.heads, ctx.offset, ctx.scale = heads, offset, scale
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)


def _mix_backward(ctx, grad, *_):
    *sources, query, prior, prior_lse, rstd, logits, lse = ctx.saved_tensors
    if grad is None:
        return [None] * len(sources), *(None,) * 10
    options = ctx.heads, ctx.offset, ctx.scale
    dsources, dquery, dprior, dprior_lse = torch.ops.depthroute.depth_mix_backward(
        grad, sources, query, prior, prior_lse, rstd, logits, lse, *options
    )
    dresidual = None
    if ctx.residual_dtype is not None:
        dresidual = (grad if ctx.scale == 1.0 else grad * ctx.scale).to(ctx.residual_dtype)
    if prior is None:
        dprior = dprior_lse = None
    return dsources, dquery, dresidual, dprior, dprior_lse, *(None,) * 6


torch.library.register_autograd("depthroute::depth_mix", _mix_backward, setup_context=_mix_setup)


@torch.library.custom_op("depthroute::depth_mix_group", mutates_args=())
def _depth_mix_group(
    sources: list[Tensor], queries: Tensor, eps: float, heads: int, slice_norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ran("depth_mix_group", "torch")
    return _torch.group_forward(sources, queries, eps, heads, slice_norm)


@_depth_mix_group.register_fake
def _(sources, queries, eps, heads, slice_norm):
    (tokens, width), count = sources[0].shape, queries.shape[0]
    return (
        queries.new_empty(count, tokens, width),
        queries.new_empty(count, tokens, heads),
        queries.new_empty(len(sources), tokens, heads if slice_norm else 1),
        queries.new_empty(len(sources), count, tokens, heads),
    )


@torch.library.custom_op("depthroute::depth_mix_group_backward", mutates_args=())
def _depth_mix_group_backward(
    grad: Tensor,
    grad_lse: Tensor,
    sources: list[Tensor],
    queries: Tensor,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    heads: int,
) -> tuple[list[Tensor], Tensor]:
    ran("depth_mix_group_backward", "torch")
    return _torch.group_backward(grad, grad_lse, sources, queries, rstd, logits, lse, heads)


@_depth_mix_group_backward.register_fake
def _(grad, grad_lse, sources, queries, rstd, logits, lse, heads):
    return [s.new_empty(s.shape) for s in sources], queries.new_empty(queries.shape)


_depth_mix_group_backward.register_autograd(no_second_derivative)


def _group_setup(ctx, inputs, output) -> None:
    sources, queries, _, heads, _ = inputs
    _, lse, rstd, logits = output
    ctx.mark_non_differentiable(rstd, logits)
    ctx.save_for_backward(*sources, queries, rstd, logits, lse)
    ctx.heads = heads


def _group_backward(ctx, grad, grad_lse, *_):
    refuse_batched("depth_mix_group", "torch", grad, grad_lse)
    *sources, queries, rstd, logits, lse = ctx.saved_tensors
    dsources, dqueries = torch.ops.depthroute.depth_mix_group_backward(
        grad, grad_lse, sources, queries, rstd, logits, lse, ctx.heads
    )
    return dsources, dqueries, None, None, None


torch.library.register_autograd(
    "depthroute::depth_mix_group", _group_backward, setup_context=_group_setup
)
