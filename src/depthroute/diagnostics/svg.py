"""Charts as SVG text. Colours are light-mode attributes, so a saved figure suits a paper; the
page restyles the same elements by class for dark mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH = 1000
NARROW = 360
"""Of the second drawing of every figure, for a phone: its parts are below each other."""
INK, SOFT, FAINT, GRID = "#1f2933", "#52606d", "#7b8794", "#e4e7eb"
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Style:
    """How a series looks everywhere: a colour, a dash and a number the page refers to."""

    number: int
    label: str
    color: str
    dash: str = ""


@dataclass(frozen=True)
class Line:
    style: Style
    x: list[float]
    y: list[float]
    spread: list[float | None]
    mark: float | None = None
    """The x of a point with a ring around it."""
    runs: list[int] | None = None
    """Which run each point is of; None where all are of the run of the series."""


@dataclass(frozen=True)
class Facet:
    title: str
    x_label: str
    lines: list[Line]
    x_kind: str = "number"
    """number, or tokens (shown as 1.2M)."""
    logarithmic: bool = False
    top: float | None = None
    """Largest y shown; None shows everything."""
    has_zero_line: bool = False
    bounds: tuple[float, float] | None = None
    x_bounds: tuple[float, float] | None = None
    """Shared by facets that are read side by side; None fits the lines."""
    has_markers: bool = False
    x_ticks: dict[float, str] | None = None
    """Places and their words; None for round numbers."""
    is_x_logarithmic: bool = False


@dataclass
class Figure:
    """SVG text, and where things are in it for the page's hovers."""

    name: str
    title: str
    svg: str
    hover: dict[str, Any] = field(default_factory=dict)
    narrow: Figure | None = None


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 11,
    anchor: str = "start",
    kind: str = "soft",
    extra: str = "",
) -> str:
    color = {"ink": INK, "soft": SOFT, "faint": FAINT}[kind]
    weight = ' font-weight="600"' if kind == "ink" else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}{extra}>{escape(words)}</text>'
    )


def document(name: str, title: str, height: float, body: str, width: float = WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" viewBox="0 0 {width} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}" font-family="{escape(FONT)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**p for p in powers if low <= 10.0**p <= high]
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    if len(ticks) < 3:  # two lines do not tell how far apart other values are
        ticks = [m * 10.0**p for p in powers for m in (1, 2, 3, 5, 7) if low <= m * 10.0**p <= high]
    if high >= 200 * low or (len(ticks) > 6 and len(tens) > 1):
        ticks = tens  # even steps: every second of 1, 2, 5 would not be
    return ticks[:: -(-len(ticks) // 6)] if ticks else [low, high]


def count_text(value: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:g}"


def tick_text(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{round(value, 6):g}".replace("-", "\N{MINUS SIGN}")


def text_width(words: str, size: float = 12) -> float:
    """About what a sans-serif font takes; narrow letters count as half."""
    narrow = sum(letter in "ijltfr.,:;|-() '" for letter in words)
    return size * (0.58 * (len(words) - narrow) + 0.34 * narrow)


def shortened(words: str, longest: int) -> str:
    """Beginning and end, which tell names apart."""
    if len(words) <= longest:
        return words
    end = max(1, longest // 2 - 1)
    return f"{words[: max(1, longest - 1 - end)]}…{words[-end:]}"


def fitted(words: str, room: float, size: float = 12) -> str:
    """As much of ``words`` as there is room for."""
    return shortened(words, max(3, int(len(words) * min(1.0, room / text_width(words, size)))))


def legend(styles: list[Style], y: float, room: float) -> tuple[str, float]:
    """Swatches in rows across the top; returns them and the height they took."""
    parts, x, row = [], 8.0, y
    for style in styles:
        label = fitted(style.label, room - 68)
        width = 52 + text_width(label)
        if x + width > room - 8 and x > 8:
            x, row = 8.0, row + 20
        parts.append(
            f'<g class="key" data-series="{style.number}" tabindex="0" role="button">'
            f'<rect x="{x - 4:.0f}" y="{row - 13:.0f}" width="{width - 6:.0f}" height="19" '
            'fill="transparent"/>'
            f"{_stroke(style, f'M{x:.1f} {row - 3.5:.1f}h22', 2.4)}"
            f"{text(x + 28, row, label, size=12)}</g>"
        )
        x += width
    return "".join(parts), row - y + 22


def _stroke(style: Style, path: str, width: float = 1.8) -> str:
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    return (
        f'<path class="c{style.number}" d="{path}" fill="none" stroke="{style.color}" '
        f'stroke-width="{width:g}" stroke-linejoin="round" stroke-linecap="round"{dash}/>'
    )


def line_figure(
    name: str, title: str, facets: list[Facet], columns: int, height: float = 230
) -> Figure:
    """Small multiples that share one legend."""
    figure = _small_multiples(name, title, facets, columns, height, WIDTH)
    figure.narrow = _small_multiples(f"{name}-narrow", title, facets, 1, height, NARROW)
    return figure


def _small_multiples(
    name: str, title: str, facets: list[Facet], columns: int, height: float, room: float
) -> Figure:
    styles = {line.style.number: line.style for facet in facets for line in facet.lines}
    body, used = legend([styles[n] for n in sorted(styles)], 16, room)
    top, gap = 8 + used, 22
    width = (room - gap * (columns - 1)) / columns
    hovers = []
    for number, facet in enumerate(facets):
        left = (number % columns) * (width + gap)
        y = top + (number // columns) * (height + 16)
        drawn, hover = _facet(facet, left, y, width, height, f"{name}-{number}")
        body += drawn
        hovers.append(hover)
    rows = -(-len(facets) // columns)
    total = top + rows * (height + 16)
    return Figure(name, title, document(name, title, total, body, room), {"facets": hovers})


@dataclass(frozen=True)
class _Axes:
    """Where the values of a facet lie in its box: left, top, width and height."""

    box: tuple[float, float, float, float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    is_logarithmic: bool
    is_x_logarithmic: bool

    def x(self, value: float) -> float:
        return self.box[0] + self.box[2] * _share(value, self.x_range, self.is_x_logarithmic)

    def y(self, value: float) -> float:
        return self.box[1] + self.box[3] * (1 - _share(value, self.y_range, self.is_logarithmic))

    def across(self, y: float, kind: str, color: str) -> str:
        """A line from side to side."""
        path = f"M{self.box[0]:.1f} {y:.1f}h{self.box[2]:.1f}"
        return f'<path class="{kind}" d="{path}" fill="none" stroke="{color}" stroke-width="1"/>'


def _share(value: float, bounds: tuple[float, float], is_logarithmic: bool) -> float:
    low, high = bounds
    if is_logarithmic:
        return math.log(max(value, low) / low) / math.log(high / low)
    return (value - low) / (high - low)


def _facet(
    facet: Facet, left: float, top: float, width: float, height: float, name: str
) -> tuple[str, dict[str, Any]]:
    box = x0, y0, w, h = (left + 50, top + 24, width - 58, height - 62)
    scales = (_x_range(facet), _y_range(facet), facet.logarithmic, facet.is_x_logarithmic)
    axes = _Axes(box, *scales)
    # all bands below all lines: a band over a line would change its colour
    opacity = 0.16 if len(facet.lines) < 4 else 0.09
    parts = [
        text(left + 4, top + 12, fitted(facet.title, width - 8, 13), size=13, kind="ink"),
        *_scales(facet, axes),
        text(x0 + w, y0 + h + 32, facet.x_label, anchor="end", kind="faint"),
        f'<clipPath id="{name}-clip"><rect x="{x0 - 4:.1f}" y="{y0 - 3:.1f}" width="{w + 8:.1f}" '
        f'height="{h + 6:.1f}"/></clipPath><g clip-path="url(#{name}-clip)">',
        *(_band(line, axes, opacity) for line in facet.lines),
        *(_line(line, axes, facet.has_markers) for line in facet.lines),
        "</g>",
    ]
    hover = {
        "title": facet.title,
        "x_label": facet.x_label,
        "x_kind": facet.x_kind,
        "box": [round(v, 1) for v in box],
        "x_range": list(axes.x_range),
        "y_range": list(axes.y_range),
        "is_x_logarithmic": facet.is_x_logarithmic,
        "is_logarithmic": facet.logarithmic,
        "lines": [
            {"series": n.style.number, "x": n.x, "y": n.y, "spread": n.spread}
            | ({} if n.runs is None else {"runs": n.runs})
            for n in facet.lines
        ],
    }
    return "".join(parts), hover


def _scales(facet: Facet, axes: _Axes) -> list[str]:
    """A rule and a number for every tick of y, the zero line, the axis and the ticks of x."""
    parts, (low, high), (x0, y0, w, h) = [], axes.y_range, axes.box
    for tick in log_ticks(low, high) if facet.logarithmic else nice_ticks(low, high, 5):
        y = axes.y(tick)
        parts += [
            axes.across(y, "grid", GRID),
            text(x0 - 7, y + 3.8, tick_text(tick), anchor="end"),
        ]
    if facet.has_zero_line and low < 0 < high:
        parts.append(axes.across(axes.y(0), "zero", FAINT))
    parts.append(axes.across(y0 + h, "axis", FAINT))
    end = x0 - 46  # words stay in the figure, and those that would meet others are left out
    for place, words in sorted((facet.x_ticks or {}).items()):
        half = text_width(words, 11) / 2
        x = min(max(axes.x(place), x0 - 46 + half), x0 + w + 7 - half)
        if x - half >= end:
            parts.append(text(x, y0 + h + 16, words, anchor="middle"))
            end = x + half + 6
    is_counted = facet.x_kind == "tokens"
    for tick in [] if facet.x_ticks else nice_ticks(*axes.x_range, max(2, int(w / 62))):
        if is_counted or tick == round(tick):  # there is no layer 1.5
            words = count_text(tick) if is_counted else tick_text(tick)
            parts.append(text(axes.x(tick), y0 + h + 16, words, anchor="middle"))
    return parts


def _x_range(facet: Facet) -> tuple[float, float]:
    values = [x for line in facet.lines for x in line.x] or [0.0, 1.0]
    low, high = facet.x_bounds or (min(values), max(values))
    if facet.is_x_logarithmic:
        margin = max(1.3, (high / low) ** 0.09)  # room for the words at the ends
        return low / margin, high * margin
    if high > low:
        return low, high
    return (0.0, high) if high > 0 else (low, low + 1)  # a single point: from zero to it


def _y_range(facet: Facet) -> tuple[float, float]:
    if facet.bounds is not None:
        return facet.bounds
    values = [0.0] if facet.has_zero_line else []
    for line in facet.lines:
        for y, spread in zip(line.y, line.spread, strict=True):
            margin = 0.0 if facet.logarithmic else spread or 0.0
            values += [y - margin, y + margin]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    high = min(high, facet.top) if facet.top is not None and facet.top > low else high
    if facet.logarithmic:
        return low / 1.15, high * 1.15
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _band(line: Line, axes: _Axes, opacity: float) -> str:
    """One standard deviation either side, where more than one seed says what it is."""
    triples = list(zip(line.x, line.y, line.spread, strict=True))
    if not triples or any(s is None for _, _, s in triples):
        return ""
    upper = [f"{axes.x(x):.1f} {axes.y(y + (s or 0)):.1f}" for x, y, s in triples]
    lower = [f"{axes.x(x):.1f} {axes.y(y - (s or 0)):.1f}" for x, y, s in reversed(triples)]
    number = line.style.number
    return (
        f'<path class="series band f{number}" data-series="{number}" '
        f'd="M{"L".join(upper + lower)}Z" fill="{line.style.color}" fill-opacity="{opacity:g}"/>'
    )


def _line(line: Line, axes: _Axes, has_markers: bool) -> str:
    style = line.style
    points = [f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in zip(line.x, line.y, strict=True)]
    marks = ""
    if has_markers or len(points) == 1:
        dots = "".join(f"M{p}h.01" for p in points)
        marks = (
            f'<path class="c{style.number}" d="{dots}" fill="none" stroke="{style.color}" '
            'stroke-width="5" stroke-linecap="round"/>'
        )
    if line.mark in line.x:
        place = points[line.x.index(line.mark)].split()
        marks += (
            f'<circle class="c{style.number}" cx="{place[0]}" cy="{place[1]}" r="6.5" fill="none" '
            f'stroke="{style.color}" stroke-width="1.8"/>'
        )
    width = 1.8 if len(points) <= 64 else 1.2
    drawn = _stroke(style, "M" + "L".join(points), width) if points else ""
    return f'<g class="series" data-series="{style.number}">{drawn}{marks}</g>'
