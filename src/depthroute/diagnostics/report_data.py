"""From run directories to what a report shows, JSON-ready. Nothing is read but the runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from depthroute import files
from depthroute.diagnostics.comparing import name_methods, name_runs, tabulate
from depthroute.diagnostics.record import first_not_finite
from depthroute.diagnostics.run_files import read_ladder, read_run
from depthroute.json_shape import is_finite, jsonable
from depthroute.methods import BASELINE
from depthroute.runs.ladder import fit
from depthroute.visible import visible

CURVE_POINTS = 60
"""A training curve is averaged down to this many points; more would show single batches."""


def collect(paths: Sequence[files.StrPath]) -> dict[str, Any]:
    """All runs in the order given, and one series for every method of each.

    A ladder is its sizes, and alone on its page.
    """
    places = [files.at_home(path) for path in paths]
    rungs = read_ladder(places)
    runs = [read_run(path) for path in ([path for path, _ in rungs] or places)]
    name_runs(runs)
    names, tables = name_methods(runs), tabulate(runs)
    ladder = None
    if rungs:
        for group, (run, table) in enumerate(zip(runs, tables, strict=True)):
            summary = run["summary"]  # sizes are not compared with each other
            table |= {"rows": summary["rows"], "step": summary["steps"], "group": group}
        ladder = fit([rung for _, rung in rungs], [run["summary"] for run in runs])
    series = []
    for position, (run, table) in enumerate(zip(runs, tables, strict=True)):
        records, traces = run.pop("records"), run.pop("traces")
        for row in table["rows"]:
            method = names[position][row["method"]]
            is_timed = run["summary"]["equal"] == "time"
            series.append(
                {
                    "label": f"{method} · {run['name']}" if len(runs) > 1 else method,
                    "run": position,
                    "method": method,
                    "row": row,
                    "step": row["steps"] if is_timed else table["step"],
                    "group": table["group"],
                }
                | _series(row, run, records, traces)
            )
    _relate(series, [run["config"] for run in runs])
    return _spelled_out(jsonable({"runs": runs, "series": series, "ladder": ladder}))


def _spelled_out(value: Any) -> Any:
    """All text made such that no page, picture or terminal obeys it."""
    if isinstance(value, dict):
        return {visible(key): _spelled_out(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_spelled_out(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value


def _relate(series: list[dict[str, Any]], configs: list[dict[str, Any]]) -> None:
    """Runs of one model each are set beside the one standard model there is.

    Only where the model's shape, the batch and the hardware are the same: other speeds say nothing
    about the method.
    """
    standard = [s for s in series if s["method"] == BASELINE]
    if len(standard) != 1:
        return
    other = standard[0]["cost"]
    for each in series:
        if _circumstances(configs[each["run"]]) != _circumstances(configs[standard[0]["run"]]):
            continue
        cost = each["cost"]
        for relative, absolute in (
            ("relative_speed", "tokens_per_second"),
            ("relative_memory", "peak_memory_bytes"),
        ):
            if cost[relative] is None and cost[absolute] and other[absolute]:
                cost[relative] = cost[absolute] / other[absolute]


def _circumstances(config: dict[str, Any]) -> tuple[Any, ...]:
    train, environment = config["train"], config["environment"]
    shape = (config["preset"], config.get("base"), config.get("ranks", 1))
    batch = (train["batch_size"], train["sequence_length"])
    return (*shape, *batch, config["device"], environment["devices"])


def _series(
    row: dict[str, Any],
    run: dict[str, Any],
    records: list[dict[str, Any]],
    traces: list[dict[str, Any]],
) -> dict[str, Any]:
    method = row["method"]
    is_alone = len(run["summary"]["rows"]) == 1  # a run of one model need not name it
    own = [t for t in traces if is_alone or t["method"] == method]
    drawable = [t for t in own if first_not_finite(t) is None]
    memory = _peak(own)
    standard = _peak([t for t in traces if t.get("method", method) == BASELINE])
    return _curves(method, run["config"]["train"], records) | {
        "cost": {
            "tokens_per_second": row["tokens_per_second"],
            "relative_speed": row["relative_speed"],
            "peak_memory_bytes": memory,
            "relative_memory": memory / standard if memory and standard else None,
        },
        "trace": _mean_trace(drawable) if drawable else None,
    }


def _curves(
    method: str, train: dict[str, Any], records: list[dict[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Losses of one method by step: held out, on the batches, and against standard."""
    steps = (r["tokens"] for r in records if r["event"] == "step" and r["tokens"])
    tokens_per_step = next(steps, train["batch_size"] * train["sequence_length"])
    validation = _by_seed(records, "validation", method)
    training = {
        seed: _thin({step + 1: loss for step, loss in curve.items()})
        for seed, curve in _by_seed(records, "step", method).items()
    }
    standard = {} if method == BASELINE else _standard_beside(records, method)
    paired = {
        seed: {s: v - standard[seed][s] for s, v in curve.items() if s in standard[seed]}
        for seed, curve in validation.items()
        if seed in standard
    }
    return {
        "validation": _curve(validation, tokens_per_step),
        "training": _curve(training, tokens_per_step),
        "difference": _curve(paired, tokens_per_step) if paired else None,
    }


def _by_seed(records: list[dict[str, Any]], event: str, method: str) -> dict[int, dict[int, float]]:
    losses: dict[int, dict[int, float]] = {}
    for record in records:
        is_mine = record["event"] == event and record["method"] == method
        if is_mine and is_finite(record["loss"]):
            losses.setdefault(record["seed"], {})[record["step"]] = record["loss"]
    return losses


def _standard_beside(records: list[dict[str, Any]], method: str) -> dict[int, dict[int, float]]:
    """The standard model's losses where ``method`` was validated, by the method's own step.

    With equal time the two are at other steps then, but in the same round.
    """
    validations = [r for r in records if r["event"] == "validation" and is_finite(r["loss"])]
    places = {(r["method"], r["seed"], r.get("round", r["step"])): r for r in validations}
    beside: dict[int, dict[int, float]] = {}
    for (label, seed, place), record in places.items():
        standard = places.get((BASELINE, seed, place))
        if label == method and standard is not None:
            beside.setdefault(seed, {})[record["step"]] = standard["loss"]
    return beside


def _thin(curve: dict[int, float]) -> dict[int, float]:
    """Means over equal stretches of steps, each placed at its last step."""
    size = max(-(-len(curve) // CURVE_POINTS), min(5, len(curve) // 8), 1)
    steps = sorted(curve)
    groups = [steps[at : at + size] for at in range(0, len(steps), size)] if steps else []
    return {group[-1]: statistics.fmean(curve[s] for s in group) for group in groups}


def _curve(by_seed: dict[int, dict[int, float]], tokens_per_step: int) -> dict[str, Any]:
    """Mean and sample standard deviation over the seeds that reached each step."""
    steps = sorted({step for curve in by_seed.values() for step in curve})
    values = [[curve[s] for curve in by_seed.values() if s in curve] for s in steps]
    return {
        "steps": steps,
        "tokens": [step * tokens_per_step for step in steps],
        "mean": [_short(statistics.fmean(v)) for v in values],
        "spread": [_short(statistics.stdev(v)) if len(v) > 1 else None for v in values],
        "seeds": sorted(by_seed),
    }


def _peak(traces: list[dict[str, Any]]) -> int | None:
    return max((t["peak_memory_bytes"] for t in traces if t.get("peak_memory_bytes")), default=None)


def _mean_trace(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's seeds have the same sites and sources: every figure is averaged over them."""
    first = traces[0]
    sites = []
    for same in zip(*(t["sites"] for t in traces), strict=True):
        columns = zip(*(site["weights"] for site in same), strict=True)
        sites.append(
            {key: same[0][key] for key in ("name", "kind", "layer", "sources")}
            | {"weights": [_short(statistics.fmean(c), 4) for c in columns]}
            | _importance(same)
            | {key: _spread(same, key) for key in ("normalised_max", "normalised_entropy")}
        )
    sublayers = [
        {key: same[0][key] for key in ("name", "kind", "layer")}
        | {key: _spread(same, key) for key in ("output_rms", "stream_rms", "gradient_rms")}
        for same in zip(*(t["sublayers"] for t in traces), strict=True)
    ]
    return {
        "num_layers": first["num_layers"],
        "seeds": [t.get("seed") for t in traces],
        "sources": first["sources"],
        "sites": sites,
        "sublayers": sublayers,
        "rank_correlation": _agreement(traces),
    }


def _importance(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one site, where every seed has looked for it."""
    found = [site.get("importance", [None]) for site in same]
    if any(rise is None for rises in found for rise in rises):
        return {}
    return {"importance": [_short(statistics.fmean(c), 4) for c in zip(*found, strict=True)]}


def _agreement(traces: list[dict[str, Any]]) -> float | None:
    """Mean rank correlation of weight and importance, where every seed has one."""
    found = [trace.get("rank_correlation") for trace in traces]
    if any(value is None for value in found):
        return None
    return _short(statistics.fmean(value for value in found if value is not None), 3)


def _spread(rows: tuple[dict[str, Any], ...], key: str) -> list[float | None]:
    """``[mean, sample standard deviation]``, None where unknown or of one seed."""
    values = [row[key] for row in rows if row[key] is not None and is_finite(row[key])]
    if not values:
        return [None, None]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return [_short(statistics.fmean(values)), None if deviation is None else _short(deviation)]


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
