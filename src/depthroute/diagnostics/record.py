"""A trace as JSON: what a run directory keeps and the report reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthroute.diagnostics.importance import importance, rank_correlation
from depthroute.diagnostics.svg_map import first_to_last
from depthroute.diagnostics.trace import SiteTrace, Trace, trace
from depthroute.json_shape import is_finite

KINDS = ("attention", "mlp", "values")
"""What reads: an attention sublayer, an MLP (and the end of the stack), attention's values."""


def kind_of(name: str) -> str:
    """``attention`` for ``layers.3.attention``; ``final`` reads as the row after the last MLP."""
    return "mlp" if name == "final" else name.rsplit(".", 1)[-1]


def layer_of(name: str, num_layers: int) -> int:
    """``3`` for ``layers.3.attention``; ``final`` comes after the last layer."""
    return num_layers if name == "final" else int(name.split(".")[1])


def look(model: Any, tokens: Tensor, with_importance: bool = False) -> dict[str, Any]:
    """What a run keeps of a model that it has trained."""
    seen = trace(model, tokens, gradients=True)
    found = importance(model, tokens, seen=seen) if with_importance and seen.sites else None
    return record(seen, found)


def record(trace: Trace, rises: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Every source is named once, in ``sources``; sites refer to it by position.

    With ``rises``, what :func:`depthroute.importance` found stands beside the weights of the
    sites that it looked at, and ``rank_correlation`` says how far the two agree.
    """
    rises = rises or {}
    ordered = first_to_last(n for site in trace.sites.values() for n in site.source_names)
    positions = {name: position for position, name in enumerate(ordered)}
    num_layers = 1 + max(layer_of(name, 0) for name in trace.sublayers)
    sites = [
        _site(site, positions, num_layers, rises.get(site.name)) for site in trace.sites.values()
    ]
    sublayers = [
        {
            "name": s.name,
            "kind": kind_of(s.name),
            "layer": layer_of(s.name, num_layers),
            "output_rms": _finite(s.output_rms),
            "stream_rms": _finite(s.stream_rms),
            "gradient_rms": _finite(s.gradient_rms),
        }
        for s in trace.sublayers.values()
    ]
    mean = trace.mean_normalised_max
    agreement = _agreement(sites)
    return {
        "loss": trace.loss if trace.loss is None or math.isfinite(trace.loss) else None,
        "num_layers": num_layers,
        "mean_normalised_max": None if mean is None else _short(mean),
        "rank_correlation": None if agreement is None else _short(agreement),
        "sources": ordered,
        "sites": sites,
        "sublayers": sublayers,
    }


def _site(
    site: SiteTrace, positions: Mapping[str, int], num_layers: int, rises: Tensor | None
) -> dict[str, Any]:
    of_site = {
        "name": site.name,
        "kind": kind_of(site.name),
        "layer": layer_of(site.name, num_layers),
        "sources": [positions[name] for name in site.source_names],
        "weights": [_short(w) for w in site.weights.tolist()],
        "max_weight": _short(site.max_weight),
        "normalised_max": _short(site.normalised_max),
        "normalised_entropy": _short(site.normalised_entropy),
    }
    if rises is not None:
        of_site["importance"] = [_finite(rise) for rise in rises.tolist()]
    if site.mixing is not None:
        of_site["kept"] = _short(site.mixing.diagonal().mean().item())
    return of_site


def _agreement(sites: list[dict[str, Any]]) -> float | None:
    """Of weight and importance, over all pairs of a site and a source that were tried."""
    pairs = [
        (weight, rise)
        for site in sites
        for weight, rise in zip(site["weights"], site.get("importance", ()), strict=False)
        if rise is not None
    ]
    return rank_correlation(*torch.tensor(pairs).unbind(1)) if pairs else None


def first_not_finite(record: dict[str, Any]) -> str | None:
    """The first site whose weights are no numbers; a model that diverged has such."""
    for site in record["sites"]:
        values = (*site["weights"], site["normalised_max"], site["normalised_entropy"])
        if not all(is_finite(value) for value in values):
            return site["name"]
    return None


def _finite(value: float | None) -> float | None:
    """A half-precision magnitude can overflow, and JSON has no infinity."""
    return _short(value) if value is not None and math.isfinite(value) else None


def _short(value: float) -> float:
    """Five digits: more than any picture shows, a third of the file."""
    return float(f"{value:.5g}")
