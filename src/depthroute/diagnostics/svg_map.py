"""The depth-by-source map and the cost bars, as SVG text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from depthroute.diagnostics.svg import (
    FAINT,
    GRID,
    INK,
    NARROW,
    WIDTH,
    Figure,
    Style,
    document,
    shortened,
    text,
    text_width,
)

LEVELS = 24
"""Shades; a cell's is the square root of its weight, so that 1% is still seen beside 60%."""
_STOPS = (0.0, 0.12, 0.3, 0.5, 0.7, 1.0)
"""Most change is at the low end, where the weights of a deep model lie."""
_LIGHT = ("e9f0f8", "cfe1f2", "a9cfe8", "74b0dc", "3379b8", "08306b")
_DARK = ("1b2530", "1c354e", "1f4a70", "26629a", "4f98d6", "e3f1ff")
_HEIGHT, _ROW, _COLUMN = 480.0, 21.0, 54.0
"""Most height of a map and most size of a cell: deep models get small cells, shallow ones calm."""


def ramp(is_dark: bool = False) -> list[str]:
    """The colour of every level, faint to full."""
    stops = [[int(c[n : n + 2], 16) for n in (0, 2, 4)] for c in (_DARK if is_dark else _LIGHT)]
    colors = []
    for level in range(LEVELS):
        position = level / (LEVELS - 1)
        after = next(n for n, stop in enumerate(_STOPS) if stop >= position and n)
        start, end = _STOPS[after - 1], _STOPS[after]
        share = (position - start) / (end - start)
        pairs = zip(stops[after - 1], stops[after], strict=True)
        colors.append("#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs))
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


def first_to_last(sources: Iterable[str]) -> list[str]:
    """Each once, as they come up; the block being filled is the newest at every site."""
    return sorted(dict.fromkeys(sources), key=lambda name: name == "partial")


def map_figure(
    name: str, title: str, trace: dict[str, Any], kinds: list[tuple[str, str]]
) -> Figure:
    """One map a site kind, side by side on one scale from 0 to 1."""
    figure = _maps(name, title, trace, kinds, WIDTH, is_stacked=False)
    figure.narrow = _maps(f"{name}-narrow", title, trace, kinds, NARROW, is_stacked=True)
    return figure


def _maps(
    name: str,
    title: str,
    trace: dict[str, Any],
    kinds: list[tuple[str, str]],
    room: float,
    *,
    is_stacked: bool,
) -> Figure:
    groups = [
        (words, [s for s in trace["sites"] if s["kind"] == kind])
        for kind, words in kinds
        if any(s["kind"] == kind for s in trace["sites"])
    ]
    gap, columns = 30, 1 if is_stacked else len(groups)
    width = (room - gap * (columns - 1)) / columns
    # a layer has the same height in every map, so that they are read across
    first = min(site["layer"] for _, sites in groups for site in sites)
    rows = 1 + max(site["layer"] for _, sites in groups for site in sites) - first
    cell = min(_ROW, _HEIGHT / rows)
    body, hovers, bottom = "", [], 0.0
    for number, (words, sites) in enumerate(groups):
        left = number % columns * (width + gap)
        top = number // columns * (rows * cell + 94)
        drawn, hover = _map(words, sites, trace["sources"], (left, top), width, cell, first)
        body += drawn
        hovers.append(hover)
        bottom = top + 42 + rows * cell + 44
    body += _scale(bottom, room)
    return Figure(name, title, document(name, title, bottom + 52, body, room), {"maps": hovers})


def _map(
    words: str,
    sites: list[dict[str, Any]],
    names: list[str],
    corner: tuple[float, float],
    width: float,
    height: float,
    first: int,
) -> tuple[str, dict[str, Any]]:
    rows: list[dict[str, Any] | None] = [None] * (1 + max(site["layer"] for site in sites) - first)
    for site in sites:
        rows[site["layer"] - first] = site
    used = sorted({position for site in sites for position in site["sources"]})
    column = {position: number for number, position in enumerate(used)}
    left, top = corner
    x0, y0 = left + 40, top + 42.0
    wide = min(_COLUMN, (width - 56) / len(used))
    parts = [text(left + 4, top + 15, words, size=13, kind="ink")]
    cells = [
        (column[position], site["layer"] - first, weight)
        for site in sites
        for position, weight in zip(site["sources"], site["weights"], strict=True)
    ]
    parts += _cells(cells, (x0, y0, wide, height))
    bottom = y0 + len(rows) * height
    parts += _rows(rows, x0, y0, height, first)
    parts += _columns([names[p] for p in used], x0, bottom, wide)
    end = x0 + len(used) * wide
    parts.append(
        f'<path class="grid" d="M{x0:.1f} {y0:.1f}V{bottom:.1f}H{end:.1f}" fill="none" '
        f'stroke="{GRID}"/>'
    )
    hover = {
        "title": words,
        "box": [
            round(x0, 2),
            round(y0, 2),
            round(len(used) * wide, 2),
            round(len(rows) * height, 2),
        ],
        "sources": used,
        "sites": [site and site["name"] for site in rows],
    }
    return "".join(parts), hover


def _cells(
    cells: list[tuple[int, int, float]], place: tuple[float, float, float, float]
) -> list[str]:
    """Of column, row and weight each: one path a shade, and numbers where there is room."""
    x0, y0, wide, height = place
    by_level: dict[int, list[str]] = {}
    figures = []
    for column, row, weight in cells:
        x, level = x0 + column * wide, level_of(weight)
        y, below = y0 + row * height, y0 + (row + 1) * height
        # neighbours share their edges to the digit, or hairlines would show between them
        path = f"M{x:.1f} {y:.1f}H{x + wide:.1f}V{below:.1f}H{x:.1f}z"
        by_level.setdefault(level, []).append(path)
        if wide >= 26 and height >= 14:
            kind = "over" if level > 0.6 * LEVELS else "under"
            color = "#ffffff" if kind == "over" else INK
            figures.append(
                f'<text class="{kind}" x="{x + wide / 2:.1f}" y="{y + height / 2 + 3.5:.1f}" '
                f'fill="{color}">{f"{weight:.2f}".removeprefix("0")}</text>'
            )
    colors = ramp()
    shades = [
        f'<path class="w{level}" fill="{colors[level]}" d="{"".join(paths)}"/>'
        for level, paths in sorted(by_level.items())
    ]
    parts = ['<g shape-rendering="crispEdges">', *shades, "</g>"]
    if figures:
        parts.append(f'<g font-size="9.5" text-anchor="middle">{"".join(figures)}</g>')
    return parts


def _every(size: float, room: float) -> int:
    """Label one layer in this many: a round number with ``room`` for each."""
    return next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n * size >= room or n == 500)


def _rows(
    rows: list[dict[str, Any] | None], x0: float, y0: float, height: float, first: int
) -> list[str]:
    every = _every(height, 13)
    parts = [text(x0 - 6, y0 - 7, "layer", anchor="end", kind="faint")]
    last = rows[-1]
    has_final = last is not None and last["name"] == "final"
    for row in range(len(rows)):
        is_final = has_final and row == len(rows) - 1
        is_crowded = has_final and (len(rows) - 1 - row) * height < 12
        if is_final or ((first + row) % every == 0 and not is_crowded):
            label = "final" if is_final else str(first + row)
            parts.append(text(x0 - 6, y0 + (row + 0.5) * height + 3.8, label, anchor="end"))
    return parts


def _columns(names: list[str], x0: float, bottom: float, wide: float) -> list[str]:
    """Every source, or where there is no room the first one of each so many layers."""
    parts, end = [], -math.inf
    layers = [re.fullmatch(r"layers\.(\d+)(\.\w+)?", name) for name in names]
    each = max(1, round(len(names) / max(1, len({m[1] for m in layers if m}))))
    every = 1 if wide >= 24 else _every(wide * each, 32)
    seen = set()
    for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
        x, label = x0 + (number + 0.5) * wide, short_name(name)
        if wide < 24 and layer:
            if layer[1] in seen or int(layer[1]) % every:
                continue
            seen.add(layer[1])
        if x - len(label) * 3.3 > end + 5:
            parts.append(text(x, bottom + 15, label, anchor="middle"))
            end = x + len(label) * 3.3
    parts.append(text(x0, bottom + 31, "source, first to last", kind="faint"))
    return parts


def _scale(y: float, room: float) -> str:
    """The legend: weights at the places their shades have, and what they are, beside or below."""
    x0, width = 40.0, 240.0
    step = width / LEVELS
    cells = "".join(
        f'<rect class="w{n}" x="{x0 + n * step:.1f}" y="{y:.0f}" width="{step:.1f}" '
        f'height="10" fill="{color}" shape-rendering="crispEdges"/>'
        for n, color in enumerate(ramp())
    )
    ticks = "".join(
        text(x0 + width * math.sqrt(v), y + 24, f"{v:g}", anchor="middle")
        for v in (0, 0.05, 0.25, 0.5, 1)
    )
    place = (x0 + width + 12, y + 9) if room > 2 * width else (x0, y + 42)
    return cells + ticks + text(*place, "mean weight; blank is no source", kind="faint")


def bar_figure(
    name: str,
    title: str,
    groups: list[tuple[str, list[tuple[Style, float, str]]]],
    is_relative: bool = True,
) -> Figure:
    """Horizontal bars from 0; where they are relative, the rule at 1 is the standard model."""
    figure = _bars(name, title, groups, is_relative, WIDTH, len(groups))
    figure.narrow = _bars(f"{name}-narrow", title, groups, is_relative, NARROW, 1)
    return figure


def _bars(
    name: str,
    title: str,
    groups: list[tuple[str, list[tuple[Style, float, str]]]],
    is_relative: bool,
    page: float,
    columns: int,
) -> Figure:
    gap = 40
    width = (page - gap * (columns - 1)) / columns
    row, body, hovers = 25.0, "", []
    high = 34 + max(len(bars) for _, bars in groups) * row + 10
    for number, (words, bars) in enumerate(groups):
        left, above = number % columns * (width + gap), number // columns * high
        top = above + 34
        widest = max((style.label for style, _, _ in bars), key=text_width)
        labels = min(text_width(widest) + 20, width * 0.45)
        letters = int(len(widest) * (labels - 20) / text_width(widest)) if widest else 0
        x0, room = left + labels, width - labels - 130
        most = max([1.0 if is_relative else 0.0, *(value for _, value, _ in bars)]) or 1.0
        body += text(left + 4, above + 15, words, size=13, kind="ink")
        boxes = []
        for at, (style, value, shown) in enumerate(bars):
            y, length = top + at * row, room * value / most
            body += (
                f'<g class="series" data-series="{style.number}">'
                f"{text(x0 - 8, y + 13, shortened(style.label, letters), size=12, anchor='end')}"
                f'<rect class="f{style.number}" x="{x0:.1f}" y="{y:.1f}" width="{length:.1f}" '
                f'height="{row - 8:.1f}" rx="2" fill="{style.color}"/>'
                f"{text(x0 + room + 10, y + 13, shown, size=12)}</g>"
            )
            boxes.append([round(v, 1) for v in (left, y, width, row)])
        bottom = top + len(bars) * row
        if is_relative:
            one = x0 + room / most
            body += (
                f'<path class="zero" d="M{one:.1f} {top - 4:.1f}V{bottom:.1f}" stroke="{FAINT}" '
                'stroke-dasharray="3 3" fill="none"/>'
            )
        hovers.append({"boxes": boxes, "series": [style.number for style, _, _ in bars]})
    total = high * -(-len(groups) // columns)
    return Figure(name, title, document(name, title, total, body, page), {"bars": hovers})
