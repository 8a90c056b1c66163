"""The ladder of the evidence page: grids on one text at several sizes, as `compare --ladder` would
show them. `bench/evidence.toml` names the grids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from results_data import on_white, table, wrapped
from results_fields import (
    LEAST_SEEDS,
    Field,
    Outcome,
    difference,
    fields,
    plan,
    short,
    worth,
)

from depthroute.diagnostics.figures import figures
from depthroute.methods import BASELINE
from depthroute.runs import ladder
from depthroute.runs.display import law_text
from depthroute.runs.ladder import TREND
from depthroute.train.ladder import num_flops

PICTURE = "evidence_ladder.svg"
WAITS = "Not yet to be said: it takes standard with three seeds at two sizes."


def sizes() -> list[Field]:
    """Smallest first: those that standard has seeds enough of, on the text of the first and with
    its optimiser."""
    found = [field for grid in plan()["ladder"]["grids"] for field in fields(grid)]
    found = [f for f in found if BASELINE in _methods(f) and f.text["sha256"] is not None]
    found = [f for f in found if (f.text, f.optimizer) == (found[0].text, found[0].optimizer)]
    found = sorted(found, key=lambda field: field.run["parameters"])
    for field, other in pairwise(found):
        if field.run["parameters"] == other.run["parameters"]:
            raise ValueError(
                f"grids {field.grid} and {other.grid} both have {field.size}, and a ladder has "
                "every size once; leave out runs that train the same methods again"
            )
    return found


def _methods(field: Field) -> list[str]:
    """With as many seeds as a verdict takes, each beside one of standard's, and none diverged."""
    known = field.series.keys() if BASELINE in field.series else []
    pairs = {
        method: difference(field, method, BASELINE)
        for method in known
        if not field.series[method]["row"]["diverged"]
    }
    return [m for m, pair in pairs.items() if pair and len(pair["by_seed"]) >= LEAST_SEEDS]


def fitted(found: list[Field]) -> dict[str, Any]:
    """How standard's loss falls with compute, and every method's advantage by that."""
    rungs, summaries = [], []
    for field in found:
        model, parameters = field.run["config"]["preset"]["model"], field.run["parameters"]
        tokens = field.run["summary"]["tokens"]
        about = {"name": short(parameters), "parameters": parameters, "tokens": tokens}
        rungs.append(about | {"flops": num_flops(model, parameters, tokens)})
        own = {method: field.series[method]["row"] for method in _methods(field)}
        rows = [
            row | {"difference": None if m == BASELINE else difference(field, m, BASELINE)}
            for m, row in own.items()
        ]
        summaries.append({"unit": field.run["summary"]["unit"], "tokens": tokens, "rows": rows})
    return ladder.fit(rungs, summaries)


def own_law() -> dict[str, Any] | None:
    """How standard's loss falls with compute on the ladder; None before that is known."""
    found = sizes()
    law = fitted(found)["law"] if len(found) > 1 else None
    return law if law and law["source"].startswith("fitted") else None


def section() -> str:
    found = sizes()
    about = plan()["ladder"]["about"].strip()
    if len(found) < 2:
        return f"{about}\n\n{WAITS}\n"
    result = fitted(found)
    law = result["law"]
    head = ["method"]
    for field in found:
        head += [f"{field.size}: vs standard [95%]", "speed-up by loss"]
    rows = []
    for method, known in result["methods"].items():
        cells = [method]
        for field in found:
            there = method != BASELINE and method in _methods(field)
            against = difference(field, method, BASELINE) if there else None
            up = worth(field, method, by_time=False, law=law) if there else None
            cells.append(Outcome(field.grid, "", against, 0.0).number or "-")
            cells.append(Outcome(field.grid, "", up, 1.0).number or "-")
        trend = known["trend"]
        rows.append([*cells, "-" if trend is None else f"{trend:.2f}x"])
    losses = [point["loss"]["mean"] for point in result["methods"][BASELINE]["points"]]
    words = [
        f"{loss:.4f} at {r['flops']:.2g} FLOPs"
        for loss, r in zip(losses, result["rungs"], strict=True)
    ]
    text = wrapped(
        f"Standard: {', '.join(words)}.",
        law_text(law),
        f"{TREND} last column.",
    )
    table_ = table([*head, "ten times the compute"], rows)
    return f"{about}\n\n{text}\n{table_}\n![Loss against compute](images/{PICTURE})\n"


def pictures() -> dict[str, str]:
    """SVG texts by file name, none before there are two sizes."""
    found = sizes()
    if len(found) < 2:
        return {}
    series = [
        each | {"run": number, "label": method}
        for number, field in enumerate(found)
        for method, each in field.series.items()
    ]
    data = {"runs": [field.run for field in found], "series": series, "ladder": fitted(found)}
    return {PICTURE: next(on_white(f.svg) for f in figures(data) if f.name == "ladder")}
