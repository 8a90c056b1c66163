"""A whole run: steps, validations, checkpoints and records, from the start or from where it was."""

from __future__ import annotations

import resource
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from depthroute.errors import CheckpointError, DepthrouteError
from depthroute.models import saving
from depthroute.parallel.sharded import whole_state
from depthroute.parallel.wrap import is_sharded
from depthroute.train.checkpoint import Checkpoints
from depthroute.train.data import Batch, TokenData
from depthroute.train.interrupt import Stop, stop_signals
from depthroute.train.loop import DivergenceError, StepResult, Trainer
from depthroute.train.run_directory import RunDirectory
from depthroute.train.seal import DamagedError, none_good


class Sink(Protocol):
    """Where records go besides ``metrics.jsonl``, which is the truth."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Interrupted(DepthrouteError):
    """A signal ended the run; everything up to ``step`` is saved."""

    def __init__(self, signal: int, step: int) -> None:
        self.signal, self.step = signal, step
        super().__init__(f"stopped by signal {signal} after step {step}, and saved")


@dataclass
class Fit:
    """One trainer on one run directory. Every rank has one; the first writes."""

    trainer: Trainer
    data: TokenData
    run: RunDirectory
    seed: int = 0
    label: str = "standard"
    """What the records call the method."""
    sinks: Sequence[Sink] = ()
    on_step: Callable[[StepResult], None] = lambda result: None

    def __post_init__(self) -> None:
        settings = self.trainer.settings
        self.checkpoints = Checkpoints(self.run.path / "checkpoints", settings.keep_last)
        self.last_validation: float | None = None

    def resume(self, note: Callable[[str], None] = lambda text: None) -> int | None:
        """Go back to the newest good checkpoint; its step, or None where there is none.

        ``note`` hears which were skipped and why.
        """
        reasons = []
        steps = self.trainer.world.gather(self.checkpoints.steps())[0]
        for step in reversed(steps):
            try:
                lost = self._go_back(step)
            except DamagedError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                note(f"skipped: {reason}")
            if lost:
                note(f"{self.run.metrics} has lost {lost} lines; the curve will have a gap")
            self.checkpoints.skipped = {later for later in steps if later > step}
            self.checkpoints.tidy(self.trainer.world)
            return step
        if reasons:
            raise none_good(reasons)
        if self.trainer.world.is_main and self.run.count():
            self.record("resumed", step=0, lines=0)
        return None

    def _go_back(self, step: int) -> int:
        """How many lines that were recorded before the checkpoint are no longer there."""
        state = self.checkpoints.read(step, self.trainer.world)
        here = self._state(step)
        for name in ("data", "seed"):
            if state.get(name) != here[name]:
                raise CheckpointError(
                    f"{self.run.path} was run with {name} {state.get(name)} and now has "
                    f"{here[name]}; resume with the same, or start a new run with another --out"
                )
        self.checkpoints.load(self.trainer, step)
        self.last_validation = state["validation_loss"]
        # an older checkpoint does not say how many lines had been written
        lines = {"lines": state["lines"]} if "lines" in state else {}
        lost = max(0, state.get("lines", 0) - self.run.count()) if self.trainer.world.is_main else 0
        self.record("resumed", step=step, **lines)
        return lost

    def __call__(self) -> dict[str, Any]:
        """The remaining steps. Raises :class:`Interrupted` once a signal came and all is saved."""
        trainer, settings = self.trainer, self.trainer.settings
        validation = self.data.validation_batches(settings.validation_sequences)
        if trainer.completed == 0:
            self._start()
        with stop_signals(is_alone=trainer.world.size == 1) as stop:
            try:
                while not trainer.is_done:
                    self._step(validation, stop)
            except DivergenceError as error:
                self.record("diverged", step=error.step, reason=str(error))
                self.save()
                raise
            finally:
                for sink in self.sinks:
                    sink.close()
        return {
            "steps": trainer.completed,
            "validation_loss": self.last_validation,
            "best": self.checkpoints.best,
        }

    def _step(self, validation: list[Batch], stop: Stop) -> None:
        trainer, settings, world = self.trainer, self.trainer.settings, self.trainer.world
        batch = self.data.batch(trainer.completed, self.seed, world.rank, world.size)
        result = trainer.take_step(batch)
        self._record_step(result, batch)
        self.on_step(result)
        done = trainer.completed
        # every rank must stop at the same step, whichever of them was told to
        number = int(world.max(stop.signal))
        loss = None
        if _is_due(done, settings.validate_every) or trainer.is_done:
            loss = self.last_validation = trainer.validate(validation)
            tokens = sum(b.num_targets for b in validation)
            self.record("validation", step=done, loss=loss, tokens=tokens)
        is_best = loss is not None and self.checkpoints.is_best(loss)
        if is_best or number or trainer.is_done or _is_due(done, settings.save_every):
            self.save(loss)
        if number and not trainer.is_done:
            self.record("interrupted", step=done, signal=number)
            raise Interrupted(number, done)

    def save(self, loss: float | None = None) -> Path:
        # recorded first: a resumed run goes on after the lines that its checkpoint counts
        self.record("checkpoint", step=self.trainer.completed)
        state = self._state(self.trainer.completed)
        if self.trainer.world.is_main:
            state["lines"] = self.run.count()
        return self.checkpoints.save(self.trainer, state, loss)

    def _state(self, step: int) -> dict[str, Any]:
        data = self.data
        return {
            "seed": self.seed,
            "data": f"{data.num_sequences} sequences of {data.sequence_length}, "
            f"{data.batch_size} a step",
            "data_position": data.position(step),
        }

    def _start(self) -> None:
        model = self.trainer.inner
        routing = model.routing_parameters() if hasattr(model, "sites") else []
        self.record(
            "start",
            parameters=sum(p.numel() for p in model.parameters()),
            routing_parameters=sum(p.numel() for p in routing),
            trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        )

    def _record_step(self, result: StepResult, batch: Batch) -> None:
        if result.skipped is not None:  # its loss may be no number, and no curve should hold it
            self.record("skipped", step=result.step, reason=result.skipped)
            return
        self.record(
            "step",
            step=result.step,
            loss=result.loss,
            lr=result.lr,
            gradient_norm=result.gradient_norm,
            seconds=result.seconds,
            tokens=result.tokens,
            memory_bytes=peak_memory(self.trainer.device),
            batch_crc32=zlib.crc32(batch.inputs.numpy().tobytes()),
        )

    def record(self, event: str, **values: Any) -> None:
        """One line of ``metrics.jsonl``, and a copy to every sink."""
        if not self.trainer.world.is_main:
            return
        record = {"event": event, "seed": self.seed, "method": self.label} | values
        self.run.append(record)
        for sink in self.sinks:
            sink.write(record)


def export(trainer: Trainer, folder: Path, tokenizer: Any = None) -> None:
    """The trained model for everybody's use: ``save_pretrained``, whole, with its tokenizer."""
    model = trainer.inner
    weights = whole_state(model) if is_sharded(model) else None
    failure = None
    if trainer.world.is_main:
        try:
            with saving.replacing(folder) as new:
                model.write_into(new, **({} if weights is None else {"state_dict": weights}))
                if tokenizer is not None:
                    tokenizer.save_pretrained(new)
        except DepthrouteError as error:
            failure = error
    trainer.world.raise_together(failure)


def peak_memory(device: torch.device) -> int:
    """Bytes: what torch held on the accelerator at most, or this process in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _is_due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
