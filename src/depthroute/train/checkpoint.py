"""Checkpoints of a run: written whole or not at all, the newest few and the best kept.

    checkpoints/step_00001000/   state.json, model.safetensors, optimizer.safetensors
    checkpoints/best             a link to the one with the lowest validation loss

A model sharded by FSDP2 is written by every rank through ``torch.distributed.checkpoint`` into
``sharded/`` instead, and can be read back by another number of ranks.
"""

from __future__ import annotations

import base64
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from depthroute import files
from depthroute.errors import CheckpointError
from depthroute.parallel.sharded import load_sharded, save_sharded
from depthroute.parallel.world import World
from depthroute.parallel.wrap import is_sharded
from depthroute.train.loop import Trainer
from depthroute.train.seal import DamagedError, damage, digests, read_state, seal

FAILURES = (OSError, SafetensorError, CheckpointException)
UNREADABLE = (*FAILURES, KeyError, TypeError, ValueError, RuntimeError)
"""What reading a damaged file can end in."""
_NAME = re.compile(r"step_(\d{8,})")


@dataclass
class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int = 2
    best: dict[str, Any] | None = field(default=None)
    """Step and loss of the best validation so far."""

    skipped: set[int] = field(default_factory=set)
    """Steps of damaged checkpoints, which are written again when they are reached again."""

    def is_best(self, loss: float) -> bool:
        """A loss that is no number is never the best, whatever comes after it."""
        return math.isfinite(loss) and (self.best is None or loss < self.best["loss"])

    def steps(self) -> list[int]:
        """Of every checkpoint, oldest first. Other names in the folder are somebody else's."""
        if not self.folder.is_dir():
            return []
        names = map(_NAME.fullmatch, (item.name for item in self.folder.iterdir()))
        steps = {int(match[1]) for match in names if match}
        return sorted(step for step in steps if self.path(step).is_dir())

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(self, trainer: Trainer, state: dict[str, Any], loss: float | None = None) -> Path:
        """The trainer as it stands, with ``state`` beside it; ``loss`` is a validation of it.

        Called by every rank; the first one names and prunes. A step that is saved already is left
        as it is: a run that reaches it again has the same parameters.
        """
        world, step = trainer.world, trainer.completed
        target = self.path(step)
        if world.max(float(target.exists() and step not in self.skipped)):
            return target
        temporary = self.folder / world.gather(files.unfinished_name(target.name))[0]
        if loss is not None and self.is_best(loss):
            self.best = {"step": step, "loss": loss}
        state = state | _state(trainer, loss, self.best)
        with self._writing(world, target, temporary):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                files.clear(self.folder)
                temporary.mkdir()
        with self._writing(world, target, temporary):
            if is_sharded(trainer.model):
                save_sharded(trainer.model, trainer.optimizer, temporary / "sharded")
            elif world.is_main:
                save_whole(trainer, temporary)
        checksums: dict[str, str] = {}
        with self._writing(world, target, temporary):
            if is_sharded(trainer.model):
                checksums = digests(temporary, world.rank, world.size)
            elif world.is_main:
                checksums = digests(temporary)
        checksums = {k: v for found in world.gather(checksums) for k, v in found.items()}
        with self._writing(world, target, temporary):
            if world.is_main:
                seal(temporary, state, checksums)
                files.sync(temporary)
                files.put_in_place(temporary, target)
                shutil.rmtree(temporary, ignore_errors=True)  # a damaged one that was there
                self.skipped.discard(step)
                self._prune()
        return target

    @contextmanager
    def _writing(self, world: World, target: Path, temporary: Path) -> Iterator[None]:
        """One stage of a save: all ranks pass it, or all fail with one error."""
        failure = None
        try:
            yield
        except FAILURES as error:
            failure = self._explain(target, error)
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
        world.raise_together(failure)

    def _explain(self, target: Path, error: BaseException) -> CheckpointError:
        kept = self.steps()
        last = f"the last good checkpoint is {self.path(kept[-1])}" if kept else "none is kept yet"
        return CheckpointError(
            f"cannot write the checkpoint {target}: {files.reason(error)}; {last}. Free some space "
            "or make the folder writable, then resume with --resume auto"
        )

    def tidy(self, world: World) -> None:
        """What a kill came before: the link to the best one, the removal of those not kept."""
        failure = None
        if world.is_main:
            try:
                files.clear(self.folder)
                self._prune()
            except OSError as error:
                failure = CheckpointError(f"cannot write in {self.folder}: {files.reason(error)}")
        world.raise_together(failure)

    def _prune(self) -> None:
        steps = [step for step in self.steps() if step not in self.skipped]
        kept = set(steps[-self.keep_last :])
        if self.best is not None and self.best["step"] in steps:
            kept.add(self.best["step"])
            files.point(self.folder / "best", self.path(self.best["step"]).name)
        passed = {step for step in self.skipped if step < steps[-1]}
        for step in set(steps) - kept | passed:
            files.remove(self.path(step))
        self.skipped -= passed

    def read(self, step: int, world: World) -> dict[str, Any]:
        """The state of one checkpoint, which every rank has found to be as it was written."""
        path = self.path(step)
        state = read_state(path)
        found = world.first(damage(path, state, world.rank, world.size))
        if found:
            raise DamagedError(f"{path} is damaged: {found}")
        return state

    def load(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Put ``trainer`` where it was after ``step`` steps; the state that was saved with it."""
        path = self.path(step)
        state = self.read(step, trainer.world)
        sharded = (path / "sharded").is_dir()
        if sharded != is_sharded(trainer.model):
            raise CheckpointError(
                f"{path} was written {'with' if sharded else 'without'} FSDP2; resume "
                f"{'under torchrun with --parallel fsdp' if sharded else 'without it'}"
            )
        try:
            if sharded:
                load_sharded(trainer.model, trainer.optimizer, path / "sharded")
            else:
                load_whole(trainer, path)
            trainer.completed = state["step"]
            trainer.recent.clear()
            trainer.recent.extend(state["recent_losses"])
            set_random_state(state["random"], trainer.world.rank)
            self.best = state["best"]
        except UNREADABLE as error:
            raise DamagedError(
                f"cannot resume from {path}: {files.reason(error)}; the checkpoint is damaged or "
                "of another model"
            ) from error
        return state


def _state(trainer: Trainer, loss: float | None, best: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "step": trainer.completed,
        "validation_loss": loss,
        "best": best,
        "recent_losses": list(trainer.recent),
        "ranks": trainer.world.size,
        "random": trainer.world.gather(random_state()),
    }


def random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in states.items()}


def set_random_state(states: list[dict[str, str]], rank: int) -> None:
    """A rank that was not there before takes the first rank's numbers and moves on from them."""
    saved = states[rank] if rank < len(states) else states[0]
    for name, text in saved.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
    if rank >= len(states):
        torch.manual_seed(torch.initial_seed() + rank)


def save_whole(trainer: Trainer, folder: Path) -> None:
    names = {id(p): name for name, p in trainer.inner.named_parameters()}
    tensors = dict(trainer.inner.named_parameters()) | dict(_kept_buffers(trainer.inner))
    save_file(
        {n: t.detach().contiguous() for n, t in tensors.items()}, folder / "model.safetensors"
    )
    moments = {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }
    save_file(moments, folder / "optimizer.safetensors")


def load_whole(trainer: Trainer, folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    tensors = dict(trainer.inner.named_parameters()) | dict(_kept_buffers(trainer.inner))
    if set(saved) != set(tensors):
        odd = sorted(set(saved) ^ set(tensors))
        raise KeyError(f"{odd[0]} ({len(odd)} such) is in one of checkpoint and model only")
    for name, tensor in tensors.items():
        _must_fit(name, saved[name], tensor)
    moments = _moments(trainer, folder)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    trainer.optimizer.state.clear()
    for parameter, state in moments.items():
        trainer.optimizer.state[parameter] = state


def _moments(trainer: Trainer, folder: Path) -> dict[Tensor, dict[str, Tensor]]:
    """The optimiser's state of each parameter, which has all of it or, if never trained, none."""
    parameters = dict(trainer.inner.named_parameters())
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        if value.ndim or moment != "step":
            _must_fit(key, value, parameter)
        # the step counter is a scalar and stays where fused AdamW wants it, with its parameter
        moments.setdefault(parameter, {})[moment] = value.to(parameter.device)
    whole = set().union(*moments.values())
    for name, parameter in parameters.items():
        missing = whole - moments[parameter].keys() if parameter in moments else ()
        if missing:
            raise KeyError(f"{name}/{min(missing)} is missing from the optimiser's state")
    return moments


def _must_fit(name: str, saved: Tensor, tensor: Tensor) -> None:
    if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
        raise TypeError(
            f"{name} is {saved.dtype} of shape {tuple(saved.shape)} in the checkpoint and "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model"
        )


def _kept_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    return [(name, b) for name, b in model.named_buffers() if name in state]
