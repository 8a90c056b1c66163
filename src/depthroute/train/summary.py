"""From a run's records to the figures of its table. Nothing here is known only in memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from depthroute.train.methods import BASELINE

Records = list[dict[str, Any]]


def summarise(config: dict[str, Any], records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One row a method, from ``config.json`` and the lines of ``metrics.jsonl``.

    Only seeds whose methods were all validated at the same, latest step are compared, so an
    interrupted run never sets a half-trained model beside a trained one.
    """
    by_event: dict[str, Records] = {}
    last: dict[str, Any] = {"event": None}
    for last in records:
        by_event.setdefault(last["event"], []).append(last)
    labels = list(config["methods"])
    diverged = by_event.get("diverged", [])
    step, losses = comparable_losses(labels, by_event.get("validation", []), diverged)
    rows = [_row(label, labels, losses, by_event) for label in labels]
    asked = [(label, seed) for label in labels for seed in config["seeds"]]
    steps = dict.fromkeys(labels, config["train"]["steps"])
    for record in by_event.get("pace", []):
        steps |= record["steps"]
    ended = {
        (r["method"], r["seed"])
        for r in by_event.get("validation", [])
        if r["step"] == steps[r["method"]]
    } | {(r["method"], r["seed"]) for r in diverged}
    return {
        "is_complete": all(pair in ended for pair in asked),
        "signal": last.get("signal") if last["event"] == "interrupted" else None,
        "preset": config["preset"]["name"],
        "equal": config.get("equal", "tokens"),
        "steps": step,
        "tokens": step * config["train"]["batch_size"] * config["train"]["sequence_length"],
        "seeds": sorted(losses),
        "data": config["data"].get("validation") or config["data"]["name"],
        "unit": config["data"].get("unit", "byte"),
        "baselines": config["data"]["baselines"],
        "rows": rows,
    }


def comparable_losses(
    labels: list[str], validations: Records, diverged: Records
) -> tuple[int, dict[int, dict[str, float]]]:
    """The latest step that some seed has validated for all its methods, and the losses there.

    Where methods take different numbers of steps it is the latest round.
    """
    lost = {(r["seed"], r["method"]) for r in diverged}
    table: dict[int, dict[int, dict[str, float]]] = {}
    for record in validations:
        seeds = table.setdefault(record.get("round", record["step"]), {})
        seeds.setdefault(record["seed"], {})[record["method"]] = record["loss"]
    for step in sorted(table, reverse=True):
        whole = {
            seed: found
            for seed, found in table[step].items()
            if all(label in found or (seed, label) in lost for label in labels)
        }
        if whole:
            return step, whole
    return 0, {}


def _row(
    label: str,
    labels: list[str],
    losses: dict[int, dict[str, float]],
    by_event: dict[str, Records],
) -> dict[str, Any]:
    starts = {r["method"]: r for r in by_event.get("start", [])}
    values = {seed: found[label] for seed, found in losses.items() if label in found}
    paired = {
        seed: value - losses[seed][BASELINE]
        for seed, value in values.items()
        if BASELINE in losses[seed] and label != BASELINE
    }
    rate, baseline = (_median_rate(name, by_event.get("step", [])) for name in (label, BASELINE))
    sharp = [
        r["mean_normalised_max"]
        for r in by_event.get("routing", [])
        if r["method"] == label and r["mean_normalised_max"] is not None
    ]
    start = starts.get(label, {})
    taken = [r for r in by_event.get("step", []) if r["method"] == label and r["seed"] in losses]
    return {
        "method": label,
        "validation_loss": _statistics(values),
        "difference": _statistics(paired),
        "parameters": start.get("parameters"),
        "routing_parameters": start.get("routing_parameters"),
        "steps": len(taken) // len(losses) if losses else 0,
        "tokens": sum(r["tokens"] for r in taken) // len(losses) if losses else 0,
        "seconds": _seconds(taken) / len(losses) if losses else 0.0,
        "tokens_per_second": rate,
        "relative_speed": rate / baseline if rate and baseline else None,
        "mean_normalised_max": statistics.fmean(sharp) if sharp else None,
        "diverged": [
            {"seed": r["seed"], "step": r["step"]}
            for r in by_event.get("diverged", [])
            if r["method"] == label
        ],
    }


def _statistics(values: dict[int, float]) -> dict[str, Any] | None:
    """Mean and sample standard deviation over seeds; one seed has no spread."""
    if not values:
        return None
    numbers = list(values.values())
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    by_seed = {str(seed): value for seed, value in values.items()}
    return {"mean": statistics.fmean(numbers), "spread": spread, "by_seed": by_seed}


def _seconds(steps: Records) -> float:
    """Of all steps, but for those in which a model was compiled."""
    times = [r["seconds"] for r in steps]
    longest = 10 * statistics.median(times) if times else 0.0
    return sum(t for t in times if t <= longest)


def _median_rate(label: str, steps: Records) -> float | None:
    """Tokens a second of the median step: one slow step on a busy machine does not count."""
    times = [r["seconds"] / r["tokens"] for r in steps if r["method"] == label]
    return 1 / statistics.median(times) if times else None
