"""One page that needs nothing but itself, and its figures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.diagnostics.figures import figures, palette
from depthroute.diagnostics.finding import finding
from depthroute.diagnostics.report_data import collect
from depthroute.diagnostics.results import has_one_seed, results, untraced
from depthroute.diagnostics.run_files import ReportError
from depthroute.diagnostics.svg import Figure, count_text
from depthroute.diagnostics.svg_map import ramp
from depthroute.runs.display import given_time, law_text, number_of
from depthroute.runs.ladder import TREND
from depthroute.visible import visible_line

PANELS = {
    "ladder": (
        "Loss against compute",
        "Mean over seeds at the end of training; the band is one sample standard deviation. "
        "Compute is 6 FLOPs a parameter and token, the head included, without attention's "
        "quadratic part and without the routing, which the wall clock charges. {ladder}",
    ),
    "sweep": (
        "Chosen values",
        "Mean validation loss at the end of training over the tuning seeds, against the value; the "
        "ring is what was chosen for the method. The seeds of all other panels are new ones at "
        "that value. The axis ends one nat above the best; diverged runs are left out.",
    ),
    "curves": (
        "Loss",
        "{seeds} The loss axes leave out the first tenth of training. Point at a legend entry to "
        "pick out a method; click it to hide the method, and a point to see its run.",
    ),
    "maps": (
        "Where each site reads",
        "A row is a site, a column a source, stronger colour is more weight (mean over tokens, "
        "heads and seeds, on held-out text). E is the embedding, 3a and 3m are the attention and "
        "MLP outputs of layer 3 and 3 alone its values, b2 is a block, now is the block being "
        "filled. Sites with one source choose nothing and are left blank.",
    ),
    "sharpness": (
        "How sharply each site chooses",
        "Normalised by the number of sources S: the max weight as (max - 1/S)/(1 - 1/S), where 0 "
        "is uniform and 1 picks one source; entropy over log S, where 1 is uniform.",
    ),
    "magnitudes": (
        "Magnitudes by depth",
        "Root mean square of what each sublayer adds, of the residual state it is added to, and of "
        "the loss gradient at its output, on held-out text after training.",
    ),
    "cost": (
        "Cost",
        "Speed is the median training step; memory is the peak of a step.",
    ),
}

SPREAD = {
    False: "Mean over seeds; the band is one sample standard deviation. The paired difference "
    "subtracts the standard model of the same seed, so what the seeds share cancels.",
    True: "One seed, so there is no band: how far a curve varies from seed to seed is not known "
    "here. The difference subtracts the standard model at the same step.",
}
"""What the caption of the curves says of the spread, by whether every run has a single seed."""


def write_report(
    paths: Sequence[files.StrPath], out: files.StrPath, title: str | None = None
) -> dict[str, Any]:
    """Write the page; returns the data it shows."""
    data = collect(paths)
    drawn = figures(data)
    page = render(data, drawn, title or _title(data))
    try:
        files.write_named(out, page)
    except OSError as error:
        raise ReportError(f"cannot write {str(out)!r}: {files.reason(error)}") from error
    return data


def write_figures(paths: Sequence[files.StrPath], folder: Path) -> list[Path]:
    """Every figure of the report as an SVG file."""
    written = []
    try:
        folder = files.destination(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures(collect(paths)):
            path = folder / f"{figure.name}.svg"
            files.write_text(path, figure.svg)
            written.append(path)
    except OSError as error:
        raise ReportError(f"cannot write to {str(folder)!r}: {files.reason(error)}") from error
    return written


def render(data: dict[str, Any], drawn: list[Figure], title: str) -> str:
    file = resources.files("depthroute.diagnostics").joinpath("report_template.html")
    template = file.read_text(encoding="utf-8")
    title = visible_line(title)
    drawings = [f for figure in drawn for f in (figure, figure.narrow) if f is not None]
    hover = {figure.name: figure.hover for figure in drawings}
    embedded = json.dumps(data | {"hover": hover}, separators=(",", ":"), allow_nan=False)
    colors = palette(data)
    values = {
        "title": escape(title),
        "light_colors": _variables([light for light, _ in colors], ramp()),
        "dark_colors": _variables([dark for _, dark in colors], ramp(is_dark=True)),
        "classes": _classes(len(colors), len(ramp())),
        "body": _body(data, drawn, title),
        # the text of a page may not hold "</script>"
        "data": embedded.replace("<", "\\u003c"),
    }
    values["policy"] = _policy(
        style=_filled(_between(template, "<style>", "</style>"), values),
        script=_between(template, "<script>", "</script>"),
    )
    return _filled(template, values)


def _filled(template: str, values: dict[str, str]) -> str:
    """In one pass: a run may be called ``{{body}}``."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], template)


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _policy(style: str, script: str) -> str:
    """The page's own style and script run, by their hashes, and nothing else does or is loaded.

    Images are the drawings themselves, on their way to a PNG.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _title(data: dict[str, Any]) -> str:
    names = [run["name"] for run in data["runs"]]
    return "Routing over depth: " + (", ".join(names) if len(names) < 4 else f"{len(names)} runs")


def _variables(series: list[str], levels: list[str]) -> str:
    pairs = [(f"--c{n}", color) for n, color in enumerate(series)]
    pairs += [(f"--w{n}", color) for n, color in enumerate(levels)]
    return "  " + " ".join(f"{name}: {color};" for name, color in pairs)


def _classes(num_series: int, num_levels: int) -> str:
    rules = [
        f"svg .c{n} {{ stroke: var(--c{n}); }} svg .f{n} {{ fill: var(--c{n}); }} "
        f".s{n} {{ background: var(--c{n}); }}"
        for n in range(num_series)
    ]
    rules += [f"svg .w{n} {{ fill: var(--w{n}); }}" for n in range(num_levels)]
    rules.append("svg text.under { fill: var(--ink); } svg text.over { fill: var(--page); }")
    return "\n".join(rules)


def _body(data: dict[str, Any], drawn: list[Figure], title: str) -> str:
    parts = [
        f'<header><h1>{escape(title)}</h1><p class="finding">{escape(finding(data))}</p>'
        f'<p class="lead">{_lead(data)}</p></header>'
    ]
    parts.append(results(data))
    by_panel: dict[str, list[Figure]] = {}
    for figure in drawn:
        by_panel.setdefault(figure.name.split("-")[0].replace("map", "maps"), []).append(figure)
    for name in PANELS:
        if name in by_panel or (name == "maps" and untraced(data)):
            parts.append(_panel(name, data, by_panel.get(name, [])))
    parts.append(_settings(data))
    return "\n".join(parts)


def _lead(data: dict[str, Any]) -> str:
    words = []
    for number, run in enumerate(data["runs"]):
        summary = run["summary"]
        seeds = len(summary["seeds"] or run["config"]["seeds"])
        state = " (unfinished)" if summary["signal"] is None else " (interrupted)"
        state = "" if summary["is_complete"] else state
        words.append(
            f'<a href="#run-{number}"><b>{escape(run["name"])}</b></a>{state}: preset '
            f"{escape(summary['preset'])}, {_given(summary)}, {number_of(seeds, 'seed')}, on "
            f"{escape(summary['data'])}."
        )
    return "<br/>".join(words)


def _given(summary: dict[str, Any]) -> str:
    if not summary["comparable_steps"]:
        return "not validated yet"
    if summary["equal"] == "time":
        return given_time(summary)
    return f"{summary['steps']:,} steps, {count_text(summary['tokens'])} tokens each"


def _panel(name: str, data: dict[str, Any], drawn: list[Figure]) -> str:
    heading, caption = PANELS[name]
    caption = caption.replace("{seeds}", SPREAD[has_one_seed(data)])
    caption = caption.replace("{ladder}", _ladder_text(data))
    if name == "cost" and not any(s["cost"]["peak_memory_bytes"] for s in data["series"]):
        devices = ", ".join(sorted({run["config"]["device"] for run in data["runs"]}))
        why = f"which this device ({devices}) does not count"
        if "cuda" in devices:
            why = "which a run records when it ends"
        caption = f"{caption[:-1]}, {why}."
    notes = f"<p>{escape(caption)}</p>" if drawn else ""
    if name == "maps" and (labels := untraced(data)):
        notes += (
            f'<p class="note">No routing was recorded for {escape(", ".join(labels))}: a run '
            "without traces.json, or one whose weights are no numbers, has curves and cost alone. "
            "<code>depthroute inspect</code> draws the map of a saved model.</p>"
        )
    tabs = ""
    labels = [data["series"][int(f.name[4:])]["label"] if name == "maps" else "" for f in drawn]
    if len(drawn) > 1:
        buttons = "".join(
            f'<button role="tab" aria-selected="{str(not n).lower()}" '
            f'data-shows="{figure.name}">{escape(label)}</button>'
            for n, (figure, label) in enumerate(zip(drawn, labels, strict=True))
        )
        tabs = f'<div class="tabs" role="tablist">{buttons}</div>'
    pictures = "".join(
        f'<figure data-label="{escape(label)}"{" hidden=" + chr(34) * 2 if n else ""}>'
        f"{figure.svg}{figure.narrow.svg if figure.narrow else ''}</figure>"
        for n, (figure, label) in enumerate(zip(drawn, labels, strict=True))
    )
    tools = (
        '<div class="tools"><button data-format="svg">SVG</button>'
        '<button data-format="png">PNG</button></div>'
        if drawn
        else ""
    )
    return (
        f'<section id="panel-{name}" class="{name}"><div class="head"><h2>{heading}</h2>{tools}'
        f"</div>{notes}{tabs}{pictures}</section>"
    )


def _ladder_text(data: dict[str, Any]) -> str:
    """The law, and how each method's advantage changes with size."""
    if data.get("ladder") is None:
        return ""
    trends = {label: method["trend"] for label, method in data["ladder"]["methods"].items()}
    words = [f"{label} {trend:.2f}x" for label, trend in trends.items() if trend is not None]
    return law_text(data["ladder"]["law"]) + (f" {TREND} {', '.join(words)}." if words else "")


def _settings(data: dict[str, Any]) -> str:
    """Runs that differ in their methods alone share one block."""
    shared: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for number, run in enumerate(data["runs"]):
        config = run["config"]
        environment = config["environment"]
        packages = {name: v for name, v in environment["packages"].items() if v}
        seeds = {"seeds": config["seeds"]}
        if "sweep" in config:
            seeds["seeds that chose"] = config["sweep"]["seeds"]
        groups = {
            "Training": config["train"] | seeds | {"device": config["device"]},
            "Model": {"preset": config["preset"]["name"]} | config["preset"]["model"],
            "Data": config["data"],
            "Methods": config["methods"],
            "Versions": {key: environment[key] for key in ("depthroute", "commit", "python")}
            | packages
            | {"platform": environment["platform"]},
            "Hardware": {d["device"]: d["name"] for d in environment["devices"]},
        }
        same = json.dumps({**groups, "Methods": None}, sort_keys=True)
        names, known = shared.setdefault(same, ([], groups))
        names.append(
            f'<span id="run-{number}"><b>{escape(run["name"])}</b> '
            f"<code>{escape(run['path'])}</code></span>"
        )
        methods = dict(known["Methods"])
        for name, routing in groups["Methods"].items():
            is_other = methods.get(name, routing) != routing
            methods[f"{name} · {run['name']}" if is_other else name] = routing
        known["Methods"] = methods
    blocks = [
        f'<p class="lead">{"<br/>".join(names)}</p><div class="settings">'
        + "".join(_setting_table(name, values) for name, values in groups.items())
        + "</div>"
        for names, groups in shared.values()
    ]
    return (
        '<section id="panel-settings"><div class="head"><h2>Settings and versions</h2></div>'
        f"{''.join(blocks)}</section>"
    )


def _setting_table(name: str, values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(_words(value))}</td></tr>"
        for key, value in values.items()
        if value != {}
    )
    return f"<div><h3>{name}</h3><table><tbody>{rows}</tbody></table></div>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_words(inner) for inner in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return "not set" if value is None else str(value)
