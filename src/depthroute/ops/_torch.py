"""The torch backend: any device, no compilation, memory-sane.

Forward keeps one fp32 accumulator and, per source and token, a reciprocal rms and a logit; backward
recomputes the rest from the sources, so no fp32 copy of a source outlives its turn. All functions
work on flattened tokens: sources ``[N, D]``, query ``[D]`` (gain already folded in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _unrounded(function: F) -> F:
    """Without autocast, which would round what goes into dot products to 16 bits."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        device = (args[0] if isinstance(args[0], Tensor) else args[1]).device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return cast(F, run)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, which takes microseconds even to do nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _scores(
    sources: Sequence[Tensor], queries: Tensor, eps: float, heads: int, slice_norm: bool
) -> tuple[Tensor, Tensor]:
    """1/rms [S, N, 1|H] and logits [S, G, N, H] of every source, each read twice and never copied.

    Small tensors cost a launch each, so whatever is per token is done for all sources at once.
    """
    tokens, width = sources[0].shape
    count, dtype = queries.shape[0], queries.dtype
    parts = heads if slice_norm else 1
    norms = queries.new_empty(len(sources), tokens, parts)
    dots = queries.new_empty(len(sources), count, tokens, heads)
    sliced = queries.view(count, heads, -1)
    for n, source in enumerate(sources):
        s = _as(source, dtype)
        if parts == 1:
            torch.linalg.vector_norm(s, dim=-1, keepdim=True, out=norms[n])
        else:
            torch.linalg.vector_norm(s.unflatten(-1, (parts, -1)), dim=-1, out=norms[n])
        if heads == 1 and count == 1:
            torch.mv(s, queries[0], out=dots[n].view(tokens))
        else:
            dots[n] = torch.einsum("nhd,ghd->gnh", s.unflatten(-1, (heads, -1)), sliced)
    rstd = norms.square_().mul_(parts / width).add_(eps).rsqrt_()
    return rstd, dots.mul_(rstd.unsqueeze(1))


def _pair_dot(a: Tensor, b: Tensor, heads: int, out: Tensor) -> None:
    """a . b per token and head, into ``out`` [N, H]."""
    if heads == 1:
        torch.linalg.vecdot(a, b, out=out.squeeze(-1))
    else:
        a, b = a.unflatten(-1, (heads, -1)), b.unflatten(-1, (heads, -1))
        torch.linalg.vecdot(a, b, out=out)


def _spread(w: Tensor, width: int) -> Tensor:
    """Per-head weights [N, H] as something that multiplies [N, D]."""
    return w if w.shape[-1] == 1 else w.repeat_interleave(width // w.shape[-1], dim=-1)


def _weights(logits: Tensor, offset: int, scale: float) -> Tensor:
    """What multiplies each source, [S, N, H]."""
    if scale == 1.0 and offset >= 0:
        weights = torch.softmax(logits, 0)
        return weights.add_(1.0) if offset else weights
    exponentials = (logits - logits.amax(0)).exp_()
    total = exponentials.sum(0)
    # scale/total before multiplying: weights are exactly 1 at zero queries when scale is S
    # (tensor by tensor: a Python number over a tensor is a rounded reciprocal and a product)
    scales = torch.full_like(total, scale)
    weights = exponentials * (scales / total)
    if offset < 0:
        weights -= scales / torch.full_like(total, logits.shape[0])
    elif offset > 0:
        weights += scale
    return weights


@_unrounded
def mix_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    residual: Tensor | None,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    eps: float,
    heads: int,
    slice_norm: bool,
    offset: int,
    scale: float,
    out_dtype: torch.dtype,
    needs_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, D], rstd [S, N, 1|H], logits [S, N, H], lse [N, H].

    ``offset``: weights are alpha_n, alpha_n + 1 (1) or alpha_n - 1/S (-1). Backward here takes the
    softmax of the logits, so an eager call leaves out lse.
    """
    tokens, width = (prior if prior is not None else sources[0]).shape
    dtype = query.dtype
    if sources:
        rstd, logits = _scores(sources, query.unsqueeze(0), eps, heads, slice_norm)
        logits = logits.squeeze(1)
    else:  # a finished group with nothing newer
        rstd = query.new_empty(0, tokens, heads if slice_norm else 1)
        logits = query.new_empty(0, tokens, heads)
    every = logits if prior_lse is None else torch.cat([prior_lse.unsqueeze(0), logits])
    lse = torch.logsumexp(every, 0) if needs_lse else every.new_empty(0)
    weights = _weights(every, offset, scale)
    values = list(sources) if prior is None else [prior, *sources]
    terms = [
        (_spread(weight, width), _as(value, dtype))
        for weight, value in zip(weights, values, strict=True)
    ]
    weight, value = terms[0]
    if residual is None:
        out = weight * value
    else:
        start = _as(residual, dtype)
        out = torch.addcmul(start if scale == 1.0 else start * scale, weight, value)
    for weight, value in terms[1:]:
        out.addcmul_(weight, value)
    return _as(out, out_dtype), rstd, logits, lse


@_unrounded
def mix_backward(
    grad: Tensor,
    sources: Sequence[Tensor],
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
    """Gradients of the sources, the query, the prior and its lse.

    With u_n = dx . s_n and delta = sum alpha_n u_n:  ds_n = alpha_n (u_n - delta);
    dsource_n = alpha_n dx + ds_n r_n (q - khat_n logit_n / D);  dq = sum ds_n khat_n.
    """
    dtype, width = query.dtype, grad.shape[-1]
    dx = _as(grad, dtype)
    if scale != 1.0:
        dx = dx * scale
    every = logits if prior_lse is None else torch.cat([prior_lse.unsqueeze(0), logits])
    values = list(sources) if prior is None else [prior, *sources]
    alpha = torch.softmax(every, 0)  # exp(logit - lse) would lose digits where logits are large
    u = torch.empty_like(alpha)
    for n, value in enumerate(values):
        _pair_dot(dx, _as(value, dtype), heads, u[n])
    weighted = alpha * u
    dlogits = torch.addcmul(weighted, alpha, weighted.sum(0), value=-1.0)
    weights = alpha - 1.0 / len(values) if offset < 0 else alpha + 1.0 if offset > 0 else alpha
    dprior, dprior_lse = dx.new_empty(0), dx.new_empty(0)
    if prior is not None:
        dprior = (_spread(weights[0], width) * dx).to(prior.dtype)
        dprior_lse, dlogits, weights = dlogits[0].clone(), dlogits[1:], weights[1:]
    dquery = torch.zeros_like(query)
    through, pull = _through_norm(dlogits, logits, rstd, width)
    dsources = []
    for n, source in enumerate(sources):
        s = _as(source, dtype)
        _add_query_gradient(dquery, through[n], s, heads)
        out = _spread(weights[n], width) * dx
        out.addcmul_(_spread(through[n], width), query.expand_as(out))
        out.addcmul_(_spread(pull[n], width), s)
        dsources.append(_as(out, source.dtype))
    return dsources, dquery, dprior, dprior_lse


def _through_norm(
    dlogits: Tensor, logits: Tensor, rstd: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """What multiplies q and s in a source's gradient: r ds, and -(sum_h ds logit) r^2 / D.

    The sum runs over the heads that share a norm; a slice normalised on its own has D/H entries.
    """
    through = dlogits * rstd
    parts = rstd.shape[-1]
    pull = through * logits
    if parts != pull.shape[-1]:
        pull = pull.sum(-1, keepdim=True)
    return through, pull.mul_(rstd).mul_(-parts / width)


def _add_query_gradient(dquery: Tensor, through: Tensor, s: Tensor, heads: int) -> None:
    """dq += sum over tokens of ds_n khat_n."""
    if heads == 1:
        dquery.addmv_(s.t(), through.squeeze(-1))
    else:
        grouped = torch.einsum("nh,nhd->hd", through, s.unflatten(-1, (heads, -1)))
        dquery.add_(grouped.reshape(-1))


@_unrounded
def group_forward(
    sources: Sequence[Tensor], queries: Tensor, eps: float, heads: int, slice_norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """outputs [G, N, D], lse [G, N, H], rstd [S, N, 1|H], logits [S, G, N, H]."""
    tokens, width = sources[0].shape
    count, dtype = queries.shape[0], queries.dtype
    rstd, logits = _scores(sources, queries, eps, heads, slice_norm)
    lse = torch.logsumexp(logits, 0)
    out = queries.new_zeros(count, tokens, width)
    for n, source in enumerate(sources):
        s, alpha = source.to(dtype), (logits[n] - lse).exp_()
        for g in range(count):
            out[g].addcmul_(_spread(alpha[g], width), s)
    return out, lse, rstd, logits


@_unrounded
def group_backward(
    grad: Tensor,
    grad_lse: Tensor,
    sources: Sequence[Tensor],
    queries: Tensor,
    rstd: Tensor,
    logits: Tensor,
    lse: Tensor,
    heads: int,
) -> tuple[list[Tensor], Tensor]:
    """As :func:`mix_backward` for every query at once, with ``grad_lse`` joining the logits."""
    dtype, count = queries.dtype, queries.shape[0]
    width = grad.shape[-1]
    dx = grad.to(dtype)
    alpha = (logits - lse).exp_()
    u = torch.empty_like(alpha)
    for n, source in enumerate(sources):
        s = source.to(dtype)
        for g in range(count):
            _pair_dot(dx[g], s, heads, u[n, g])
    dlogits = alpha * (u - (alpha * u).sum(0) + grad_lse)
    through, pull = _through_norm(dlogits, logits, rstd.unsqueeze(1), width)
    pull = pull.sum(1)
    dqueries = torch.zeros_like(queries)
    dsources = []
    for n, source in enumerate(sources):
        s = source.to(dtype)
        total = _spread(pull[n], width) * s
        for g in range(count):
            _add_query_gradient(dqueries[g], through[n, g], s, heads)
            total.addcmul_(_spread(alpha[n, g], width), dx[g])
            total.addcmul_(_spread(through[n, g], width), queries[g].expand_as(total))
        dsources.append(total.to(source.dtype))
    return dsources, dqueries


@_unrounded
def attention_mix_forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float
) -> tuple[Tensor, Tensor]:
    """Mixed values [B, Hkv, T, dv] and weights [J, B, Hkv, T]."""
    dtype = wide(query.dtype)
    qbar = _grouped_mean(query.to(dtype), keys[0].shape[1])
    logits = torch.stack([torch.linalg.vecdot(qbar, k.to(dtype)) for k in keys])
    alpha = torch.softmax(logits.mul_(scaling), 0)
    out = alpha[0].unsqueeze(-1) * values[0].to(dtype)
    for weight, value in zip(alpha[1:], values[1:], strict=True):
        out.addcmul_(weight.unsqueeze(-1), value.to(dtype))
    return out.to(values[-1].dtype), alpha


@_unrounded
def attention_mix_backward(
    grad: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    alpha: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    dtype = wide(query.dtype)
    dout = grad.to(dtype)
    groups = keys[0].shape[1]
    qbar = _grouped_mean(query.to(dtype), groups)
    u = torch.stack([torch.linalg.vecdot(dout, v.to(dtype)) for v in values])
    dlogits = (alpha * (u - (alpha * u).sum(0))).mul_(scaling)
    dqbar = torch.zeros_like(qbar)
    dkeys, dvalues = [], []
    for weight, ds, key, value in zip(alpha, dlogits, keys, values, strict=True):
        dqbar.addcmul_(ds.unsqueeze(-1), key.to(dtype))
        dkeys.append((ds.unsqueeze(-1) * qbar).to(key.dtype))
        dvalues.append((weight.unsqueeze(-1) * dout).to(value.dtype))
    repeat = query.shape[1] // groups
    dquery = dqbar.div_(repeat).repeat_interleave(repeat, dim=1).to(query.dtype)
    return dquery, dkeys, dvalues


def _grouped_mean(query: Tensor, groups: int) -> Tensor:
    if query.shape[1] == groups:
        return query
    return query.unflatten(1, (groups, -1)).mean(2)
