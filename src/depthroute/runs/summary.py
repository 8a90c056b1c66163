"""From a run's records to the figures of its table. Nothing here is known only in memory."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable
from typing import Any

from depthroute.json_shape import is_finite
from depthroute.methods import BASELINE
from depthroute.runs.directory import RunError
from depthroute.runs.inference import Law, interval, law_for

Records = list[dict[str, Any]]


def summarise(
    config: dict[str, Any], records: Iterable[dict[str, Any]], at: int | None = None
) -> dict[str, Any]:
    """One row a method, from ``config.json`` and the lines of ``metrics.jsonl``.

    Only seeds whose methods were all validated at the same step are compared, so an interrupted
    run never sets a half-trained model beside a trained one. It is the latest such step, or ``at``.
    Methods that differ in more than their routing are refused.
    """
    by_event: dict[str, Records] = {}
    last: dict[str, Any] = {"event": None}
    for last in records:
        _refuse_foreign(last, config)
        by_event.setdefault(last["event"], []).append(last)
    labels = list(config["methods"])
    base, order = _base_parameters(by_event.get("start", [])), _data_order(by_event.get("step", []))
    validations, stopped = (by_event.get(name, []) for name in ("validation", "diverged"))
    by_event["diverged"] = stopped + _not_finite(validations, stopped)
    places = comparable_places(labels, validations, by_event["diverged"])
    step = max(places, default=0) if at is None else at
    losses = places.get(step, {})
    rows = [_row(label, losses, by_event) for label in labels]
    law = law_for(unit_of(config["data"]))
    value(rows, law)
    asked = [(label, seed) for label in labels for seed in config["seeds"]]
    steps = dict.fromkeys(labels, config["train"]["steps"])
    for record in by_event.get("pace", []):
        steps |= record["steps"]
    last_step = [r for r in validations if r["step"] == steps[r["method"]]]
    ended = {(r["method"], r["seed"]) for r in [*last_step, *stopped]}
    return {
        "is_complete": all(pair in ended for pair in asked),
        "signal": last.get("signal") if last["event"] == "interrupted" else None,
        "preset": config["preset"]["name"],
        "equal": config.get("equal", "tokens"),
        "steps": step,
        "tokens": step * config["train"]["batch_size"] * config["train"]["sequence_length"],
        "comparable_steps": sorted(places),
        "seeds": sorted(losses),
        "data": config["data"].get("validation") or config["data"]["name"],
        "unit": unit_of(config["data"]),
        "baselines": config["data"]["baselines"],
        "base_parameters": base,
        "data_order": order,
        "law": None if law is None else law.to_dict(),
        "rows": rows,
    }


def unit_of(data: dict[str, Any]) -> str:
    """What a loss is per: a byte, or a token of some other vocabulary."""
    tokenizer = data.get("tokenizer")
    if "unit" in data or not isinstance(tokenizer, dict):
        return data.get("unit", "byte")
    return "byte" if tokenizer.get("name") == "bytes" else "token"


def _refuse_foreign(record: dict[str, Any], config: dict[str, Any]) -> None:
    """Records and configuration of one run name the same methods and seeds."""
    for name, known in (("method", list(config["methods"])), ("seed", config["seeds"])):
        if name in record and record[name] not in known:
            raise RunError(
                f"metrics.jsonl has {name} {record[name]!r} and config.json only "
                f"{', '.join(map(repr, known))}: they are not of one run"
            )


def _base_parameters(starts: Records) -> int | None:
    """Without the routing: the same for all methods, or they cannot be compared."""
    counts = {
        (r["method"], r["parameters"] - r["routing_parameters"])
        for r in starts
        if "parameters" in r and "routing_parameters" in r
    }
    if len({count for _, count in counts}) > 1:
        words = ", ".join(f"{label} {count:,}" for label, count in sorted(counts))
        raise RunError(
            f"methods differ in parameters without their routing ({words}), so their losses cannot "
            "be compared; run them with one model shape"
        )
    return next((count for _, count in counts), None)


def _data_order(steps: Records) -> dict[str, str]:
    """By seed, a hash of the batches and their order, which all methods were given."""
    orders: dict[int, dict[int, tuple[int, int]]] = {}
    for record in steps:
        if "batch_crc32" not in record:
            continue
        batch = (record["batch_crc32"], record["tokens"])
        known = orders.setdefault(record["seed"], {}).setdefault(record["step"], batch)
        if known != batch:
            raise RunError(
                f"{record['method']} had another batch than the methods before it at step "
                f"{record['step']} of seed {record['seed']} (checksum and tokens {batch}, not "
                f"{known}), so their losses cannot be compared; train them on the same data"
            )
    return {
        str(seed): hashlib.sha256(repr(sorted(order.items())).encode()).hexdigest()[:16]
        for seed, order in sorted(orders.items())
    }


def value(rows: Records, law: Law | None) -> None:
    """What each row's loss is worth: the training that standard would need for it, over its own,
    in tokens and in time."""
    for row in rows:
        row["speed_up"] = None
        if law is None or row["difference"] is None or row["diverged"]:
            continue
        paired, losses = row["difference"]["by_seed"], row["validation_loss"]["by_seed"]
        loss = statistics.fmean(losses[seed] for seed in paired)
        by_loss, speed = law.speed_up(loss - row["difference"]["mean"], loss), row["relative_speed"]
        if by_loss is not None:
            by_time = None if speed is None else by_loss * speed
            row["speed_up"] = {"by_loss": by_loss, "by_wall_clock": by_time}


def comparable_places(
    labels: list[str], validations: Records, diverged: Records
) -> dict[int, dict[int, dict[str, float]]]:
    """By step, the losses of the seeds that have validated all their methods there.

    Those that diverged need not be among them. Where methods take different numbers of steps, it
    is by round.
    """
    lost = {(r["seed"], r["method"]) for r in diverged}
    table: dict[int, dict[int, dict[str, float]]] = {}
    for record in validations:
        if is_finite(record["loss"]):
            seeds = table.setdefault(record.get("round", record["step"]), {})
            seeds.setdefault(record["seed"], {})[record["method"]] = record["loss"]
    whole = {
        step: {
            seed: losses
            for seed, losses in seeds.items()
            if all(label in losses or (seed, label) in lost for label in labels)
        }
        for step, seeds in table.items()
    }
    return {step: seeds for step, seeds in whole.items() if seeds}


def _not_finite(validations: Records, stopped: Records) -> Records:
    """Methods that diverged and were not stopped: their last validation is of no number."""
    known = {(r["seed"], r["method"]) for r in stopped}
    last = {(r["seed"], r["method"]): r for r in validations}
    return [r for who, r in last.items() if who not in known and not is_finite(r["loss"])]


def _row(
    label: str,
    losses: dict[int, dict[str, float]],
    by_event: dict[str, Records],
) -> dict[str, Any]:
    mine = {event: [r for r in rs if r.get("method") == label] for event, rs in by_event.items()}
    steps = [r for r in mine.get("step", []) if r["seed"] in losses]
    start = (mine.get("start") or [{}])[-1]
    standard = [r for r in by_event.get("step", []) if r["method"] == BASELINE]
    rate, baseline = _median_rate(mine.get("step", [])), _median_rate(standard)
    for record in by_event.get("speed", []):  # of methods run apart, measured side by side
        rate, baseline = (record["tokens_per_second"].get(name) for name in (label, BASELINE))
    num_seeds = max(1, len(losses))
    return {
        "method": label,
        "validation_loss": over_seeds(_of_method(label, losses)),
        "difference": over_seeds(_paired_differences(label, losses)),
        "parameters": start.get("parameters"),
        "routing_parameters": start.get("routing_parameters"),
        "steps": len(steps) // num_seeds,
        "tokens": sum(r["tokens"] for r in steps) // num_seeds,
        "seconds": _seconds(steps) / num_seeds,
        "tokens_per_second": rate,
        "relative_speed": rate / baseline if rate and baseline else None,
        "mean_normalised_max": _mean_sharpness(mine.get("routing", [])),
        "diverged": [{"seed": r["seed"], "step": r["step"]} for r in mine["diverged"]],
    }


def _of_method(label: str, losses: dict[int, dict[str, float]]) -> dict[int, float]:
    """By seed; those in which it diverged have none."""
    return {seed: methods[label] for seed, methods in losses.items() if label in methods}


def _paired_differences(label: str, losses: dict[int, dict[str, float]]) -> dict[int, float]:
    """From the baseline of the same seed, where that did not diverge."""
    if label == BASELINE:
        return {}
    baseline = _of_method(BASELINE, losses)
    mine = _of_method(label, losses)
    return {seed: value - baseline[seed] for seed, value in mine.items() if seed in baseline}


def _mean_sharpness(looks: Records) -> float | None:
    """Of the trained models in which something chooses."""
    values = [r["mean_normalised_max"] for r in looks]
    values = [value for value in values if value is not None and is_finite(value)]
    return statistics.fmean(values) if values else None


def over_seeds(values: dict[int, float]) -> dict[str, Any] | None:
    """Mean, sample standard deviation and confidence interval over seeds; one seed has neither."""
    if not values:
        return None
    numbers = list(values.values())
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    by_seed = {str(seed): value for seed, value in values.items()}
    mean = statistics.fmean(numbers)
    return {"mean": mean, "spread": spread, "interval": interval(numbers), "by_seed": by_seed}


def _seconds(steps: Records) -> float:
    """Of all steps, but for those in which a model was compiled."""
    times = [r["seconds"] for r in steps]
    longest = 10 * statistics.median(times) if times else 0.0
    return sum(t for t in times if t <= longest)


def _median_rate(steps: Records) -> float | None:
    """Tokens a second of the median step: one slow step on a busy machine does not count."""
    times = [r["seconds"] / r["tokens"] for r in steps if r["tokens"]]
    median = statistics.median(times) if times else 0.0
    return 1 / median if median > 0 else None
