"""The table of a report: one row a method of a run, and what its numbers may be held against."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from depthroute.runs.display import (
    INTERVAL,
    difference_text,
    has_spread,
    interval_text,
    law_text,
    loss_text,
    unpaired,
)

_RUN = "run"
_LOSS = "validation loss"
_FORM = "{:.4f}"
_DIGITS = 4
MINUS = "\N{MINUS SIGN}"
_SEEDS = {
    False: "± is the sample standard deviation over seeds, and differences are paired by seed.",
    True: "one seed, so how far a loss varies from seed to seed is not known here.",
}
"""By whether no row has a spread."""


def has_one_seed(data: dict[str, Any]) -> bool:
    """Or as good as one: no ± is shown anywhere."""
    return not any(has_spread(series["row"]) for series in data["series"])


def units(data: dict[str, Any]) -> list[str]:
    """What losses are per: ``byte``, ``token`` or both."""
    return sorted({run["summary"]["unit"] for run in data["runs"]})


def untraced(data: dict[str, Any]) -> list[str]:
    """Methods that route, of runs that did not record where to."""
    return [
        series["label"]
        for series in data["series"]
        if series["trace"] is None and series["row"]["mean_normalised_max"] is not None
    ]


def results(data: dict[str, Any]) -> str:
    best = lowest(data)
    table = [_cells(data, series) for series in data["series"]]
    shown = [name for name in table[0] if any(row[name] is not None for row in table)]
    rows = []
    for number, row in enumerate(table):
        cells = [f'<td><i class="swatch s{number}"></i>{escape(row["method"] or "")}</td>']
        for name in shown[1:]:
            kind = "best" if name == _LOSS and number in best else name if name == _RUN else ""
            words = escape(row[name] or "-")
            if name == _RUN:
                words = f'<a href="#run-{data["series"][number]["run"]}">{words}</a>'
            cells.append(f'<td{_class(kind)} data-name="{name}">{words}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    header = "".join(f"<th{_class(_RUN * (name == _RUN))}>{name}</th>" for name in shown)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _notes(data))
    return (
        '<section id="panel-results"><div class="head"><h2>Results</h2></div>'
        f"<p>{escape(_caption(data))}</p>{notes}"
        f'<div class="wide"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _cells(data: dict[str, Any], series: dict[str, Any]) -> dict[str, str | None]:
    """By column; None where it says nothing, and a column of those is left out."""
    row, cost = series["row"], series["cost"]
    added, sharp = row["routing_parameters"], row["mean_normalised_max"]
    run = data["runs"][series["run"]]
    difference = difference_text(row, "{:+.4f}").replace("-", MINUS)
    interval = interval_text(row["difference"], "{:+.4f}").replace("-", MINUS)
    worth = row["speed_up"] or {"by_loss": None, "by_wall_clock": None}
    return {
        "method": series["method"],
        _RUN: run["name"] if len(data["runs"]) > 1 else None,
        _LOSS: loss_text(row, _FORM),
        "at step": f"{series['step']:,}" if len(_steps(data)) > 1 and series["step"] else None,
        "nats per": run["summary"]["unit"] if len(units(data)) > 1 else None,
        "chosen": _chosen(run, row["method"]),
        "vs standard": "-" if difference == MINUS else difference,
        "95% interval": None if interval == MINUS else interval,
        "speed-up by loss": _times(worth["by_loss"]),
        "by wall clock": _times(worth["by_wall_clock"]),
        "parameters added": "-" if added is None else f"{added:,}",
        "tokens/s": _speed(cost["tokens_per_second"], cost["relative_speed"]),
        "normalised max weight": "-" if sharp is None else f"{sharp:.3f}",
    }


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _chosen(run: dict[str, Any], method: str) -> str | None:
    """The value of a sweep, with its name."""
    sweep = run["config"].get("sweep", {"methods": {}})
    value = sweep["methods"].get(method, {}).get("chosen")
    return None if value is None else f"{sweep['name']} {value}"


def _speed(rate: float | None, relative: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" + ("" if relative is None else f" ({relative:.2f}x)")


def lowest(data: dict[str, Any]) -> set[int]:
    """Which rows have the lowest loss, as shown, of all that may be compared with them."""
    groups: dict[int, dict[int, float]] = {}
    for number, series in enumerate(data["series"]):
        loss = series["row"]["validation_loss"]
        if loss and not series["row"]["diverged"]:
            groups.setdefault(series["group"], {})[number] = round(loss["mean"], _DIGITS)
    compared = [losses for losses in groups.values() if len(losses) > 1]
    return {n for losses in compared for n in losses if losses[n] == min(losses.values())}


def _steps(data: dict[str, Any]) -> set[int]:
    return {series["step"] for series in data["series"]}


def _caption(data: dict[str, Any]) -> str:
    steps, words = _steps(data), _SEEDS[has_one_seed(data)]
    loss = f"Loss in nats per {' or '.join(units(data))}"
    if not any(steps):
        return "No run was validated yet."
    if len(steps) == 1:
        return (
            f"{loss} at step {max(steps):,}, the last that all methods were validated at; {words}"
        )
    if len(data["runs"]) == 1:
        return f"{loss} of each method at the end of the same training time; {words}"
    return (
        f"{loss} at the step in its row: the last that all methods of the run were validated at, "
        f"and those of other runs on the same data where there is such a step; {words}"
    )


def _notes(data: dict[str, Any]) -> list[str]:
    """What a reader of several runs, or of one that went wrong, has to know."""
    runs, rows = data["runs"], [series["row"] for series in data["series"]]
    notes = []
    if any(row["difference"] and row["difference"]["interval"] for row in rows):
        notes.append(INTERVAL)
    if any(row["speed_up"] for row in rows):
        notes += sorted({law_text(run["summary"]["law"]) for run in runs})
    if len(runs) > 1 and len({s["group"] for s in data["series"]}) > 1:
        notes.append(
            "Bold is the lowest loss among rows of the same data, tokens, batches and step; other "
            "rows cannot be compared."
        )
    for position, run in enumerate(runs):
        mine = [series for series in data["series"] if series["run"] == position]
        notes += _notes_of_run(run, mine, "" if len(runs) == 1 else run["name"])
    return notes


def _notes_of_run(run: dict[str, Any], mine: list[dict[str, Any]], alias: str) -> Iterator[str]:
    """``alias`` is its name, where there are others."""
    name, went_on = alias or "This run", run["summary"]["steps"]
    if run["summary"]["equal"] != "time" and mine[0]["step"] < went_on:
        yield (
            f"{name} went on to step {went_on:,}, as the curves show; where runs are of "
            "different length, their learning rates at one step differ."
        )
    for series in mine:
        if series["method"] != series["row"]["method"]:
            yield f"{series['method']} is {series['row']['method']} in {name}."
        agreement = (series["trace"] or {}).get("rank_correlation")
        if agreement is not None:
            yield (
                f"{series['method']}{alias and ' in ' + alias}: rank correlation of a source's "
                f"weight and the loss without it, {agreement:.2f} (hover over its map for both)."
            )
    for method, tuned in run["config"].get("sweep", {}).get("methods", {}).items():
        if tuned["edge"]:
            yield (
                f"{name}: {method} is best at {tuned['chosen']}, the {tuned['edge']} value "
                "that was tried, and is not reported."
            )
    if lost := unpaired([series["row"] for series in mine]):
        yield f"{alias}: {lost}" if alias else lost
