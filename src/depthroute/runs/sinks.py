"""Optional copies of a run's records for other viewers; ``metrics.jsonl`` stays the truth."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from depthroute.errors import ConfigError

SHOWN = {
    "step": ("loss", "lr", "gradient_norm", "memory_bytes"),
    "validation": ("loss",),
}
"""The numbers of each event, by the names they are shown under."""


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """``train/loss`` and so on; empty for events without numbers."""
    event = record["event"]
    prefix = {"step": "train"}.get(event, event)
    numbers = {f"{prefix}/{name}": record[name] for name in SHOWN.get(event, ())}
    if event == "step":
        numbers["train/tokens_per_second"] = record["tokens"] / record["seconds"]
    return numbers


def steps_done(record: dict[str, Any]) -> int:
    """A ``step`` names itself from 0, a validation the steps before it."""
    return record["step"] + (record["event"] == "step")


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, folder: Path) -> None:
        module = _needed("torch.utils.tensorboard", "tensorboard", "--tensorboard")
        self._writer = module.SummaryWriter(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, steps_done(record))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a W&B project, which keeps its name and curve when the run is resumed."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        module = _needed("wandb", "wandb", "--wandb")
        name = folder.resolve().name
        self._run = module.init(
            project=project, dir=str(folder), name=name, id=name, resume="allow", config=config
        )

    def write(self, record: dict[str, Any]) -> None:
        numbers = scalars(record)
        if numbers:
            self._run.log(numbers, step=steps_done(record))

    def close(self) -> None:
        self._run.finish()


def _needed(module: str, package: str, option: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{option} needs {package}; install it with: pip install {package}"
        ) from error
