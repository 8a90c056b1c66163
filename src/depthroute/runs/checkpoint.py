"""Checkpoints of a run: written whole or not at all, the newest few and the best kept.

    checkpoints/step_00001000/state.json, 0/model.safetensors, 0/optimizer.safetensors, 1/...
    checkpoints/best             a link to the one with the lowest validation loss

The name counts the steps that all methods and seeds have taken; every method that is trained has a
folder, by its place in ``state.json``. A model sharded by FSDP2 is written by every rank through
``torch.distributed.checkpoint`` into ``0/sharded/`` instead, and can be read back by another number
of ranks.

Formats 1 and 2 had the files of a run of one model beside ``state.json``, and a comparison counted
lines in the name (``at_000001200``). Both are read.
"""

from __future__ import annotations

import base64
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from depthroute import files
from depthroute.errors import CheckpointError
from depthroute.parallel.sharded import load_sharded, save_sharded
from depthroute.parallel.world import SINGLE, World
from depthroute.parallel.wrap import is_sharded
from depthroute.runs.seal import DamagedError, damage, digests, read_state, seal

FAILURES = (OSError, SafetensorError, CheckpointException)
UNREADABLE = (*FAILURES, KeyError, TypeError, ValueError, RuntimeError)
"""What reading a damaged file can end in."""
_NAME = re.compile(r"at_\d{9,}|step_\d{8,}")


class Trainee(Protocol):
    """What is saved of a trainer."""

    model: Any
    inner: Any
    """The model inside what DDP makes of it."""
    optimizer: Any
    completed: int
    recent: Any


@dataclass
class Checkpoints:
    """The ``checkpoints`` folder of a run. Every rank has one; the first names and prunes."""

    folder: Path
    keep_last: int = 2
    world: World = SINGLE
    best: dict[str, Any] | None = None
    """Step and loss of the best validation so far."""
    skipped: set[Path] = field(default_factory=set)
    """Damaged checkpoints, which are written again when their step is reached again."""

    def is_best(self, loss: float | None) -> bool:
        """A loss that is no number is never the best, whatever comes after it."""
        is_number = loss is not None and math.isfinite(loss)
        return is_number and (self.best is None or loss < self.best["loss"])

    def paths(self) -> list[Path]:
        """Of every checkpoint, oldest first. Other names in the folder are somebody else's."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _is_checkpoint(p)), key=_age)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(
        self, trainers: Mapping[str, Trainee], state: dict[str, Any], loss: float | None = None
    ) -> Path:
        """The trainers as they stand after ``state["step"]`` steps; ``loss`` is a validation.

        Called by every rank. A step that is saved already is left as it is: a run that reaches it
        again has the same parameters.
        """
        step, world = state["step"], self.world
        target = self.path(step)
        if world.max(float(target.exists() and target not in self.skipped)):
            return target
        temporary = self.folder / world.gather(files.unfinished_name(target.name))[0]
        if self.is_best(loss):
            self.best = {"step": step, "loss": loss}
        methods = {
            label: {"completed": t.completed, "recent_losses": list(t.recent)}
            for label, t in trainers.items()
        }
        state = state | {"validation_loss": loss, "best": self.best, "methods": methods}
        state |= {"ranks": world.size, "random": world.gather(_random_state())}
        with self._writing(target, temporary):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                files.clear(self.folder)
                temporary.mkdir()
                for number in range(len(trainers)):
                    (temporary / str(number)).mkdir()
        with self._writing(target, temporary):
            for number, trainer in enumerate(trainers.values()):
                if is_sharded(trainer.model):
                    place = temporary / str(number) / "sharded"
                    save_sharded(trainer.model, trainer.optimizer, place)
                elif world.is_main:
                    _save_whole(trainer, temporary / str(number))
        checksums: dict[str, str] = {}
        with self._writing(target, temporary):
            if any(is_sharded(trainer.model) for trainer in trainers.values()):
                checksums = digests(temporary, world.rank, world.size)
            elif world.is_main:
                checksums = digests(temporary)
        checksums = {k: v for share in world.gather(checksums) for k, v in share.items()}
        with self._writing(target, temporary):
            if world.is_main:
                seal(temporary, state, checksums)
                files.sync(temporary)
                files.put_in_place(temporary, target)
                shutil.rmtree(temporary, ignore_errors=True)  # a damaged one that was there
                self.skipped.discard(target)
                self._prune()
        return target

    @contextmanager
    def _writing(self, target: Path, temporary: Path) -> Iterator[None]:
        """One stage of a save: all ranks pass it, or all fail with one error."""
        failure = None
        try:
            yield
        except FAILURES as error:
            last = next((p for p in reversed(self.paths()) if p != target), None)
            kept = "none is kept yet" if last is None else f"the last good checkpoint is {last}"
            failure = CheckpointError(
                f"cannot write the checkpoint {target}: {files.reason(error)}; {kept}. Free some "
                "space or make the folder writable, then resume with --resume auto"
            )
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
        self.world.raise_together(failure)

    def tidy(self) -> None:
        """What a kill came before: the link to the best one, the removal of those not kept."""
        failure = None
        if self.world.is_main:
            try:
                files.clear(self.folder)
                self._prune()
            except OSError as error:
                failure = CheckpointError(f"cannot write in {self.folder}: {files.reason(error)}")
        self.world.raise_together(failure)

    def _prune(self) -> None:
        paths = [path for path in self.paths() if path not in self.skipped]
        kept = set(paths[-self.keep_last :])
        best = None if self.best is None else self.path(self.best["step"])
        if best in paths:
            kept.add(best)
            files.point(self.folder / "best", best.name)
        passed = {path for path in self.skipped if _age(path) < _age(paths[-1])}
        for path in set(paths) - kept | passed:
            files.remove(path)
        self.skipped -= passed

    def remove(self) -> None:
        """All of them, and the folder if nothing else is in it."""
        with suppress(OSError):
            for path in self.paths():
                files.remove(path)
            files.clear(self.folder)
            self.folder.rmdir()

    def newest(self, load: Callable[[Path], None], note: Callable[[str], None]) -> Path | None:
        """The newest that ``load`` takes; those it finds damaged are skipped, and ``note`` hears
        which and why. None where there is no checkpoint at all."""
        reasons: list[str] = []
        paths = self.world.gather(self.paths())[0]
        for path in reversed(paths):
            try:
                load(path)
            except DamagedError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                note(f"skipped: {reason}")
            self.skipped = {later for later in paths if _age(later) > _age(path)}
            self.tidy()
            return path
        if reasons:
            raise CheckpointError(
                f"no checkpoint of the run is good, and nothing was changed: {'; '.join(reasons)}. "
                "Bring a good one back, or start again with another --out"
            )
        return None

    def load(self, path: Path, trainers: dict[str, Any]) -> dict[str, Any]:
        """Put ``trainers`` where they were; the state that was saved with them, in today's format.

        Every rank has found the files to be as they were written. Methods that had left a
        comparison by then leave ``trainers`` too.
        """
        state = read_state(path)
        why = self.world.first(damage(path, state, self.world.rank, self.world.size))
        if why:
            raise DamagedError(f"{path} is damaged: {why}")
        _refuse_other_sharding(path, trainers)
        try:
            state = _of_today(state, list(trainers))
            for label in set(trainers) - set(state["methods"]):
                del trainers[label]
            for number, (label, saved) in enumerate(state["methods"].items()):
                _load_trainer(trainers[label], _place(path, number))
                trainers[label].completed = saved["completed"]
                trainers[label].recent.clear()
                trainers[label].recent.extend(saved["recent_losses"])
            _set_random_state(state["random"], self.world.rank)
            self.best = state["best"]
        except UNREADABLE as error:
            raise DamagedError(
                f"cannot resume from {path}: {files.reason(error)}; the checkpoint is damaged or "
                "of another model"
            ) from error
        return state


def _is_checkpoint(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _age(path: Path) -> tuple[bool, int]:
    """Those that count lines are older than any that count steps."""
    kind, _, number = path.name.partition("_")
    return kind == "step", int(number)


def _place(path: Path, number: int) -> Path:
    """Of one method's files; those of formats 1 and 2 of one model lie beside ``state.json``."""
    folder = path / str(number)
    return folder if folder.is_dir() else path


def _of_today(state: dict[str, Any], labels: list[str]) -> dict[str, Any]:
    """Formats 1 and 2 counted no steps of a comparison, and named no method of one model."""
    if state["format"] > 2:
        return state
    if "methods" in state:  # every step is a line, so lines are a count that only grows
        return state | {"step": state["lines"], "validation_loss": None, "best": None}
    saved = {"completed": state["step"], "recent_losses": state["recent_losses"]}
    return state | {"round": state["step"], "memory": {}, "methods": dict.fromkeys(labels, saved)}


def _refuse_other_sharding(path: Path, trainers: Mapping[str, Trainee]) -> None:
    sharded = (_place(path, 0) / "sharded").is_dir()
    if any(is_sharded(trainer.model) != sharded for trainer in trainers.values()):
        raise CheckpointError(
            f"{path} was written {'with' if sharded else 'without'} FSDP2; resume "
            f"{'under torchrun with --parallel fsdp' if sharded else 'without it'}"
        )


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in states.items()}


def _set_random_state(states: list[dict[str, str]], rank: int) -> None:
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


def _save_whole(trainer: Trainee, folder: Path) -> None:
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


def _load_trainer(trainer: Trainee, folder: Path) -> None:
    if is_sharded(trainer.model):
        load_sharded(trainer.model, trainer.optimizer, folder / "sharded")
        return
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


def _moments(trainer: Trainee, folder: Path) -> dict[Tensor, dict[str, Tensor]]:
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
    names = {parameter: name for name, parameter in parameters.items()}
    for kind in _kinds(trainer.optimizer):
        mine = [parameter for parameter in kind if parameter in moments]
        whole = set().union(*(moments[parameter] for parameter in mine))
        for parameter in mine:
            if missing := whole - moments[parameter].keys():
                name = names[parameter]
                raise KeyError(f"{name}/{min(missing)} is missing from the optimiser's state")
    return moments


def _kinds(optimizer: Any) -> list[list[Tensor]]:
    """Parameters by what is kept of them: momentum alone by Muon, more by AdamW."""
    groups = optimizer.param_groups
    kinds = [[g for g in groups if ("momentum" in g) == is_muon] for is_muon in (False, True)]
    return [[p for group in kind for p in group["params"]] for kind in kinds]


def _must_fit(name: str, saved: Tensor, tensor: Tensor) -> None:
    if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
        raise TypeError(
            f"{name} is {saved.dtype} of shape {tuple(saved.shape)} in the checkpoint and "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model"
        )


def _kept_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    return [(name, b) for name, b in model.named_buffers() if name in state]
