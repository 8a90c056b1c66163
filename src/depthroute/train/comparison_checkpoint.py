"""Where a comparison stands: all its trainers in one folder, written whole or not at all.

    checkpoints/at_000001200/state.json, 0/model.safetensors, 0/optimizer.safetensors, 1/...

The name counts the lines of ``metrics.jsonl`` that were written before. Two are kept, so that
there is one to go on from if the newest is damaged, and they go when the comparison is complete.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.errors import CheckpointError
from depthroute.train.checkpoint import (
    FAILURES,
    UNREADABLE,
    load_whole,
    random_state,
    save_whole,
    set_random_state,
)
from depthroute.train.loop import Trainer
from depthroute.train.seal import DamagedError, damage, digests, none_good, read_state, seal

KEPT = 2
_NAME = re.compile(r"at_\d{9,}")


@dataclass(frozen=True)
class ComparisonCheckpoints:
    folder: Path

    def paths(self) -> list[Path]:
        """Oldest first."""
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("at_")))

    def newest(self, note: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """The newest that is as it was written, with its state; ``note`` hears of others."""
        reasons = []
        for path in reversed(self.paths()):
            try:
                state = read_state(path)
                found = damage(path, state)
                if found:
                    raise DamagedError(f"{path} is damaged: {found}")
            except DamagedError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                note(f"skipped: {reason}")
            return path, state
        if reasons:
            raise none_good(reasons)
        return None

    def save(self, state: dict[str, Any], trainers: Mapping[str, Trainer]) -> Path:
        """``state`` holds ``lines``; a trainer is known by its name again."""
        target = self.folder / f"at_{state['lines']:09d}"
        temporary = self.folder / files.unfinished_name(target.name)
        methods = {
            label: {"completed": t.completed, "recent_losses": list(t.recent)}
            for label, t in trainers.items()
        }
        state = state | {"random": [random_state()], "methods": methods}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.clear(self.folder)
            temporary.mkdir()
            for number, trainer in enumerate(trainers.values()):
                (temporary / str(number)).mkdir()
                save_whole(trainer, temporary / str(number))
            seal(temporary, state, digests(temporary))
            files.sync(temporary)
            files.put_in_place(temporary, target)
            for old in self.paths()[:-KEPT]:
                files.remove(old)
        except FAILURES as error:
            last = next((p for p in reversed(self.paths()) if p != target), "none")
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {files.reason(error)}; the last good one "
                f"is {last}. Free some space or make the folder writable, then resume with "
                "--resume auto"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def load(self, path: Path, trainers: dict[str, Trainer]) -> None:
        """Put ``trainers`` where they were; those that had left the comparison are removed."""
        state = read_state(path)
        try:
            for label in set(trainers) - set(state["methods"]):
                del trainers[label]
            for number, (label, saved) in enumerate(state["methods"].items()):
                load_whole(trainers[label], path / str(number))
                trainers[label].completed = saved["completed"]
                trainers[label].recent.extend(saved["recent_losses"])
            set_random_state(state["random"], 0)
        except UNREADABLE as error:
            raise DamagedError(
                f"cannot resume from {path}: {files.reason(error)}; the checkpoint is damaged or "
                "of another model. Start again with another --out"
            ) from error

    def remove(self) -> None:
        """All of them, and the folder if nothing else is in it."""
        with suppress(OSError):
            for path in self.paths():
                files.remove(path)
            files.clear(self.folder)
            self.folder.rmdir()
