"""Methods trained side by side: same seed, same weights to begin with, same batches.

Every method takes its step on a batch before the next batch is drawn, and the order rotates, so
step times are taken on the same machine under the same load and can be compared.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from depthroute.config import Method
from depthroute.errors import ConfigError, unknown
from depthroute.presets import Preset
from depthroute.train import environment
from depthroute.train.comparison_checkpoint import ComparisonCheckpoints
from depthroute.train.data import Batch, TokenData, ngram_losses
from depthroute.train.interrupt import stop_signals
from depthroute.train.lockstep import Interrupt, Lockstep, Look, Progress, Sharpness
from depthroute.train.pace import EQUAL, Pace
from depthroute.train.resuming import refuse_another
from depthroute.train.run_directory import RunDirectory, RunError
from depthroute.train.settings import TrainSettings
from depthroute.train.summary import summarise


@dataclass(frozen=True)
class Comparison:
    preset: Preset
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    settings: TrainSettings
    data: TokenData
    device: torch.device
    equal: str = "tokens"
    """What every method is given the same of: ``tokens``, or ``time`` to train."""
    about_data: dict[str, Any] | None = None
    """What ``config.json`` says of the data; left out, that they are bytes."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={list(self.seeds)} must be at least one, each named once")
        if self.equal not in EQUAL:
            raise unknown("--equal", self.equal, EQUAL)

    @property
    def labels(self) -> list[str]:
        return [method.label for method in self.methods]

    def config(self) -> dict[str, Any]:
        """Everything needed to run this again, JSON-ready; ``data.baselines`` comes on top."""
        about = self.about_data or {
            "name": self.data.name,
            "train_bytes": len(self.data.train),
            "validation_bytes": len(self.data.validation),
            "train_sha256": hashlib.sha256(self.data.train[:].tobytes()).hexdigest(),
        }
        return {
            "kind": "compare",
            "preset": self.preset.to_dict(),
            "methods": {m.label: m.routing.to_dict() for m in self.methods},
            "seeds": list(self.seeds),
            "equal": self.equal,
            "train": self.settings.to_dict(),
            "device": str(self.device),
            "data": about,
            "environment": environment.describe(),
        }


def run_comparison(
    comparison: Comparison,
    run: RunDirectory,
    *,
    is_resumed: bool = False,
    sharpness: Sharpness | None = None,
    look: Look | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train, record, and return the summary, which is also written to the run.

    SIGTERM and Ctrl-C end training after the step in hand; all is saved, and what was recorded
    until then is summarised. With ``is_resumed`` the run goes on from its last good checkpoint;
    ``note`` hears of others.
    """
    validation = comparison.data.validation_batches(comparison.settings.validation_sequences)
    config = _configure(comparison, run, validation, is_resumed)
    checkpoints = ComparisonCheckpoints(run.path / "checkpoints")
    if is_resumed and _is_finished(config, run, sharpness is not None, look is not None):
        return _summarise(config, run, checkpoints)
    state, path = _go_back(run, checkpoints, note) if is_resumed else (None, None)
    traces: list[dict[str, Any]] = []
    first = comparison.seeds[0] if state is None else state["seed"]
    if state is not None and first != comparison.seeds[0] and look is not None:
        finished = comparison.seeds[: comparison.seeds.index(first)]
        traces = [t for t in _traces(run) if t["seed"] in finished]
    try:
        with stop_signals() as stop:
            for seed in comparison.seeds[comparison.seeds.index(first) :]:
                lockstep = Lockstep(
                    comparison.preset,
                    comparison.methods,
                    comparison.settings,
                    comparison.data,
                    comparison.device,
                    seed,
                    validation,
                    run,
                    checkpoints,
                    _known_pace(comparison, run),
                    sharpness,
                    on_step,
                )
                lockstep.run(stop, path if seed == first else None)
                if look is not None:
                    traces += lockstep.traces(look)
                    run.write_json("traces.json", {"traces": traces})
                lockstep.finish(comparison.seeds)
    except (KeyboardInterrupt, Interrupt) as reason:
        number = reason.signal if isinstance(reason, Interrupt) else signal.SIGINT
        run.append({"event": "interrupted", "signal": int(number)})
    return _summarise(config, run, checkpoints)


def _summarise(
    config: dict[str, Any], run: RunDirectory, checkpoints: ComparisonCheckpoints
) -> dict[str, Any]:
    """The summary on disk; only then are a finished comparison's checkpoints of no more use."""
    summary = summarise(config, run.records())
    run.write_json("summary.json", summary)
    if summary["is_complete"]:
        checkpoints.remove()
    return summary


def _is_finished(
    config: dict[str, Any], run: RunDirectory, is_sharp: bool, is_looked: bool
) -> bool:
    """Trained to the end, and every trained model looked at: a kill may have come between."""
    records = list(run.records())
    if not summarise(config, records)["is_complete"]:
        return False
    with suppress(RunError):
        if run.read_json("summary.json").get("is_complete"):
            return True

    def pairs(found: Iterable[dict[str, Any]]) -> set[tuple[str, int]]:
        return {(r["method"], r["seed"]) for r in found}

    trained = pairs(r for r in records if r["event"] == "start")
    trained -= pairs(r for r in records if r["event"] == "diverged")
    is_measured = trained <= pairs(r for r in records if r["event"] == "routing")
    return (is_measured or not is_sharp) and (trained <= pairs(_traces(run)) or not is_looked)


def _traces(run: RunDirectory) -> list[dict[str, Any]]:
    """Of the seeds that were finished."""
    if not (run.path / "traces.json").is_file():
        return []
    traces = run.read_json("traces.json").get("traces")
    if not isinstance(traces, list) or not all(isinstance(t, dict) for t in traces):
        raise RunError(f"{run.path / 'traces.json'} holds no traces: it is damaged; remove it")
    return traces


def _configure(
    comparison: Comparison, run: RunDirectory, validation: list[Batch], is_resumed: bool
) -> dict[str, Any]:
    config = comparison.config()
    if is_resumed:
        return refuse_another(run, config)
    size = comparison.preset.model["vocab_size"]
    config["data"] |= {"baselines": ngram_losses(comparison.data, validation, size)}
    run.write_json("config.json", config)
    return config


def _go_back(
    run: RunDirectory, checkpoints: ComparisonCheckpoints, note: Callable[[str], None]
) -> tuple[Any, Any]:
    """The state of the newest good checkpoint and where it lies; without one, from the start."""
    path, state = checkpoints.newest(note) or (None, None)
    if state is not None and run.count() < state["lines"]:
        raise RunError(
            f"{run.metrics} has {run.count()} lines and had {state['lines']} when {path} was "
            "written: it is damaged. Bring a good copy back, or start again with another --out"
        )
    run.append({"event": "resumed", "lines": 0 if state is None else state["lines"]})
    return (state, path) if state is not None and state["methods"] else (state, None)


def _known_pace(comparison: Comparison, run: RunDirectory) -> Pace | None:
    """Measured once for all seeds, so it is looked for in the records first."""
    if comparison.equal == "tokens":
        return Pace.of_tokens(comparison.labels, comparison.settings)
    for record in run.records():
        if record["event"] == "pace":
            return Pace(record["steps"], comparison.settings.steps)
    return None
