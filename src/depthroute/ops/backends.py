"""Which implementation runs, and why."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch

from depthroute.errors import BackendError, unknown
from depthroute.ops.private.transforms import refuse_transforms

logger = logging.getLogger("depthroute")

OPS = (
    "depth_mix",
    "depth_mix_group",
    "depth_mix_merge",
    "depth_attention_mix",
    "static_mix",
    "doubly_stochastic",
    "linear_cross_entropy",
)
"""Those with kernels."""
BACKENDS = ("auto", "torch", "triton", "reference")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768
"""Of a row held in the registers of one program."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


ASKED = "asked for"


class BackendChoice(NamedTuple):
    op: str
    backend: str
    reason: str


_announced: set[BackendChoice] = set()
RUNS: Counter[tuple[str, str]] = Counter()
"""Of every (op, backend), counted where it happens, compiled or not."""
_setting: ContextVar[str] = ContextVar("depthroute.ops.backend", default="auto")
_settings: list[str] = []
"""Those in force anywhere in this process: what compiled code reads and guards on, because Dynamo
cannot read a context variable."""


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """The backend of every op inside the block that is not given one of its own.

    ``"reference"`` is the definition itself, plain differentiable arithmetic: slow, and all that
    ``torch.func``, forward mode and second derivatives can go through.

    A setting of its thread or task. Code under ``torch.compile`` sees the one that was made last
    in the process, and is compiled anew when that changes.

    >>> with backend("reference"):
    ...     backend_report("cpu")[0].backend
    'reference'
    """
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    compiling = torch.compiler.is_dynamo_compiling()
    token = None if compiling else _setting.set(name)
    _settings.append(name)
    try:
        yield
    finally:
        del _settings[len(_settings) - 1 - _settings[::-1].index(name)]
        if token is not None:
            _setting.reset(token)


def keeping_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the setting of now, whenever it is called: a checkpointed layer runs again
    in backward, after the block or in a thread without one."""
    if torch.compiler.is_dynamo_compiling():
        return function  # what is run again is the graph
    name = _setting.get()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with backend(name):
            return function(*args, **kwargs)

    return run


def _in_force() -> str:
    if torch.compiler.is_dynamo_compiling():
        return _settings[-1] if _settings else "auto"
    return _setting.get()


def ran_by_definition(op: str) -> None:
    """Counts a run of the reference, which a compiler looks into: a graph of it is not counted."""
    if not torch.compiler.is_compiling():
        RUNS[op, "reference"] += 1


@contextlib.contextmanager
def record_backends() -> Iterator[Counter[tuple[str, str]]]:
    """Counts of (op, backend) inside the block: what really ran, for tests and benchmarks."""
    before, seen = RUNS.copy(), Counter()
    try:
        yield seen
    finally:
        seen.update(RUNS - before)


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
    """The backend to run ``op`` with on such tensors; an explicit request never falls back."""
    choice = _choice(op, device_type, requested, dtype, width)
    if choice.backend != "reference":
        refuse_transforms(op, choice.backend)
    if choice.reason is ASKED or torch.compiler.is_compiling():
        return choice
    if choice not in _announced:
        _announced.add(choice)
        logger.info("%s: backend %s (%s)", op, choice.backend, choice.reason)
    return choice


def _choice(
    op: str, device_type: str, requested: str, dtype: torch.dtype | None, width: int | None
) -> BackendChoice:
    if requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    if requested == "auto":
        requested = _in_force()
    if requested in ("torch", "reference"):
        return BackendChoice(op, requested, ASKED)
    obstacle = triton_obstacle(device_type, dtype, width)
    if op not in OPS:
        obstacle = "it has no kernel"
    if requested == "triton":
        if obstacle is not None:
            raise BackendError(
                f"backend='triton' was asked for {op} and cannot run: {obstacle}; use "
                "backend='auto' or 'torch'"
            )
        return BackendChoice(op, "triton", ASKED)
    if obstacle is None and device_type != "cuda":
        obstacle = "the interpreter is for tests; ask for backend='triton' to use it"
    if obstacle is None:
        return BackendChoice(op, "triton", "a CUDA device, Triton and supported dtypes")
    return BackendChoice(op, "torch", obstacle)


def backend_report(device: str | torch.device | None = None) -> list[BackendChoice]:
    """What each op would use on ``device`` (default: the accelerator if there is one), and why."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [_choice(op, torch.device(device).type, "auto", None, None) for op in OPS]
