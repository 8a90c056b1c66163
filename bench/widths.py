"""The depth mix at every width of real models, against a copy of as many bytes.

A shape has so many tokens that one activation exceeds the L2 cache, and its ceilings are copies of
what its forward, and both directions, move at least. Each shape is checked against fp64 at a few
tokens, which run the same kernels, and then timed briefly. An earlier record goes on where it was
cut short.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import precompile
from depthroute.bench import accuracy, timing
from depthroute.bench.operators import OURS, Row, add, attempt, our_mix
from depthroute.bench.record import Record
from depthroute.errors import DepthrouteError
from depthroute.ops import reference

WIDTHS = (
    *(576, 640, 768, 896, 960, 1152, 1280, 1536, 1600, 1792, 2048, 2304, 2560, 2880, 3072, 3584),
    *(3840, 4096, 4608, 5120, 5376, 6144, 6656, 7168, 8192),
)
SOURCES = (9, 5, 17, 33, 2, 3, 13, 25, 57)
"""Those that models have most often first: a limit costs the others."""
ELEMENTS = 2**25
CHECKED_TOKENS = 64
TIMED_MS = 30.0
FORWARD_GOAL, BOTH_GOAL = 0.88, 0.80
PRECOMPILE_SHARE = 0.6


class Shape(NamedTuple):
    sources: int
    width: int
    dtype: str = "bfloat16"
    heads: int = 1

    @property
    def tokens(self) -> int:
        return -(-ELEMENTS // self.width)

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def row(self) -> Row:
        return {
            "who": OURS,
            "S": self.sources,
            "N": self.tokens,
            "D": self.width,
            "dtype": self.dtype,
            "heads": self.heads,
        }


EVERY_SHAPE = [Shape(sources, width) for sources in SOURCES for width in WIDTHS]
OTHERS = [
    Shape(sources, width, dtype, heads)
    for sources, width in ((9, 1152), (9, 2048), (9, 5120), (33, 2560))
    for dtype, heads in (("float16", 1), ("float32", 1), ("bfloat16", 4))
]
"""A few in other dtypes and with heads."""
SEVERAL_HEADS = [
    Shape(sources, width, heads=heads)
    for sources, width, heads in (
        *((9, 768, 4), (9, 768, 8), (9, 1024, 4), (9, 1024, 8), (9, 1536, 4), (9, 2048, 2)),
        *((9, 2048, 8), (9, 4096, 4), (9, 4096, 8), (3, 2048, 4), (5, 1024, 4), (17, 2048, 4)),
        *((33, 1024, 8), (9, 2560, 4), (9, 3072, 8), (17, 4096, 8)),
    )
]
"""With 4 or 8 heads, which are the best for multi-head attention residuals, and some with 2."""


def run(
    record: Record,
    device: torch.device,
    shapes: Sequence[Shape],
    *,
    seconds: float,
    num_processes: int = 0,
    earlier: Sequence[Row] = (),
) -> None:
    """A row for every shape that ``earlier`` has none of, as long as there is time."""
    ends, known = time.monotonic() + seconds, {key(row): row for row in earlier}
    for shape in shapes:
        if key(shape.row) in known:
            record.add(known[key(shape.row)])
    missing = [shape for shape in shapes if key(shape.row) not in known]
    if num_processes > 0:
        rows = [[OURS, s.sources, s.width, s.heads] for s in missing if s.dtype == "bfloat16"]
        record.values["precompiled"] = precompile.operators(
            rows, num_processes, record.say, seconds * PRECOMPILE_SHARE
        )
    for number, shape in enumerate(missing):
        if time.monotonic() > ends:
            record.values["cut_short"] = f"{len(missing) - number} shapes were not reached"
            record.say(f"{record.values['cut_short']}; go on with --resume")
            break
        record.progress(f"{shape.sources} sources of {shape.width}", number, len(missing))
        if not add(record, shape.row, partial(attempt, partial(measure, shape, device), device)):
            break
    record.values["worst"] = {name: worst(record.rows, name) for name in GOALS}
    record.save()


GOALS = {"forward_frac": FORWARD_GOAL, "both_frac": BOTH_GOAL}


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("S", "N", "D", "dtype", "heads"))


def measure(shape: Shape, device: torch.device) -> Row:
    """As :func:`depthroute.bench.operators.measure`, with ceilings of its own."""
    dtype = getattr(torch, shape.dtype)
    mix = partial(our_mix, heads=shape.heads)
    definition = partial(reference.depth_mix, heads=shape.heads)
    few = accuracy.draw(shape.sources, CHECKED_TOKENS, shape.width, device, dtype=dtype)
    verdict = accuracy.check(mix, few, definition)
    row: Row = {"budget": verdict.ratio, "error": verdict.error, "within_budget": verdict.holds}
    if not verdict.holds:
        return row | {"status": "wrong", "reason": str(verdict)}
    inputs = accuracy.draw(shape.sources, shape.tokens, shape.width, device, dtype=dtype)
    sources, query, grad = inputs.sources, inputs.query, inputs.grad
    with torch.no_grad():
        forward = timing.median_ms(lambda: mix(sources, query), device, TIMED_MS)
    both = timing.median_ms(lambda: accuracy.run_both(mix, sources, query, grad), device, TIMED_MS)
    row |= {"status": "timed", "forward_ms": forward, "both_ms": both}
    for name, milliseconds, passes in (
        ("forward", forward, shape.sources + 1),
        ("both", both, 3 * shape.sources + 2),
    ):
        num_bytes = passes * grad.nbytes
        ceiling = copy_speed(device, passes * ELEMENTS * dtype.itemsize)
        row[f"{name}_frac"] = timing.fraction(num_bytes, milliseconds, ceiling)
        row[f"{name}_ceiling"] = ceiling
    return row


@cache
def copy_speed(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy that moves so many, reading half of them."""
    return timing.copy_ceiling(device, min(num_bytes // 2, timing.COPY_BYTES))


def worst(rows: Sequence[Row], name: str, count: int = 10) -> list[Row]:
    return sorted((row for row in rows if name in row), key=lambda row: row[name])[:count]


def missed(rows: Sequence[Row]) -> list[Shape]:
    """Those below a goal."""
    below = (row for row in rows if any(row.get(name, 1.0) < goal for name, goal in GOALS.items()))
    return [Shape(row["S"], row["D"], row["dtype"], row["heads"]) for row in below]


def summary(rows: Sequence[Row]) -> list[str]:
    """How many shapes miss a goal, and the worst of each."""
    lines = []
    for name, goal in GOALS.items():
        timed = [row[name] for row in rows if name in row]
        missed = sum(fraction < goal for fraction in timed)
        low = min(timed, default=math.nan)
        lines.append(f"{name}: {missed} of {len(timed)} shapes below {goal}, the lowest {low:.3f}")
    return lines


def read_rows(path: Path) -> list[Row]:
    """Those of an earlier record that were timed."""
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DepthrouteError(
            f"--resume {str(path)!r} is no record of `python -m bench widths`: {error}"
        ) from error
    return [row for row in rows if row.get("status") == "timed"]
