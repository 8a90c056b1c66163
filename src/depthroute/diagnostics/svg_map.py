"""The depth-by-source map and the cost bars, as SVG text."""

from __future__ import annotations

import math
from typing import Any

from depthroute.diagnostics.svg import FAINT, GRID, INK, WIDTH, Figure, Style, document, text

LEVELS = 24
"""Shades; a cell's is the square root of its weight, so that 1% is still seen beside 60%."""
_LIGHT = ((243, 246, 250), (139, 184, 221), (8, 48, 107))
_DARK = ((30, 37, 46), (44, 108, 165), (203, 230, 255))
_HEIGHT, _ROW, _COLUMN = 480.0, 21.0, 54.0
"""Most height of a map and most size of a cell: deep models get small cells, shallow ones calm."""


def ramp(is_dark: bool = False) -> list[str]:
    """The colour of every level, faint to full."""
    low, middle, high = _DARK if is_dark else _LIGHT
    colors = []
    for level in range(LEVELS):
        position = 2 * level / (LEVELS - 1)
        start, end = (low, middle) if position < 1 else (middle, high)
        share = position if position < 1 else position - 1
        mixed = (round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
        colors.append("#" + "".join(f"{c:02x}" for c in mixed))
    return colors


def level_of(weight: float) -> int:
    return round(math.sqrt(min(max(weight, 0.0), 1.0)) * (LEVELS - 1))


def short_name(source: str) -> str:
    """``3a`` and ``3m`` for a layer's sublayers, ``E`` for the embedding, ``b2`` for a block."""
    head, _, rest = source.partition(".")
    if head == "layers":
        layer, _, kind = rest.partition(".")
        return layer + {"attention": "a", "mlp": "m"}.get(kind, "")
    return {"embedding": "E", "partial": "now", "block": f"b{rest}"}.get(head, rest or head)


def map_figure(
    name: str, title: str, trace: dict[str, Any], kinds: list[tuple[str, str]]
) -> Figure:
    """One map a site kind, side by side on one scale from 0 to 1."""
    groups = [
        (words, [s for s in trace["sites"] if s["kind"] == kind])
        for kind, words in kinds
        if any(s["kind"] == kind for s in trace["sites"])
    ]
    gap = 30
    width = (WIDTH - gap * (len(groups) - 1)) / len(groups)
    rows = max(len(sites) for _, sites in groups)
    cell = min(_ROW, _HEIGHT / rows)
    body, hovers = "", []
    for number, (words, sites) in enumerate(groups):
        drawn, hover = _map(words, sites, trace["sources"], number * (width + gap), width, cell)
        body += drawn
        hovers.append(hover)
    bottom = 42 + rows * cell + 44
    body += _scale(bottom)
    hover = {"maps": hovers}
    return Figure(name, title, document(name, title, bottom + 34, body), hover)


def _map(
    words: str,
    sites: list[dict[str, Any]],
    names: list[str],
    left: float,
    width: float,
    height: float,
) -> tuple[str, dict[str, Any]]:
    used = sorted({position for site in sites for position in site["sources"]})
    column = {position: number for number, position in enumerate(used)}
    x0, y0 = left + 40, 42.0
    wide = min(_COLUMN, (width - 56) / len(used))
    parts = [text(left + 4, 15, words, size=13, kind="ink")]
    by_level: dict[int, list[str]] = {}
    figures = []
    for row, site in enumerate(sites):
        y, below = y0 + row * height, y0 + (row + 1) * height
        for position, weight in zip(site["sources"], site["weights"], strict=True):
            x, level = x0 + column[position] * wide, level_of(weight)
            # neighbours share their edges to the digit, or hairlines would show between them
            cell = f"M{x:.1f} {y:.1f}H{x + wide:.1f}V{below:.1f}H{x:.1f}z"
            by_level.setdefault(level, []).append(cell)
            if wide >= 26 and height >= 14:
                shown = f"{weight:.2f}".removeprefix("0")
                kind = "over" if level > 0.6 * LEVELS else "under"
                color = "#ffffff" if kind == "over" else INK
                figures.append(
                    f'<text class="{kind}" x="{x + wide / 2:.1f}" y="{y + height / 2 + 3.5:.1f}" '
                    f'fill="{color}">{shown}</text>'
                )
    colors = ramp()
    parts.append('<g shape-rendering="crispEdges">')
    parts += [
        f'<path class="w{level}" fill="{colors[level]}" d="{"".join(cells)}"/>'
        for level, cells in sorted(by_level.items())
    ]
    parts.append("</g>")
    if figures:
        parts.append(f'<g font-size="9.5" text-anchor="middle">{"".join(figures)}</g>')
    parts += _axes(sites, [names[p] for p in used], x0, y0, wide, height)
    end = x0 + len(used) * wide
    bottom = y0 + len(sites) * height
    parts.append(
        f'<path class="grid" d="M{x0:.1f} {y0:.1f}V{bottom:.1f}H{end:.1f}" fill="none" '
        f'stroke="{GRID}"/>'
    )
    hover = {
        "title": words,
        "box": [round(x0, 2), y0, round(len(used) * wide, 2), round(len(sites) * height, 2)],
        "sources": used,
        "sites": [site["name"] for site in sites],
    }
    return "".join(parts), hover


def _axes(
    sites: list[dict[str, Any]],
    names: list[str],
    x0: float,
    y0: float,
    wide: float,
    height: float,
) -> list[str]:
    parts = []
    every = max(1, math.ceil(13 / height))
    for row, site in enumerate(sites):
        is_final = site["name"] == "final"
        clear = len(sites) - 1 - row >= every or not any(s["name"] == "final" for s in sites)
        if is_final or (row % every == 0 and clear):
            label = "final" if is_final else str(site["layer"])
            parts.append(text(x0 - 6, y0 + (row + 0.5) * height + 3.8, label, anchor="end"))
    every = max(1, math.ceil(26 / wide))
    bottom = y0 + len(sites) * height
    for number in range(0, len(names), every):
        x = x0 + (number + 0.5) * wide
        parts.append(text(x, bottom + 15, short_name(names[number]), anchor="middle"))
    parts.append(text(x0 - 6, y0 - 7, "layer", anchor="end", kind="faint"))
    parts.append(text(x0, bottom + 31, "source, first to last", kind="faint"))
    return parts


def _scale(y: float) -> str:
    """The legend: weights at the places their shades have."""
    x0, width = 40.0, 240.0
    step = width / LEVELS
    cells = "".join(
        f'<rect class="w{n}" x="{x0 + n * step:.1f}" y="{y:.0f}" width="{step + 0.3:.1f}" '
        f'height="10" fill="{color}"/>'
        for n, color in enumerate(ramp())
    )
    ticks = "".join(
        text(x0 + width * math.sqrt(v), y + 24, f"{v:g}", anchor="middle")
        for v in (0, 0.05, 0.25, 0.5, 1)
    )
    return cells + ticks + text(x0 + width + 12, y + 9, "mean weight", kind="faint")


def bar_figure(
    name: str, title: str, groups: list[tuple[str, list[tuple[Style, float, str]]]]
) -> Figure:
    """Horizontal bars; the rule at 1 is the standard model."""
    gap = 40
    width = (WIDTH - gap * (len(groups) - 1)) / len(groups)
    row, top, body, hovers = 25.0, 34.0, "", []
    for number, (words, bars) in enumerate(groups):
        left = number * (width + gap)
        labels = min(7.0 * max(len(style.label) for style, _, _ in bars) + 14, width * 0.4)
        x0, room = left + labels, width - labels - 130
        most = max(1.0, *(value for _, value, _ in bars))
        body += text(left + 4, 15, words, size=13, kind="ink")
        boxes = []
        for at, (style, value, shown) in enumerate(bars):
            y, length = top + at * row, room * value / most
            body += (
                f'<g class="series" data-series="{style.number}">'
                f"{text(x0 - 8, y + 13, style.label, size=12, anchor='end')}"
                f'<rect class="f{style.number}" x="{x0:.1f}" y="{y:.1f}" width="{length:.1f}" '
                f'height="{row - 8:.1f}" rx="2" fill="{style.color}"/>'
                f"{text(x0 + room + 10, y + 13, shown, size=12)}</g>"
            )
            boxes.append([round(v, 1) for v in (left, y, width, row)])
        bottom = top + len(bars) * row
        one = x0 + room / most
        body += (
            f'<path class="zero" d="M{one:.1f} {top - 4:.1f}V{bottom:.1f}" stroke="{FAINT}" '
            'stroke-dasharray="3 3" fill="none"/>'
        )
        hovers.append({"boxes": boxes, "series": [style.number for style, _, _ in bars]})
    height = top + max(len(bars) for _, bars in groups) * row + 10
    return Figure(name, title, document(name, title, height, body), {"bars": hovers})
