"""Which implementation runs, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from depthroute.errors import BackendError, unknown

logger = logging.getLogger("depthroute")

OPS = ("depth_mix", "depth_mix_group", "depth_mix_merge", "depth_attention_mix")
BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class BackendChoice:
    op: str
    backend: str
    reason: str


_announced: set[BackendChoice] = set()


def choose(op: str, device_type: str, requested: str = "auto") -> BackendChoice:
    """The backend for ``op`` on ``device_type``; an explicit request never falls back."""
    if requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    if requested == "triton":
        raise BackendError(
            f"backend='triton' was asked for and {op} has no Triton kernel in this version; "
            "use backend='auto' or 'torch'"
        )
    if requested == "torch":
        return BackendChoice(op, "torch", "asked for")
    choice = BackendChoice(op, "torch", f"the only backend that {op} has on {device_type}")
    if not torch.compiler.is_compiling() and choice not in _announced:
        _announced.add(choice)
        logger.info("%s: backend %s (%s)", op, choice.backend, choice.reason)
    return choice


def backend_report(device: str | torch.device | None = None) -> list[BackendChoice]:
    """What each op would use on ``device`` (default: the accelerator if there is one), and why."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [choose(op, torch.device(device).type) for op in OPS]
