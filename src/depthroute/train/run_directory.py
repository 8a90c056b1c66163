"""A run on disk: ``config.json``, ``metrics.jsonl`` (append-only, the truth), ``summary.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthroute.errors import DepthrouteError
from depthroute.train import records


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
            run = cls(path)
            is_begun = run.metrics.exists() and run.metrics.stat().st_size > 0
            # stopped before it had anything to say, a run leaves an empty list of records
            if is_begun or any(item != run.metrics for item in path.iterdir()):
                raise RunError(
                    f"{path} already holds a run or other files; give a new or empty directory "
                    "with --out"
                )
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

    def count(self) -> int:
        """Lines so far; a checkpoint keeps it, so that a resumed run knows which of them count."""
        return self.metrics.read_bytes().count(b"\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of the run that counts: where it went on from a checkpoint, what had come
        after that checkpoint is left out, because it was done again. A last line without its end
        is being written, or was when its process was killed."""
        kept: list[tuple[int, dict[str, Any]]] = []
        with self.metrics.open("rb") as handle:
            whole = (line for line in handle if line.endswith(b"\n"))
            for number, line in enumerate(whole):
                try:
                    record = records.parse(line)
                except ValueError as error:
                    raise RunError(f"{self.metrics}, line {number + 1}: {error}") from error
                if record["event"] == "resumed":
                    kept = [(n, r) for n, r in kept if not _is_undone(n, r, record)]
                kept.append((number, record))
        yield from (record for _, record in kept)

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


def _is_undone(number: int, record: dict[str, Any], resumed: dict[str, Any]) -> bool:
    if "lines" in resumed:  # a comparison, whose methods and seeds count their own steps
        return number >= resumed["lines"]
    return _is_after(record, resumed["step"])


def _is_after(record: dict[str, Any], completed: int) -> bool:
    """A step names itself, counted from 0; every other event the steps done before it."""
    done = record.get("step", 0) + (record["event"] in ("step", "skipped"))
    return done > completed
