"""Which figures a report has, and what each shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from depthroute.diagnostics.results import units
from depthroute.diagnostics.svg import (
    DASHES,
    Facet,
    Figure,
    Line,
    Style,
    line_figure,
    shortened,
)
from depthroute.diagnostics.svg_map import bar_figure, map_figure
from depthroute.methods import NAMES

# Okabe and Ito's set, told apart by colour-blind readers; light page, dark page. One for each name
# in its order, the others for names with settings.
_PAIRS = (
    ("#30363d", "#f1f3f5"),
    ("#e69f00", "#f0b840"),
    ("#d55e00", "#f08a4b"),
    ("#0072b2", "#3f93ea"),
    ("#56b4e9", "#9fdcff"),
    ("#009e73", "#35c49a"),
    ("#cc79a7", "#e3a3c6"),
    ("#7d3c98", "#b98ad0"),
    ("#8c6d1f", "#cbb26a"),
    ("#b03a5b", "#e88aa5"),
    ("#5b7f1f", "#a9cc6b"),
    ("#2f6f73", "#6fb7bb"),
    ("#7a7f87", "#b4bac2"),
    ("#3d4fb5", "#8f9cf0"),
    ("#a0522d", "#d99a73"),
    ("#1f8f3a", "#66cf80"),
    ("#c0392b", "#f2776a"),
    ("#0e7490", "#45c3e0"),
)
COLORS = dict(zip(NAMES, _PAIRS, strict=False))
SPARE = _PAIRS[len(COLORS) :]
_LONGEST_RUNG = 12
_MOST_ABOVE = 1.0
"""Nats above the best that a sweep's axis shows: a value that nearly diverged would flatten it."""
KINDS = [("attention", "Attention"), ("mlp", "MLP and final read"), ("values", "Values")]


def palette(data: dict[str, Any]) -> list[tuple[str, str]]:
    """A light and a dark colour for every series; a method keeps its colour in every run."""
    chosen: dict[str, tuple[str, str]] = {}
    taken = {COLORS[s["method"]] for s in data["series"] if s["method"] in COLORS}
    free = [c for c in [*SPARE, *COLORS.values()] if c not in taken] or list(SPARE)
    for series in data["series"]:
        method = series["method"]
        if method not in chosen:
            others = sum(m not in COLORS for m in chosen)
            chosen[method] = COLORS.get(method) or free[others % len(free)]
    return [chosen[series["method"]] for series in data["series"]]


def series_styles(data: dict[str, Any]) -> list[Style]:
    """Colour tells the method; the dash tells the run of a method that several runs have."""
    methods = [series["method"] for series in data["series"]]
    pairs = zip(data["series"], palette(data), strict=True)
    return [
        Style(
            number,
            series["label"],
            light,
            DASHES[methods[:number].count(series["method"]) % len(DASHES)],
        )
        for number, (series, (light, _)) in enumerate(pairs)
    ]


def figures(data: dict[str, Any]) -> list[Figure]:
    """In the order of the page; a figure without data is left out."""
    styles = series_styles(data)
    drawn = [
        _ladder(data, styles),
        _sweeps(data, styles),
        _curves(data, styles),
        *_maps(data),
        _sharpness(data, styles),
    ]
    drawn += [_magnitudes(data, styles), _cost(data, styles)]
    return [figure for figure in drawn if figure is not None]


def _ladder(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    """Loss, and the difference to standard, against compute."""
    if data.get("ladder") is None:
        return None
    # a method has one colour in all sizes; its first series stands for it
    first: dict[str, Style] = {}
    for style, series in zip(styles, data["series"], strict=True):
        first.setdefault(series["row"]["method"], style)
    facets = []
    titles = {
        "loss": f"Validation loss, nats per {data['ladder']['unit']}",
        "difference": "Difference to standard, paired by seed",
    }
    for key, title in titles.items():
        lines = []
        runs = {rung["name"]: n for n, rung in enumerate(data["ladder"]["rungs"])}
        for label, method in data["ladder"]["methods"].items():
            points = [point for point in method["points"] if point[key]]
            if points and label in first:
                x, y = [p["flops"] for p in points], [p[key]["mean"] for p in points]
                style = replace(first[label], label=label, dash="")
                places = [runs[p["rung"]] for p in points]
                lines.append(Line(style, x, y, [p[key]["spread"] for p in points], runs=places))
        if lines:
            rungs = data["ladder"]["rungs"]
            ticks = {
                r["flops"]: f"{shortened(r['name'], _LONGEST_RUNG)} · {r['flops']:.1e}".replace(
                    "+", ""
                )
                for r in rungs
            }
            facets.append(
                Facet(
                    title,
                    "training compute, FLOPs",
                    lines,
                    has_zero_line=key == "difference",
                    has_markers=True,
                    x_ticks=ticks,
                    is_x_logarithmic=True,
                )
            )
    return (
        line_figure("ladder", "Loss against compute", facets, len(facets), 290) if facets else None
    )


def _sweeps(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    """Loss on the tuning seeds against the value, and which was chosen."""
    facets = []
    for position, run in enumerate(data["runs"]):
        if "sweep" in run["config"]:
            pairs = zip(styles, data["series"], strict=True)
            methods = [(style, s["row"]["method"]) for style, s in pairs if s["run"] == position]
            facets += _swept(run, methods, has_name=len(data["runs"]) > 1)
    if not facets:
        return None
    return line_figure("sweep", "Loss against the swept value", facets, min(2, len(facets)), 290)


def _swept(run: dict[str, Any], methods: list[tuple[Style, str]], *, has_name: bool) -> list[Facet]:
    sweep = run["config"]["sweep"]
    tried = [p["value"] for m in sweep["methods"].values() for p in m["points"]]
    is_ordered = all(isinstance(value, int | float) for value in tried)
    values = sorted(set(tried)) if is_ordered else list(dict.fromkeys(tried))
    is_logarithmic = is_ordered and all(value > 0 for value in values)
    places = {v: float(v) if is_ordered else float(n) for n, v in enumerate(values)}
    lines = []
    for style, method in methods:
        tuned = sweep["methods"].get(method, {"points": [], "chosen": None})
        points = [(places[p["value"]], p["loss"]) for p in tuned["points"] if p["loss"] is not None]
        if points:
            x, y = ([point[n] for point in points] for n in (0, 1))
            lines.append(Line(style, x, y, [None] * len(x), places.get(tuned["chosen"])))
    if not lines:
        return []
    name = f" · {run['name']}" if has_name else ""
    title = f"Validation loss, nats per {run['summary']['unit']}{name}"
    lowest = min(y for line in lines for y in line.y)
    return [
        Facet(
            title,
            sweep["name"],
            lines,
            top=lowest + _MOST_ABOVE,
            has_markers=True,
            x_ticks={place: str(value) for value, place in places.items()},
            is_x_logarithmic=is_logarithmic,
        )
    ]


def _curves(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    facets = []
    keys = ("validation", "difference", "training")
    known = [s[key]["tokens"] for s in data["series"] for key in keys if s[key]]
    end = max((tokens[-1] for tokens in known if tokens), default=1.0)
    unit = " or ".join(units(data))
    titles = (
        f"Validation loss, nats per {unit}",
        "Difference to standard, paired by seed",
        f"Training loss, nats per {unit}",
    )
    for key, title in zip(keys, titles, strict=True):
        lines = [
            Line(style, curve["tokens"], curve["mean"], curve["spread"])
            for style, series in zip(styles, data["series"], strict=True)
            if (curve := series[key]) and curve["steps"]
        ]
        if lines:
            is_difference = key == "difference"
            facets.append(
                Facet(
                    title,
                    "training tokens",
                    lines,
                    x_kind="tokens",
                    x_bounds=(0.0, float(end)),  # one axis: a late first validation is seen
                    has_zero_line=is_difference,
                    top=None if is_difference else _after_the_fall(lines),
                )
            )
    if not facets:
        return None
    return line_figure("curves", "Loss during training", facets, len(facets), 290)


def _after_the_fall(lines: list[Line]) -> float:
    """The highest loss after a tenth of training: what came before would flatten the rest."""
    return max(
        max((y for x, y in zip(n.x, n.y, strict=True) if x >= 0.1 * n.x[-1]), default=n.y[-1])
        for n in lines
    )


def _maps(data: dict[str, Any]) -> list[Figure]:
    return [
        map_figure(f"map-{number}", f"Routing of {series['label']}", series["trace"], KINDS)
        for number, series in enumerate(data["series"])
        if series["trace"] and series["trace"]["sites"]
    ]


def _by_depth(
    data: dict[str, Any], styles: list[Style], rows: str, kind: str, measure: str
) -> list[Line]:
    lines = []
    for style, series in zip(styles, data["series"], strict=True):
        known = [
            row
            for row in (series["trace"] or {rows: []})[rows]
            if row["kind"] == kind and row[measure][0] is not None
        ]
        if known:
            x = [float(row["layer"]) for row in known]
            y, spread = [row[measure][0] for row in known], [row[measure][1] for row in known]
            lines.append(Line(style, x, y, spread))
    return lines


Named = tuple[str, str]
"""A key of the data, and what the page calls it."""


def _facets(
    data: dict[str, Any],
    styles: list[Style],
    rows: str,
    pairs: list[tuple[Named, Named]],
    *,
    bounds: tuple[float, float] | None = None,
    logarithmic: Sequence[str] = (),
) -> list[Facet]:
    """One for every kind of row and measure that has lines; ``logarithmic`` names measures."""
    # the layers of the deepest model: charts that are read side by side share this axis
    traces = [series["trace"] for series in data["series"] if series["trace"]]
    deepest = max((row["layer"] for trace in traces for row in trace[rows]), default=1)
    facets = []
    for (kind, words), (measure, title) in pairs:
        if lines := _by_depth(data, styles, rows, kind, measure):
            facets.append(
                Facet(
                    f"{words}: {title}",
                    "layer",
                    lines,
                    bounds=bounds,
                    x_bounds=(0.0, float(deepest)),
                    logarithmic=measure in logarithmic,
                    has_markers=max(len(line.x) for line in lines) <= 16,
                )
            )
    return facets


def _sharpness(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    measures = (
        ("normalised_max", "normalised max weight"),
        ("normalised_entropy", "normalised entropy"),
    )
    kinds = [k for k in KINDS if _by_depth(data, styles, "sites", k[0], "normalised_max")]
    pairs = [(kind, measure) for measure in measures for kind in kinds]
    facets = _facets(data, styles, "sites", pairs, bounds=(0, 1.04))
    if not facets:
        return None
    return line_figure("sharpness", "How sharply each site chooses", facets, len(kinds))


def _magnitudes(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    measures = (
        ("output_rms", "output rms"),
        ("stream_rms", "residual stream rms"),
        ("gradient_rms", "gradient rms at the output"),
    )
    kinds = (("attention", "Attention"), ("mlp", "MLP"))
    wide = []  # kinds share the scale of a measure
    for measure, _ in measures:
        lines = [n for k, _ in kinds for n in _by_depth(data, styles, "sublayers", k, measure)]
        values = [y for line in lines for y in line.y]
        if values and min(values) > 0 and max(values) > 8 * min(values):
            wide.append(measure)
    pairs = [(kind, measure) for kind in kinds for measure in measures]
    facets = _facets(data, styles, "sublayers", pairs, logarithmic=wide)
    if not facets:
        return None
    columns = sum(facet.title.startswith("Attention") for facet in facets) or len(facets)
    return line_figure("magnitudes", "Magnitudes by depth", facets, columns)


def _cost(data: dict[str, Any], styles: list[Style]) -> Figure | None:
    """Relative to standard where that is known of every series; else as measured."""
    pairs = zip(styles, data["series"], strict=True)
    costs = [(style, s["cost"]) for style, s in pairs if s["cost"]["tokens_per_second"]]
    is_relative = all(cost["relative_speed"] is not None for _, cost in costs)

    def bars(absolute: str, relative: str, words: Callable[[float], str]) -> list[Any]:
        known = [(style, cost[absolute], cost[relative]) for style, cost in costs]
        if not is_relative:
            return [(style, value, words(value)) for style, value, _ in known if value is not None]
        return [
            (style, share, f"{share:.2f}x  ({words(value)})")
            for style, value, share in known
            if value is not None and share is not None
        ]

    speed = bars("tokens_per_second", "relative_speed", lambda rate: f"{rate:,.0f}/s")
    memory = bars("peak_memory_bytes", "relative_memory", lambda size: f"{size / 2**30:.2f} GiB")
    words = ", relative to standard" if is_relative else ""
    groups = [(f"Training tokens per second{words}", speed)]
    groups.append((f"Peak memory of a step{words}", memory))
    groups = [(words, bars) for words, bars in groups if bars]
    return bar_figure("cost", "What each method costs", groups, is_relative) if groups else None
