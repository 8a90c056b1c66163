"""How much a source matters: what the loss is without it, at one site and nowhere else.

A weight says how much of a source a site reads, not what comes of it. Here the site may not read
the source: its softmax runs over the others (``w_m / (1 - w_n)``), everything else is the model's
own. What was added to the residual state stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.checks import check_whole
from depthroute.diagnostics.trace import Trace, observe, trace, values_name
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.evaluate.perplexity import token_losses
from depthroute.models.modes import evaluating
from depthroute.nn import ResidualStream, SiteParameters


class Removal(NamedTuple):
    site: str
    source: int
    """By its position among the site's sources."""


@torch.no_grad()
def importance(
    model: Any,
    input_ids: Tensor,
    *,
    sites: str = "*",
    batch_size: int = 4,
    seen: Trace | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """By how many nats a token the loss of ``input_ids`` [B, T] rises without each source, [S], of
    every site whose name matches the pattern ``sites``.

    One forward pass of the text for every source of every site, ``batch_size`` at a time. ``seen``
    is a trace of the model, if there is one already.
    """
    check_whole("batch_size", batch_size)
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise DepthrouteError(
            f"input_ids has shape {tuple(input_ids.shape)}; importance needs [batch, tokens] with "
            "at least 2 tokens"
        )
    seen = trace(model, input_ids) if seen is None else seen
    chosen = [site for name, site in seen.sites.items() if fnmatchcase(name, sites)]
    if not chosen:
        raise ConfigError(
            f"no site of this model that chooses among sources matches {sites!r}; it has "
            f"{', '.join(seen.sites) or 'none'}"
        )
    removals = [Removal(site.name, n) for site in chosen for n in range(len(site.source_names))]
    rises: dict[str, list[float]] = {site.name: [] for site in chosen}
    with evaluating(model):
        for start in range(0, len(removals), batch_size):
            part = removals[start : start + batch_size]
            for removal, rise in zip(part, _rises(model, input_ids, part), strict=True):
                rises[removal.site].append(rise)
            progress(start + len(part), len(removals))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in rises.items()}


def _rises(model: Any, input_ids: Tensor, removals: Sequence[Removal]) -> list[float]:
    """Against the same tokens in the same batch, with everything read."""
    rows = len(input_ids)
    with observe(model, _Without(removals, rows)):
        losses = token_losses(model, input_ids.repeat(1 + len(removals), 1))
    means = losses.double().view(1 + len(removals), -1).mean(1)
    return (means[1:] - means[0]).tolist()


@dataclass(frozen=True)
class _Without:
    """The observer. A batch holds the text once as it is and then once for every removal."""

    removals: Sequence[Removal]
    rows: int

    def on_read(self, stream: ResidualStream, site: SiteParameters | None, x: Tensor) -> Tensor:
        place = stream.place
        if site is None or not place.chooses:
            return x
        name = place.reads[site.read]
        if not self._at(name):
            return x
        factor: float | Tensor = place.scale
        if place.has_gate:
            assert site.gate is not None
            factor = site.gate.to(x.dtype)
        if stream.plan.has_streams:  # whose weights are shares of what is read
            assert stream.state is not None
            factor = site.stream_weights(stream.state)[0].sum(-1, keepdim=True)
        sources = stream.visible()
        weights = site.weights(sources)
        spread = weights.repeat_interleave(x.shape[-1] // weights.shape[-1], -1)
        return self._changed(name, x, spread, [factor * s for s in sources])

    def on_depth_mix(
        self,
        layer: int,
        layers: tuple[int, ...],
        weights: Tensor,
        values: Sequence[Tensor],
        mixed: Tensor,
    ) -> Tensor:
        name = values_name(layer)
        if weights.ndim > 1:
            return self._changed(name, mixed, weights.unsqueeze(-1), values)
        mixed = mixed.clone()  # a sum of terms that nothing normalises
        for rows, source in self._at(name):
            mixed[rows] -= values[source][rows]
        return mixed

    def on_push(self, stream: ResidualStream, output: Tensor) -> Tensor:
        return output

    def _at(self, name: str) -> list[tuple[slice, int]]:
        """The rows in which a source of this site is not read, and which."""
        return [
            (slice((1 + k) * self.rows, (2 + k) * self.rows), source)
            for k, (site, source) in enumerate(self.removals)
            if site == name
        ]

    def _changed(self, name: str, x: Tensor, weights: Tensor, values: Sequence[Tensor]) -> Tensor:
        """``x`` and, in the rows of a removal, what the change of weights makes of it."""
        x = x.clone()
        for rows, source in self._at(name):
            of_rows = weights[:, rows]
            change = without(of_rows, source) - of_rows
            for weight, value in zip(change, values, strict=True):
                x[rows] += (weight * value[rows]).to(x.dtype)
        return x


def without(weights: Tensor, source: int) -> Tensor:
    """The softmax ``weights`` [S, ...] over all sources but one; even where it had everything."""
    others = weights.clone()
    others[source] = 0.0
    total = others.sum(0)
    even = torch.full_like(weights, 1.0 / (len(weights) - 1))
    even[source] = 0.0
    return torch.where(total > 0, others / total.where(total > 0, 1.0), even)


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Spearman's, ties sharing their mean rank; None where one of them is all the same."""
    ranks = torch.stack([_ranks(a), _ranks(b)])
    value = torch.corrcoef(ranks)[0, 1].item() if len(a) > 1 else float("nan")
    return None if value != value else value


def _ranks(values: Tensor) -> Tensor:
    below = (values.unsqueeze(0) < values.unsqueeze(1)).sum(1)
    equal = (values.unsqueeze(0) == values.unsqueeze(1)).sum(1)
    return below.double() + (equal.double() - 1) / 2
