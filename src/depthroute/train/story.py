"""What fine-tuning started from and what became of it: RUN/start.json, and its end beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from depthroute.json_shape import ANYTHING, NUMBER, TEXT, WHOLE, check
from depthroute.models.convert import IdentityReport
from depthroute.parallel.wrap import is_sharded
from depthroute.runs.directory import RunDirectory
from depthroute.train.loop import Experiment, Look

FILE = "start.json"
_SITE = {"name": TEXT, "sources": [ANYTHING], "weights": [NUMBER]}
_TRACE = {"mean_normalised_max": NUMBER.or_null(), "sources": [TEXT], "sites": [_SITE]}
_IDENTITY = {
    "max_difference": NUMBER,
    "mean_difference": NUMBER,
    "loss_before": NUMBER.or_null(),
    "loss_after": NUMBER.or_null(),
    "num_tokens": WHOLE,
}
_SHAPE = {"identity?": _IDENTITY, "validation_loss": NUMBER, "trace?": _TRACE}
_MOST = 3
"""Sites that are named as those that changed most."""


def begin(experiment: Experiment, look: Look | None, note: Callable[[str], None]) -> None:
    """Before the first step: is it the base, how good is it, where does it read."""
    trainer = experiment.trainer
    identity: IdentityReport | None = getattr(trainer.parts[0], "identity", None)
    loss = trainer.validate(experiment.validation, experiment.on_validation)
    (label,) = experiment.trainers
    tokens = sum(batch.num_targets for batch in experiment.validation)
    experiment.record("validation", label, step=0, loss=loss, tokens=tokens)
    if not experiment.world.is_main:
        return
    if identity is not None:
        note(str(identity))
    note(f"validation loss before the first step: {loss:.4f}")
    start: dict[str, Any] = {"validation_loss": loss}
    start |= {} if identity is None else {"identity": asdict(identity)}
    if look is not None and not is_sharded(trainer.model):
        traces = experiment.traces(look, note, is_recorded=False)
        start |= {"trace": traces[0]} if traces else {}
    experiment.directory.write_json(FILE, start)


def end(run: RunDirectory, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """What the summary says of it; nothing where the start is not known."""
    start = _start(run)
    if not start:
        return {}
    story = {"validation_loss_before": start["validation_loss"]}
    if "identity" in start:
        story["identity"] = start["identity"]
    if "trace" in start and traces:
        story["routing"] = _changes(start["trace"], traces[0])
    return story


def identity(run: RunDirectory) -> IdentityReport | None:
    """Of the conversion that the run began with; one that goes on converts nothing."""
    found = _start(run).get("identity")
    return None if found is None else IdentityReport(**{name: found[name] for name in _IDENTITY})


def loss_before(run: RunDirectory) -> float | None:
    """The validation loss before the first step, where it was taken."""
    return _start(run).get("validation_loss")


def _start(run: RunDirectory) -> dict[str, Any]:
    with suppress(ValueError):  # damaged, or of a run that was begun before there was such a file
        start = run.read_json(FILE)
        check(start, _SHAPE, FILE)
        return start
    return {}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """By how much of its weight each site reads elsewhere now, most first."""
    earlier = {site["name"]: site["weights"] for site in before["sites"]}
    changes = []
    for site in after["sites"]:
        pairs = list(zip(earlier.get(site["name"], ()), site["weights"], strict=False))
        if len(pairs) != len(site["weights"]):
            continue
        risen = max(range(len(pairs)), key=lambda n: pairs[n][1] - pairs[n][0])
        changes.append(
            {
                "site": site["name"],
                "moved": sum(abs(b - a) for a, b in pairs) / 2,
                "source": after["sources"][site["sources"][risen]],
                "before": pairs[risen][0],
                "after": pairs[risen][1],
            }
        )
    changes.sort(key=lambda change: -change["moved"])
    return {
        "normalised_max_before": before["mean_normalised_max"],
        "normalised_max_after": after["mean_normalised_max"],
        "changed_most": changes[:_MOST],
    }
