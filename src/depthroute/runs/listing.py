"""What a folder of runs holds: how far each one is, and the command that goes on with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.json_shape import ANYTHING, NUMBER, OBJECT, TEXT, WHOLE, check
from depthroute.runs import ladder, sweep
from depthroute.runs.directory import RUN_FILE, RunDirectory, RunError

_COMMANDS: dict[str, str] = {sweep.KIND: "compare", ladder.KIND: "compare"}
"""Of the kinds of runs that are not called what their command is."""
_DEEPEST = 3
"""Folders below the one that is named: somebody may name his home."""
_CONFIG = {
    "kind?": TEXT,
    "methods?": {"*": OBJECT},
    "seeds?": [WHOLE],
    "train?": {"steps": WHOLE},
    "ranks?": WHOLE,
    "environment?": {"command?": [TEXT]},
}
_SUMMARY = {
    "is_complete?": ANYTHING,
    "steps?": WHOLE,
    "validation_loss?": NUMBER.or_null(),
    "rows?": [{"method": TEXT, "validation_loss": ANYTHING}],
}


@dataclass(frozen=True)
class Listed:
    path: Path
    kind: str
    methods: tuple[str, ...] = ()
    steps: int = 0
    """Taken, of the method and seed that was last trained."""
    steps_in_all: int | None = None
    loss: float | None = None
    """The last on held-out text; of several methods, the lowest."""
    best_method: str | None = None
    state: str = "running"
    """running, finished, interrupted, diverged, stopped without a word, or what is damaged."""
    resume: str | None = None
    """The command that goes on; None where nothing is left to do, or it is under way."""
    changed: float = 0.0
    """When it last wrote, in seconds of the epoch."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"path": str(self.path), "methods": list(self.methods)}


def list_runs(folder: Path) -> list[Listed]:
    """The runs in ``folder``, and below folders that are no runs themselves; newest first."""
    folder = files.at_home(folder)
    if not folder.is_dir():
        raise RunError(f"{str(folder)!r} is no folder; name that of your runs with --folder")
    return sorted(map(read, _runs_below(folder)), key=lambda run: run.changed, reverse=True)


def _runs_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth < _DEEPEST:
        with suppress(PermissionError):  # not ours to read
            for inner in sorted(folder.iterdir()):
                if inner.is_dir() and not inner.is_symlink():
                    yield from _runs_below(inner, depth + 1)


def is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "metrics.jsonl"))


def read(path: Path) -> Listed:
    """One run; whatever is wrong with it is its state."""
    run = RunDirectory(path)
    changed = run.metrics.stat().st_mtime
    try:
        config = run.read_json("config.json")
        check(config, _CONFIG, "config.json")
        known = _progress(run, config)
    except (OSError, ValueError) as error:
        return Listed(path, "run", state=f"damaged: {files.reason(error)}", changed=changed)
    kind: str = config.get("kind", "compare")  # older runs do not say it
    if files.is_locked(path / files.LOCK):
        known["state"] = "running"
    if known["state"] not in ("running", "finished"):
        known["resume"] = resume_command(
            path,
            _COMMANDS.get(kind, kind),
            processes=config.get("ranks", 1),
            was=config.get("environment", {}).get("command", []),
        )
    return Listed(path, kind, tuple(config.get("methods", ())), changed=changed, **known)


def _progress(run: RunDirectory, config: dict[str, Any]) -> dict[str, Any]:
    """How far it is: from its summary where it is finished, or else from its records."""
    in_all = config.get("train", {}).get("steps")
    known: dict[str, Any] = {"steps_in_all": in_all, "state": "stopped"}
    summary: dict[str, Any] = {}
    if (run.path / "summary.json").is_file():
        summary = run.read_json("summary.json")
        check(summary, _SUMMARY, "summary.json")
    rows = _losses(summary)
    if rows:
        known["best_method"], known["loss"] = min(rows.items(), key=lambda row: row[1])
    if summary.get("is_complete", "validation_loss" in summary):
        loss = known.get("loss", summary.get("validation_loss"))
        steps = summary.get("steps", in_all or 0)
        return known | {"steps": steps, "loss": loss, "state": "finished"}
    for record in run.records():
        event = record["event"]
        if event == "step":
            known["steps"] = record["step"] + 1
        elif event == "validation" and not rows:
            known["loss"] = record["loss"]
        if event in ("interrupted", "diverged"):
            known["state"] = event
        elif event in ("step", "resumed"):
            known["state"] = "stopped"
    return known


def _losses(summary: dict[str, Any]) -> dict[str, float]:
    """By method, where several were compared."""
    rows = {row["method"]: row["validation_loss"] for row in summary.get("rows", ())}
    return {
        name: loss["mean"]
        for name, loss in rows.items()
        if isinstance(loss, dict) and isinstance(loss.get("mean"), float)
    }


def resume_command(
    path: Path, command: str, *, processes: int = 1, was: list[str] | None = None
) -> str:
    """What to type to go on with the run in ``path``; ``was`` is what older ones were begun with,
    which have no run file."""
    start = ["depthroute"]
    if processes > 1:
        start = ["torchrun", "--nproc-per-node", str(processes), "-m", "depthroute"]
    options = [command, "--config", str(path / RUN_FILE)]
    if not (path / RUN_FILE).is_file():
        options = _without_place(was[1:] if was else [command])
    return shlex.join([*start, *options, "--out", str(path), "--resume", "auto"])


def _without_place(words: list[str]) -> list[str]:
    kept: list[str] = []
    left_out = iter(words)
    for word in left_out:
        if word in ("--out", "--resume"):
            next(left_out, None)
        elif not word.startswith(("--out=", "--resume=")):
            kept.append(word)
    return kept
