"""A ladder on disk: one sweep a size, and how loss falls with compute.

OUT/config.json, metrics.jsonl, summary.json     of the whole
OUT/rungs/NAME/                                  a sweep each
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from depthroute.json_shape import NUMBER, TEXT, WHOLE, check
from depthroute.methods import BASELINE
from depthroute.runs.directory import RunDirectory, RunError
from depthroute.runs.inference import Law, fit_law, law_for
from depthroute.runs.summary import value

KIND = "ladder"
_SHAPE = {"rungs": [{"name": TEXT, "parameters": WHOLE, "tokens": WHOLE, "flops": NUMBER}]}


def rung_folder(root: Path, name: str) -> Path:
    return root / "rungs" / name


def read_rungs(root: Path) -> list[dict[str, Any]]:
    """Name, parameters, tokens and flops of every size, smallest first."""
    config = RunDirectory(root).read_json("config.json")
    try:
        check(config, _SHAPE, "config.json")
    except ValueError as error:
        raise RunError(f"the ladder in {root} is damaged: {error}") from error
    return sorted(config["rungs"], key=lambda rung: rung["flops"])


def fit(rungs: list[dict[str, Any]], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The law of standard over the sizes, and every method's advantage under it.

    ``summaries`` are those of the sizes; their rows are given what a difference is worth by the
    law that is found. A size that is not trained to its end has no place on the ladder yet, nor has
    a method that diverged there.
    """
    unit = summaries[0]["unit"]
    points = [
        {
            row["method"]: row
            for row in summary["rows"]
            if row["validation_loss"] and not row["diverged"]
            if summary["tokens"] == rung["tokens"]
        }
        for rung, summary in zip(rungs, summaries, strict=True)
    ]
    standard = [
        (rung["flops"], rows[BASELINE]["validation_loss"]["mean"])
        for rung, rows in zip(rungs, points, strict=True)
        if BASELINE in rows
    ]
    fitted = fit_law([flops for flops, _ in standard], [loss for _, loss in standard], unit)
    law = fitted or law_for(unit)
    for summary in summaries:
        value(summary["rows"], law)
        summary["law"] = None if law is None else law.to_dict()
    labels = dict.fromkeys(label for rows in points for label in rows)
    methods = {label: _method(label, rungs, points, law) for label in labels}
    return {
        "rungs": rungs,
        "unit": unit,
        "law": None if law is None else law.to_dict(),
        "methods": methods,
    }


def _method(
    label: str, rungs: list[dict[str, Any]], points: list[dict[str, Any]], law: Law | None
) -> dict[str, Any]:
    rows = [(rung, rows[label]) for rung, rows in zip(rungs, points, strict=True) if label in rows]
    gains = [
        (math.log10(rung["flops"]), math.log(row["speed_up"]["by_loss"]))
        for rung, row in rows
        if row["speed_up"]
    ]
    trend = None
    if len({compute for compute, _ in gains}) > 1:
        trend = math.exp(statistics.linear_regression(*zip(*gains, strict=True)).slope)
    return {
        "points": [
            {
                "rung": rung["name"],
                "flops": rung["flops"],
                "loss": row["validation_loss"],
                "difference": row["difference"],
                "speed_up": row["speed_up"],
            }
            for rung, row in rows
        ],
        "trend": trend,
    }


TREND = "Ten times the compute multiplies the speed-up by (through so few sizes a guess):"
