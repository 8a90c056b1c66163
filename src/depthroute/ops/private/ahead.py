"""Kernels compiled before they are launched, side by side.

A launch of meta tensors launches nothing: a thread compiles the kernel for the device that is
current, and Triton keeps it, in memory and on disk. Triton's passes, its assembler and the C
compiler of its launchers, which take most of the time, run without Python's lock; so threads do,
and need neither a start nor a cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from depthroute.errors import ConfigError

logger = logging.getLogger("depthroute")

VARIABLE = "DEPTHROUTE_COMPILE_THREADS"
MOST_THREADS = 8
LONGEST = 120.0
"""Seconds that a launch waits for a thread."""
SPARED_CORES = 2
"""For the process itself and what it starts."""


class Tally(NamedTuple):
    """Of kernels that were launched for the first time in this process."""

    kernels: int = 0
    seconds: float = 0.0
    """To compile, load and launch them, wherever that was done."""
    waited: float = 0.0
    """Of which launches waited for: all where nothing was compiled ahead."""

    def since(self, before: Tally) -> Tally:
        kernels, seconds, waited = before
        return Tally(self.kernels - kernels, self.seconds - seconds, self.waited - waited)


_tally = Tally()


def tally() -> Tally:
    """Of all kernels up to now."""
    return _tally


def count(seconds: float, waited: float) -> None:
    """One more."""
    global _tally
    _tally = Tally(_tally.kernels + 1, _tally.seconds + seconds, _tally.waited + waited)


def num_threads() -> int:
    """That compile ahead; 0 where cores are few, or the environment says so."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        if not asked.isdecimal():
            raise ConfigError(f"{VARIABLE}={asked!r} is no number of threads; 0 is none")
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    each = cores // max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(0, min(MOST_THREADS, each - SPARED_CORES))


class Pool:
    """Threads that compile for one device, where there is one, and end when nothing is left."""

    def __init__(self, threads: int, device: int | None) -> None:
        self.device = device
        self.futures: dict[Any, Future[float]] = {}
        self._threads, self._running, self._lock = threads, 0, threading.Lock()
        self._waiting: deque[tuple[Future[float], Callable[[], Any]]] = deque()

    def submit(self, key: Any, compile_one: Callable[[], Any]) -> Future[float]:
        """``compile_one`` by a thread, in the order of calls; the result is the seconds it took."""
        future = self.futures[key] = Future()
        with self._lock:
            self._waiting.append((future, compile_one))
            if self._running < self._threads:
                self._running += 1
                threading.Thread(target=self._work, name="depthroute-compile").start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                # the interpreter waits for threads when it ends, and needs no kernels any more
                if not self._waiting or not threading.main_thread().is_alive():
                    self._running -= 1
                    return
                future, compile_one = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(self._seconds_of(compile_one))

    def _seconds_of(self, compile_one: Callable[[], Any]) -> float:
        started = time.perf_counter()
        try:
            with (
                contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device)
            ):
                compile_one()
        except Exception as error:  # met again, and raised, by the launch
            logger.debug("a kernel was not compiled ahead: %s: %s", type(error).__name__, error)
        return time.perf_counter() - started


_local = threading.local()


def current() -> Pool | None:
    """That launches of meta tensors go to, in this thread."""
    return getattr(_local, "pool", None)


@contextlib.contextmanager
def preparing(pool: Pool) -> Iterator[None]:
    before, _local.pool = current(), pool
    try:
        yield
    finally:
        _local.pool = before


def settled(future: Future[float]) -> float:
    """The seconds that a thread took; one that has not begun is cancelled, and took none, and one
    that does not end is not waited for."""
    try:
        return 0.0 if future.cancel() else future.result(LONGEST)
    except TimeoutError:
        return 0.0
