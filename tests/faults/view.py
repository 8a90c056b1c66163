"""What lies in a folder, in a form in which two runs that are the same are equal."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from depthroute.errors import DepthrouteError
from depthroute.runs.directory import RunDirectory

CLOCKS = {
    "seconds",
    "step_seconds",
    "tokens_per_second",
    "relative_speed",
    "memory_bytes",
    "by_wall_clock",
}
"""Nobody can repeat these."""
OF_STATE = {"lines", "sha256"}
"""A checkpoint counts the lines of ``metrics.jsonl``, of which a resumed run has more."""
View = dict[str, Any]
_DAMAGED = "damaged"


def view(folder: Path) -> View:
    """Every path with its content: numbers of files that hold times, digests of all others."""
    paths = [path for path in sorted(folder.rglob("*")) if not _is_idle(path)]
    return {str(path.relative_to(folder)): _content(path) for path in paths}


def _is_idle(path: Path) -> bool:
    """The lock of tokens that are made already: it holds nobody up, and nobody takes it again."""
    return path.parent.name == "tokens" and path.name.endswith(".depthroute-lock")


def part(whole: View, folder: str) -> View:
    prefix = f"{folder}/"
    return {path: content for path, content in whole.items() if path.startswith(prefix)}


def damaged(whole: View) -> list[str]:
    """Files that cannot be read; those whose names begin with a dot are not finished yet."""
    named = {path: content for path, content in whole.items() if "/." not in f"/{path}"}
    return [f"{p} is {c}" for p, c in named.items() if str(c).startswith(_DAMAGED)]


def differences(expected: View, seen: View) -> list[str]:
    lines = [f"{path} is missing" for path in expected if path not in seen]
    lines += [f"{path} is left over" for path in seen if path not in expected]
    for path in expected:
        if path in seen and expected[path] != seen[path]:
            lines.append(f"{path}: {_first_difference(expected[path], seen[path])}")
    return lines


def _content(path: Path) -> Any:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    if path.is_dir():
        return "folder"
    try:
        if path.name == "metrics.jsonl":
            records = RunDirectory(path.parent).records()
            return [_without(CLOCKS, r) for r in records if r["event"] != "resumed"]
        if path.name == "state.json":
            return _without(CLOCKS | OF_STATE, json.loads(path.read_text()))
        if path.name == "run.toml":  # every trial has a folder of its own
            return _without({"out", "data", "base", "cache"}, tomllib.loads(path.read_text()))
        if path.suffix == ".json":
            return _without(CLOCKS, json.loads(path.read_text()))
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, DepthrouteError) as error:
        return f"{_DAMAGED}: {error}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _without(names: set[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without(names, v) for k, v in value.items() if k not in names}
    if isinstance(value, list):
        return [_without(names, item) for item in value]
    return value


def _first_difference(expected: Any, seen: Any) -> str:
    if isinstance(expected, list) and isinstance(seen, list):
        for number, (one, other) in enumerate(zip(expected, seen, strict=False)):
            if one != other:
                return f"entry {number} is {_short(other)} instead of {_short(one)}"
        return f"{len(seen)} entries instead of {len(expected)}"
    if isinstance(expected, dict) and isinstance(seen, dict):
        for key in [*expected, *seen]:
            if expected.get(key) != seen.get(key):
                return f"{key} is {_short(seen.get(key))} instead of {_short(expected.get(key))}"
    return f"{_short(seen)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else f"{text[:157]}..."
