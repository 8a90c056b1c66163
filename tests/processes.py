"""Processes that need not import everything again: forks, for tests of signals, kills and locks."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from depthroute.runs.directory import RunDirectory

PATIENCE = 600.0
"""Seconds after which a process hangs, on however slow a machine."""


class Forked:
    """``function`` in a process of its own, with the output of each stream for itself."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.returncode: int | None = None
        self.stdout = self.stderr = ""  # once it has ended
        self._streams = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.pid = os.fork()
        if not self.pid:
            os._exit(self._run(function))

    def _run(self, function: Callable[[], object]) -> int:
        for number, stream in enumerate(self._streams, start=1):
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        torch.set_num_threads(1)  # other threads are not forked
        warnings.resetwarnings()  # as a new interpreter has them, and not errors
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        status = 0
        try:
            function()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return status

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.stdout, self.stderr = map(_read_and_close, self._streams)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """What it printed and what it said of errors, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
            time.sleep(0.01)
        return self.stdout, self.stderr


def _read_and_close(stream: IO[str]) -> str:
    with stream:
        stream.seek(0)
        return stream.read()


def signal_oneself(number: int, records: int, seconds: float = 0.0) -> None:
    """In a fork: the signal comes when so many records of runs have been written from now on, or
    ``seconds`` later. Whoever waits for them outside may wake up when all is over."""
    append, left = RunDirectory.append, itertools.count(records - 1, -1)

    def counted(run: RunDirectory, record: dict[str, object]) -> None:
        append(run, record)
        if not next(left):
            if seconds:
                threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
            else:
                os.kill(os.getpid(), number)

    RunDirectory.append = counted


def forked_command(*arguments: object, first: Callable[[], object] = lambda: None) -> Forked:
    """``depthroute`` with these arguments, in a process that calls ``first`` before."""
    return forked_python("-m", "depthroute", *map(str, arguments), first=first)


def forked_python(
    *command: str,
    folder: Path | None = None,
    first: Callable[[], object] = lambda: None,
    **environment: str,
) -> Forked:
    """``python -m MODULE ...`` or ``python FILE ...``."""

    def run() -> None:
        os.environ.update(environment)
        if folder is not None:
            os.chdir(folder)
        first()
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*command]
            runpy.run_path(command[0], run_name="__main__")

    return Forked(run)
