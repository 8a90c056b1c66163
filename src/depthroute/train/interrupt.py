"""SIGTERM and Ctrl-C end a run between two steps, with everything saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST = 1.0
"""Seconds: `timeout` signals a process and then its group, and that is one request."""


@dataclass
class Stop:
    """The first signal that came; 0 as long as none has."""

    signal: int = 0


@contextmanager
def stop_signals(*, is_alone: bool = True) -> Iterator[Stop]:
    """A second signal ends the process at once: who asks twice does not want to wait.

    Unless the process is one of several: Ctrl-C reaches it from the terminal and then once more
    from torchrun, which itself ends those that take too long.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = stop.signal or number
        first.append(time.monotonic())
        if is_alone and first[-1] - first[0] > ONE_REQUEST:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
