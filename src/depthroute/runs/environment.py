"""What a run ran on: versions, commit and hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import ops
from depthroute._version import __version__

_PACKAGES = ("torch", "transformers", "numpy", "triton")


def describe() -> dict[str, Any]:
    """JSON-ready, for ``config.json`` and ``depthroute env``."""
    return {
        "depthroute": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": devices(),
        "command": ["depthroute", *sys.argv[1:]],
    }


def devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return devices


def resident_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """What stays in memory between steps: parameters, buffers and the optimiser's state."""
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


class MemoryMeter:
    """Peak device memory of one model's step while other models lie on the same device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def peak_bytes(self, resident: Iterable[Tensor]) -> int | None:
        """What the step added at its peak, and what its model holds between steps.

        None on devices that do not count, such as the CPU.
        """
        if self.device.type != "cuda":
            return None
        added = torch.cuda.max_memory_allocated(self.device) - self.before
        return added + sum(t.numel() * t.element_size() for t in resident)


def backends() -> list[dict[str, str]]:
    """Which backend each op would use here, and why."""
    return [
        {"op": choice.op, "backend": choice.backend, "reason": choice.reason}
        for choice in ops.backend_report()
    ]


def commit() -> str | None:
    """Of the checkout that depthroute itself runs from; None where it was installed.

    ``DEPTHROUTE_COMMIT`` names it where only the files were copied, or into another checkout.
    """
    if named := os.environ.get("DEPTHROUTE_COMMIT"):
        return named
    here = Path(__file__).resolve()
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return None
    revision = _git(here, "rev-parse", "HEAD")
    return f"{revision}-dirty" if _git(here, "status", "--porcelain", "-uno") else revision


def _git(file: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """``platform.processor()`` is empty on many Linux systems."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
