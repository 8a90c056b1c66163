"""Figures for notebooks, by matplotlib: made without its global state, and shown where they are the
last value of a cell."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from typing import Any

from depthroute.diagnostics.figures import palette
from depthroute.diagnostics.svg_map import first_to_last, short_name
from depthroute.errors import DepthrouteError

_KINDS = {"attention": "Attention", "mlp": "MLP and final read", "values": "Values"}
_MOST_LABELS = 24


def optional(name: str) -> Any:
    """A package of the extra ``notebook``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DepthrouteError(
            f"this needs {package}, which is not installed; pip install 'depthroute[notebook]'"
        ) from error


def _figure(width: float, height: float) -> Any:
    """A figure that shows itself in every notebook, whatever its backend is."""

    class Shown(optional("matplotlib.figure").Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
            return buffer.getvalue()

    return Shown(figsize=(width, height), layout="constrained")


def routing_map(sites: Iterable[Any]) -> Any:
    """Which sources every site reads: a row a site, a column a source, darker is more weight."""
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for site in sites:
        kind = site.name.rpartition(".")[2]
        found[kind if kind in _KINDS else "mlp"].append(site)
    groups = {kind: members for kind, members in found.items() if members}
    if not groups:
        raise DepthrouteError("no site of this model chooses among sources; there is no map")
    rows = max(map(len, groups.values()))
    figure = _figure(5.2 * len(groups), min(8.0, 1.6 + 0.28 * rows))
    image, places = None, figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (kind, members) in zip(places, groups.items(), strict=True):
        sources = first_to_last(name for site in members for name in site.source_names)
        table = [[float("nan")] * len(sources) for _ in members]
        for row, site in zip(table, members, strict=True):
            for name, weight in zip(site.source_names, site.weights.tolist(), strict=True):
                row[sources.index(name)] = weight
        image = axes.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(_KINDS[kind], loc="left", fontsize=10, fontweight="bold")
        _label(axes, "y", [site.name.removeprefix("layers.") for site in members])
        _label(axes, "x", [short_name(name) for name in sources])
        axes.set_xlabel("source, first to last")
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=figure.axes, label="mean weight", shrink=0.8)
    return figure


def _label(axes: Any, side: str, names: list[str]) -> None:
    every = -(-len(names) // _MOST_LABELS)
    ticks = range(0, len(names), every)
    getattr(axes, f"set_{side}ticks")(list(ticks), [names[n] for n in ticks], fontsize=7)


def loss_curves(data: dict[str, Any]) -> Any:
    """Validation loss of every method, and its difference to standard where there is one."""
    panels = [
        (key, title)
        for key, title in (("validation", "Validation loss"), ("difference", "vs standard"))
        if any(series[key] and series[key]["steps"] for series in data["series"])
    ]
    if not panels:
        raise DepthrouteError("nothing was validated yet; there is no curve")
    figure = _figure(5.6 * len(panels), 3.6)
    for axes, (key, title) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for series, (color, _) in zip(data["series"], palette(data), strict=True):
            curve = series[key]
            if not curve or not curve["steps"]:
                continue
            axes.plot(curve["steps"], curve["mean"], color=color, label=series["label"], lw=1.6)
            if None not in curve["spread"]:
                bounds = [
                    [m + sign * s for m, s in zip(curve["mean"], curve["spread"], strict=True)]
                    for sign in (-1, 1)
                ]
                axes.fill_between(curve["steps"], *bounds, color=color, alpha=0.15, lw=0)
        if key == "difference":
            axes.axhline(0, color="#7b8794", lw=1)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("step")
        axes.set_ylabel("nats per " + data["runs"][0]["summary"]["unit"])
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure
