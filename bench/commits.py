"""This tree beside another checkout of it: operators, training steps and the cost of a call.

Two copies of one namespace of ops cannot share a process, so each tree has its own, and they take
turns on the device: a round times one and then the other, and the next round begins with the other.
Ratios are of one round, so that what the clock does between rounds is in none of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from depthroute.bench.operators import EVERY_SHAPE, num_tokens
from depthroute.bench.record import Record
from depthroute.errors import DepthrouteError, unknown

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS = 7, 4
SLOWER = 1.01
"""What is above, as time of this tree over the other's, is said to be slower."""

PARTS = ("calls", "operators", "steps")

Row = dict[str, Any]


class Tree:
    """A checkout, and the process that works with it."""

    def __init__(self, root: Path) -> None:
        self.root, self.process = root, start(root)

    def ask(self, **task: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise DepthrouteError(f"the process of {self.root} ended; what it said is above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.root.name}: {answer['error']}")
        return answer["result"]

    def does(self, **task: Any) -> Any:
        self.ask(**task)
        return self.answer()


def start(root: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.Popen(
        [sys.executable, "-P", str(ROOT / "bench" / "commit_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


@contextmanager
def working(root: Path) -> Iterator[Tree]:
    tree = Tree(root)
    with tree.process:  # closes its pipes and waits for it
        try:
            yield tree
        finally:
            tree.process.kill()


def run(
    record: Record,
    other: Path,
    steps: Sequence[tuple[dict[str, Any], str]],
    *,
    parts: Sequence[str] = PARTS,
    num_processes: int = 0,
) -> None:
    """``steps`` are settings and a method each."""
    if not (other / "src" / "depthroute").is_dir():
        raise DepthrouteError(f"{str(other)!r} is no checkout of this project")
    for part in parts:
        if part not in PARTS:
            raise unknown("part", part, PARTS)
    shapes = [(sources, num_tokens(sources), width) for sources, width in EVERY_SHAPE]
    shapes, steps = shapes if "operators" in parts else [], steps if "steps" in parts else []
    if num_processes:
        compile_first(record, other, shapes, steps, num_processes)
    for name, pair in call_costs(other).items() if "calls" in parts else ():
        finish(record, {"what": f"CPU, {name}", "unit": "us", **summary([pair])})
    with working(ROOT) as mine, working(other) as theirs:
        for sources, tokens, width in shapes:
            task = {"do": "operator", "sources": sources, "tokens": tokens, "width": width}
            for tree in (mine, theirs):
                tree.does(**task)
            pairs = rounds([mine, theirs], {"do": "times"})
            for name in ("forward", "both"):
                each = [(a[name], b[name]) for a, b in pairs]
                row = {"what": f"{sources} x {width}, {name}", "unit": "ms", **summary(each)}
                finish(record, row)
        for settings, method in steps:
            task = {"do": "step", "settings": settings, "method": method}
            for tree in (mine, theirs):  # at once: what takes long is compiling
                tree.ask(**task)
            for tree in (mine, theirs):
                tree.answer()
            pairs = rounds([mine, theirs], {"do": "steps", "count": STEPS})
            each = [pair for a, b in pairs for pair in zip(a, b, strict=True)]
            what = f"step of {settings['preset']}, {method}"
            finish(record, {"what": what, "unit": "ms", **summary(each)})


def rounds(trees: list[Tree], timed: dict[str, Any]) -> list[Any]:
    """What both, ready as they are, say in each round, this tree's first."""
    pairs = []
    for turn in range(ROUNDS):
        order = trees if turn % 2 else trees[::-1]
        said = {id(tree): tree.does(**timed) for tree in order}
        pairs.append(tuple(said[id(tree)] for tree in trees))
    return pairs


def summary(pairs: Sequence[tuple[float, float]]) -> Row:
    ratios = [mine / theirs for mine, theirs in pairs]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "this": statistics.median(mine for mine, _ in pairs),
        "other": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
    }


def finish(record: Record, row: Row) -> None:
    record.add(row)
    mark = "  slower" if row["ratio"] > SLOWER else ""
    low, high = row["quartiles"]
    record.say(
        f"{row['what']:<48} {row['this']:9.4f} {row['other']:9.4f} {row['unit']}  "
        f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}){mark}"
    )


def call_costs(other: Path, turns: int = 3) -> dict[str, tuple[float, float]]:
    """The least of several runs of `bench/call_cost.py`, of what both trees time."""
    least: list[dict[str, float]] = [{}, {}]
    for _ in range(turns):
        for found, root in zip(least, (ROOT, other), strict=True):
            command = [sys.executable, str(root / "bench" / "call_cost.py"), "--rounds", "6"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for line in text.splitlines():
                name, _, rest = line.strip().rpartition("  ")
                name, micros = name.strip(), float(rest.split()[0])
                found[name] = min(micros, found.get(name, micros))
    return {name: (least[0][name], least[1][name]) for name in least[0] if name in least[1]}


def compile_first(
    record: Record,
    other: Path,
    shapes: Sequence[tuple[int, int, int]],
    steps: Sequence[tuple[dict[str, Any], str]],
    num_processes: int,
) -> None:
    """Into the caches on disk, ``num_processes`` a tree at a time."""
    tasks: list[dict[str, Any]] = [{"do": "step", "settings": s, "method": m} for s, m in steps]
    shares = [list(shapes[i::num_processes]) for i in range(num_processes)]
    tasks += [{"do": "compiled", "shapes": share} for share in shares if share]
    for first in range(0, len(tasks), num_processes):
        with ExitStack() as stack:
            trees = []
            for task in tasks[first : first + num_processes]:
                for root in (ROOT, other):
                    tree = stack.enter_context(working(root))
                    tree.ask(**task)
                    trees.append(tree)
            for tree in trees:
                tree.answer()
        record.say(f"compiled {min(first + num_processes, len(tasks))} of {len(tasks)}")
