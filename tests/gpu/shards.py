"""The tests that need a GPU, shared out to processes: most of their time goes into compiling.

    python -m tests.gpu.shards --processes 15 --seconds 240

What fails is shown when it does, what was not reached is named at the end, and either is exit
status 1. Tests that time something run last, by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
NAME = re.compile(r"(?:\S*/)?(test_\w+\.py::.*)")
OUTCOME = re.compile(r"(?:\S*/)?(test_\w+\.py::.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
ALONE = "timing"
"""In the name of a file whose tests have the device to themselves."""


def collected(folder: str) -> list[str]:
    """File and test, without the folder."""
    listing = subprocess.run(
        [*PYTEST, "--collect-only", "-q", folder], cwd=ROOT, capture_output=True, text=True
    )
    ids = [found[1] for found in map(NAME.match, listing.stdout.splitlines()) if found]
    if listing.returncode or not ids:
        raise SystemExit(listing.stdout + listing.stderr + f"no tests found in {folder}")
    return ids


def run(folder: str, ids: Sequence[str], ends: float) -> dict[str, str]:
    """The outcome of those that have one by then, in one process."""
    if not ids or time.monotonic() > ends:
        return {}
    outcomes: dict[str, str] = {}
    shown: list[str] = []
    with (
        subprocess.Popen(
            [*PYTEST, "-v", "--tb=short", *(f"{folder}/{name}" for name in ids)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "COLUMNS": "1000"},
            start_new_session=True,
        ) as process,
        ThreadPoolExecutor(1) as waiting,
    ):
        waiting.submit(_end, process, ends)
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            found = OUTCOME.match(line)
            if found is not None:
                outcomes[found[1]] = found[2]
                if found[2] in ("FAILED", "ERROR"):
                    print(line.strip(), flush=True)
        status = process.wait()
    # 5 is pytest's for nothing to run, and it is ended by SIGKILL when time is over
    is_over = status == -signal.SIGKILL and time.monotonic() > ends
    if status not in (0, 5) and not is_over:
        print("".join(shown) + f"ended with status {status}", flush=True)
    return outcomes


def _end(process: subprocess.Popen[str], ends: float) -> None:
    """The process when it is time, and in any case all that it has started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, ends - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="tests/gpu")
    parser.add_argument("--processes", type=int, default=8, choices=range(1, 129), metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="and no more")
    given = parser.parse_args(arguments)
    ends, ids = time.monotonic() + given.seconds, collected(given.folder)
    last = [name for name in ids if ALONE in name.partition("::")[0]]
    others = [name for name in ids if name not in last]
    random.Random(0).shuffle(others)  # neighbours take alike
    shares = [others[i :: given.processes] for i in range(given.processes)]
    with ThreadPoolExecutor(given.processes) as pool:
        made = [*pool.map(lambda share: run(given.folder, share, ends), shares)]
    made.append(run(given.folder, last, ends))
    outcomes = {name: outcome for each in made for name, outcome in each.items()}
    missing = [name for name in ids if name not in outcomes]
    for name in missing:
        print(f"not reached: {name}")
    count = [*outcomes.values()].count
    failed = count("FAILED") + count("ERROR")
    passed = count("PASSED") + count("XPASS")
    skipped = count("SKIPPED") + count("XFAIL")
    print(f"{passed} passed, {failed} failed, {skipped} skipped", end="")
    print(f", {len(missing)} not reached")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
