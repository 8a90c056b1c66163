"""Which implementation runs, and why."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from depthroute.errors import BackendError, unknown

logger = logging.getLogger("depthroute")

OPS = ("depth_mix", "depth_mix_group", "depth_mix_merge", "depth_attention_mix")
BACKENDS = ("auto", "torch", "triton")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768
"""Of a row held in the registers of one program."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class BackendChoice:
    op: str
    backend: str
    reason: str


_announced: set[BackendChoice] = set()
_ran: Counter[tuple[str, str]] = Counter()


def ran(op: str, backend: str) -> None:
    """Counts one run of an op's implementation; called where it happens, compiled or not."""
    _ran[op, backend] += 1


@contextlib.contextmanager
def record_backends() -> Iterator[Counter[tuple[str, str]]]:
    """Counts of (op, backend) inside the block: what really ran, for tests and benchmarks."""
    before, seen = _ran.copy(), Counter()
    try:
        yield seen
    finally:
        seen.update(_ran - before)


def triton_obstacle(
    device_type: str, dtype: torch.dtype | None = None, width: int | None = None
) -> str | None:
    """Why the Triton kernels cannot run on such tensors; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device_type != "cuda" and not (device_type == "cpu" and INTERPRETS):
        return f"Triton has no {device_type} device here"
    if dtype is not None and dtype not in TRITON_DTYPES:
        return f"the kernels take bf16, fp16 and fp32, not {dtype}"
    if width is not None and width > MAX_WIDTH:
        return f"width {width} is above the {MAX_WIDTH} that fit one program"
    return None


def choose(
    op: str,
    device_type: str,
    requested: str = "auto",
    dtype: torch.dtype | None = None,
    width: int | None = None,
) -> BackendChoice:
    """The backend for ``op`` on such tensors; an explicit request never falls back."""
    if requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    if requested == "torch":
        return BackendChoice(op, "torch", "asked for")
    obstacle = triton_obstacle(device_type, dtype, width)
    if requested == "triton":
        if obstacle is not None:
            raise BackendError(
                f"backend='triton' was asked for {op} and cannot run: {obstacle}; use "
                "backend='auto' or 'torch'"
            )
        return BackendChoice(op, "triton", "asked for")
    if obstacle is None and device_type != "cuda":
        obstacle = "the interpreter is for tests; ask for backend='triton' to use it"
    if obstacle is None:
        choice = BackendChoice(op, "triton", "a CUDA device, Triton and supported dtypes")
    else:
        choice = BackendChoice(op, "torch", obstacle)
    if not torch.compiler.is_compiling() and choice not in _announced:
        _announced.add(choice)
        logger.info("%s: backend %s (%s)", op, choice.backend, choice.reason)
    return choice


def backend_report(device: str | torch.device | None = None) -> list[BackendChoice]:
    """What each op would use on ``device`` (default: the accelerator if there is one), and why."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [choose(op, torch.device(device).type) for op in OPS]
