"""A result as data: what was measured, on what, with which code, and what failed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from depthroute import files
from depthroute.errors import DepthrouteError
from depthroute.runs import environment

Say = Callable[[str], None]
Progress = Callable[[str, int, int | None], None]
"""What is being done, and of how many parts how many are."""
_LIST = re.compile(r"\[\n[^\[\]{}]*\]")


def to_stderr(text: str) -> None:
    """Progress, line by line as it happens; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


class Record:
    """Saved after every row, so that a run that is cut short keeps what it had."""

    def __init__(
        self, kind: str, settings: dict[str, Any], out: Path | None = None, say: Say = to_stderr
    ) -> None:
        self.out, self.say = out, say
        self.progress: Progress = self._say_once
        self._said = ""
        self.values: dict[str, Any] = {
            "kind": kind,
            "machine": machine(),
            "settings": settings,
            "rows": [],
            "failures": [],
        }
        self.save()  # a path that cannot be written costs no measurement

    def _say_once(self, doing: str, completed: int = 0, total: int | None = None) -> None:
        """Where nothing draws a bar: a line when something else is begun."""
        if doing != self._said:
            self._said = doing
            self.say(doing)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.values["rows"].append(row)
        self.save()
        return row

    def fail(self, what: str) -> None:
        """Something that must be right was not: the command goes on and ends with status 1."""
        self.values["failures"].append(what)
        self.say(f"FAILED {what}")
        self.save()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.values["rows"]

    def save(self) -> None:
        if self.out is not None:
            write_json(self.out, self.values)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """A reader sees the old file or the whole new one. A list of numbers or words is one line."""
    text = _LIST.sub(lambda found: re.sub(r"\n *", " ", found[0]), json.dumps(values, indent=1))
    try:
        files.write_named(path, f"{text}\n")
    except OSError as error:
        advice = "" if isinstance(error, IsADirectoryError) else "; give a writable file"
        raise DepthrouteError(
            f"cannot write --out {str(path)!r}: {files.reason(error)}{advice}"
        ) from error


def machine() -> dict[str, Any]:
    """Hardware, versions and commit."""
    return environment.describe() | {"cuda": torch.version.cuda}


def one_line(error: BaseException, limit: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:limit]}"
