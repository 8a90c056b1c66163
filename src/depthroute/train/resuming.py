"""A run that goes on must be the run that was begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.errors import ConfigError
from depthroute.train.run_directory import RunDirectory, RunError
from depthroute.train.settings import MAY_CHANGE

_SAME = ("kind", "preset", "base", "freeze_base", "methods", "seeds", "equal", "data")


def open_run(path: Path, *, resume: bool) -> tuple[RunDirectory, bool]:
    """The run in ``path`` and whether it was there already and goes on."""
    path = files.at_home(path)
    if resume and (path / "config.json").is_file():
        return RunDirectory.reopen(path), True
    return RunDirectory.create(path), False


def refuse_another(run: RunDirectory, now: dict[str, Any]) -> dict[str, Any]:
    """The configuration ``run`` was begun with, if ``now`` is the same run."""
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
    old, new = old["train"], new["train"]
    for setting in sorted({*old, *new} - set(MAY_CHANGE)):
        if old.get(setting) != new.get(setting):
            raise _other_run(run.path, f"train.{setting}", old.get(setting), new.get(setting))
    return saved


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Without where the data lies, and what was computed from it."""
    left_out = ("name", "validation", "baselines")
    data = {k: v for k, v in config["data"].items() if k not in left_out}
    return config | {"data": data}


def _other_run(path: Path, name: str, old: Any, new: Any) -> ConfigError:
    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) < 60 else f"{text[:57]}..."

    return ConfigError(
        f"{path} was started with {name} {short(old)} and now has {short(new)}; resume with the "
        "same, or start a new run with another --out"
    )
