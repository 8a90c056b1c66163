"""A sweep on disk: a run directory for every method, value and seed, and what they come to.

    OUT/config.json, metrics.jsonl, summary.json     of the whole; metrics has its own few events
    OUT/runs/METHOD/NAME=VALUE/seed-N/               a run of one method each

A value is chosen for each method by its loss on the tuning seeds; what is reported are other seeds
at that value. Everything here is read from the runs, so it is the same whenever it is asked for.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.errors import ConfigError
from depthroute.json_shape import ANYTHING, NUMBER, OBJECT, TEXT, WHOLE, Shape, check
from depthroute.runs.directory import RunDirectory, RunError
from depthroute.runs.summary import Records, summarise

KIND = "sweep"
_PART = {
    "methods": {"*": OBJECT},
    "seeds": [WHOLE],
    "train": {"steps": WHOLE, "batch_size": WHOLE, "sequence_length": WHOLE},
    "preset": {"name": TEXT},
    "data": {"name": TEXT, "baselines": {"*": NUMBER}},
}
_WHOLE = _PART | {"sweep": {"name": TEXT.or_null(), "values": [ANYTHING], "seeds": [WHOLE]}}
Value = float | int | str | None
"""None where a method has nothing to sweep, and runs as set."""


@dataclass(frozen=True)
class Choice:
    """What was tried for one method, and the best of it."""

    losses: dict[Value, dict[int, float]]
    """By value and tuning seed, in the order of the values; infinite where it diverged."""
    value: Value
    edge: str | None
    """Which end of the sweep the value is at: lowest or highest; None inside."""

    def to_dict(self) -> dict[str, Any]:
        points = [
            {
                "value": value,
                "loss": _mean(losses),
                "by_seed": {str(s): x for s, x in losses.items()},
            }
            for value, losses in self.losses.items()
            if losses
        ]
        return {
            "points": points,
            "chosen": self.value,
            "edge": self.edge,
            "next": further(self),
        }


def folder(root: Path, label: str, name: str | None, value: Value, seed: int) -> Path:
    point = "as-set" if value is None else f"{name}={value}"
    return root / "runs" / _as_name(label) / _as_name(point) / f"seed-{seed}"


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]", "_", text)


def choose(losses: dict[Value, dict[int, float]], end: Value = None) -> Choice:
    """The value with the lowest mean over the tuning seeds; nothing is allowed beyond ``end``."""
    if set(losses) == {None}:
        return Choice(losses, None, None)
    values = sorted_values(losses)
    losses = {value: losses[value] for value in values}
    best = min(values, key=lambda value: _mean(losses[value]))
    edge = None
    if is_ordered(values) and best in (values[0], values[-1]) and best != end:
        edge = "highest" if best == values[-1] else "lowest"
    return Choice(losses, best, edge)


def is_ordered(values: list[Value]) -> bool:
    """Numbers have ends, names have not."""
    return all(isinstance(value, int | float) for value in values)


def sorted_values(values: Any) -> list[Any]:
    return sorted(values) if is_ordered(list(values)) else list(values)


def further(choice: Choice) -> Value:
    """The next value beyond the edge, by the ratio of the two values there; None below zero."""
    values: list[Any] = list(choice.losses)
    if choice.edge is None or len(values) < 2:
        return None
    end, beside = (values[-1], values[-2]) if choice.edge == "highest" else values[:2]
    if end * beside < 0 or end == 0:
        return None
    ratio = end / beside if beside else 2.0
    return between(end, end * ratio)


def between(end: Any, beyond: float) -> Any:
    """``beyond`` as a value of the setting that has ``end``, and never ``end`` itself if that is a
    whole number."""
    if not isinstance(end, int):
        return float(f"{beyond:.4g}")
    return max(round(beyond), end + 1) if beyond > end else min(round(beyond), end - 1)


def read_losses(root: Path, config: dict[str, Any]) -> dict[str, dict[Value, dict[int, float]]]:
    """Of the tuning runs that are finished, by method, value and seed."""
    name, tried = config["sweep"]["name"], tried_values(root)
    return {
        label: {
            value: {
                seed: loss
                for seed in config["sweep"]["seeds"]
                if value is not None
                and (loss := final_loss(folder(root, label, name, value, seed))) is not None
            }
            for value in tried.get(label, [])
        }
        for label in config["methods"]
    }


def final_loss(path: Path) -> float | None:
    """Of a finished run of one method; infinite where it diverged, None before it has ended."""
    if not (path / "config.json").is_file():
        return None
    config = _config(path, _PART)
    try:
        summary = summarise(config, RunDirectory(path).records())
    except OSError as error:
        raise RunError(f"cannot read the run in {path}: {files.reason(error)}") from error
    row = summary["rows"][0]
    if not summary["is_complete"]:
        return None
    return math.inf if row["diverged"] else row["validation_loss"]["mean"]


def choices(root: Path, config: dict[str, Any]) -> dict[str, Choice]:
    """Of the methods whose every value was run on every tuning seed."""
    number = len(config["sweep"]["seeds"])
    ends = {r["method"]: r["value"] for r in RunDirectory(root).records() if r["event"] == "end"}
    return {
        label: choose(losses, ends.get(label))
        for label, losses in read_losses(root, config).items()
        if losses and all(v is None or len(seeds) == number for v, seeds in losses.items())
    }


def read_sweep(root: Path) -> tuple[dict[str, Any], Records, list[dict[str, Any]]]:
    """Configuration, records and traces of the reported runs, as if they were one comparison.

    ``config["sweep"]["methods"]`` says what was tried. A method that has no value inside its sweep
    is not reported.
    """
    run, config = RunDirectory(root), read_config(root)
    chosen = choices(root, config)
    reported = {n: r for n, r in config["methods"].items() if n in chosen and not chosen[n].edge}
    records, traces, settings = [], [], []
    for seed in config["seeds"]:
        for label in reported:
            path = folder(root, label, config["sweep"]["name"], chosen[label].value, seed)
            if (path / "config.json").is_file():
                part = RunDirectory(path)
                settings.append(_config(path, _PART))
                records += [
                    r for r in part.records() if r["event"] not in ("resumed", "interrupted")
                ]
                traces += part.traces()
    records += [r for r in run.records() if r.get("method") in (None, *reported)]
    swept = config["sweep"] | {"methods": {n: c.to_dict() for n, c in chosen.items()}}
    train = config["train"] | _trained([s["train"] for s in settings])
    methods = reported or config["methods"]
    return config | {"sweep": swept, "train": train, "methods": methods}, records, traces


def read_config(root: Path) -> dict[str, Any]:
    """Of the whole."""
    return _config(root, _WHOLE)


def _config(path: Path, shape: Shape) -> dict[str, Any]:
    config = RunDirectory(path).read_json("config.json")
    try:
        check(config, shape, "config.json")
    except ValueError as error:
        raise RunError(
            f"the run in {path} is damaged: {error}; remove it, or bring a good copy"
        ) from error
    if not config["methods"] or not config["seeds"]:
        raise RunError(f"the run in {path} is damaged: it names no methods or seeds")
    return config


def _trained(settings: Records) -> dict[str, Any]:
    """Of the reported runs: a setting that is not the same in all of them is the method's."""
    names = settings[0] if settings else {}
    return {
        name: value if all(s.get(name) == value for s in settings) else "by method"
        for name, value in names.items()
    }


def tried_values(root: Path) -> dict[str, list[Value]]:
    """Every value that was begun, by method."""
    tried: dict[str, list[Value]] = {}
    for record in RunDirectory(root).records():
        if record["event"] == "value" and record["value"] not in tried.setdefault(
            record["method"], []
        ):
            tried[record["method"]].append(record["value"])
    return tried


def _mean(losses: dict[int, float]) -> float:
    return statistics.fmean(losses.values())


def refuse_edges(sweep: dict[str, Any]) -> None:
    """Of a summary: who reads it must know of a better value that may be beyond."""
    words = [
        f"{label} is best at {method['chosen']}, the {method['edge']} {sweep['name']}"
        + ("" if method["next"] is None else f" (add {method['next']})")
        for label, method in sweep["methods"].items()
        if method["edge"]
    ]
    if words:
        raise ConfigError(
            f"{'; '.join(words)}. What is best may lie beyond, so it is not reported: add the "
            "value to --sweep, or more with --extend, and go on with --resume auto"
        )
