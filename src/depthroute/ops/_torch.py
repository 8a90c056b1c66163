"""The torch backend: any device, no compilation, memory-sane.

Forward keeps one fp32 accumulator and, per source and token, a reciprocal rms and a logit; backward
recomputes the rest from the sources, so no fp32 copy of a source outlives its turn. Inside, tokens
are flattened: sources ``[N, D]``, query ``[D]`` (gain already folded in). A boundary's push and
norm are done around it (:mod:`depthroute.ops.mix`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthroute.ops import _record
from depthroute.ops._record import Mix, MixBackward, MixGradients, MixResults, num_norms

T = TypeVar("T")


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
_HAVE_AUTOCAST = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))
"""Asked once: a graph of torch 2.11 cannot, and ``meta`` has none and says so with an error."""


def is_autocast(device: str) -> bool:
    return device in _HAVE_AUTOCAST and torch.is_autocast_enabled(device)


def unrounded(device: str) -> AbstractContextManager[Any]:
    """Without autocast, which would round what goes into products to 16 bits."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


def _unrounded(function: Callable[[Any], T]) -> Callable[[Any], T]:
    @wraps(function)
    def run(record: Any) -> T:
        query = record.queries if hasattr(record, "queries") else record.query
        with unrounded("cpu" if query.is_cpu else query.device.type):
            return function(record)

    return run


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, which takes microseconds even to do nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def write_scores(
    sources: Sequence[Tensor], queries: Tensor, eps: float, rstd: Tensor, logits: Tensor
) -> None:
    """Writes 1/rms [S, N, 1|H] and logits [S, G, N, H] of every source, never copied.

    Small tensors cost a launch each, so whatever is per token is done for all sources at once. A
    product with each query alone: what a layer recomputes for fewer of them is the same to the bit.
    """
    width, dtype, parts, heads = *queries.shape[1:], queries.dtype, rstd.shape[-1], logits.shape[-1]
    sliced = queries.view(-1, heads, width // heads)
    for source, norm, dots in zip(sources, rstd.unbind(), logits.unbind(), strict=True):
        s = source if source.dtype == dtype else source.to(dtype)
        if parts == 1:
            torch.linalg.vector_norm(s, dim=-1, keepdim=True, out=norm)
        else:
            torch.linalg.vector_norm(s.unflatten(-1, (parts, -1)), dim=-1, out=norm)
        if heads == 1:
            for query, dot in zip(queries.unbind(), dots.squeeze(-1).unbind(), strict=True):
                torch.mv(s, query, out=dot)
        else:
            s = s.unflatten(-1, (heads, -1))
            for query, dot in zip(sliced.unbind(), dots.unbind(), strict=True):
                dot.copy_(torch.linalg.vecdot(s, query))
    rstd.square_().mul_(parts / width).add_(eps).rsqrt_()
    logits.mul_(rstd.unsqueeze(1))


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


def used_weights(logits: Tensor, offset: int, scale: float) -> Tensor:
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


def _split(stats: Tensor, count: int, record: Mix | MixBackward) -> tuple[Tensor, Tensor]:
    """1/rms [S, N, 1|H] and logits [S, N, H], one after the other in the room of ``stats``."""
    tokens, parts = stats.shape[:-1].numel(), num_norms(record)
    flat, end = stats.view(-1), count * tokens * parts
    return flat[:end].view(count, tokens, parts), flat[end:].view(count, tokens, record.heads)


def as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _with_prior(record: Any, sources: list[Tensor], logits: Tensor) -> tuple[list[Tensor], Tensor]:
    """Everything that has a weight, and the logits."""
    if record.prior is None:
        return sources, logits
    prior_lse = as_rows(record.prior_lse).unsqueeze(0)
    return [as_rows(record.prior), *sources], torch.cat([prior_lse, logits])


FEW_TOKENS, FEW_ELEMENTS = 16, 1 << 15
"""In all sources, up to which copying them side by side costs less than a call for each. So few
tokens are decoded, not trained on: what is recomputed in training is the same to the bit."""


def is_few(mix: Mix) -> bool:
    """Whether :func:`few_forward` does this mix, if nothing has to be kept for backward."""
    if mix.heads > 1 or mix.prior is not None or mix.offset or not mix.query.is_cpu:
        return False
    elements, width = mix.sources[0].numel(), mix.query.shape[0]
    return 0 < elements <= FEW_TOKENS * width and elements * len(mix.sources) <= FEW_ELEMENTS


@_unrounded
def few_forward(mix: Mix) -> Tensor:
    """x alone, in as few calls as possible: there a call costs more than its arithmetic."""
    query, shape, dtype = mix.query, mix.sources[0].shape, mix.query.dtype
    count, width, scale = len(mix.sources), shape[-1], mix.scale
    rows = _as(torch.stack(mix.sources), dtype).view(-1, width)
    rstd = torch.linalg.vector_norm(rows, dim=-1).square_().mul_(1.0 / width).add_(mix.eps).rsqrt_()
    weights = torch.softmax(torch.mv(rows, query).mul_(rstd).view(count, -1), 0)
    if scale != 1.0:  # divided, so that they are exactly 1 at zero queries when scale is S
        weights.div_(1.0 / scale if scale else math.inf)
    residual = None if mix.residual is None else _as(mix.residual, dtype)
    if len(rows) > count:  # more than one token
        x = rows.view(count, -1, width).mul_(weights.unsqueeze(-1)).sum(0).view(shape)
        x = x if residual is None else x.add_(residual, alpha=scale)
    elif residual is None:
        x = torch.mv(rows.t(), weights.view(count)).view(shape)
    else:
        x = torch.addmv(residual.view(width), rows.t(), weights.view(count), beta=scale).view(shape)
    return _as(x, mix.dtype)


@_unrounded
def mix_forward(mix: Mix) -> MixResults:
    query, scale, shape = mix.query, mix.scale, mix.example.shape
    sources = mix.sources if len(shape) == 2 else [as_rows(s) for s in mix.sources]
    stats = query.new_empty(*shape[:-1], mix.num_scores)
    rstd, logits = _split(stats, len(sources), mix)
    if sources:  # there may be a finished group with nothing newer
        write_scores(sources, query.unsqueeze(0), mix.eps, rstd, logits.unsqueeze(1))
    values, logits = _with_prior(mix, sources, logits)
    x = weighted_sum(used_weights(logits, mix.offset, scale), values)
    if mix.residual is not None:
        x.add_(as_rows(mix.residual), alpha=scale)
    return stats, [_as(x, mix.dtype).view(shape)]


def weighted_sum(weights: Tensor, values: Sequence[Tensor], start: Tensor | None = None) -> Tensor:
    """``start`` and weights [S, ..., H] times values [..., D], unrounded."""
    dtype, (weight, *others) = weights.dtype, _spread(weights, values[0].shape[-1]).unbind()
    first = _as(values[0], dtype)
    x = weight * first if start is None else torch.addcmul(start, weight, first)
    for weight, value in zip(others, values[1:], strict=True):
        x.addcmul_(weight, value if value.dtype == dtype else value.to(dtype))
    return x


@_unrounded
def mix_backward(back: MixBackward) -> MixGradients:
    """With u_n = dx . s_n and delta = sum alpha_n u_n:  ds_n = alpha_n (u_n - delta);
    dsource_n = alpha_n dx + ds_n r_n (q - khat_n logit_n / D);  dq = sum ds_n khat_n.
    """
    assert back.grad is not None
    query, heads, prior, shape = back.query, back.heads, back.prior, back.grad.shape
    dtype, width = query.dtype, shape[-1]
    dx, sources = _as(as_rows(back.grad), dtype), [as_rows(s) for s in back.sources]
    dx = dx if back.scale == 1.0 else dx * back.scale
    rstd, logits = _split(back.stats, len(sources), back)
    values, every = _with_prior(back, sources, logits)
    values = [_as(value, dtype) for value in values]
    weights, dlogits = weight_gradients([dx], every.unsqueeze(1), values, back.offset)
    weights, dlogits = weights.squeeze(1), dlogits.squeeze(1)
    others = []
    if prior is not None and back.prior_lse is not None:
        dprior = (_spread(weights[0], width) * dx).to(prior.dtype)
        others = [dprior.view(shape), dlogits[0].clone().view(back.prior_lse.shape)]
        dlogits, weights, values = dlogits[1:], weights[1:], values[1:]
    dquery = torch.zeros_like(query)
    through, pull = _through_norm(dlogits, logits, rstd, width)
    dsources, source_dtype = [], sources[0].dtype if sources else dtype
    factors = (_spread(t, width).unbind() for t in (weights, through, pull))
    of_sources = zip(values, through.unbind(), *factors, strict=True)
    for s, of_query, weight, to_query, to_source in of_sources:
        if heads == 1:
            dquery.addmv_(s.t(), of_query.squeeze(-1))
        else:
            dquery += torch.einsum("nh,nhd->hd", of_query, s.unflatten(-1, (heads, -1))).flatten()
        out = (weight * dx).addcmul_(to_query, query).addcmul_(to_source, s)
        dsources.append(_as(out, source_dtype).view(shape))
    return dsources, dquery.unsqueeze(0), others


def weight_gradients(
    grads: Sequence[Tensor], logits: Tensor, values: Sequence[Tensor], offset: int
) -> tuple[Tensor, Tensor]:
    """The weights, and the gradients of the logits [S, G, ..., H], of G reads."""
    alpha = torch.softmax(logits, 0)  # exp(logit - lse) would lose digits where logits are large
    u, heads, dtype = torch.empty_like(alpha), logits.shape[-1], logits.dtype
    for value, dots in zip(values, u.unbind(), strict=True):
        wide_value = value if value.dtype == dtype else value.to(dtype)
        for dx, dot in zip(grads, dots.unbind(), strict=True):
            _pair_dot(dx, wide_value, heads, dot)
    of_weights = alpha * u
    dlogits = torch.addcmul(of_weights, alpha, of_weights.sum(0), value=-1.0)
    if offset:
        alpha = alpha + (1.0 if offset > 0 else -1.0 / len(values))
    return alpha, dlogits


def score_gradients(
    source: Tensor, queries: Tensor, rstd: Tensor, logits: Tensor, dlogits: Tensor
) -> tuple[Tensor, Tensor]:
    """Of a source, unrounded, and of its queries from those of its logits [G, N, H]."""
    (count, width), heads = queries.shape, logits.shape[-1]
    s = _as(as_rows(source), queries.dtype)
    through, pull = _through_norm(dlogits, logits, rstd, width)
    dsource = _spread(pull.sum(0), width) * s
    with unrounded(source.device.type):
        if heads == 1:
            flat = through.view(count, -1)
            return dsource.addmm_(flat.t(), queries), flat @ s
        sliced, heads_of = queries.view(count, heads, -1), s.unflatten(-1, (heads, -1))
        dsource += torch.einsum("gnh,ghd->nhd", through, sliced).flatten(-2)
        return dsource, torch.einsum("gnh,nhd->ghd", through, heads_of).flatten(-2)


def _through_norm(
    dlogits: Tensor, logits: Tensor, rstd: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """What multiplies q and s in a source's gradient: r ds, and -(sum_h ds logit) r^2 / D.

    The sum runs over the heads that share a norm; a slice normalised on its own has D/H entries.
    """
    through, parts = dlogits * rstd, rstd.shape[-1]
    pull = through * logits
    if parts != pull.shape[-1]:
        pull = pull.sum(-1, keepdim=True)
    return through, pull.mul_(rstd).mul_(-parts / width)


@_unrounded
def group_forward(group: _record.Group) -> _record.GroupResults:
    sources, queries, heads = group.sources, group.queries, group.heads
    (tokens, width), count, dtype = sources[0].shape, queries.shape[0], queries.dtype
    rstd = queries.new_empty(tokens, len(sources), num_norms(group))
    logits = queries.new_empty(tokens, len(sources), count, heads)
    room = _by_source(rstd, logits)
    write_scores(sources, queries, group.eps, *room)
    lse = torch.logsumexp(room[1], 0)
    out = queries.new_zeros(count, tokens, width)
    for n, source in enumerate(sources):
        s, alpha = source.to(dtype), (room[1][n] - lse).exp_()
        for g in range(count):
            out[g].addcmul_(_spread(alpha[g], width), s)
    return _as(out, group.dtype), lse, rstd, logits


def _by_source(rstd: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As [S, N, 1|H] and [S, G, N, H]: what is kept is written in that order."""
    tokens, num_sources, count, heads = logits.shape
    norms = rstd.shape[-1]
    return rstd.view(num_sources, tokens, norms), logits.view(num_sources, count, tokens, heads)


@_unrounded
def group_backward(back: _record.GroupBackward) -> _record.GroupGradients:
    """As :func:`mix_backward` for every query at once, with ``grad_lse`` joining the logits."""
    queries, heads, sources = back.queries, back.heads, back.sources
    dtype, (count, width) = queries.dtype, queries.shape
    rstd, logits = _by_source(back.rstd, back.logits)
    dx = [grad.to(dtype) for grad in back.grads]
    alpha = (logits - back.lse).exp_()
    u = torch.empty_like(alpha)
    for n, source in enumerate(sources):
        s = source.to(dtype)
        for g in range(count):
            _pair_dot(dx[g], s, heads, u[n, g])
    dlogits = alpha * (u - (alpha * u).sum(0) + back.grad_lse)
    dqueries = torch.zeros_like(queries)
    dsources = []
    for n, source in enumerate(sources):
        total, dq = score_gradients(source, queries, rstd[n], logits[n], dlogits[n])
        dqueries += dq
        for g in range(count):
            total.addcmul_(_spread(alpha[n, g], width), dx[g])
        dsources.append(total.to(source.dtype))
    return dsources, dqueries


@_unrounded
def attention_forward(mix: _record.AttentionMix) -> tuple[Tensor, list[Tensor]]:
    """Mixed values [B, Hkv, T, dv] and weights [J, B, Hkv, T]."""
    query, keys, values, scaling = mix
    dtype = wide(query.dtype)
    qbar = _grouped_mean(_as(query, dtype), keys[0].shape[1])
    if len(keys) * values[0].numel() <= FEW_ELEMENTS:
        every, mixed = _as(torch.stack(keys), dtype), _as(torch.stack(values), dtype)
        alpha = torch.softmax(torch.linalg.vecdot(qbar, every).mul_(scaling), 0)
        return _as(mixed.mul_(alpha.unsqueeze(-1)).sum(0), values[-1].dtype), [alpha]
    logits = torch.stack([torch.linalg.vecdot(qbar, _as(k, dtype)) for k in keys])
    alpha = torch.softmax(logits.mul_(scaling), 0)
    weights = alpha.unsqueeze(-1).unbind()
    out = weights[0] * _as(values[0], dtype)
    for weight, value in zip(weights[1:], values[1:], strict=True):
        out.addcmul_(weight, _as(value, dtype))
    return _as(out, values[-1].dtype), [alpha]


@_unrounded
def attention_backward(
    back: _record.AttentionBackward,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    query, keys, values, (alpha,), scaling = back[3:]
    dtype = wide(query.dtype)
    dout, *others = (_as(grad, dtype) for grad in back.grads)
    for other in others:
        dout = dout + other
    arrived = back.arrived()
    of_query, of_keys, of_values = arrived[0], arrived[1 : 1 + len(keys)], arrived[1 + len(keys) :]
    qbar = _grouped_mean(query.to(dtype), keys[0].shape[1])
    u = torch.stack([torch.linalg.vecdot(dout, v.to(dtype)) for v in values])
    dlogits = (alpha * (u - (alpha * u).sum(0))).mul_(scaling)
    dqbar = torch.zeros_like(qbar)
    dkeys, dvalues = [], []
    weights, dlogits = alpha.unsqueeze(-1).unbind(), dlogits.unsqueeze(-1).unbind()
    for weight, ds, key, value, of_key, of_value in zip(
        weights, dlogits, keys, values, of_keys, of_values, strict=True
    ):
        dqbar.addcmul_(ds, key.to(dtype))
        dkeys.append(_product_and_rest(ds, qbar, of_key, key))
        dvalues.append(_product_and_rest(weight, dout, of_value, value))
    dquery = torch.empty_like(query, dtype=dtype)
    groups, repeats = dqbar.shape[1], query.shape[1] // dqbar.shape[1]
    dquery.unflatten(1, (groups, repeats)).copy_(dqbar.div_(repeats).unsqueeze(2))
    for other in of_query:
        dquery.add_(other)
    return _as(dquery, query.dtype), dkeys, dvalues


def _product_and_rest(a: Tensor, b: Tensor, rest: Sequence[Tensor], like: Tensor) -> Tensor:
    """``a * b`` and the ``rest`` added to it, lying in memory as ``like`` does."""
    total = torch.empty_like(like, dtype=a.dtype)
    if not rest:
        torch.mul(a, b, out=total)
    else:
        torch.addcmul(_as(rest[0], a.dtype), a, b, out=total)
    for other in rest[1:]:
        total.add_(other)
    return _as(total, like.dtype)


def _grouped_mean(query: Tensor, groups: int) -> Tensor:
    if query.shape[1] == groups:
        return query
    return query.unflatten(1, (groups, -1)).mean(2)
