"""Which figures a report has, and what each shows."""

from __future__ import annotations

from typing import Any

from depthroute.diagnostics.svg import DASHES, Facet, Figure, Line, Style, line_figure
from depthroute.diagnostics.svg_map import bar_figure, map_figure

# Okabe and Ito's set, told apart by colour-blind readers; light page, dark page
COLORS = {
    "standard": ("#6b7280", "#a3adba"),
    "delta": ("#0072b2", "#4aa8e0"),
    "delta-block": ("#56b4e9", "#9bd5f7"),
    "attnres-block": ("#e69f00", "#f0b840"),
    "attnres-full": ("#d55e00", "#f08a4b"),
    "depth-attention": ("#009e73", "#35c49a"),
    "x0-skip": ("#cc79a7", "#e3a3c6"),
    "x0-skip-learned": ("#7d3c98", "#b98ad0"),
}
SPARE = (("#8c6d1f", "#cbb26a"), ("#1b1b1b", "#f2f2f2"), ("#b03a5b", "#e88aa5"))
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


def styles(data: dict[str, Any]) -> list[Style]:
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
    looks = styles(data)
    found = [_curves(data, looks), *_maps(data), _sharpness(data, looks)]
    found += [_magnitudes(data, looks), _cost(data, looks)]
    return [figure for figure in found if figure is not None]


def _curves(data: dict[str, Any], looks: list[Style]) -> Figure | None:
    facets = []
    for key, title in (
        ("validation", "Validation loss"),
        ("difference", "Difference to standard, paired by seed"),
        ("training", "Training loss"),
    ):
        lines = [
            Line(look, curve["tokens"], curve["mean"], curve["spread"])
            for look, series in zip(looks, data["series"], strict=True)
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
    data: dict[str, Any], looks: list[Style], rows: str, kind: str, measure: str
) -> list[Line]:
    lines = []
    for look, series in zip(looks, data["series"], strict=True):
        found = [
            row
            for row in (series["trace"] or {rows: []})[rows]
            if row["kind"] == kind and row[measure][0] is not None
        ]
        if found:
            x = [float(row["layer"]) for row in found]
            y, spread = [row[measure][0] for row in found], [row[measure][1] for row in found]
            lines.append(Line(look, x, y, spread))
    return lines


def _sharpness(data: dict[str, Any], looks: list[Style]) -> Figure | None:
    facets = []
    kinds = [k for k in KINDS if _by_depth(data, looks, "sites", k[0], "normalised_max")]
    for measure, title in (
        ("normalised_max", "normalised max weight"),
        ("normalised_entropy", "normalised entropy"),
    ):
        for kind, words in kinds:
            lines = _by_depth(data, looks, "sites", kind, measure)
            shallow = max(len(line.x) for line in lines) <= 16
            facets.append(
                Facet(f"{words}: {title}", "layer", lines, bounds=(0, 1.04), has_markers=shallow)
            )
    if not facets:
        return None
    return line_figure("sharpness", "How sharply each site chooses", facets, len(kinds))


def _magnitudes(data: dict[str, Any], looks: list[Style]) -> Figure | None:
    facets = []
    for measure, title in (
        ("output_rms", "output rms"),
        ("stream_rms", "residual stream rms"),
        ("gradient_rms", "gradient rms at the output"),
    ):
        for kind, words in (("attention", "Attention"), ("mlp", "MLP")):
            lines = _by_depth(data, looks, "sublayers", kind, measure)
            values = [y for line in lines for y in line.y]
            if not values:
                continue
            facets.append(
                Facet(
                    f"{words}: {title}",
                    "layer",
                    lines,
                    logarithmic=min(values) > 0 and max(values) > 8 * min(values),
                    has_markers=max(len(line.x) for line in lines) <= 16,
                )
            )
    if not facets:
        return None
    return line_figure("magnitudes", "Magnitudes by depth", facets, 2)


def _cost(data: dict[str, Any], looks: list[Style]) -> Figure | None:
    speed, memory = [], []
    for look, series in zip(looks, data["series"], strict=True):
        cost = series["cost"]
        if cost["relative_speed"] is not None:
            rate = f"{cost['relative_speed']:.2f}x  ({cost['tokens_per_second']:,.0f}/s)"
            speed.append((look, cost["relative_speed"], rate))
        if cost["relative_memory"] is not None:
            size = f"{cost['relative_memory']:.2f}x  ({cost['peak_memory_bytes'] / 2**30:.2f} GiB)"
            memory.append((look, cost["relative_memory"], size))
    groups = [("Training tokens per second, relative to standard", speed)]
    groups.append(("Peak memory of a step, relative to standard", memory))
    groups = [(words, bars) for words, bars in groups if bars]
    return bar_figure("cost", "What each method costs", groups) if groups else None
