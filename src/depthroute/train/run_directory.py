"""A run on disk: ``config.json``, ``metrics.jsonl`` (append-only, the truth), ``summary.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthroute.errors import DepthrouteError


class RunError(DepthrouteError):
    """A run directory that cannot be used."""


class RunDirectory:
    """Made before training starts, so that a bad path costs no training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        path = Path(path).expanduser()
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; give a new or empty directory with --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(
                    f"{path} already holds a run or other files; give a new or empty directory "
                    "with --out"
                )
            run = cls(path)
            run.metrics.touch()
        except OSError as error:
            raise RunError(
                f"cannot write to {path}: {error.strerror}; give a writable directory with --out"
            ) from error
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunDirectory:
        """A run that is to go on. A line cut short when its process was killed is removed."""
        run = cls(Path(path).expanduser())
        try:
            with run.metrics.open("r+b") as handle:
                text = handle.read()
                handle.truncate(text.rfind(b"\n") + 1)
        except OSError as error:
            raise RunError(f"cannot resume {run.path}: {error.strerror}") from error
        return run

    def append(self, record: dict[str, Any]) -> None:
        """One line, on disk before the next step is taken."""
        try:
            with self.metrics.open("a") as handle:
                handle.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {error.strerror}") from error

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of the run that counts: where it went on from a checkpoint, what had come
        after that checkpoint is left out, because it was done again."""
        kept: list[dict[str, Any]] = []
        with self.metrics.open() as handle:
            for line in handle:
                record = json.loads(line)
                if record["event"] == "resumed":
                    kept = [r for r in kept if not _is_after(r, record["step"])]
                kept.append(record)
        yield from kept

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Written under another name first: a reader sees the old file or the whole new one."""
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(json.dumps(values, indent=2) + "\n")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text())


def _is_after(record: dict[str, Any], completed: int) -> bool:
    """A step names itself, counted from 0; every other event the steps done before it."""
    done = record.get("step", 0) + (record["event"] in ("step", "skipped"))
    return done > completed
