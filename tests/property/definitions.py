"""The methods written a second time, straight from their definitions and as naively as possible.

Nothing here imports the plan, the stream or the operators: a source is the *set of terms it sums*
(-1 for the embedding, ``i`` for the output of sublayer ``i``), kept by a loop that follows the
text, so agreement with the package is agreement between two readings of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EMBEDDING = -1
Terms = frozenset[int]


def block_sources(
    count: int, size: int, *, include_partial: bool, embedding: bool = True
) -> list[list[Terms]]:
    """Sources before each of ``count`` sublayers, and at the end: block deltas."""
    finished = [frozenset({EMBEDDING})] if embedding else []
    current: set[int] = set()
    places = []
    for sublayer in range(count):
        partial = [frozenset(current)] if current and include_partial else []
        places.append(finished + partial)
        current.add(sublayer)
        if len(current) == size:
            finished, current = [*finished, frozenset(current)], set()
    return [*places, finished + ([frozenset(current)] if current else [])]


def cumulative_sources(count: int, size: int, *, embedding: bool = True) -> list[list[Terms]]:
    """States h_0, h_size, h_2*size, ..., and at the end the last state of all."""
    state = frozenset({EMBEDDING})
    kept = [state] if embedding else []
    places = []
    for sublayer in range(count):
        places.append(kept)
        state = state | {sublayer}
        if (sublayer + 1) % size == 0:
            kept = [*kept, state]
    return [*places, kept if count % size == 0 else [*kept, state]]


def released_sources(num_layers: int, layers_per_block: int) -> list[list[Terms]]:
    """The released Delta Block, by its closed form: s_k sums D_j with j <= k of k's parity.

    Source k is stored at the first layer of block k, after its attention is computed and before
    it is added, so the MLP of that layer is the first to see it.
    """
    true_deltas = [frozenset({EMBEDDING})]
    for first in range(0, num_layers, layers_per_block):
        last = min(first + layers_per_block, num_layers)
        true_deltas.append(frozenset(range(2 * first, 2 * last)))
    places = []
    for sublayer in range(2 * num_layers + 1):
        starts = range(0, 2 * num_layers, 2 * layers_per_block)
        stored = [k for k, start in enumerate(starts) if start < sublayer]
        places.append(
            [frozenset().union(*(true_deltas[j] for j in range(k % 2, k + 1, 2))) for k in stored]
        )
    return places


def places_of(
    method: str,
    num_layers: int,
    size: int = 1,
    *,
    sources: str = "delta",
    include_partial: bool | None = None,
    embedding: bool = True,
) -> list[list[Terms]]:
    count = 2 * num_layers
    if method == "x0_skip":
        return [[frozenset({EMBEDDING})]] * (count + 1)
    if sources == "cumulative":
        return cumulative_sources(count, size, embedding=embedding)
    if sources == "reference":
        return released_sources(num_layers, math.ceil(size / 2))
    partial = (method == "attnres") if include_partial is None else include_partial
    return block_sources(count, size, include_partial=partial, embedding=embedding)


def naive_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    gain: Tensor | None,
    *,
    eps: float,
    heads: int = 1,
    head_norm: str = "full",
) -> Tensor:
    """softmax_n(w . (g * RMSNorm(s_n))) weighting the raw sources, by stacking everything; without
    a gain softmax(w), one number a source."""
    stacked = torch.stack(list(sources))  # [S, ..., D]
    if gain is None:
        return torch.einsum("s,s...->...", query.exp() / query.exp().sum(), stacked)
    width = stacked.shape[-1]
    pieces = []
    for part in torch.arange(width).chunk(heads):
        normed = stacked[..., part] if head_norm == "slice" else stacked
        rms = (normed.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        keys = stacked[..., part] / rms * gain[part]
        weights = torch.softmax(keys @ query[part], dim=0)
        pieces.append((weights.unsqueeze(-1) * stacked[..., part]).sum(0))
    return torch.cat(pieces, -1)


def run(
    places: Sequence[Sequence[Terms]],
    embedding: Tensor,
    sublayers: Sequence[Callable[..., Tensor]],
    parameters: Callable[[int], Sequence[Tensor | None]],
    *,
    routing: str,
    init: str = "paper",
    learned: bool = False,
    eps: float = 1e-6,
    heads: int = 1,
    head_norm: str = "full",
) -> list[Tensor]:
    """What every sublayer reads, and what the final norm reads.

    ``parameters(i)`` gives query (or logits), gain, gate and the values' query of place ``i``; None
    where it has none. A sublayer is given what it reads and what the values' query does.
    """
    values = {EMBEDDING: embedding}
    inputs = []
    for place in range(len(sublayers) + 1):
        state = sum(values[term] for term in sorted(values))
        query, gain, gate, value_query = parameters(place)
        at_end = place == len(sublayers)
        tensors = [sum(values[term] for term in sorted(terms)) for terms in places[place]]
        ends_plain = at_end and routing == "additive"
        # a gate on sources that sum to the state is dead, so that place is left plain
        dead = init == "gate" and sorted(t for terms in places[place] for t in terms) == [*values]
        reads = []
        for chosen in [query] if value_query is None else [query, value_query]:
            if place == 0 or not tensors or ends_plain or dead:
                reads.append(state)
                continue
            if len(tensors) == 1:
                mix = tensors[0]
            else:
                mix = naive_mix(tensors, chosen, gain, eps=eps, heads=heads, head_norm=head_norm)
            count = len(tensors)
            if init == "centered":
                reads.append(state + mix - sum(tensors) / count)
            elif init == "gate" or learned:
                reads.append(state + gate * mix)
            elif routing == "additive":
                reads.append((state + mix) * (count / (count + 1) if init == "complete" else 1))
            else:
                reads.append(mix * (count if init == "complete" else 1))
        inputs.append(reads[0])
        if not at_end:
            values[place] = sublayers[place](*reads)
    return inputs


def run_streams(
    embedding: Tensor,
    sublayers: Sequence[Callable[[Tensor], Tensor]],
    parameters: Callable[[int], tuple[Tensor, Tensor, Tensor]],
    count: int,
    eps: float,
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """What every sublayer reads of ``count`` streams and, last, their mean; and at every place the
    three weights. ``parameters(i)`` gives projection, bias and factors of place ``i``."""
    streams, inputs, weights = [embedding] * count, [], []
    for place, sublayer in enumerate(sublayers):
        projection, bias, (to_pre, to_post, to_res) = parameters(place)
        joined = torch.cat(streams, -1)
        normed = joined / (joined.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        dynamic = torch.einsum("...d,md->...m", normed, projection)
        pre = 1 / (1 + torch.exp(-(to_pre * dynamic[..., :count] + bias[:count])))
        post = to_post * dynamic[..., count : 2 * count] + bias[count : 2 * count]
        post = 2 / (1 + torch.exp(-post))
        res = torch.exp(to_res * dynamic[..., 2 * count :] + bias[2 * count :])
        res = res.unflatten(-1, (count, count))
        for _ in range(20):
            res = res / res.sum(-2, keepdim=True)
            res = res / res.sum(-1, keepdim=True)
        x = sum(pre[..., n, None] * streams[n] for n in range(count))
        output = sublayer(x)
        streams = [
            sum(res[..., i, j, None] * streams[j] for j in range(count))
            + post[..., i, None] * output
            for i in range(count)
        ]
        inputs.append(x)
        weights.append((pre, post, res))
    return [*inputs, sum(streams) / count], weights
