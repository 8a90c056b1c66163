"""Registered ops over the Triton depth-mix kernels. Imports Triton only when one runs.

``depth_mix_triton`` keeps its statistics as [N, S, H], a token's together, so one program writes
them in a row; ``depth_mix`` of the torch backend keeps [S, N, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthroute.ops.backends import ran

FROM_MIX_BYTES = float("inf")
"""Source bytes of one token above which backward takes delta from x and sweeps once.

Off: on an H200, up to D 4096, it moved 0.72 to 0.82 of the copy ceiling against 0.55 to 0.66 for
two sweeps, but some source gradients were up to 1.9 times over the error budget, because x is
rounded.
"""


@torch.library.custom_op("depthroute::depth_mix_triton", mutates_args=())
def _depth_mix(
    sources: list[Tensor],
    query: Tensor,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops._triton.mix_launch import mix_forward

    ran("depth_mix", "triton")
    return mix_forward(
        sources,
        query,
        residual,
        prior,
        prior_lse,
        norm_weight,
        eps,
        heads,
        slice_norm,
        centered,
        scale,
        norm_eps,
        dtype,
    )


@_depth_mix.register_fake
def _(
    sources,
    query,
    residual,
    prior,
    prior_lse,
    norm_weight,
    eps,
    heads,
    slice_norm,
    centered,
    scale,
    norm_eps,
    dtype,
):
    example = sources[0] if prior is None else prior
    tokens, width = example.shape
    x = example.new_empty(tokens, width, dtype=dtype)
    normed = norm_weight is not None
    return (
        x,
        x.new_empty(x.shape) if normed else x.new_empty(0),
        query.new_empty(tokens, len(sources), heads if slice_norm else 1),
        query.new_empty(tokens, len(sources), heads),
        query.new_empty(tokens, heads),
        query.new_empty(tokens if normed else 0),
    )


@torch.library.custom_op("depthroute::depth_mix_triton_backward", mutates_args=())
def _depth_mix_backward(
    grad: Tensor | None,
    grad_y: Tensor | None,
    carried: list[Tensor],
    sources: list[Tensor],
    query: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    norm_weight: Tensor | None,
    x: Tensor | None,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    norm_rstd: Tensor | None,
    heads: int,
    slice_norm: bool,
    centered: bool,
    scale: float,
    from_mix: bool,
    residual_dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops._triton.mix_launch import mix_backward

    ran("depth_mix_backward", "triton")
    return mix_backward(
        grad,
        grad_y,
        carried,
        sources,
        query,
        prior,
        prior_lse,
        norm_weight,
        x,
        rstd,
        logits,
        lse,
        norm_rstd,
        heads,
        slice_norm,
        centered,
        scale,
        from_mix,
        residual_dtype,
    )


@_depth_mix_backward.register_fake
def _(
    grad,
    grad_y,
    carried,
    sources,
    query,
    prior,
    prior_lse,
    norm_weight,
    x,
    rstd,
    logits,
    lse,
    norm_rstd,
    heads,
    slice_norm,
    centered,
    scale,
    from_mix,
    residual_dtype,
):
    empty = query.new_empty(0)
    dresidual = query.new_empty(0, dtype=residual_dtype)
    if residual_dtype is not None:
        dresidual = query.new_empty(lse.shape[0], query.shape[0], dtype=residual_dtype)
    return (
        [s.new_empty(s.shape) for s in sources],
        query.new_empty(query.shape),
        empty if prior is None else prior.new_empty(prior.shape),
        empty.clone() if prior_lse is None else prior_lse.new_empty(prior_lse.shape),
        empty.clone() if norm_weight is None else norm_weight.new_empty(norm_weight.shape),
        dresidual,
    )


def delta_from_mix(
    num_sources: int, width: int, itemsize: int, residual: bool, centered: bool
) -> bool:
    """Whether backward takes delta from x: only where x is the mix and nothing else."""
    return num_sources * width * itemsize > FROM_MIX_BYTES and not residual and not centered


def save(ctx, inputs, output) -> None:
    sources, query, residual, prior, prior_lse, norm_weight, _, heads, slice_norm = inputs[:9]
    ctx.centered, ctx.scale = inputs[9], inputs[10]
    x, _, rstd, logits, lse, norm_rstd = output
    ctx.from_mix = len(sources) > 0 and delta_from_mix(
        len(sources),
        query.shape[0],
        sources[0].element_size(),
        residual is not None,
        ctx.centered,
    )
    has_norm = norm_weight is not None
    ctx.save_for_backward(
        *sources,
        query,
        prior,
        prior_lse,
        norm_weight,
        x if ctx.from_mix or has_norm else None,
        rstd,
        logits,
        lse,
        norm_rstd if has_norm else None,
    )
    ctx.heads, ctx.slice_norm = heads, slice_norm
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.num_inputs, ctx.num_sources = len(inputs), len(sources)


def gradients(ctx, saved, grad: Tensor | None, grad_y: Tensor | None, carried: list[Tensor]):
    """Of sources, query, residual, prior, prior_lse and norm weight; one grad may be absent.

    ``saved`` is ``ctx.saved_tensors``, which checkpointing lets a backward read only once.
    """
    *sources, query, prior, prior_lse, norm_weight, x, rstd, logits, lse, norm_rstd = saved
    if norm_weight is None:
        grad_y = None
    elif grad_y is None:
        norm_weight = norm_rstd = None
    # without a norm the residual's gradient is the incoming one, and costs nothing
    written = ctx.residual_dtype if grad_y is not None else None
    dsources, dquery, dprior, dprior_lse, dnorm, dresidual = (
        torch.ops.depthroute.depth_mix_triton_backward(
            grad,
            grad_y,
            carried,
            sources,
            query,
            prior,
            prior_lse,
            norm_weight,
            x if ctx.from_mix or grad_y is not None else None,
            rstd,
            logits,
            lse,
            norm_rstd,
            ctx.heads,
            ctx.slice_norm,
            ctx.centered,
            ctx.scale,
            ctx.from_mix,
            written,
        )
    )
    if ctx.residual_dtype is None:
        dresidual = None
    elif written is None:
        assert grad is not None
        dresidual = (grad if ctx.scale == 1.0 else grad * ctx.scale).to(ctx.residual_dtype)
    if prior is None:
        dprior = dprior_lse = None
    return dsources, dquery, dresidual, dprior, dprior_lse, dnorm if grad_y is not None else None


def _setup(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    save(ctx, inputs, output)


def _backward(ctx, grad, grad_y, *_):
    if grad is None and grad_y is None:
        return [None] * ctx.num_sources, *(None,) * (ctx.num_inputs - 1)
    return *gradients(ctx, ctx.saved_tensors, grad, grad_y, []), *(None,) * (ctx.num_inputs - 6)


torch.library.register_autograd("depthroute::depth_mix_triton", _backward, setup_context=_setup)
