"""How long something takes, and how fast memory is.

On a GPU times are medians of CUDA-graph replays, because an eager timing of operators this short
measures Python. One graph holds as many calls as take a millisecond, because starting a graph takes
microseconds, which a model pays once a step and not once a call. On a CPU times are medians of
wall-clock times or, of one thread (:func:`steadied`), of its CPU time, which other programs change
least. ``frac`` is the fewest bytes that could be moved over the time, as a fraction of
the bytes per second of a plain copy in the same run.
"""

from __future__ import annotations

import contextlib
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.runs.environment import MemoryMeter

READS_OVER_COPIES = 1.12
"""Mostly reading is faster than copying, which also turns the bus around: the datasheet's 4.8 TB/s
over the 4.23 to 4.28 TB/s that a copy reaches on an H200. Anything above is a wrong measurement."""

COPY_BYTES = 2**32
MAX_REPEATS, MIN_REPEATS = 100, 8
GRAPH_MS, MAX_CALLS = 1.0, 32
"""Of one replay, as long as that many calls are enough."""
WARM_MS, MAX_WARM = 30.0, 1000
"""Of calls before the first that counts: a GPU that waited for the CPU has to raise its clocks."""


def device_of(name: str, command: str, *, cpu: bool) -> torch.device:
    """The device to measure on; an error says what can be measured without a GPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise DepthrouteError(f"--device {name!r}: give auto, cpu, cuda or cuda:N")
    if cpu and name == "cpu":
        return torch.device("cpu")
    if name != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda" if name == "auto" else name)
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DepthrouteError(f"--device {name}: there are {count} CUDA devices, from cuda:0")
        torch.cuda.set_device(device.index or 0)
        return device
    hint = "`depthroute bench step --device cpu --preset tiny` and `bench decode --device cpu "
    raise DepthrouteError(
        f"bench {command} measures a CUDA device and "
        f"{'was given the CPU' if name == 'cpu' else 'there is none here'}; on a CPU run "
        f"{hint}--preset tiny`, whose ratios mean something"
    )


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are captured. Autograd runs a backward on the stream of its forward, so a
    backward that is captured alone needs a forward that ran here."""
    return torch.cuda.Stream(device)


def capture(
    function: Callable[[], object], device: torch.device, calls: int = 1
) -> torch.cuda.CUDAGraph:
    """The work of ``calls``, ready to be replayed; three calls before compile and allocate."""
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    return graph


def median_ms(
    function: Callable[[], object], device: torch.device, budget_ms: float = 120.0
) -> float:
    """Median time of one call; on a GPU of the calls of one graph, each replay timed on its own."""
    if device.type != "cuda":
        return statistics.median(_repeat(function, device, budget_ms))
    graph = capture(function, device)
    graph.replay()
    (alone,) = each_ms(graph.replay, device, 1)
    calls = calls_per_graph(alone)
    if calls > 1:
        graph = capture(function, device, calls)
    return statistics.median(_repeat(graph.replay, device, budget_ms)) / calls


def calls_per_graph(milliseconds: float) -> int:
    return int(min(MAX_CALLS, max(1.0, GRAPH_MS / max(milliseconds, 1e-3))))


def _repeat(call: Callable[[], object], device: torch.device, budget_ms: float) -> list[float]:
    call()
    (first,) = each_ms(call, device, 1)
    if device.type == "cuda":
        for _ in range(int(min(MAX_WARM, WARM_MS / max(first, 1e-3)))):
            call()
    repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, budget_ms / max(first, 1e-3))))
    return each_ms(call, device, repeats)


def each_ms(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """The time of every call, without waiting for the device between them."""
    if device.type != "cuda":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times = []
        for _ in range(repeats):
            started = clock()
            call()
            times.append((clock() - started) * 1e3)
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


@contextlib.contextmanager
def steadied(device: torch.device) -> Iterator[str]:
    """Calls inside the block run on one thread if on a CPU: several wait for each other, and for
    other programs. What their times are then, in words."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        yield "time on the device"
        return
    torch.set_num_threads(1)
    try:
        yield "CPU time of one thread"
    finally:
        torch.set_num_threads(threads)


def copy_ceiling(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written per second by a copy.

    Launched directly: it lasts milliseconds, and a copy inside a graph becomes a memcpy node, which
    need not be as fast.
    """
    source = torch.randn(num_bytes // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = each_ms(lambda: target.copy_(source), device, 23)
    return 2 * source.nbytes / (statistics.median(times[3:]) / 1e3)


def fraction(num_bytes: float, milliseconds: float, ceiling: float) -> float:
    return num_bytes / (milliseconds / 1e3) / ceiling


def release() -> None:
    """Return the memory of what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forget() -> None:
    """Return what the last measurement held: graphs, models, cached blocks, compiled code."""
    torch._dynamo.reset()
    release()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gb(
    device: torch.device,
    call: Callable[[], Any],
    resident: Callable[[], Iterable[Tensor]] = tuple,
) -> float | None:
    """What one call adds at most, and what ``resident`` it works on, in GB: whatever else lies on
    the device is not counted. None where nothing is counted."""
    meter = MemoryMeter(device)
    call()
    synchronise(device)
    peak = meter.peak_bytes(resident())
    return None if peak is None else peak / 1e9
