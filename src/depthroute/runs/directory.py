"""A run on disk: ``config.json``, ``metrics.jsonl`` (append-only, the truth), ``summary.json``, and
``run.toml``, the options that start it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from depthroute import files
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.runs import records

_SAME = ("kind", "preset", "base", "freeze_base", "methods", "seeds", "equal", "data")
MAY_CHANGE = ("validate_every", "save_every", "keep_last", "on_bad_step")
"""Training settings that a resumed run may set anew: none of them changes a step that is taken."""
MAY_CHANGE_ALONE = (*MAY_CHANGE, "validation_sequences")
"""The same of a run that trains one model: what is compared is judged by the same text."""
ALONE = ("train", "finetune")
"""Kinds of such runs."""
_BEFORE = {"optimizer": "adamw", "output_init": "default"}
"""Training settings that came later, and what runs had before them."""

RUN_FILE = "run.toml"
_RUN_FILE_HEAD = "# Every option of this run, written by depthroute.\n"


class RunError(DepthrouteError):
    """A run directory that cannot be used."""


class RunDirectory:
    """Made before training starts, so that a bad path costs no training.

    One that was created or reopened is this process's to write until it is closed or gone; anybody
    may read it.
    """

    _locks: ClassVar[WeakValueDictionary[Path, files.Lock]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self._lock: files.Lock | None = None

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        run = cls(files.at_home(path))
        try:
            if run.path.exists() and not run.path.is_dir():
                raise RunError(f"{path} is a file; give a new or empty directory with --out")
            files.destination(run.path).mkdir(parents=True, exist_ok=True)
            run._take()
            run._refuse_used()
            os.close(files.open_to_append(run.metrics))
        except OSError as error:
            raise RunError(
                f"cannot write to {path}: {files.reason(error)}; give a writable directory with "
                "--out"
            ) from error
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunDirectory:
        """A run that is to go on. A line cut short when its process was killed is removed."""
        run = cls(files.at_home(path))
        try:
            run._take()
            files.clear(run.path)
            with run.metrics.open("r+b") as handle:
                text = handle.read()
                handle.truncate(text.rfind(b"\n") + 1)
        except OSError as error:
            raise RunError(f"cannot resume {run.path}: {files.reason(error)}") from error
        return run

    def close(self) -> None:
        """Others may write here now."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self) -> None:
        """Keep other processes out. The objects of one process share the lock."""
        place = files.destination(self.path)
        lock = self._locks.get(place)
        if lock is None or not lock.is_held:
            lock = self._locks[place] = files.lock(place / files.LOCK)
        self._lock = lock

    def _refuse_used(self) -> None:
        """Stopped before it had anything to say, a run leaves an empty list of records."""
        begun = self.metrics.exists() and self.metrics.stat().st_size > 0
        known = (self.metrics.name, files.LOCK)
        others = [p.name for p in self.path.iterdir() if p.name not in known and not _is_ours(p)]
        if begun or not all(map(files.is_unfinished, others)):
            self.close()
            raise RunError(
                f"{self.path} already holds a run or other files; give a new or empty directory "
                "with --out"
            )
        files.clear(self.path)

    def append(self, record: dict[str, Any]) -> None:
        """One line, on disk before the next step is taken; or none of it."""
        try:
            with open(files.open_to_append(self.metrics), "ab", buffering=0) as handle:
                size = handle.seek(0, os.SEEK_END)
                line = json.dumps(record).encode() + b"\n"
                try:
                    while line:
                        line = line[handle.write(line) :]
                except OSError:
                    handle.truncate(size)
                    raise
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {files.reason(error)}") from error

    def sync(self) -> None:
        """What was appended is on the disk, whatever happens to the machine."""
        try:
            files.sync_file(self.metrics)
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {files.reason(error)}") from error

    def count(self) -> int:
        """Lines so far, on the disk; a checkpoint keeps it, so that a resumed run knows which of
        them count."""
        try:
            with self.metrics.open("rb") as handle:
                os.fsync(handle.fileno())
                return handle.read().count(b"\n")
        except OSError as error:
            raise RunError(f"cannot read {self.metrics}: {files.reason(error)}") from error

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of the run that counts: where it went on from a checkpoint, what had come
        after that checkpoint is left out, because it was done again. A last line without its end
        is being written, or was when its process was killed."""
        kept: list[tuple[int, dict[str, Any]]] = []
        for number, record in enumerate(self._lines()):
            if record["event"] == "resumed":
                kept = [(n, r) for n, r in kept if not _is_undone(n, r, record)]
            kept.append((number, record))
        yield from (record for _, record in kept)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Every record; a last line without an end is still being written, or never was whole."""
        with self.metrics.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield records.parse(line)
                except ValueError as error:
                    raise RunError(
                        f"{self.metrics}, line {number}: {error}. The file is damaged; bring a "
                        "good copy back, or start a new run with another --out"
                    ) from error

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        self._write(name, json.dumps(values, indent=2) + "\n")

    def write_run_file(self, options: str) -> None:
        self._write(RUN_FILE, _RUN_FILE_HEAD + options)

    def _write(self, name: str, text: str) -> None:
        """A reader sees the old file or the whole new one."""
        try:
            # a path may hold bytes that are no text
            files.write_bytes(self.path / name, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {files.reason(error)}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            values = json.loads((self.path / name).read_text())
        except RecursionError:
            raise RunError(f"cannot read {self.path / name}: nested too deeply") from None
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self.path / name}: {files.reason(error)}") from error
        if not isinstance(values, dict):
            raise RunError(f"cannot read {self.path / name}: it must be an object")
        return values

    def traces(self) -> list[dict[str, Any]]:
        """Of the trained models that were looked at."""
        if not (self.path / "traces.json").is_file():
            return []
        traces = self.read_json("traces.json").get("traces")
        if not isinstance(traces, list) or not all(isinstance(t, dict) for t in traces):
            raise RunError(f"{self.path / 'traces.json'} holds no traces: it is damaged; remove it")
        return traces


def _is_undone(number: int, record: dict[str, Any], resumed: dict[str, Any]) -> bool:
    """By the lines that the checkpoint counts; older runs of one model give the step alone, and
    in a comparison methods and seeds count their own."""
    is_later = number >= resumed.get("lines", number + 1)
    return is_later or ("step" in resumed and _is_after(record, resumed["step"]))


def _is_after(record: dict[str, Any], completed: int) -> bool:
    """A step names itself, counted from 0; every other event the steps done before it."""
    return record.get("step", 0) + (record["event"] in ("step", "skipped")) > completed


def _is_ours(path: Path) -> bool:
    """The run file of a run that was stopped before its first record; not one that a user wrote."""
    if path.name != RUN_FILE or not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(len(_RUN_FILE_HEAD)) == _RUN_FILE_HEAD.encode()


def open_run(path: Path, *, resume: bool, options: str = "") -> tuple[RunDirectory, bool]:
    """The run in ``path`` and whether it was there already and goes on.

    A new one keeps its ``options``, the text of a run file.
    """
    path = files.at_home(path)
    if resume and (path / "config.json").is_file():
        return RunDirectory.reopen(path), True
    run = RunDirectory.create(path)
    if options:
        run.write_run_file(options)
    return run, False


def refuse_another(run: RunDirectory, now: dict[str, Any]) -> dict[str, Any]:
    """The configuration ``run`` was begun with, if ``now`` is the same run.

    It goes on under the names of methods that it has: they were others in earlier versions.
    """
    saved = run.read_json("config.json")
    if not all(isinstance(saved.get(name), dict) for name in ("data", "train", "methods")):
        raise RunError(
            f"{run.path / 'config.json'} does not say what was run: it is damaged. Bring a good "
            "copy back, or start a new run with another --out"
        )
    old, new = (_comparable(config) for config in (saved, now))
    for name in _SAME:
        if old.get(name) != new.get(name):
            raise _other_run(run.path, name, old.get(name), new.get(name))
    free = MAY_CHANGE_ALONE if saved.get("kind") in ALONE else MAY_CHANGE
    old, new = _BEFORE | old["train"], new["train"]
    for setting in sorted({*old, *new} - set(free)):
        if old.get(setting) != new.get(setting):
            raise _other_run(run.path, f"train.{setting}", old.get(setting), new.get(setting))
    return saved


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Without where the data lies, what was computed from it, and what methods were called."""
    left_out = ("name", "validation", "baselines")
    data = {k: v for k, v in config["data"].items() if k not in left_out}
    return config | {"data": data, "methods": sorted(map(str, config["methods"].values()))}


def _other_run(path: Path, name: str, old: Any, new: Any) -> ConfigError:
    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) < 60 else f"{text[:57]}..."

    return ConfigError(
        f"{path} was started with {name} {short(old)} and now has {short(new)}; resume with the "
        "same, or start a new run with another --out"
    )
