"""The one loop: methods trained beside each other, seed by seed, on one run directory.

``compare`` is several methods, ``train`` and ``finetune`` are one. All methods of a seed start from
the same weights; every one takes its step on a batch before the next batch is drawn, and the order
rotates, so step times are taken on the same machine under the same load and can be compared.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthroute.data.batches import Batch, TokenData
from depthroute.errors import CheckpointError, ConfigError, DepthrouteError
from depthroute.parallel.world import SINGLE, World
from depthroute.runs.checkpoint import Checkpoints
from depthroute.runs.directory import RunDirectory, RunError
from depthroute.runs.environment import MemoryMeter
from depthroute.runs.seal import read_state
from depthroute.train import pace
from depthroute.train.interrupt import Stop, stop_signals
from depthroute.train.pace import Pace
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import DivergenceError, StepResult, Trainer

Look = Callable[[Any, Tensor, bool], dict[str, Any]]
"""A trace of a trained model on some tokens, JSON-ready."""
LOOK_SEQUENCES = 8
SAVE_SECONDS = 600.0
"""Between checkpoints where ``save_every`` names no steps: a short run writes none."""


class Sink(Protocol):
    """Where records go besides ``metrics.jsonl``, which is the truth."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Interrupted(DepthrouteError):
    """A signal ended the run; everything up to ``step`` is saved."""

    def __init__(self, signal: int, step: int) -> None:
        self.signal, self.step = signal, step
        super().__init__(f"stopped by signal {signal} after step {step}, and saved")


@dataclass(frozen=True)
class Progress:
    """Handed to the caller after every step of every method."""

    seed: int
    method: str
    result: StepResult
    rounds: tuple[int, int]
    """Under way, and in all, of this seed."""
    memory: int
    """Bytes at most: of this step on an accelerator, of this process so far on the CPU."""


@dataclass
class Experiment:
    """Methods on one run directory. Every rank has one; the first writes.

    One method alone is a training: its checkpoints are a result, the best and the last among them,
    and a bad step ends it. Of a comparison they only serve to go on, and a method that diverges
    leaves the others to go on.
    """

    builders: Mapping[str, Callable[[], Any]]
    """By method, what makes its model; the seed is set before."""
    settings: TrainSettings
    data: TokenData
    directory: RunDirectory
    seeds: Sequence[int] = (0,)
    world: World = SINGLE
    is_comparison: bool = False
    equal: str = "tokens"
    wrap: Callable[[Any], Any] = lambda model: model
    """What makes of a model one that the ranks share."""
    sinks: Sequence[Sink] = ()
    on_built: Callable[[Experiment], None] = lambda experiment: None
    """What is done with the models of a seed before their first step."""
    on_step: Callable[[Progress], None] = lambda progress: None
    on_validation: Callable[[int, int], None] = lambda done, parts: None
    on_trained: Callable[[Experiment], None] = lambda experiment: None
    """What is done with the trained models of a seed before they make room for the next."""

    def __post_init__(self) -> None:
        folder = self.directory.path / "checkpoints"
        self.checkpoints = Checkpoints(folder, self.settings.keep_last, self.world)
        self.validation = self.data.validation_batches(self.settings.validation_sequences)
        self.trainers: dict[str, Trainer] = {}
        self.memory: dict[str, int] = {}
        """Peak bytes of a step of each method, where the device counts them."""
        self.seed, self.round, self.taken = self.seeds[0], 0, 0
        """Where it stands: rounds of this seed, and steps of all methods and seeds."""
        self.last_validation: float | None = None
        self._is_resumed = False
        self.is_new = True
        """Whether models are made for their first step, not to be given a checkpoint's state."""
        self._stop = Stop()
        self._drawn = lru_cache(maxsize=2 * len(self.builders))(self._draw)
        self._saved = time.monotonic()

    @property
    def trainer(self) -> Trainer:
        """Of the one method that is trained."""
        (trainer,) = self.trainers.values()
        return trainer

    def __call__(self) -> None:
        """What remains. Raises :class:`Interrupted` once a signal came and all is saved."""
        with stop_signals(is_alone=self.world.size == 1) as self._stop:
            try:
                for seed in self.seeds[self.seeds.index(self.seed) :]:
                    if not self._is_resumed:
                        self.seed, self.round = seed, 0
                        self._build(is_new=True)
                        self.on_built(self)
                    self._is_resumed = False
                    self._train()
                    self.on_trained(self)
                    self._leave(seed)
            finally:
                self.checkpoints.leave()
                for sink in self.sinks:
                    sink.close()

    def _train(self) -> None:
        steps = self._pace()
        for label, trainer in self.trainers.items():
            trainer.settings = steps.settings(label, self.settings)
        while self.round < steps.rounds:
            self._take_steps(steps)
            loss, done = None, self.round + 1
            is_last = done == steps.rounds
            if is_last or steps.is_due(done, self.settings.validate_every):
                loss = self._validate(steps)
            self.round = done
            self.checkpoints.settle()
            signal = self._signal()
            if self._is_save_due(steps, loss, is_last) or (signal and not is_last):
                self.save(loss)
            if signal and not is_last:
                self._interrupt(signal)
        self.checkpoints.wait()

    def _take_steps(self, steps: Pace) -> None:
        """Of one round. Stopped inside it, a run goes on with the methods that were left."""
        order = pace.rotated(list(self.trainers), self.round)
        for label in order:
            if self.trainers[label].completed < steps.target(label, self.round + 1):
                self._step(label, (self.round + 1, steps.rounds))
            if label != order[-1]:
                self._stop_inside()

    def _step(self, label: str, rounds: tuple[int, int]) -> None:
        trainer = self.trainers[label]
        batch, checksum = self._drawn(self.seed, trainer.completed)
        is_known = trainer.is_replayed and label in self.memory
        resident = [] if is_known else list(trainer.resident_tensors())
        meter = None if is_known else MemoryMeter(self.world.device)
        try:
            result = trainer.take_step(batch)
        except DivergenceError as error:
            self.record("diverged", label, step=error.step, reason=str(error))
            if not self.is_comparison:
                self.save()
                self.checkpoints.wait()
                raise
            del self.trainers[label]
            return
        self.taken += 1
        memory = self.memory.get(label) if meter is None else meter.peak_bytes(resident)
        if memory is not None:
            memory = self.memory[label] = max(memory, self.memory.get(label, 0))
        memory = memory or process_memory()
        if result.skipped is not None:  # its loss may be no number, and no curve should hold it
            self.record("skipped", label, step=result.step, reason=result.skipped)
        else:
            self.record(
                "step",
                label,
                step=result.step,
                loss=result.loss,
                lr=result.lr,
                gradient_norm=result.gradient_norm,
                seconds=result.seconds,
                tokens=result.tokens,
                memory_bytes=memory,
                batch_crc32=checksum,
            )
        self.on_step(Progress(self.seed, label, result, rounds, memory))

    def _draw(self, seed: int, step: int) -> tuple[Batch, int]:
        """This rank's part of a batch on its device, which methods share, and its checksum."""
        batch = self.data.batch(step, seed, *self.world.part)
        return batch.to(self.world.device), zlib.crc32(batch.inputs.numpy().tobytes())

    def _validate(self, steps: Pace) -> float | None:
        """The loss, where one method alone is trained."""
        lines = self._lines()  # stopped half way, it is done again as a whole
        tokens = sum(batch.num_targets for batch in self.validation)
        # where methods take different steps, it is the round that they are compared at
        place = {} if steps.is_even else {"round": self.round + 1}
        for position, (label, trainer) in enumerate(self.trainers.items()):
            if position:
                self._stop_inside(lines)
            loss = self.last_validation = trainer.validate(self.validation, self.on_validation)
            step = trainer.completed
            self.record("validation", label, step=step, loss=loss, tokens=tokens, **place)
        return None if self.is_comparison else self.last_validation

    def _is_save_due(self, steps: Pace, loss: float | None, is_last: bool) -> bool:
        if is_last:
            return not self.is_comparison
        if self.settings.save_every is None:
            is_due = self.world.max(time.monotonic() - self._saved) > SAVE_SECONDS
        else:
            is_due = steps.is_due(self.round, self.settings.save_every)
        return is_due or self.checkpoints.is_best(loss)

    def save(self, loss: float | None = None, lines: int | None = None) -> Path:
        """As it stands, in the background; ``lines`` of the records count, if not all."""
        state = {
            "step": self.taken,
            "seed": self.seed,
            "round": self.round,
            "lines": self._lines() if lines is None else lines,
            "data": self._about_data(),
            "data_position": self.data.position(
                max((trainer.completed for trainer in self.trainers.values()), default=0)
            ),
            "memory": self.memory,
        }
        self._saved = time.monotonic()
        return self.checkpoints.save(self.trainers, state, loss)

    def _leave(self, seed: int) -> None:
        """The next seed begins here, and this one is never trained again."""
        later = self.seeds[self.seeds.index(seed) + 1 :]
        if not later:
            return
        self.seed, self.round = later[0], 0
        self.trainers.clear()
        self.memory.clear()
        if self.checkpoints.paths():
            self.save()

    def _signal(self) -> int:
        """Every rank must stop at the same step, whichever of them was told to."""
        return int(self.world.max(self._stop.signal))

    def _stop_inside(self, lines: int | None = None) -> None:
        signal = self._signal()
        if signal:
            self.save(lines=lines)
            self._interrupt(signal)

    def _interrupt(self, signal: int) -> None:
        self.checkpoints.wait()
        self.record("interrupted", step=self.taken, signal=signal)
        raise Interrupted(signal, self.taken)

    def resume(self, note: Callable[[str], None] = lambda text: None) -> int | None:
        """Go back to the newest good checkpoint; its step, or None where there is none.

        ``note`` hears which were skipped and why.
        """
        if self.checkpoints.newest(lambda path: self._go_back(path, note), note) is not None:
            return self.taken
        if self.world.is_main and self.directory.count():
            self.record("resumed", step=0, lines=0)
        return None

    def _go_back(self, path: Path, note: Callable[[str], None]) -> None:
        state = read_state(path)
        self._refuse_others(state)
        missing = state.get("lines", 0) - self._lines() if self.world.is_main else 0
        if missing > 0 and self.is_comparison:
            raise RunError(
                f"{self.directory.metrics} has {self._lines()} lines and had {state['lines']} when "
                f"{path} was written: it is damaged. Bring a good copy back, or start again with "
                "another --out"
            )
        self.seed = state["seed"]
        if self._is_between_seeds(state):
            self.round, self.taken = 0, state.get("step", state["lines"])
        else:
            self._build(is_new=False)
            state = self.checkpoints.load(path, self.trainers)
            self.round, self.taken, self.memory = state["round"], state["step"], state["memory"]
            self.last_validation, self._is_resumed = state["validation_loss"], True
        if missing > 0:
            note(f"{self.directory.metrics} has lost {missing} lines; the curve will have a gap")
        # format 1 does not say how many lines had been written
        lines = {"lines": state["lines"]} if "lines" in state else {}
        self.record("resumed", step=self.taken, **lines)

    def _is_between_seeds(self, state: dict[str, Any]) -> bool:
        return state.get("methods") == {} and state["round"] == 0

    def _refuse_others(self, state: dict[str, Any]) -> None:
        """The data, where the format says it, and the seed must be those of this run."""
        here = {"data": self._about_data(), "seed": state["seed"]}
        if state["seed"] not in self.seeds:
            here["seed"] = ", ".join(map(str, self.seeds))
        for name, value in here.items():
            if state.get(name, value) != value:
                raise CheckpointError(
                    f"{self.directory.path} was run with {name} {state[name]} and now has {value}; "
                    "resume with the same, or start a new run with another --out"
                )

    def _about_data(self) -> str:
        sequences = f"{self.data.num_sequences} sequences of {self.data.sequence_length}"
        return f"{sequences}, {self.data.batch_size} a step"

    def _lines(self) -> int:
        return self.directory.count() if self.world.is_main else 0

    def _build(self, *, is_new: bool) -> None:
        """Every method's model and trainer, at the start of the seed."""
        self.trainers.clear()
        self.memory, self.is_new = {}, is_new
        if self.settings.compile is not None and self.settings.compile_scope == "whole":
            raise_recompile_limit(len(self.builders))
        first = None
        for label, build in self.builders.items():
            torch.manual_seed(self.seed)
            model = build()
            first = first or model
            if model is not first:
                share_start(first, model, label)
            if is_new:
                self._record_start(label, model)
            torch.manual_seed(self.seed + self.world.part[0])
            is_timed = len(self.builders) > 1
            trainer = Trainer(self.wrap(model), self.settings, self.world, is_timed=is_timed)
            self.trainers[label] = trainer

    def _record_start(self, label: str, model: Any) -> None:
        parameters = list(model.parameters())
        self.record(
            "start",
            label,
            parameters=sum(p.numel() for p in parameters),
            routing_parameters=sum(p.numel() for p in model.routing_parameters()),
            trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            base_weights_sha256=fingerprint(model) if self.world.is_main else None,
        )

    def _pace(self) -> Pace:
        """Steps a method: the same, or measured once for all seeds, so looked for in the records
        first."""
        if self.equal == "tokens":
            return Pace.of_tokens(list(self.builders), self.settings)
        for record in self.directory.records():
            if record["event"] == "pace":
                return Pace(record["steps"], self.settings.steps)
        seconds = pace.measure(self.trainers, self._drawn(self.seed, 0)[0])
        steps = Pace.of_time(seconds, self.settings)
        self.record("pace", steps=dict(steps.steps), step_seconds=seconds)
        return steps

    def traces(
        self,
        look: Look,
        note: Callable[[str], None] = lambda text: None,
        whole: Callable[[Trainer], Any] = lambda trainer: trainer.inner,
        *,
        is_recorded: bool = True,
    ) -> list[dict[str, Any]]:
        """Every trained model looked at on the same held-out tokens, by the first rank alone.

        Apart from training, so never in its times. ``whole`` makes one model of a sharded one.
        """
        inputs = look_inputs(self.validation, self.settings).to(self.world.device)
        traces = []
        for label, trainer in self.trainers.items():
            try:
                model = whole(trainer)
                with trainer.looking():
                    trace = look(model, inputs, trainer.settings.importance)
            except torch.OutOfMemoryError:
                note(f"no memory left to look at {label} as trained; traces.json is without it")
                continue
            about = {"seed": self.seed, "method": label}
            traces.append(about | {"peak_memory_bytes": self.memory.get(label)} | trace)
            if is_recorded:
                self.record("routing", label, mean_normalised_max=trace["mean_normalised_max"])
        return traces

    def record(self, event: str, label: str | None = None, **values: Any) -> None:
        """One line of ``metrics.jsonl``, and a copy to every sink."""
        if not self.world.is_main:
            return
        method = {} if label is None else {"method": label}
        record = {"event": event, "seed": self.seed} | method | values
        self.directory.append(record)
        for sink in self.sinks:
            sink.write(record)


def look_inputs(validation: list[Batch], settings: TrainSettings) -> Tensor:
    """A few held-out sequences, and no more than a step runs at once: there is room for those."""
    count = min(LOOK_SEQUENCES, max(1, settings.batch_size // settings.accumulation))
    return torch.cat([b.inputs for b in validation])[:count]


def process_memory() -> int:
    """Bytes that this process held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def raise_recompile_limit(models: int) -> None:
    """Each model as a whole has a graph for training and one for validation, and all share their
    code.

    Beyond its limit for one piece of code torch.compile would go on uncompiled.
    """
    config: Any = torch._dynamo.config  # pyright: ignore
    config.recompile_limit = max(config.recompile_limit, 4 * models)


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
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
