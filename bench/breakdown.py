"""Where the time of one step goes: kernels by what they do, from torch's profiler."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from depthroute.bench.operators import OURS
from depthroute.methods import BASELINE

WORDS = {
    "optimiser": ("adam", "fusedoptimizer", "multi_tensor_apply", "optimizer"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "GEMM": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem", "triton_mm",
             "aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkldnn"),
    "loss": ("cross_entropy", "nll_loss", "log_softmax"),
    "inductor": ("triton_", "compiledfxgraph", "compiledfunction", "torch-compiled region"),
    "copy": ("memcpy", "memset", "copy_"),
}  # fmt: skip
"""Of a name in lower case, the first group with a word in it; :data:`OURS` comes before them all.
``inductor`` is what the compiler fused: norms, activations, additions."""
OWN_NODES = ("depthroute::", "DepthMix", "DepthAttentionMix", "Score", "StaticMix")
"""How what this library does on a CPU begins: registered ops, and nodes of autograd."""
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 40
WARM = 2


@cache
def our_kernels() -> frozenset[str]:
    """Names of this library's Triton kernels, as the profiler shows them."""
    try:
        import triton
    except ImportError:
        return frozenset()
    from depthroute.ops import _triton

    names = [module.name for module in pkgutil.iter_modules(_triton.__path__)]
    modules = [importlib.import_module(f"{_triton.__name__}.{name}") for name in names]
    return frozenset(
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.runtime.JITFunction)
    )


def category(name: str) -> str:
    if name.startswith(OWN_NODES) or name in our_kernels():
        return OURS
    lower = name.lower()
    for group, words in WORDS.items():
        if any(word in lower for word in words):
            return group
    return "other"


def of(
    step: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """One step under the profiler; milliseconds by category and the longest names.

    ``before`` is run first, :data:`WARM` times while the profiler warms up as well: it is slow to
    start, and a GPU that has rested meanwhile is faster than one at work.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    phases = schedule(wait=0, warmup=WARM, active=1, repeat=1)
    with profile(activities=activities, schedule=phases, acc_events=True) as profiler:
        for call in (*[before or step] * WARM, step):
            call()
            if device.type == "cuda":  # all of it inside its own phase
                torch.cuda.synchronize(device)
            profiler.step()
    if device.type != "cuda":
        averages = [e for e in profiler.key_averages() if not e.key.startswith("ProfilerStep")]
        return summarise((e.key, e.self_cpu_time_total / 1e3, e.count) for e in averages)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return of_trace(events)


def of_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace's events those of the GPU; ``busy_ms`` counts what overlaps once."""
    kernels = [e for e in events if e.get("cat") in GPU_EVENTS and "dur" in e]
    profile = summarise((e["name"], e["dur"] / 1e3, 1) for e in kernels)
    return profile | {"busy_ms": covered((e["ts"], e["ts"] + e["dur"]) for e in kernels) / 1e3}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union: streams run beside each other."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(events: Iterable[tuple[str, float, int]]) -> dict[str, Any]:
    """Of (name, milliseconds, count)."""
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, milliseconds, count in events:
        by_name[name][0] += milliseconds
        by_name[name][1] += count
    groups: dict[str, float] = defaultdict(float)
    ours: dict[str, dict[str, float]] = {}
    for name, (milliseconds, count) in by_name.items():
        groups[category(name)] += milliseconds
        if category(name) == OURS:
            ours[name] = {"ms": milliseconds, "count": count}
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "total_ms": sum(groups.values()),
        "by_category_ms": dict(sorted(groups.items(), key=lambda item: -item[1])),
        OURS: ours,
        "longest": [
            {"name": name[:160], "ms": ms, "count": count, "category": category(name)}
            for name, (ms, count) in longest
        ],
    }


def line(
    profile: dict[str, Any], of: str = "", step_ms: float = 0.0, idle_ms: float | None = None
) -> str:
    parts = [f"{name} {ms:.2f}" for name, ms in profile["by_category_ms"].items()]
    idle = "" if idle_ms is None else f", idle {idle_ms:.2f} of {step_ms:.2f} ms"
    if idle_ms is not None and step_ms > 0:
        idle += f" ({idle_ms / step_ms:.0%})"
    text = f"    {of}kernels {profile['total_ms']:.2f} ms{idle}: {', '.join(parts)}"
    if profile[OURS]:
        ours = [f"{k} {v['ms']:.2f} ms in {v['count']:.0f}" for k, v in profile[OURS].items()]
        text += f"\n    depthroute: {', '.join(ours)}"
    return text


def lines(row: dict[str, Any]) -> list[str]:
    """What a step's row says of its own profile and of that of the standard step beside it."""
    both = (("", row), ("standard beside it: ", row.get(BASELINE, {})))
    said = [
        line(side["breakdown"], of, side["ms"], side.get("idle_ms"))
        for of, side in both
        if "breakdown" in side
    ]
    if "breakdown_error" in row:
        said.append(f"    no breakdown: {row['breakdown_error']}")
    return said
