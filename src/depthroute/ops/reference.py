"""The definition of every operator, written as the equations are.

Legend: ``S`` sources along depth, ``D`` width, ``H`` routing heads, ``G`` queries of a group. All
arithmetic is in fp32, or fp64 for fp64 inputs, and the result is rounded once. Sources come as a
list and are never stacked. These functions are what every other implementation is tested against;
use :mod:`depthroute.ops` for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SINKHORN_ITERATIONS = 20
"""Of columns and rows, as published for mHC."""


def widen(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Float[Tensor, "*tokens D"], weight: Float[Tensor, " D"], eps: float = 1e-6
) -> Float[Tensor, "*tokens D"]:
    """A sublayer's pre-norm, y = weight * x / rms(x), rounded once."""
    wide = widen(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(weight)
    return y.to(x.dtype)


def depth_logits(
    sources: Sequence[Float[Tensor, "*tokens D"]],
    query: Float[Tensor, " D"],
    key_weight: Float[Tensor, " D"] | None = None,
    *,
    eps: float = 1e-6,
    heads: int = 1,
    head_norm: str = "full",
) -> Float[Tensor, "S *tokens H"]:
    """logit_n = w . (g * RMSNorm(s_n)), per head after slicing the width into H groups.

    ``head_norm="full"`` normalises over the whole width before slicing (MHAR eq. 3); ``"slice"``
    normalises each slice, as MHAR's listing does.
    """
    q = _folded(query, key_weight, sources[0]).unflatten(-1, (heads, -1))
    logits = []
    for source in sources:
        s = widen(source).unflatten(-1, (heads, -1))
        dims = (-2, -1) if head_norm == "full" else (-1,)
        khat = s * torch.rsqrt(s.square().mean(dims, keepdim=True) + eps)
        logits.append((q * khat).sum(-1))
    return torch.stack(logits)


def depth_mix(
    sources: Sequence[Float[Tensor, "*tokens D"]],
    query: Float[Tensor, " D"],
    key_weight: Float[Tensor, " D"] | None = None,
    *,
    residual: Float[Tensor, "*tokens D"] | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    head_norm: str = "full",
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
) -> Any:
    """x = scale * (residual + sum_n alpha_n s_n), alpha = softmax_n(logit_n)  (AttnRes eq. 2-4).

    ``centered`` uses ``alpha_n - 1/S`` instead, which vanishes exactly at zero queries;
    ``adds_sources`` uses ``1 + alpha_n``: the sources' own sum besides the mix.
    """
    logits = depth_logits(sources, query, key_weight, eps=eps, heads=heads, head_norm=head_norm)
    alpha = torch.softmax(logits, dim=0)
    x = _mixed(alpha, sources, residual, centered, adds_sources, scale, dtype)
    return (x, alpha) if return_weights else x


def static_weights(
    logits: Float[Tensor, " S"], sources: Sequence[Float[Tensor, "*tokens D"]]
) -> Float[Tensor, " S"]:
    """softmax(logits), one weight a source, at the precision of the sum that it is used in."""
    return torch.softmax(_folded(logits, None, sources[0]), dim=0)


def static_mix(
    sources: Sequence[Float[Tensor, "*tokens D"]],
    logits: Float[Tensor, " S"],
    *,
    residual: Float[Tensor, "*tokens D"] | None = None,
    centered: bool = False,
    adds_sources: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*tokens D"]:
    """x = scale * (residual + sum_n alpha_n s_n), alpha = softmax(logits): no token has a say."""
    alpha = static_weights(logits, sources)
    return _mixed(alpha[:, None], sources, residual, centered, adds_sources, scale, dtype)


def depth_mix_group(
    sources: Sequence[Float[Tensor, "*tokens D"]],
    queries: Float[Tensor, "G D"],
    key_weights: Float[Tensor, "G D"] | None = None,
    *,
    eps: float = 1e-6,
    heads: int = 1,
    head_norm: str = "full",
) -> tuple[Float[Tensor, "G *tokens D"], Float[Tensor, "G *tokens H"]]:
    """Phase 1 (AttnRes section 4): every query of a group over the finished sources.

    Returns the normalised outputs, not yet rounded, and the log-sum-exp of their logits.
    """
    outputs, lses = [], []
    for g, query in enumerate(queries):
        gain = None if key_weights is None else key_weights[g]
        logits = depth_logits(sources, query, gain, eps=eps, heads=heads, head_norm=head_norm)
        outputs.append(_weighted_sum(torch.softmax(logits, dim=0), sources))
        lses.append(torch.logsumexp(logits, dim=0))
    return torch.stack(outputs), torch.stack(lses)


def depth_mix_merge(
    prior: Float[Tensor, "*tokens D"],
    prior_lse: Float[Tensor, "*tokens H"],
    sources: Sequence[Float[Tensor, "*tokens D"]],
    query: Float[Tensor, " D"],
    key_weight: Float[Tensor, " D"] | None = None,
    *,
    residual: Float[Tensor, "*tokens D"] | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    head_norm: str = "full",
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*tokens D"]:
    """Phase 2: the finished sources' output and the few newer sources, merged exactly.

    A finished group behaves as one source whose value is ``prior`` and whose logit is
    ``prior_lse``; with a single newer source this is ``o + sigmoid(s - lse) * (partial - o)``.
    """
    logits = prior_lse.unsqueeze(0)
    if sources:
        newer = depth_logits(sources, query, key_weight, eps=eps, heads=heads, head_norm=head_norm)
        logits = torch.cat([logits, newer])
    alpha = torch.softmax(logits, dim=0)
    example = residual if residual is not None else (sources[0] if sources else prior)
    dtype = dtype or example.dtype
    return _mixed(alpha, [prior, *sources], residual, False, False, scale, dtype)


def merge_partials(
    outputs: Sequence[Float[Tensor, "*tokens D"]], lses: Sequence[Float[Tensor, "*tokens H"]]
) -> tuple[Float[Tensor, "*tokens D"], Float[Tensor, "*tokens H"]]:
    """Outputs and log-sum-exps over disjoint sets of sources, as if over their union."""
    stacked = torch.stack(list(lses))
    weights = torch.softmax(stacked, dim=0)
    return _weighted_sum(weights, outputs), torch.logsumexp(stacked, dim=0)


def depth_attention_mix(
    query: Float[Tensor, "B Hq T d"],
    keys: Sequence[Float[Tensor, "B Hkv T d"]],
    values: Sequence[Float[Tensor, "B Hkv T dv"]],
    *,
    scaling: float | None = None,
    return_weights: bool = False,
) -> Any:
    """vt = sum_j alpha_j v_j, alpha = softmax_j(qbar . k_j / sqrt(d))  (Depth-Attention eq. 3-4).

    ``qbar`` is the mean of the query heads that share a KV head. Self comes last in both lists;
    earlier layers give their already mixed values.
    """
    scaling = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    qbar = widen(query).unflatten(1, (keys[0].shape[1], -1)).mean(2)
    logits = torch.stack([(qbar * widen(k)).sum(-1) * scaling for k in keys])
    alpha = torch.softmax(logits, dim=0)
    mixed = sum(a.unsqueeze(-1) * widen(v) for a, v in zip(alpha, values, strict=True))
    assert isinstance(mixed, Tensor)
    mixed = mixed.to(values[-1].dtype)
    return (mixed, alpha) if return_weights else mixed


def value_residual(
    value: Float[Tensor, "*tokens dv"],
    first: Float[Tensor, "*tokens dv"],
    weight: Float[Tensor, " 1"],
    first_weight: Float[Tensor, " 1"],
) -> Float[Tensor, "*tokens dv"]:
    """v' = a v + b v_0: the first layer's value beside a layer's own (Value Residual Learning,
    arXiv 2410.17897, Learnable-ResFormer: a is its lambda_{n,2} and b its lambda_{n,1})."""
    a, b = (_folded(number, None, value) for number in (weight, first_weight))
    return (a * widen(value) + b * widen(first)).to(value.dtype)


def mapped_logits(
    logits: Float[Tensor, "*tokens V"], scale: float = 1.0, softcap: float | None = None
) -> Float[Tensor, "*tokens V"]:
    """z = scale logits; with a softcap c, c tanh(z / c)."""
    z = scale * widen(logits)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    hidden: Float[Tensor, "*tokens D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*tokens"],
    bias: Float[Tensor, " V"] | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """sum over tokens of log sum_v exp(z_v) - z_target, z of the logits hidden W^T + bias.

    Tokens whose target is ``ignore_index`` count for nothing. The product is at the precision of
    its inputs, as a model's head computes it.
    """
    z = mapped_logits(torch.nn.functional.linear(hidden, weight, bias), scale, softcap)
    is_counted = targets != ignore_index
    places = torch.where(is_counted, targets, 0).unsqueeze(-1)
    losses = torch.logsumexp(z, dim=-1) - z.gather(-1, places).squeeze(-1)
    return torch.where(is_counted, losses, 0.0).sum()


def doubly_stochastic(
    logits: Float[Tensor, "*tokens n n"],
) -> Float[Tensor, "*tokens n n"]:
    """exp(logits), its columns and then its rows divided by their sums, twenty times.

    The first two by logarithms: no exponential overflows, and every sum after them lies between
    1/n and n, so none vanishes.
    """
    matrix = torch.softmax(torch.log_softmax(logits, -2), -1)
    for _ in range(SINKHORN_ITERATIONS - 1):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def hyper_weights(
    streams: Float[Tensor, "*tokens n D"],
    projection: Float[Tensor, "m nD"],
    bias: Float[Tensor, " m"],
    factors: Float[Tensor, "3"],
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """H_pre [*tokens n], H_post [*tokens n] and H_res [*tokens n n] (mHC eq. 14-19).

    xbar = RMSNorm of all streams side by side;  Ht = a * (xbar phi) + b for each of the three;
    H_pre = sigmoid(Ht_pre),  H_post = 2 sigmoid(Ht_post),  H_res = doubly_stochastic(Ht_res).
    """
    flat = widen(streams).flatten(-2)
    xbar = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    projected = torch.stack([(xbar * phi).sum(-1) for phi in projection.to(flat.dtype)], -1)
    pre, post, res = hyper_logits(projected, bias, factors, streams.shape[-2])
    return torch.sigmoid(pre), 2 * torch.sigmoid(post), doubly_stochastic(res)


def hyper_logits(
    projected: Float[Tensor, "*tokens m"],
    bias: Float[Tensor, " m"],
    factors: Float[Tensor, "3"],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """a * projected + b, for pre, post and res in this order, of ``count`` streams."""
    sizes = count, count, count * count
    pieces = zip(
        factors.to(projected.dtype),
        projected.split(sizes, -1),
        bias.to(projected.dtype).split(sizes),
        strict=True,
    )
    pre, post, res = (a * u + b for a, u, b in pieces)
    return pre, post, res.unflatten(-1, (count, count))


def hyper_read(
    streams: Float[Tensor, "*tokens n D"],
    projection: Float[Tensor, "m nD"],
    bias: Float[Tensor, " m"],
    factors: Float[Tensor, "3"],
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """x = H_pre X, and H_post and H_res for :func:`hyper_write`."""
    pre, post, res = hyper_weights(streams, projection, bias, factors, eps=eps)
    return (pre.unsqueeze(-1) * widen(streams)).sum(-2).to(streams.dtype), post, res


def hyper_write(
    streams: Float[Tensor, "*tokens n D"],
    output: Float[Tensor, "*tokens D"],
    post: Float[Tensor, "*tokens n"],
    res: Float[Tensor, "*tokens n n"],
) -> Float[Tensor, "*tokens n D"]:
    """X' = H_res X + H_post^T output, rounded once."""
    mixed = (res.unsqueeze(-1) * widen(streams).unsqueeze(-3)).sum(-2)
    written = mixed + post.unsqueeze(-1) * widen(output).unsqueeze(-2)
    return written.to(streams.dtype)


def _folded(query: Tensor, key_weight: Tensor | None, like: Tensor) -> Tensor:
    """q = g * w, once, at the precision of the statistics."""
    q = query if key_weight is None else widen(query) * widen(key_weight)
    return q.to(torch.promote_types(torch.promote_types(q.dtype, like.dtype), torch.float32))


def _mixed(
    alpha: Tensor,
    sources: Sequence[Tensor],
    residual: Tensor | None,
    centered: bool,
    adds_sources: bool,
    scale: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """scale * (residual + sum_n alpha_n s_n), the weights shifted where asked."""
    used = alpha - 1.0 / len(sources) if centered else alpha + 1.0 if adds_sources else alpha
    mix = _weighted_sum(used * scale, sources)
    if residual is not None:
        mix = scale * widen(residual) + mix
    return mix.to(dtype or sources[0].dtype)


def _weighted_sum(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_n weights_n s_n with weights [S, *tokens, H], each head weighting its slice."""
    heads = weights.shape[-1]
    total = None
    for weight, source in zip(weights, sources, strict=True):
        term = (weight.unsqueeze(-1) * widen(source).unflatten(-1, (heads, -1))).flatten(-2)
        total = term if total is None else total + term
    assert total is not None
    return total
