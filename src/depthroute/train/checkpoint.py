"""Checkpoints of a run: written whole or not at all, the newest few and the best kept.

    checkpoints/step_00001000/   state.json, model.safetensors, optimizer.safetensors
    checkpoints/best             a link to the one with the lowest validation loss

A model sharded by FSDP2 is written by every rank through ``torch.distributed.checkpoint`` into
``sharded/`` instead, and can be read back by another number of ranks.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from depthroute._version import __version__
from depthroute.errors import CheckpointError
from depthroute.parallel.sharded import load_sharded, save_sharded
from depthroute.parallel.world import World
from depthroute.parallel.wrap import is_sharded
from depthroute.train.loop import Trainer

FORMAT = 1
_PREFIX, _TEMPORARY = "step_", ".saving_"
FAILURES = (OSError, SafetensorError, CheckpointException)


@dataclass
class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int = 2
    best: dict[str, Any] | None = field(default=None)
    """Step and loss of the best validation so far."""

    def steps(self) -> list[int]:
        """Of every whole checkpoint, oldest first."""
        found = self.folder.glob(f"{_PREFIX}*/state.json")
        return sorted(int(f.parent.name.removeprefix(_PREFIX)) for f in found)

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, trainer: Trainer, state: dict[str, Any], loss: float | None = None) -> Path:
        """The trainer as it stands, with ``state`` beside it; ``loss`` is a validation of it.

        Called by every rank; the first one names and prunes. A step that is saved already is left
        as it is: a run that reaches it again has the same parameters.
        """
        world, target = trainer.world, self.path(trainer.completed)
        if world.max(float(target.exists())):
            return target
        temporary = self.folder / f"{_TEMPORARY}{target.name}"
        if loss is not None and (self.best is None or loss < self.best["loss"]):
            self.best = {"step": trainer.completed, "loss": loss}
        state = state | _state(trainer, loss, self.best)
        with self._writing(world, target, temporary):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in self.folder.glob(f"{_TEMPORARY}*"):
                    shutil.rmtree(leftover)
                temporary.mkdir()
        with self._writing(world, target, temporary):
            if is_sharded(trainer.model):
                save_sharded(trainer.model, trainer.optimizer, temporary / "sharded")
            elif world.is_main:
                save_whole(trainer, temporary)
        with self._writing(world, target, temporary):
            if world.is_main:
                write_state(temporary / "state.json", state)
                sync(temporary)
                temporary.rename(target)
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
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        return CheckpointError(
            f"cannot write the checkpoint {target}: {reason}; {last}. Free some space or make the "
            "folder writable, then resume with --resume auto"
        )

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.keep_last :])
        if self.best is not None and self.best["step"] in steps:
            kept.add(self.best["step"])
            link = self.folder / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(self.path(self.best["step"]).name)
            link.replace(self.folder / "best")
        for step in set(steps) - kept:
            # renamed first: killed half way, what is left has no name to resume from
            old = self.path(step).rename(self.folder / f"{_TEMPORARY}old_{step}")
            shutil.rmtree(old)

    def load(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Put ``trainer`` where it was after ``step`` steps; the state that was saved with it."""
        path = self.path(step)
        state = read_state(path)
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
        except (*FAILURES, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot resume from {path}: {str(error).splitlines()[0]}; the checkpoint is "
                "damaged or of another model. Remove that folder to resume from the one before"
            ) from error
        trainer.completed = state["step"]
        trainer.recent.extend(state["recent_losses"])
        set_random_state(state["random"], trainer.world.rank)
        self.best = state["best"]
        return state


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {state.get('format')!r}; this version reads {FORMAT}. "
            f"Use the depthroute that wrote it ({state.get('depthroute')})"
        )
    return state


def _state(trainer: Trainer, loss: float | None, best: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "depthroute": __version__,
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
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    parameters = dict(trainer.inner.named_parameters())
    trainer.optimizer.state.clear()
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        # the step counter is a scalar and stays where fused AdamW wants it, with its parameter
        trainer.optimizer.state[parameter][moment] = value.to(parameter.device)


def _kept_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    return [(name, b) for name, b in model.named_buffers() if name in state]


def write_state(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n")


def sync(folder: Path) -> None:
    """On the disk before the name is: a power cut leaves no named checkpoint half written."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    with suppress(OSError):  # some file systems cannot sync a folder
        handle = os.open(folder.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
