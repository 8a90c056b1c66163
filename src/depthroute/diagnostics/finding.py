"""The sentences on top of a report: what was found, and how sure that is."""

from __future__ import annotations

from typing import Any

from depthroute.diagnostics.results import MINUS
from depthroute.methods import BASELINE
from depthroute.runs.display import number_of

_FORM = "{:.4f}"


def finding(data: dict[str, Any]) -> str:
    """Of the runs that can be compared; of a ladder, of its largest size."""
    series = data["series"]
    known = [s for s in series if s["row"]["validation_loss"] and not s["row"]["diverged"]]
    if not known:
        return " ".join(["No method has a validation loss yet.", *_doubts(data, series)])
    groups = {s["group"]: [t for t in known if t["group"] == s["group"]] for s in known}
    chosen = list(groups.values())[-1] if data.get("ladder") else max(groups.values(), key=len)
    parts = [_alone(data, chosen[0]) if len(chosen) == 1 else _best(data, chosen)]
    parts += _went_on(data, chosen)
    if len(groups) > 1 and not data.get("ladder"):
        parts.append("Other runs are of other data, tokens or steps and are not compared with it.")
    return " ".join([*parts, *_doubts(data, series)])


def _alone(data: dict[str, Any], only: dict[str, Any]) -> str:
    steps, losses = (only["validation"][key] for key in ("steps", "mean"))
    before = f", {_FORM.format(losses[0])} before the first step" if steps[:1] == [0] else ""
    return (
        f"{only['label']} reached a validation loss of {_nats(data, only)} at step "
        f"{only['step']:,}{before}. There is nothing beside it to compare it with."
    )


def _best(data: dict[str, Any], group: list[dict[str, Any]]) -> str:
    """The method with the lowest loss, against standard where that is there."""
    best = min(group, key=_loss)
    size = f"At the largest size, {data['runs'][best['run']]['name']}, " if data["ladder"] else ""
    models = number_of(len(group), "model")
    start = f"{size}{best['label']} has the lowest loss of {models}, {_nats(data, best)}"
    standard = [s for s in group if s["method"] == BASELINE]
    routed = [s for s in group if s["method"] != BASELINE]
    if not standard or not routed:
        missing = "routing" if standard else "standard"
        return f"{start}. Without {missing} beside it, what routing is worth is not known here."
    if best["method"] == BASELINE:
        nearest = min(routed, key=_loss)
        above = _FORM.format(_loss(nearest) - _loss(best))
        words = f"no routing is below it, the nearest is {nearest['label']}, {above} above"
        return f"{start}: {words}. {_sure(nearest, best)}"
    beside = next((s for s in standard if s["run"] == best["run"]), min(standard, key=_loss))
    gain = _FORM.format(_loss(beside) - _loss(best))
    speed = best["cost"]["relative_speed"]
    cost = "" if speed is None else f", at {speed:.2f}x its speed"
    return f"{start}: {gain} below standard{cost}. {_sure(best, beside)}"


def _sure(method: dict[str, Any], standard: dict[str, Any]) -> str:
    """What the seeds say of the difference."""
    difference = method["row"]["difference"]
    if difference is None or method["run"] != standard["run"]:
        return "They are of different runs, so how much of it is chance is not known."
    if difference["interval"] is None:
        return "One seed: how much of it is chance is not known; more seeds would say."
    low, high = (f"{end:+.4f}".replace("-", MINUS) for end in difference["interval"])
    seeds = number_of(len(difference["by_seed"]), "seed")
    words = f"over {seeds} the 95% interval of that difference is {low} to {high}"
    if difference["interval"][0] <= 0 <= difference["interval"][1]:
        return f"It may be chance: {words}, which holds zero."
    return f"Likely real: {words}, without zero."


def _doubts(data: dict[str, Any], series: list[dict[str, Any]]) -> list[str]:
    """What a reader in a hurry must not overlook."""
    lost = [s["label"] for s in series if s["row"]["diverged"]]
    open_ended = [run["name"] for run in data["runs"] if not run["summary"]["is_complete"]]
    words = [f"Diverged: {', '.join(lost)}."] if lost else []
    if open_ended:
        which = "The run is" if len(data["runs"]) == 1 else f"{', '.join(open_ended)}:"
        words.append(f"{which} not finished, so this may change.")
    return words


def _went_on(data: dict[str, Any], group: list[dict[str, Any]]) -> list[str]:
    """Runs of other lengths are compared before the longer ones end."""
    runs = {s["run"]: data["runs"][s["run"]] for s in group}
    step = group[0]["step"]
    longer = [
        run["name"]
        for run in runs.values()
        if run["summary"]["equal"] != "time" and run["summary"]["steps"] > step
    ]
    words = f"That is at step {step:,}, the last that all have; {', '.join(longer)} went on."
    return [words] if longer else []


def _loss(series: dict[str, Any]) -> float:
    return series["row"]["validation_loss"]["mean"]


def _nats(data: dict[str, Any], series: dict[str, Any]) -> str:
    unit = data["runs"][series["run"]]["summary"]["unit"]
    return f"{_FORM.format(_loss(series))} nats per {unit}"
