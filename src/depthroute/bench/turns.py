"""Methods that take turns, one step each, so that what the machine does hits all of them alike.

The clock of a GPU follows its power and its temperature: the same kernels were 3 to 4% slower a
minute later. So a method is compared with standard in one window, step beside step, and with
nothing measured at another time. On a CPU all methods share one window. On a GPU each has its own
with standard, which stays on the device; where the two do not fit together they are measured one
after the other, and the row says so. Models that are known not to fit are measured alone from the
start, in rounds through all methods.

A turn waits for each step: without it, a method that is slow to launch would be launched while the
GPU is still busy with the one before, and look faster than it is.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from depthroute.bench import timing
from depthroute.bench.record import Progress, one_line
from depthroute.config import Method, RoutingConfig
from depthroute.methods import BASELINE

WARM_TURNS = 3
"""Before the clock starts: the device was idle while the last method was compiled."""
OF_A_WINDOW = ("ms", "steps", "peak_gb", "idle_ms", "breakdown")
"""What a row keeps of the standard that was measured beside it."""

Row = dict[str, Any]


class Runner(Protocol):
    """What can take a turn."""

    label: str
    device: torch.device

    def start(self) -> Row:
        """Ready for steps that can be timed; what was found on the way, with ``peak_gb``."""
        ...

    def step(self) -> None: ...

    def timed_step(self) -> float: ...

    def figures(self, times: Sequence[float]) -> Row: ...


class Profile(Protocol):
    """Where the time of a step goes, as something outside says it."""

    def of(
        self,
        step: Callable[[], object],
        device: torch.device,
        before: Callable[[], object] | None = None,
    ) -> Row: ...

    def lines(self, row: Row) -> list[str]: ...


class NoRoomError(Exception):
    """A runner ran out of memory while others were on the device."""


def groups(jobs: Sequence[Method], device: torch.device, rounds: int = 0) -> list[list[Method]]:
    """Who is compared in one go: all on a CPU and in rounds, on a GPU each method with standard,
    which comes first."""
    if device.type == "cpu" or len(jobs) < 3 or rounds:
        return [list(jobs)]
    return [[jobs[0], job] for job in jobs[1:]]


class Turns:
    def __init__(
        self,
        make: Callable[[str, RoutingConfig], Runner],
        steps: int,
        *,
        profile: Profile | None = None,
        progress: Progress = lambda doing, completed, total: None,
        rounds: int = 0,
        on_round: Callable[[str, int, float], None] = lambda label, turn, milliseconds: None,
    ) -> None:
        self.make, self.steps, self.profile, self.progress = make, steps, profile, progress
        self.rounds, self.on_round = rounds, on_round
        """Of one model on the device at a time; 0 takes turns where there is room."""
        self.ready: dict[str, Runner] = {}
        """On the device; only standard outlives its window."""
        self.about: dict[str, Row] = {}
        """What was found when a runner started, or its error."""
        self.told: set[str] = set()

    def rows(self, group: Sequence[Method]) -> Iterator[Row]:
        """A row for every method of ``group`` that has had none, relative to standard's window."""
        rows: list[Row] | None = None
        with contextlib.suppress(NoRoomError):  # and everything that the error held can go
            rows = None if self.rounds else self._together(group)
        rows = self._apart(group) if rows is None else rows
        for row in rows:
            if row["method"] not in self.told:
                self.told.add(row["method"])
                yield row

    def _together(self, group: Sequence[Method]) -> list[Row]:
        rows, times = self._window(group)
        base = rows.get(BASELINE, {})
        for label, row in rows.items():
            if "ms" in row and "error" in base:
                row["note"] = f"relative to nothing: standard failed, {base['error']}"
            if "ms" in row and "ms" in base:
                compare(row, base)
                if label != BASELINE:
                    row["paired"] = True
                    row["relative_speed_quartiles"] = quartiles(times[BASELINE], times[label])
        return list(rows.values())

    def _apart(self, group: Sequence[Method]) -> list[Row]:
        """One on the device at a time, standard last and first in turn: with an even number of
        rounds what changes with time hits all alike. The one that is last stays."""
        rows: dict[str, Row] = {}
        every: dict[str, list[list[float]]] = {label: [] for label, _ in group}
        for turn in range(self.rounds or 1):
            for method in group if turn % 2 else reversed(group):
                label = method.label
                self._clear()
                window, times = self._window([method])
                rows[label] = window[label]
                if label in self.ready:
                    every[label].append(times[label])
                    self.on_round(label, turn + 1, window[label]["ms"])
                    rows[label] |= self.ready[label].figures([*chain(*every[label])])
        base = rows.get(BASELINE, {})
        for label, row in rows.items():
            if "ms" not in row or "ms" not in base:
                continue
            compare(row, base)
            if label != BASELINE:
                row["paired"] = False
                row["note"] = "standard did not fit beside it and was measured right after it"
            if self.rounds:
                row["rounds_ms"] = [statistics.median(times) for times in every[label]]
                row["note"] = f"alone on the device, as all were, in {self.rounds} rounds"
        return [rows[label] for label, _ in group]

    def _window(self, group: Sequence[Method]) -> tuple[dict[str, Row], dict[str, list[float]]]:
        """Rows by label, and the time of every step; a failure is a row as well."""
        labels = [label for label, _ in group]
        self.ready = {label: self.ready[label] for label in labels if label in self.ready}
        timing.release()
        for label, routing in group:
            if label not in self.ready and "error" not in self.about.get(label, {}):
                self._start(label, routing)
        times = self._take_turns(labels)
        rows = {label: dict(self.about[label]) for label in labels}
        taking = self._taking(labels)
        for label in taking:
            rows[label] |= self.ready[label].figures(times[label])
        if self.profile is not None:
            for label in taking:
                rows[label] |= self._profiled(self.profile, label, taking, rows[label]["ms"])
        return rows, times

    def _taking(self, labels: Sequence[str]) -> list[str]:
        return [label for label in labels if label in self.ready]

    def _take_turns(self, labels: Sequence[str]) -> dict[str, list[float]]:
        """Milliseconds of every step after the first turns; who fails takes no further one."""
        times: dict[str, list[float]] = {label: [] for label in labels}
        total, doing = WARM_TURNS + self.steps, f"{' and '.join(labels)}: steps"
        for turn in range(total):
            self.progress(doing, turn, total)
            for label in self._taking(labels):
                try:
                    milliseconds = self.ready[label].timed_step()
                except Exception as error:
                    self._lost(label, error)
                    continue
                if turn >= WARM_TURNS:
                    times[label].append(milliseconds)
        return times

    def _start(self, label: str, routing: RoutingConfig) -> None:
        about = self.about.setdefault(label, {"method": label})
        self.progress(f"{label}: building, compiling and first steps", 0, None)
        try:
            runner = self.make(label, routing)
            self.about[label] = runner.start() | about  # of several starts the first is cold
            self.ready[label] = runner
        except Exception as error:
            self._lost(label, error)

    def _lost(self, label: str, error: Exception) -> None:
        """Keeps the error; where others take the memory, it may go well without them."""
        self.ready.pop(label, None)
        if self.ready and is_out_of_memory(error):
            raise NoRoomError from None
        self.about[label]["error"] = one_line(error, 600)

    def _profiled(
        self, profile: Profile, label: str, taking: Sequence[str], milliseconds: float
    ) -> Row:
        """Where the time goes, in the state that the turns leave the device in."""
        runner = self.ready[label]

        def turn() -> None:
            for other in taking:
                self.ready[other].step()

        try:
            breakdown = profile.of(runner.step, runner.device, before=turn)
        except Exception as error:  # the times stand
            return {"breakdown_error": one_line(error)}
        row: Row = {"breakdown": breakdown | {"window": list(taking)}}
        if "busy_ms" in breakdown:
            row["idle_ms"] = max(0.0, milliseconds - breakdown["busy_ms"])
        return row

    def _clear(self) -> None:
        self.ready.clear()
        timing.forget()


def compare(row: Row, base: Row) -> Row:
    """``row`` relative to the standard of its own window."""
    row["relative_speed"] = base["ms"] / row["ms"]
    if row.get("peak_gb") is not None:
        row["relative_memory"] = row["peak_gb"] / base["peak_gb"] - 1
    if row is not base:
        row[BASELINE] = {name: base[name] for name in OF_A_WINDOW if name in base}
    return row


def quartiles(base: Sequence[float], times: Sequence[float]) -> list[float]:
    """First and third of the ratios of steps that were taken one after the other."""
    ratios = [a / b for a, b in zip(base, times, strict=True)]
    if len(ratios) < 2:
        return 2 * ratios
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return [first, third]


def is_out_of_memory(error: Exception) -> bool:
    """Of the device; compilers and libraries say so in words of their own."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in text
        for words in ("CUDA out of memory", "CUDA error: out of memory", "[CUDA]: out of memory",
                      "CUBLAS_STATUS_ALLOC_FAILED")
    )  # fmt: skip
