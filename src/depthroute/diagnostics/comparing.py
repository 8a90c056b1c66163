"""Several runs on one page: what each is called, and which of their rows may be compared."""

from __future__ import annotations

import json
from typing import Any

from depthroute.config import RoutingConfig
from depthroute.diagnostics.svg import shortened
from depthroute.errors import ConfigError
from depthroute.runs.summary import summarise, unit_of

_LONGEST_NAME = 40


def name_runs(runs: list[dict[str, Any]]) -> None:
    """Every run gets a name of its own, short enough for a legend."""
    names = [shortened(run["name"], _LONGEST_NAME) for run in runs]
    for position, (run, name) in enumerate(zip(runs, names, strict=True)):
        run["name"] = name
        if names.count(name) > 1:
            number = position + 1
            while (numbered := f"{name} ({number})") in names:
                number += len(runs)
            run["name"] = numbered


def name_methods(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each run, what the page calls its methods: one name a routing, one routing a name.

    Runs made before methods had one name call ``delta:num_blocks=4`` what others call
    ``delta-block``. Two methods of one run stay two, whatever their routing is called elsewhere.
    """
    named = []
    for run in runs:
        names = {label: _name(routing) for label, routing in run["config"]["methods"].items()}
        shown = list(names.values())
        named.append({m: name if shown.count(name) == 1 else m for m, name in names.items()})
    return named


def _name(routing: dict[str, Any]) -> str:
    """Settings of another version, or of no version, are spelled out."""
    try:
        return RoutingConfig.from_dict(routing).name
    except ConfigError:
        settings = [f"{key}={value}" for key, value in routing.items() if key != "method"]
        return ":".join([str(routing.get("method")), *settings])


def tabulate(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run its rows, the ``step`` they are of, and the ``group`` they are compared in.

    Runs on the same text, tokens and batches are compared at the last step that all of them were
    validated at. Where there is none, a run has its own last step and is compared with no other.
    """
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        groups.setdefault(_judged_on(run["config"], position), []).append(position)
    tables: list[dict[str, Any]] = [{}] * len(runs)
    for members in groups.values():
        validated = [set(runs[n]["summary"]["comparable_steps"]) for n in members]
        common = set.intersection(*(filter(None, validated))) if any(validated) else set()
        for n in members:
            run, at = runs[n], max(common, default=None)
            summary = summarise(run["config"], run["records"], at) if common else run["summary"]
            tables[n] = {
                "rows": summary["rows"],
                "step": summary["steps"],
                "group": members[0] if common else n,
            }
    return tables


def _judged_on(config: dict[str, Any], position: int) -> str:
    """Equal for runs whose losses at one step say which method is better."""
    if config.get("equal") == "time":
        return f"run {position}"  # its methods are at different steps, and its time is its own
    data = {k: v for k, v in config["data"].items() if k not in ("baselines", "unit")}
    if any(name.endswith("sha256") for name in data):  # the same text may lie elsewhere
        data = {k: v for k, v in data.items() if k not in ("name", "validation")}
    train = config["train"]
    settings = [train.get(k) for k in ("batch_size", "sequence_length", "validation_sequences")]
    return json.dumps([data, unit_of(config["data"]), settings], sort_keys=True)
