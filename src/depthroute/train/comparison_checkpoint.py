"""Where a comparison stands: all its trainers in one folder, written whole or not at all.

    checkpoints/at_000001200/state.json, 0/model.safetensors, 0/optimizer.safetensors, 1/...

The name counts the lines of ``metrics.jsonl`` that were written before. One is kept, as it serves
nothing but going on, and it goes when the comparison is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute._version import __version__
from depthroute.errors import CheckpointError
from depthroute.train.checkpoint import (
    FAILURES,
    FORMAT,
    load_whole,
    random_state,
    read_state,
    save_whole,
    set_random_state,
    sync,
    write_state,
)
from depthroute.train.loop import Trainer

_PREFIX, _TEMPORARY = "at_", ".saving"


@dataclass(frozen=True)
class ComparisonCheckpoints:
    folder: Path

    def newest(self) -> Path | None:
        return max((f.parent for f in self.folder.glob(f"{_PREFIX}*/state.json")), default=None)

    def save(self, state: dict[str, Any], trainers: Mapping[str, Trainer]) -> Path:
        """``state`` holds ``lines``; a trainer is known by its name again."""
        target = self.folder / f"{_PREFIX}{state['lines']:09d}"
        temporary = self.folder / _TEMPORARY
        methods = {
            label: {"completed": t.completed, "recent_losses": list(t.recent)}
            for label, t in trainers.items()
        }
        about = {"format": FORMAT, "depthroute": __version__, "random": [random_state()]}
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for number, trainer in enumerate(trainers.values()):
                (temporary / str(number)).mkdir()
                save_whole(trainer, temporary / str(number))
            write_state(temporary / "state.json", about | state | {"methods": methods})
            sync(temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            for old in self.folder.glob(f"{_PREFIX}*"):
                if old != target:
                    shutil.rmtree(old)
        except FAILURES as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {reason}; the last good one is "
                f"{self.newest() or 'none'}. Free some space or make the folder writable, then "
                "resume with --resume auto"
            ) from error
        return target

    def load(self, path: Path, trainers: dict[str, Trainer]) -> None:
        """Put ``trainers`` where they were; those that had left the comparison are removed."""
        state = read_state(path)
        for label in set(trainers) - set(state["methods"]):
            del trainers[label]
        for number, (label, saved) in enumerate(state["methods"].items()):
            try:
                load_whole(trainers[label], path / str(number))
            except (*FAILURES, KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"cannot resume from {path}: {str(error).splitlines()[0]}; the checkpoint is "
                    "damaged or of another model. Start again with another --out"
                ) from error
            trainers[label].completed = saved["completed"]
            trainers[label].recent.extend(saved["recent_losses"])
        set_random_state(state["random"], 0)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
