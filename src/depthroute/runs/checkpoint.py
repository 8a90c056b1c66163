"""Checkpoints of a run: written whole or not at all, the newest few and the best kept.

    checkpoints/step_00001000/state.json, rank_00000.safetensors, rank_00001.safetensors, ...
    checkpoints/best             a link to the one with the lowest validation loss

The name counts the steps that all methods and seeds have taken. Tensors have the names of the whole
model after the number of their method, ``0/model.norm.weight`` and ``0/model.norm.weight/exp_avg``,
so any layout goes on from what any other has written (:mod:`depthroute.parallel.stored`). They are
copied when a checkpoint is due and written while training goes on.

Formats 1 to 3 had whole tensors, and each method's in a folder of its own or, of one model, beside
``state.json``; a comparison counted lines in the name (``at_000001200``). They are read, but for
what FSDP2 wrote then.
"""

from __future__ import annotations

import base64
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from depthroute import files
from depthroute.errors import CheckpointError
from depthroute.parallel import stored
from depthroute.parallel.world import SINGLE, World
from depthroute.runs.seal import DamagedError, damage, read_state, seal

FAILURES = (OSError, SafetensorError, CheckpointException)
UNREADABLE = (*FAILURES, KeyError, TypeError, ValueError, RuntimeError)
"""What reading a damaged file can end in."""
_NAME = re.compile(r"at_\d{9,}|step_\d{8,}")


class Trainee(Protocol):
    """What is saved of a trainer."""

    optimizer: Any
    completed: int
    recent: Any

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Of this rank, by their names in the whole model; a name may come twice."""
        ...


class Writing(NamedTuple):
    """A checkpoint that is on its way to the disk."""

    target: Path
    temporary: Path
    future: futures.Future[Any]


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
    writing: Writing | None = None
    copies: stored.Copies = field(default_factory=stored.Copies)

    @cached_property
    def _group(self) -> Any:
        """All ranks once more, for what is written while the others' messages are of training."""
        return None if self.world.size == 1 else distributed.new_group(backend="gloo")

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

        Called by every rank, and returns when all is copied; :meth:`settle` and :meth:`wait` tell
        what comes of it, and one that is still being written is waited for here. A step that is
        saved already is left as it is: a run that reaches it again has the same parameters.
        """
        self.wait()
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
        with self._failing_together(target, temporary):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                files.clear(self.folder)
                temporary.mkdir()
        tensors = {
            f"{number}/{name}": tensor
            for number, trainer in enumerate(trainers.values())
            for name, tensor in _held(trainer)
        }
        complete = partial(self._complete, target, temporary, state)
        future = stored.start_writing(tensors, temporary, complete, self._group, self.copies)
        self.writing = Writing(target, temporary, future)
        return target

    def _complete(
        self, target: Path, temporary: Path, state: dict[str, Any], checksums: dict[str, str]
    ) -> None:
        """On the first rank, in the background, once every rank's file is on the disk."""
        seal(temporary, state, checksums)
        files.put_in_place(temporary, target)
        shutil.rmtree(temporary, ignore_errors=True)  # a damaged one that was there
        self.skipped.discard(target)
        self._prune()

    def settle(self) -> None:
        """Between two steps: :meth:`wait`, if there is nothing to wait for on any rank."""
        if self.writing is not None and not self.world.max(not self.writing.future.done()):
            self.wait()

    def wait(self) -> None:
        """Until what is being written is in place, or has failed on some rank."""
        if self.writing is not None:
            (target, temporary, future), self.writing = self.writing, None
            with self._failing_together(target, temporary):
                future.result()

    def leave(self) -> None:
        """Let what is being written end, however it does: there is another failure to tell of."""
        if self.writing is not None:
            futures.wait([self.writing.future])

    @contextmanager
    def _failing_together(self, target: Path, temporary: Path) -> Iterator[None]:
        """One stage of a save: all ranks pass it, or all fail with one error."""
        failure = None
        try:
            yield
        except FAILURES as error:
            last = next((p for p in reversed(self.paths()) if p != target), None)
            kept = "none is kept yet" if last is None else f"the last good checkpoint is {last}"
            failure = CheckpointError(
                f"cannot write the checkpoint {target}: {_why(error)}; {kept}. Free some "
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
        state, world = read_state(path), self.world
        _refuse_old_shards(path)
        why = world.first(damage(path, state, world.rank, world.size))
        if why:
            raise DamagedError(f"{path} is damaged: {why}")
        names = {
            label: set().union(*world.gather([name for name, _ in trainer.tensors()]))
            for label, trainer in trainers.items()
        }
        with self._reading_together(path):
            state = _of_today(state, list(trainers))
            for label in set(trainers) - set(state["methods"]):
                del trainers[label]
            contents = [
                _Content(trainers[label], *_place(path, number, state["format"]), names[label])
                for number, label in enumerate(state["methods"])
            ]
        with self._reading_together(path):
            for content in contents:
                content.read(self._group)
            for label, saved in state["methods"].items():
                trainers[label].completed = saved["completed"]
                trainers[label].recent.clear()
                trainers[label].recent.extend(saved["recent_losses"])
            _set_random_state(state["random"], world.seat)
            self.best = state["best"]
        return state

    @contextmanager
    def _reading_together(self, path: Path) -> Iterator[None]:
        """All ranks pass it, or all find the checkpoint damaged."""
        why = ""
        try:
            yield
        except UNREADABLE as error:
            why = _why(error)
        if why := self.world.first(why):
            raise DamagedError(
                f"cannot resume from {path}: {why}; the checkpoint is damaged or of another model"
            )


def whole_weights(path: Path) -> dict[str, Tensor]:
    """Of the model that a training has saved in ``path``, whatever the layout that wrote it."""
    names = {n: a for n, a in stored.about(path).items() if n.count("/") == 1}
    return {n.removeprefix("0/"): t for n, t in stored.read_whole(path, names).items()}


def _why(error: BaseException) -> str:
    """In one line; torch tells every rank of the failures of all."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return files.reason(error) + (f" (rank {rank})" if rank else "")
    return files.reason(error)


def _is_checkpoint(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _age(path: Path) -> tuple[bool, int]:
    """Those that count lines are older than any that count steps."""
    kind, _, number = path.name.partition("_")
    return kind == "step", int(number)


def _place(path: Path, number: int, format: int) -> tuple[Path, str]:
    """Of one method's tensors: the folder, and what their names begin with."""
    if format > 3:
        return path, f"{number}/"
    folder = path / str(number)
    return (folder if folder.is_dir() else path), ""


def _of_today(state: dict[str, Any], labels: list[str]) -> dict[str, Any]:
    """Formats 1 and 2 counted no steps of a comparison, and named no method of one model."""
    if state["format"] > 2:
        return state
    if "methods" in state:  # every step is a line, so lines are a count that only grows
        return state | {"step": state["lines"], "validation_loss": None, "best": None}
    saved = {"completed": state["step"], "recent_losses": state["recent_losses"]}
    return state | {"round": state["step"], "memory": {}, "methods": dict.fromkeys(labels, saved)}


def _refuse_old_shards(path: Path) -> None:
    """Their index is a pickle, and their names those of another format."""
    if any(path.glob("*/sharded")) or (path / "sharded").is_dir():
        raise CheckpointError(
            f"{path} holds the shards of an earlier version's --parallel fsdp, which this one does "
            "not read; end the run with the version that began it (config.json names it), or start "
            "again with another --out"
        )


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in states.items()}


def _set_random_state(states: list[dict[str, str]], seat: int) -> None:
    """One that was not there before takes the first rank's numbers and moves on from them."""
    saved = states[seat] if seat < len(states) else states[0]
    for name, text in saved.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
    if seat >= len(states):
        torch.manual_seed(torch.initial_seed() + seat)


def _held(trainer: Trainee) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of the model and, after a ``/``, of the optimiser's state."""
    for name, tensor in dict(trainer.tensors()).items():
        yield name, tensor
        for moment, value in trainer.optimizer.state.get(tensor, {}).items():
            yield f"{name}/{moment}", value


class _Content:
    """What a checkpoint holds of one trainer; made, it fits, and nothing is changed yet."""

    def __init__(self, trainer: Trainee, folder: Path, prefix: str, names: set[str]) -> None:
        self.trainer, self.folder, self.prefix = trainer, folder, prefix
        saved = {
            name.removeprefix(prefix): tensor
            for name, tensor in stored.about(folder).items()
            if name.startswith(prefix)
        }
        if odd := sorted({name for name in saved if "/" not in name} ^ names):
            raise KeyError(f"{odd[0]} ({len(odd)} such) is in one of checkpoint and model only")
        self.tensors = dict(trainer.tensors())
        for name, tensor in self.tensors.items():
            _must_fit(name, saved[name], tensor)
        self.moments: dict[str, dict[str, Tensor]] = {}
        for key, about in saved.items():
            name, _, moment = key.partition("/")
            if moment and name in self.tensors:
                place = _place_for(key, about, self.tensors[name])
                self.moments.setdefault(name, {})[moment] = place
        self._refuse_gaps()

    def _refuse_gaps(self) -> None:
        """A parameter has all of its optimiser's state or, if never trained, none."""
        names = {parameter: name for name, parameter in self.tensors.items()}
        for kind in _kinds(self.trainer.optimizer):
            mine = [names[p] for p in kind if p in names and names[p] in self.moments]
            whole = set().union(*(self.moments[name] for name in mine))
            for name in mine:
                if missing := whole - self.moments[name].keys():
                    raise KeyError(f"{name}/{min(missing)} is missing from the optimiser's state")

    def read(self, group: Any) -> None:
        tensors = {self.prefix + name: tensor for name, tensor in self.tensors.items()}
        for name, moments in self.moments.items():
            tensors |= {f"{self.prefix}{name}/{key}": value for key, value in moments.items()}
        stored.read_into(tensors, self.folder, group)
        state = self.trainer.optimizer.state
        state.clear()
        with torch.no_grad():
            for name, tensor in self.trainer.tensors():
                moments = self.moments.get(name, {})
                if tensor is not self.tensors[name]:  # an embedding and the head that is its twin
                    tensor.copy_(self.tensors[name])
                    moments = {key: value.clone() for key, value in moments.items()}
                if moments:
                    state[tensor] = moments


def _place_for(name: str, saved: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """A tensor to read a moment into, shared out over ranks as its parameter is."""
    if name.endswith("/step") and not saved.size:
        # a scalar, which stays where fused AdamW wants it, with its parameter
        return torch.empty((), dtype=saved.properties.dtype, device=parameter.device)
    _must_fit(name, saved, parameter)
    return torch.empty_like(parameter.detach())


def _kinds(optimizer: Any) -> list[list[Tensor]]:
    """Parameters by what is kept of them: momentum alone by Muon, more by AdamW."""
    groups = optimizer.param_groups
    kinds = [[g for g in groups if ("momentum" in g) == is_muon] for is_muon in (False, True)]
    return [[p for group in kind for p in group["params"]] for kind in kinds]


def _must_fit(name: str, saved: TensorStorageMetadata, tensor: Tensor) -> None:
    if (saved.size, saved.properties.dtype) != (tensor.shape, tensor.dtype):
        raise TypeError(
            f"{name} is {saved.properties.dtype} of shape {tuple(saved.size)} in the checkpoint "
            f"and {tensor.dtype} of shape {tuple(tensor.shape)} in the model"
        )
