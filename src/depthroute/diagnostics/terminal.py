"""The routing map in a terminal: depth by source, one shaded cell a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from depthroute.diagnostics.record import KINDS

TITLES = {
    "attention": "attention sublayers",
    "mlp": "MLP sublayers and the final read",
    "values": "values of attention",
}
_SHADES = " ░▒▓█"
_LIGHT, _DARK = (228, 236, 246), (8, 48, 107)
_STATISTICS = 24
"""Columns behind the cells: `  max  0.62  entropy 0.41`."""


def routing_map(record: dict[str, Any], console: Console) -> RenderableType:
    """One map a site kind, as wide as the terminal; neighbours share a cell where it is narrow."""
    parts: list[RenderableType] = []
    for kind in KINDS:
        sites = [site for site in record["sites"] if site["kind"] == kind]
        if sites:
            parts += [*_map(TITLES[kind], sites, record["sources"], console), Text()]
    if not parts:
        return Text("no site of this model chooses among sources (method standard or x0-skip)")
    return Group(*parts, legend(console))


def _map(
    title: str, sites: list[dict[str, Any]], names: Sequence[str], console: Console
) -> list[Text]:
    used = sorted({position for site in sites for position in site["sources"]})
    columns = {position: column for column, position in enumerate(used)}
    label_width = max(len(_label(site)) for site in sites)
    room = max(8, console.width - label_width - 1 - _STATISTICS)
    width = min(4, max(1, room // len(used)))
    width = width if width in (1, 2, 4) else 2
    share = math.ceil(len(used) * width / room)
    together = "" if share == 1 else f", {share} summed in a cell"
    first, last = names[used[0]], names[used[-1]]
    lines = [
        Text(f"{title}: {len(sites)} sites", style="bold"),
        Text(f"{len(used)} sources, {first} to {last}{together}", style="dim"),
    ]
    for site in sites:
        line = Text(f"{_label(site):>{label_width}} ")
        shown = math.ceil(len(used) / share)
        sums: list[float | None] = [None] * shown
        for position, weight in zip(site["sources"], site["weights"], strict=True):
            cell = columns[position] // share
            sums[cell] = (sums[cell] or 0.0) + weight
        for value in sums:
            line.append_text(_cell(value, width, console))
        top = site["weights"].index(max(site["weights"]))
        statistics = f" max {site['normalised_max']:.2f} entropy {site['normalised_entropy']:.2f}"
        line.append(statistics, style="dim")
        best = f"  {names[site['sources'][top]]} {site['weights'][top]:.2f}"
        if "kept" in site:  # of several streams
            best += f", streams keep {site['kept']:.2f} of themselves"
        if len(line) + len(best) <= console.width:
            line.append(best)
        lines.append(line)
    return lines


def importance_table(record: dict[str, Any], rows: int = 12) -> Table:
    """The sources that are missed most, their weights beside them, and whether the two agree."""
    found = [
        (rise, weight, site["name"], record["sources"][position])
        for site in record["sites"]
        for position, weight, rise in zip(
            site["sources"], site["weights"], site.get("importance", ()), strict=False
        )
        if rise is not None
    ]
    agreement = record["rank_correlation"]
    rest = "" if len(found) <= rows else f", the first {rows} of {len(found)}"
    table = Table(
        title=f"importance in nats a token{rest}",
        title_style="bold",
        title_justify="left",
        caption="weight and importance do not vary together here"
        if agreement is None
        else f"rank correlation of weight and importance: {agreement:.2f}",
        caption_style="",
        caption_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for heading in ("loss without it", "weight"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("site", "source"):
        table.add_column(heading, overflow="fold")
    for rise, weight, site, source in sorted(found, reverse=True)[:rows]:
        table.add_row(f"{rise:+.4f}", f"{weight:.2f}", site, source)
    return table


def _label(site: dict[str, Any]) -> str:
    return "final" if site["name"] == "final" else str(site["layer"])


def _cell(weight: float | None, width: int, console: Console) -> Text:
    """Shade by the square root of the weight: one part in a hundred is still seen."""
    if weight is None:
        return Text("·".center(width) if width > 1 else "·", style="dim")
    level = math.sqrt(min(max(weight, 0.0), 1.0))
    figure = f"{weight:.2f}".removeprefix("0") if width == 4 else ""
    if console.color_system is None or console.no_color:
        shade = _SHADES[min(len(_SHADES) - 1, round(level * (len(_SHADES) - 1)))]
        return Text(f"{figure:>3}{shade}" if figure else shade * width)
    back = "#" + "".join(
        f"{round(a + (b - a) * level):02x}" for a, b in zip(_LIGHT, _DARK, strict=True)
    )
    ink = "#ffffff" if level > 0.5 else "#1a1a1a"
    return Text(f"{figure:^{width}}", style=Style(color=ink, bgcolor=back))


def legend(console: Console) -> Text:
    line = Text("weight ", style="dim")
    for value in (0.0, 0.05, 0.25, 0.5, 1.0):
        line.append(f" {value:g} ", style="dim")
        line.append_text(_cell(value, 2, console))
    line.append("   · not a source here", style="dim")
    line.append("\nmax and entropy are normalised: 0 and 1 are uniform, 1 and 0 pick one source")
    return line
