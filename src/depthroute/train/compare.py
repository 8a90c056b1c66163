"""Methods trained side by side: same seed, same weights to begin with, same batches.

Every method takes its step on a batch before the next batch is drawn, and the order rotates, so
step times are taken on the same machine under the same load and can be compared.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthroute import presets
from depthroute.errors import ConfigError
from depthroute.presets import Preset
from depthroute.train import environment
from depthroute.train.data import Batch, TokenData, ngram_losses
from depthroute.train.loop import DivergenceError, StepResult, Trainer
from depthroute.train.methods import Method
from depthroute.train.run_directory import RunDirectory
from depthroute.train.settings import TrainSettings
from depthroute.train.summary import summarise

Sharpness = Callable[[Any, Tensor], float | None]
"""Mean normalised max routing weight of a model on some tokens; None where nothing chooses."""

Look = Callable[[Any, Tensor], dict[str, Any]]
"""A trace of a trained model on some tokens, JSON-ready."""

SHARPNESS_SEQUENCES = 8


@dataclass(frozen=True)
class Progress:
    """Handed to the caller after every step of every method."""

    seed: int
    method: str
    result: StepResult


@dataclass(frozen=True)
class Comparison:
    preset: Preset
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    settings: TrainSettings
    data: TokenData
    device: torch.device

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={list(self.seeds)} must be at least one, each named once")

    def config(self, validation: list[Batch]) -> dict[str, Any]:
        """Everything needed to run this again, JSON-ready."""
        return {
            "kind": "compare",
            "preset": self.preset.to_dict(),
            "methods": {m.label: m.routing.to_dict() for m in self.methods},
            "seeds": list(self.seeds),
            "train": self.settings.to_dict(),
            "device": str(self.device),
            "data": {
                "name": self.data.name,
                "train_bytes": len(self.data.train),
                "validation_bytes": len(self.data.validation),
                "train_sha256": hashlib.sha256(self.data.train[:].tobytes()).hexdigest(),
                "baselines": ngram_losses(self.data, validation),
            },
            "environment": environment.describe(),
        }


def run_comparison(
    comparison: Comparison,
    run: RunDirectory,
    *,
    sharpness: Sharpness | None = None,
    look: Look | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Train, record, and return the summary, which is also written to the run.

    Ctrl-C ends training; what was recorded until then is summarised.
    """
    validation = comparison.data.validation_batches(comparison.settings.validation_sequences)
    config = comparison.config(validation)
    run.write_json("config.json", config)
    traces: list[dict[str, Any]] = []
    try:
        for seed in comparison.seeds:
            lockstep = _Lockstep(comparison, seed, validation, run, sharpness, on_step)
            lockstep.run()
            if look is not None:
                traces += lockstep.traces(look)
                run.write_json("traces.json", {"traces": traces})
    except KeyboardInterrupt:
        run.append({"event": "interrupted"})
    summary = summarise(config, run.records())
    run.write_json("summary.json", summary)
    return summary


class _Lockstep:
    """All methods of one seed."""

    def __init__(
        self,
        comparison: Comparison,
        seed: int,
        validation: list[Batch],
        run: RunDirectory,
        sharpness: Sharpness | None,
        on_step: Callable[[Progress], None],
    ) -> None:
        self.comparison, self.seed, self.validation = comparison, seed, validation
        self.directory, self.sharpness, self.on_step = run, sharpness, on_step
        self.trainers: dict[str, Trainer] = {}
        self.memory: dict[str, int] = {}
        """Peak bytes of a step of each method, where the device counts them."""

    def run(self) -> None:
        settings, data = self.comparison.settings, self.comparison.data
        self._start()
        for step in range(settings.steps):
            batch = data.batch(step, self.seed)
            for label in rotated(list(self.trainers), step):
                self._step(label, batch)
            done = step + 1
            is_due = settings.validate_every and done % settings.validate_every == 0
            if is_due or done == settings.steps:
                self._validate(done)
        self._look()

    def _start(self) -> None:
        first = None
        for method in self.comparison.methods:
            torch.manual_seed(self.seed)
            model = presets.build(
                self.comparison.preset, method.routing, device=self.comparison.device
            )
            first = first or model
            share_start(first, model, method.label)
            trainer = Trainer(model, self.comparison.settings)
            self.trainers[method.label] = trainer
            self._record(
                "start",
                method.label,
                parameters=sum(p.numel() for p in model.parameters()),
                routing_parameters=sum(p.numel() for p in model.routing_parameters()),
                base_weights_sha256=fingerprint(model),
            )

    def _step(self, label: str, batch: Batch) -> None:
        meter = environment.MemoryMeter(self.comparison.device)
        try:
            result = self.trainers[label].take_step(batch)
        except DivergenceError as error:
            # the other methods' comparison still stands
            self._record("diverged", label, step=error.step, reason=str(error))
            del self.trainers[label]
            return
        self._record(
            "step",
            label,
            step=result.step,
            loss=result.loss,
            lr=result.lr,
            gradient_norm=result.gradient_norm,
            seconds=result.seconds,
            tokens=result.tokens,
            batch_crc32=zlib.crc32(batch.inputs.numpy().tobytes()),
        )
        if result.step > 0:  # the first step also makes the optimiser's state
            peak = meter.peak_bytes(self.trainers[label].resident_tensors())
            if peak is not None:
                self.memory[label] = max(peak, self.memory.get(label, 0))
        self.on_step(Progress(self.seed, label, result))

    def _validate(self, step: int) -> None:
        tokens = sum(b.targets.numel() for b in self.validation)
        for label, trainer in self.trainers.items():
            loss = trainer.validate(self.validation)
            self._record("validation", label, step=step, loss=loss, tokens=tokens)

    def _look(self) -> None:
        """Routing weights of the trained models; apart from training, so never in its times."""
        if self.sharpness is None:
            return
        for label, trainer in self.trainers.items():
            value = self.sharpness(trainer.model, self._inputs().to(trainer.device))
            self._record("routing", label, mean_normalised_max=value)

    def traces(self, look: Look) -> list[dict[str, Any]]:
        """Every trained model looked at on the same held-out tokens."""
        return [
            {"seed": self.seed, "method": label, "peak_memory_bytes": self.memory.get(label)}
            | look(trainer.model, self._inputs().to(trainer.device))
            for label, trainer in self.trainers.items()
        ]

    def _inputs(self) -> Tensor:
        return torch.cat([b.inputs for b in self.validation])[:SHARPNESS_SEQUENCES]

    def _record(self, event: str, label: str, **values: Any) -> None:
        self.directory.append({"event": event, "seed": self.seed, "method": label} | values)


def rotated(labels: list[str], step: int) -> list[str]:
    """The order of a step: each method comes first equally often."""
    start = step % len(labels) if labels else 0
    return labels[start:] + labels[:start]


def base_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Everything but the routing, by name."""
    routing = {id(p) for p in model.routing_parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in routing}


@torch.no_grad()
def share_start(first: Any, model: Any, label: str) -> None:
    """Give ``model`` the base weights ``first`` starts from.

    The same seed already does so for most methods; one that draws more numbers would not.
    """
    source, target = base_parameters(first), base_parameters(model)
    if {n: p.shape for n, p in source.items()} != {n: p.shape for n, p in target.items()}:
        raise ConfigError(
            f"method {label!r} has other base parameters than the first method of the "
            "comparison, so they cannot start from the same weights; compare them in two runs"
        )
    for name, parameter in target.items():
        parameter.copy_(source[name])


def fingerprint(model: Any) -> str:
    """A hash of the base weights, recorded so that "same start" can be checked afterwards."""
    digest = hashlib.sha256()
    for name, parameter in sorted(base_parameters(model).items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
