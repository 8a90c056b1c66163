"""All methods of one seed, step by step beside each other."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import presets
from depthroute.config import Method
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.presets import Preset
from depthroute.train import environment, pace
from depthroute.train.comparison_checkpoint import ComparisonCheckpoints
from depthroute.train.data import Batch, TokenData
from depthroute.train.interrupt import Stop
from depthroute.train.loop import DivergenceError, StepResult, Trainer
from depthroute.train.pace import Pace
from depthroute.train.run_directory import RunDirectory
from depthroute.train.seal import read_state
from depthroute.train.settings import TrainSettings

Sharpness = Callable[[Any, Tensor], float | None]
"""Mean normalised max routing weight of a model on some tokens; None where nothing chooses."""

Look = Callable[[Any, Tensor], dict[str, Any]]
"""A trace of a trained model on some tokens, JSON-ready."""

LOOK_SEQUENCES = 8
SAVE_SECONDS = 600.0
"""Between checkpoints where ``save_every`` names no steps: a short comparison writes none."""


class Interrupt(DepthrouteError):
    """A signal ended the comparison, and everything is saved."""

    def __init__(self, signal: int) -> None:
        self.signal = signal
        super().__init__(f"stopped by signal {signal}, and saved")


@dataclass(frozen=True)
class Progress:
    """Handed to the caller after every step of every method."""

    seed: int
    method: str
    result: StepResult
    rounds: tuple[int, int]
    """Under way, and in all, of this seed."""


@dataclass
class Lockstep:
    preset: Preset
    methods: tuple[Method, ...]
    settings: TrainSettings
    data: TokenData
    device: torch.device
    seed: int
    validation: list[Batch]
    directory: RunDirectory
    checkpoints: ComparisonCheckpoints
    pace: Pace | None
    """None where it must be measured first."""
    sharpness: Sharpness | None
    on_step: Callable[[Progress], None]
    trainers: dict[str, Trainer] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    """Peak bytes of a step of each method, where the device counts them."""

    def __post_init__(self) -> None:
        self._drawn = lru_cache(maxsize=2 * len(self.methods))(self._draw)
        self._saved = time.monotonic()

    def run(self, stop: Stop, checkpoint: Path | None = None) -> None:
        self._build(is_new=checkpoint is None)
        first = 0
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.trainers)
            state = read_state(checkpoint)
            first, self.memory = state["round"], state["memory"]
        steps = self.pace or self._measure()
        for label, trainer in self.trainers.items():
            trainer.settings = steps.settings(label, self.settings)
        for number in range(first, steps.rounds):
            self._round(number, steps, stop)
            done = number + 1
            is_last = done == steps.rounds
            if steps.is_due(done, self.settings.validate_every) or is_last:
                self._validate(done, steps, stop)
            if not is_last and self._is_save_due(done, steps):
                self._save(done)
        self._look()

    def _round(self, number: int, steps: Pace, stop: Stop) -> None:
        """Every method's part of a round; one that was stopped half way is finished."""
        for label in rotated(list(self.trainers), number):
            if self.trainers[label].completed < steps.target(label, number + 1):
                self._step(label, (number + 1, steps.rounds))
            self._stop_if_asked(stop, number)

    def _stop_if_asked(self, stop: Stop, number: int, lines: int | None = None) -> None:
        """Saved so that the run goes on inside round ``number``."""
        if stop.signal:
            self._save(number, lines)
            raise Interrupt(stop.signal)

    def _build(self, *, is_new: bool) -> None:
        if self.settings.compile is not None:
            raise_recompile_limit(len(self.methods))
        first = None
        for method in self.methods:
            torch.manual_seed(self.seed)
            model = presets.build(self.preset, method.routing, device=self.device)
            first = first or model
            share_start(first, model, method.label)
            self.trainers[method.label] = Trainer(model, self.settings, is_timed=True)
            if is_new:
                self._record(
                    "start",
                    method.label,
                    parameters=sum(p.numel() for p in model.parameters()),
                    routing_parameters=sum(p.numel() for p in model.routing_parameters()),
                    base_weights_sha256=fingerprint(model),
                )

    def _measure(self) -> Pace:
        seconds = pace.measure(self.trainers, self._drawn(0)[0])
        found = Pace.of_time(seconds, self.settings)
        self.directory.append(
            {"event": "pace", "steps": dict(found.steps), "step_seconds": seconds}
        )
        return found

    def _draw(self, step: int) -> tuple[Batch, int]:
        """A batch on the device, which methods share, and its checksum."""
        batch = self.data.batch(step, self.seed)
        return batch.to(self.device), zlib.crc32(batch.inputs.numpy().tobytes())

    def _step(self, label: str, rounds: tuple[int, int]) -> None:
        trainer = self.trainers[label]
        batch, checksum = self._drawn(trainer.completed)
        meter = environment.MemoryMeter(self.device)
        try:
            result = trainer.take_step(batch)
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
            batch_crc32=checksum,
        )
        if result.step > 0:  # the first step also makes the optimiser's state
            peak = meter.peak_bytes(trainer.resident_tensors())
            if peak is not None:
                self.memory[label] = max(peak, self.memory.get(label, 0))
        self.on_step(Progress(self.seed, label, result, rounds))

    def _validate(self, rounds: int, steps: Pace, stop: Stop) -> None:
        lines = self.directory.count()  # stopped half way, it is done again as a whole
        tokens = sum(b.num_targets for b in self.validation)
        is_even = len(set(steps.steps.values())) == 1
        for label, trainer in self.trainers.items():
            self._stop_if_asked(stop, rounds - 1, lines)
            loss = trainer.validate(self.validation)
            # where methods take different steps, it is the round that they are compared at
            place = {} if is_even else {"round": rounds}
            step = trainer.completed
            self._record("validation", label, step=step, loss=loss, tokens=tokens, **place)

    def _is_save_due(self, done: int, steps: Pace) -> bool:
        if self.settings.save_every is not None:
            return steps.is_due(done, self.settings.save_every)
        return time.monotonic() - self._saved > SAVE_SECONDS

    def _save(self, rounds: int, lines: int | None = None) -> None:
        lines = self.directory.count() if lines is None else lines
        state = {"seed": self.seed, "round": rounds, "lines": lines}
        self.checkpoints.save(state | {"memory": self.memory}, self.trainers)
        self._saved = time.monotonic()

    def finish(self, seeds: tuple[int, ...]) -> None:
        """The next seed begins here, and this one is never trained again."""
        later = seeds[seeds.index(self.seed) + 1 :]
        if later and self.checkpoints.paths():
            state = {"seed": later[0], "round": 0, "lines": self.directory.count()}
            self.checkpoints.save(state | {"memory": {}}, {})

    def _look(self) -> None:
        """Routing weights of the trained models; apart from training, so never in its times."""
        if self.sharpness is None:
            return
        for label, trainer in self.trainers.items():
            with trainer.looking():
                value = self.sharpness(trainer.model, self._inputs())
            self._record("routing", label, mean_normalised_max=value)

    def traces(self, look: Look) -> list[dict[str, Any]]:
        """Every trained model looked at on the same held-out tokens."""
        found = []
        for label, trainer in self.trainers.items():
            about = {"seed": self.seed, "method": label}
            about |= {"peak_memory_bytes": self.memory.get(label)}
            with trainer.looking():
                found.append(about | look(trainer.model, self._inputs()))
        return found

    def _inputs(self) -> Tensor:
        return look_inputs(self.validation, self.settings).to(self.device)

    def _record(self, event: str, label: str, **values: Any) -> None:
        self.directory.append({"event": event, "seed": self.seed, "method": label} | values)


def look_inputs(validation: list[Batch], settings: TrainSettings) -> Tensor:
    """A few held-out sequences, and no more than a step runs at once: there is room for those."""
    count = min(LOOK_SEQUENCES, max(1, settings.batch_size // settings.accumulation))
    return torch.cat([b.inputs for b in validation])[:count]


def raise_recompile_limit(models: int) -> None:
    """Each model has a graph for training and one for validation, and all share their code.

    Beyond its limit for one piece of code torch.compile would go on uncompiled.
    """
    config: Any = torch._dynamo.config  # pyright: ignore
    config.recompile_limit = max(config.recompile_limit, 4 * models)


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
