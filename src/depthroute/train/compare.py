"""Methods trained side by side: same seed, same weights to begin with, same batches."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthroute import presets
from depthroute.config import Method, RoutingConfig
from depthroute.data.batches import TokenData, ngram_losses
from depthroute.errors import ConfigError, unknown
from depthroute.parallel.world import World
from depthroute.presets import Preset
from depthroute.runs import environment
from depthroute.runs.directory import RunDirectory, RunError, refuse_another
from depthroute.runs.summary import summarise
from depthroute.train.loop import Experiment, Interrupted, Look, Progress, share_start
from depthroute.train.pace import EQUAL
from depthroute.train.settings import TrainSettings


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
    tokens: Path | None = None
    """The folder that the data are read from; None is the standard library."""
    is_part: bool = False
    """One of several runs that are compared: a method starts from standard's weights even where
    that is trained elsewhere."""

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
    look: Look | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train, record, and return the summary, which is also written to the run.

    SIGTERM and Ctrl-C end training after the step in hand; all is saved, and what was recorded
    until then is summarised. With ``is_resumed`` the run goes on from its last good checkpoint;
    ``note`` hears of others.
    """
    config = _configure(comparison, run, is_resumed)
    experiment = Experiment(
        {
            label: partial(build, comparison, RoutingConfig.from_dict(routing))
            for label, routing in config["methods"].items()
        },
        comparison.settings,
        comparison.data,
        run,
        comparison.seeds,
        World(device=comparison.device),
        is_comparison=True,
        equal=comparison.equal,
        on_step=on_step,
        on_trained=lambda experiment: _look(experiment, look, note),
    )
    if not (is_resumed and _is_finished(config, run, is_looked=look is not None)):
        try:
            if is_resumed:
                experiment.resume(note)
            experiment()
        except Interrupted:
            pass  # recorded, and the summary says so
        except KeyboardInterrupt:
            experiment.record("interrupted", signal=int(signal.SIGINT))
    summary = summarise(config, run.records())
    run.sync()
    run.write_json("summary.json", summary)
    if summary["is_complete"]:  # and on disk; only now are its checkpoints of no more use
        experiment.checkpoints.remove()
    return summary


def build(comparison: Comparison, routing: RoutingConfig) -> Any:
    """The model of one method, which starts from the same weights however many are built."""
    make = partial(
        presets.build,
        comparison.preset,
        device=comparison.device,
        output_init=comparison.settings.output_init,
    )
    if not comparison.is_part:
        return make(routing)
    standard = make(RoutingConfig("standard"))
    torch.manual_seed(torch.initial_seed())
    model = make(routing)
    share_start(standard, model, routing.name)
    return model


def _look(experiment: Experiment, look: Look | None, note: Callable[[str], None]) -> None:
    """The traces of this seed after those of the seeds before it."""
    if look is None:
        return
    earlier = experiment.seeds[: experiment.seeds.index(experiment.seed)]
    traces = [t for t in experiment.directory.traces() if t["seed"] in earlier] if earlier else []
    traces += experiment.traces(look, note)
    experiment.directory.write_json("traces.json", {"traces": traces})


def _is_finished(config: dict[str, Any], run: RunDirectory, *, is_looked: bool) -> bool:
    """Trained to the end, and every trained model looked at: a kill may have come between."""
    records = list(run.records())
    if not summarise(config, records)["is_complete"]:
        return False
    with suppress(RunError):
        if run.read_json("summary.json").get("is_complete"):
            return True

    def pairs(records: Iterable[dict[str, Any]], event: str | None = None) -> set[tuple[str, int]]:
        return {(r["method"], r["seed"]) for r in records if event in (None, r.get("event"))}

    trained = pairs(records, "start") - pairs(records, "diverged")
    return not is_looked or trained <= pairs(records, "routing") & pairs(run.traces())


def _configure(comparison: Comparison, run: RunDirectory, is_resumed: bool) -> dict[str, Any]:
    config = comparison.config()
    if is_resumed:
        return refuse_another(run, config)
    if "baselines" not in config["data"]:
        config["data"] |= {"baselines": baselines(comparison)}
    run.write_json("config.json", config)
    return config


def baselines(comparison: Comparison) -> dict[str, float]:
    size = comparison.preset.model["vocab_size"]
    validation = comparison.data.validation_batches(comparison.settings.validation_sequences)
    return ngram_losses(comparison.data, validation, size)
