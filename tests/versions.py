"""Whether the library works with the torch and transformers it says: ``make test-versions``.

    make test-versions                               # every pair of PAIRS
    make test-versions PAIRS="2.15.0+newest"         # one, or several with spaces between

Each pair has an environment of its own in ``build/versions``, which the next run uses again, and
runs the same tests, ``VERSION_TESTS`` of the Makefile. With the standard library alone. Most builds
of torch bring CUDA: an environment takes up to 6 GB and some minutes to fetch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.wheel import ROOT, environment, run

PAIRS = """
    torch    transformers
    2.11.0   5.17.0
    2.12.1   5.19.0
    2.13.0   5.22.2
    2.14.1   newest
    2.15.0   newest
"""
NEEDED = ("hypothesis", "psutil", "pytest", "pyyaml")
"""By the tests, beside the library; whatever else a test would like, it is skipped without."""
UNPINNED = {"torch", "transformers", "triton", "huggingface_hub", "tokenizers"}
"""What is tried, and what torch and transformers each want a version of their own of."""
FOLDER = ROOT / "build" / "versions"
VERSION = r"(\d+\.\d+\.\d+|newest)"


class Pair(NamedTuple):
    torch: str
    transformers: str

    def __str__(self) -> str:
        return f"{self.torch}+{self.transformers}"


class Outcome(NamedTuple):
    """``pair`` is what was installed, or else asked for; ``note`` says why there are no counts."""

    pair: Pair
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.note


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("pairs", nargs="*", type=pair, metavar="torch+transformers")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is given")
    given = parser.parse_args()
    outcomes = [tried(one, given.tests) for one in given.pairs or known_pairs()]
    print("", *table(outcomes), sep="\n")
    sys.exit(not all(outcome.is_good for outcome in outcomes))


def pair(text: str) -> Pair:
    if not (found := re.fullmatch(rf"{VERSION}\+{VERSION}", text)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no pair; give versions of torch and transformers as 2.15.0+5.22.2, or "
            "newest for either"
        )
    return Pair(*found.groups())


def known_pairs() -> list[Pair]:
    return [Pair(*line.split()) for line in PAIRS.strip().splitlines()[1:]]


def tried(one: Pair, tests: list[str]) -> Outcome:
    print(f"\n== torch {one.torch}, transformers {one.transformers}", flush=True)
    try:
        python = installed(one)
    except SystemExit as end:  # the other pairs are still to be tried
        print(end, flush=True)
        return Outcome(one, note="not installed")
    counts = FOLDER / f"{one}.xml"
    counts.unlink(missing_ok=True)
    start = time.monotonic()
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={counts}")
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    alone.pop("PYTHONPATH", None)  # which may name another copy of the library
    ended = subprocess.run([*map(str, command), *tests], cwd=ROOT, env=alone)
    seconds = time.monotonic() - start
    if ended.returncode not in (0, 1):  # killed, or a file that is not there
        return Outcome(versions(python), seconds=seconds, note=f"ended with {ended.returncode}")
    return Outcome(versions(python), *counted(counts), seconds)


def installed(one: Pair) -> Path:
    """The interpreter of an environment that holds the pair; pip leaves what is there already."""
    folder = FOLDER / str(one)
    python = folder / "bin" / "python"
    if not python.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        environment(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text(unpinned((ROOT / "constraints.txt").read_text()))
    asked = one._asdict().items()
    wanted = [name if version == "newest" else f"{name}=={version}" for name, version in asked]
    command = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    command += ("--upgrade",) if "newest" in one else ()
    run(python, *command, "-c", constraints, *wanted, *NEEDED, "-e", ROOT)
    return python


def unpinned(constraints: str) -> str:
    """``constraints`` without what a pair decides."""
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in UNPINNED)


def versions(python: Path) -> Pair:
    code = "from importlib.metadata import version as v; print(v('torch'), v('transformers'))"
    return Pair(*run(python, "-c", code).split())


def counted(counts: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped, as pytest wrote; errors, as of a module that cannot be imported,
    are failures."""
    suite = ElementTree.parse(counts).getroot().find("testsuite")
    assert suite is not None, f"{counts} is no report of pytest's"
    total, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return total - failed - skipped, failed, skipped


def table(outcomes: list[Outcome]) -> list[str]:
    row = "{:<12}{:<14}{:>8}{:>8}{:>9}{:>9}  {}"
    lines = [row.format("torch", "transformers", "passed", "failed", "skipped", "seconds", "")]
    for done in outcomes:
        counts = "---" if done.note else (done.passed, done.failed, done.skipped)
        verdict = done.note or ("" if done.is_good else "FAILED")
        lines.append(row.format(*done.pair, *counts, round(done.seconds), verdict))
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    main()
