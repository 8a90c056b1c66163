"""Forked trials: a fault at one file operation, then the same command again, then a comparison."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import transformers

from tests.faults.faults import WITH_BYTES, Fault, Faults
from tests.faults.scenarios import Scenario, Workshop, load, write_and_return
from tests.faults.view import View, damaged, differences, part, view

KILLS = (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.KILL_TORN)
LONGEST = 4
PATIENCE = 60
"""Seconds after which a child counts as hung."""


@dataclass(frozen=True)
class Ending:
    """How a child ended, and what it had said until then."""

    status: int
    """As ``os.waitstatus_to_exitcode``: below zero it is a signal."""
    printed: str
    counts: dict[str, int]
    log: tuple[str, ...]

    @property
    def was_killed(self) -> bool:
        return self.status == -signal.SIGKILL


@dataclass
class Result:
    """What ``__main__`` prints of a scenario."""

    scenario: str
    operations: int = 0
    writes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Harness:
    """One warmed process with one thread, whose children are the trials."""

    def __init__(self, folder: Path) -> None:
        self.workshop = Workshop(folder.resolve())
        self.faults = Faults(self.workshop.folder)
        self.output = self.workshop.folder / "child"
        self._child(self.workshop.furnish, check=True)
        self.scenarios = {s.name: s for s in self.workshop.scenarios()}

    def warm(self, names: list[str]) -> None:
        """Do here what children would each do again: imports, and tables made at first use."""
        for name in names:
            self._renew(None)
            said = self._child(_with_modules(self.scenarios[name].run), check=True).printed
            modules = [line for line in said.splitlines() if line.startswith("module ")]
            for line in modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(line.removeprefix("module "))
        transformers.utils.logging.disable_progress_bar()  # it has a thread
        load(self.workshop.base)
        _be_alone()
        gc.freeze()

    def examine(self, name: str, choose: Callable[[list[Trial]], list[Trial]]) -> Result:
        """Every fault that ``choose`` picks of those there are."""
        scenario = self.scenarios[name]
        earlier = self._earlier(scenario)
        before = view(earlier) if earlier else {}
        self._renew(earlier)
        ending = self._child(scenario.run, Fault.NONE, check=True)
        after = view(self.workshop.trial)
        model = self.workshop.trial / scenario.whole
        if model.is_dir():  # what has the same bytes loads too
            self._child(lambda: load(model), check=True)
        counts = ending.counts
        result = Result(name, counts["operations"], counts["writes"], _kinds(ending.log))
        if counts["mappings"]:
            result.failures.append(f"{counts['mappings']} files are written through a mapping")
        for trial in choose(trials(ending)):
            self._renew(earlier)
            for reason in self._try(scenario, trial, before, after, result.tried):
                result.failures.append(f"{trial.describe(ending)}: {reason}")
        return result

    def _try(
        self, scenario: Scenario, trial: Trial, before: View, after: View, tried: dict[str, int]
    ) -> Iterator[str]:
        old, new = part(before, scenario.whole), part(after, scenario.whole)
        for place, (fault, number) in enumerate(trial.faults):
            disturbed = self._child(scenario.run, fault, number)
            is_reached = disturbed.was_killed or disturbed.counts.get("writes", 0) >= number
            tried[fault.name] = tried.get(fault.name, 0) + is_reached
            if place == 0 and not is_reached:
                yield f"it was not reached: status {disturbed.status}"
            if fault is Fault.FULL_DISK and is_reached:
                yield from _complaint(disturbed)
            everything = view(self.workshop.trial)
            yield from damaged(everything)
            now = part(everything, scenario.whole)
            if now not in (old, new):
                yield f"{scenario.whole} is neither old nor new: {differences(new, now)[:3]}"
        again = self._child(scenario.run)
        if again.status != 0:
            yield f"again: status {again.status}: {_last_line(again.printed)}"
            return
        yield from differences(after, view(self.workshop.trial))[:3]

    def _earlier(self, scenario: Scenario) -> Path | None:
        if scenario.earlier is None:
            return None
        self._renew(None)
        self._child(scenario.earlier, check=True)
        kept = self.workshop.folder / f"earlier {scenario.name}"
        shutil.copytree(self.workshop.trial, kept, symlinks=True)
        return kept

    def _renew(self, earlier: Path | None) -> None:
        shutil.rmtree(self.workshop.trial, ignore_errors=True)
        if earlier is None:
            self.workshop.trial.mkdir()
        else:
            shutil.copytree(earlier, self.workshop.trial, symlinks=True)

    def _child(
        self,
        action: Callable[[], object],
        fault: Fault | None = None,
        number: int = 0,
        *,
        check: bool = False,
    ) -> Ending:
        self.output.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            self._be_child(action, fault, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        counts = self.output / "counts"
        log = (self.output / "log").read_text()
        ending = Ending(
            status,
            (self.output / "printed").read_text(errors="replace"),
            json.loads(counts.read_text()) if status >= 0 else {},
            tuple(log.replace(f"{self.workshop.trial}/", "").splitlines()),
        )
        assert not check or status == 0, f"undisturbed, and ended with {status}: {ending.printed}"
        return ending

    def _be_child(self, action: Callable[[], object], fault: Fault | None, number: int) -> None:
        """Never returns: what the parent would do at its end is not the child's to do."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        printed = os.open(self.output / "printed", flags)
        log = os.open(self.output / "log", flags | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        signal.alarm(PATIENCE)
        status = 0
        try:
            if fault is not None:
                self.faults.arm(self.workshop.trial, fault, number, log)
            action()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        counts = self.faults.counts()
        (self.output / "counts").write_text(json.dumps(counts))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@dataclass(frozen=True)
class Trial:
    """A run with each of these faults in turn, before one without."""

    faults: tuple[tuple[Fault, int], ...]
    """With the number of the operation; of a full disk, that of the write."""

    def describe(self, undisturbed: Ending) -> str:
        words = []
        for fault, number in self.faults:
            where = "" if fault is Fault.FULL_DISK else f" ({undisturbed.log[number - 1]})"
            words.append(f"{fault.name} {number}{where}")
        return ", then ".join(words)


def trials(undisturbed: Ending) -> list[Trial]:
    """Every fault that there can be, one at a time."""
    found = []
    for number, line in enumerate(undisturbed.log, 1):
        is_torn = line.split()[0] in WITH_BYTES
        found += [(fault, number) for fault in (KILLS if is_torn else KILLS[:2])]
    writes = range(1, undisturbed.counts["writes"] + 1)
    found += [(Fault.FULL_DISK, number) for number in writes]
    return [Trial((fault,)) for fault in found]


def choice(
    kills: int | None, full_disks: int | None, chains: int, seed: int
) -> Callable[[list[Trial]], list[Trial]]:
    """So many of each, None being all, and the same whenever it is asked.

    A chain is up to ``LONGEST`` faults: the run that goes on is disturbed too.
    """

    def choose(found: list[Trial]) -> list[Trial]:
        draw = random.Random(seed)
        filling = [t for t in found if t.faults[0][0] is Fault.FULL_DISK]
        killing = [t for t in found if t not in filling]
        chosen = []
        for pool, count in ((killing, kills), (filling, full_disks)):
            chosen += pool if count is None else draw.sample(pool, min(count, len(pool)))
        for _ in range(chains):
            links = draw.sample(found, draw.randint(2, LONGEST))
            chosen.append(Trial(tuple(fault for link in links for fault in link.faults)))
        return chosen

    return choose


def as_json(result: Result) -> str:
    return json.dumps(asdict(result))


def _with_modules(run: Callable[[], None]) -> Callable[[], None]:
    def run_and_tell() -> None:
        known = set(sys.modules)
        write_and_return(run)
        for name in sorted(set(sys.modules) - known):
            print(f"\nmodule {name}")

    return run_and_tell


def _be_alone() -> None:
    """A fork has one thread, and waits for ever for what another had in hand."""
    deadline = time.monotonic() + PATIENCE
    while (threads := len(os.listdir("/proc/self/task"))) > 1:  # some are about to end
        assert time.monotonic() < deadline, f"{threads} threads in the process that is to fork"
        time.sleep(0.01)


def _kinds(log: tuple[str, ...]) -> dict[str, int]:
    names = [line.split()[0] for line in log]
    return {name: names.count(name) for name in sorted(set(names))}


def _complaint(ending: Ending) -> Iterator[str]:
    errors = [line for line in ending.printed.splitlines() if line.startswith("error: ")]
    if ending.status != 2 or len(errors) != 1 or "Traceback" in ending.printed:
        yield f"status {ending.status} and {_last_line(ending.printed)!r}, not one error line"


def _last_line(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else ""
