"""The depth mix at one site, shape by shape, against a plain copy.

One pass is one read or write of an [N, D] activation; the fewest are S + 1 forward and 2S + 1
backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthroute import ops
from depthroute.bench import accuracy, timing
from depthroute.bench.record import Record, one_line
from depthroute.errors import ConfigError

OURS = "depthroute"
SOURCES = (5, 9, 17, 33, 57)
WIDTHS = (1024, 2048, 4096, 7168)
EVERY_SHAPE = [(sources, width) for width in WIDTHS for sources in SOURCES]

Shape = tuple[int, int]
"""Sources and width."""
Row = dict[str, Any]


def num_tokens(sources: int) -> int:
    return 16384 if sources <= 17 else 8192


def parse_shapes(text: str) -> list[Shape]:
    """``"all"`` or sources x width, such as ``5x2048``, separated by commas."""
    if text == "all":
        return list(EVERY_SHAPE)
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise ConfigError(
                f"shape {part.strip()!r} is not SOURCESxWIDTH such as 9x2048, separated by commas, "
                "or all"
            )
        shapes.append((int(numbers[0]), int(numbers[1])))
    return shapes


def our_mix(sources: Sequence[Tensor], query: Tensor, heads: int = 1) -> Tensor:
    return ops.depth_mix(sources, query, heads=heads, backend="triton")


def run(record: Record, device: torch.device, shapes: Sequence[Shape]) -> bool:
    """This library at every shape; False if the device was lost on the way."""
    ceiling = record.values["ceiling"] = timing.copy_ceiling(device)
    record.say(f"copy ceiling {ceiling / 1e12:.2f} TB/s")
    for sources, width in shapes:
        row = row_of(OURS, (sources, width))
        drawn = partial(accuracy.draw, sources, row["N"], width, device)
        if not add(record, row, partial(measure, our_mix, drawn, ceiling, device, is_ours=True)):
            return False
    return True


def row_of(who: str, shape: Shape) -> Row:
    return {"who": who, "S": shape[0], "N": num_tokens(shape[0]), "D": shape[1]}


def add(record: Record, row: Row, figures: Callable[[], Row]) -> bool:
    """``row`` with its figures, said and kept; False after an error that no device survives."""
    who, where, began = row["who"], f"S {row['S']} D {row['D']}", time.monotonic()
    try:
        row |= figures()
    except RuntimeError as error:
        record.add(row | {"status": "failed", "reason": one_line(error)})
        record.fail(f"{who}, {where} lost the device: {one_line(error)}")
        return False
    row["seconds"] = time.monotonic() - began  # tuning and compilation, mostly
    record.say(line(row))
    if who == OURS and row["status"] != "timed":
        record.fail(f"{where}: {row['reason']}")
    if max(row.get("forward_frac", 0.0), row.get("both_frac", 0.0)) > timing.READS_OVER_COPIES:
        record.fail(f"{who}, {where}: faster than memory, so the timing is wrong")
    record.add(row)
    timing.forget()
    return True


def measure(
    mix: accuracy.Mix,
    draw: Callable[[], accuracy.Draw],
    ceiling: float,
    device: torch.device,
    *,
    is_ours: bool = False,
) -> Row:
    """A status, with figures if it is ``timed`` and a reason if it is not.

    An operator that computes the same with more rounding than the budget allows is timed, and its
    row says so; this library then is not.
    """

    def figures() -> Row:
        inputs = draw()
        verdict = accuracy.check(mix, inputs)
        row: Row = {"budget": verdict.ratio, "error": verdict.error}
        row["within_budget"] = verdict.holds
        if not verdict.is_same_formula or (is_ours and not verdict.holds):
            return row | {"status": "wrong", "reason": str(verdict)}
        if not verdict.holds:
            row["reason"] = str(verdict)
        return row | {"status": "timed"} | time_mix(mix, inputs, ceiling, device)

    return attempt(figures, device)


def attempt(figures: Callable[[], Row], device: torch.device) -> Row:
    """Figures, or why there are none."""
    try:
        return figures()
    except Exception as error:
        timing.synchronise(device)  # raises if the device was lost, which ends the run
        return {"status": "failed", "reason": one_line(error)}


def time_mix(mix: accuracy.Mix, inputs: accuracy.Draw, ceiling: float, device: torch.device) -> Row:
    sources, query, grad = inputs.sources, inputs.query, inputs.grad
    count, one_pass = len(sources), grad.nbytes
    with torch.no_grad():
        forward = timing.median_ms(lambda: mix(sources, query), device)
    both = timing.median_ms(lambda: accuracy.run_both(mix, sources, query, grad), device)
    return {
        "forward_ms": forward,
        "both_ms": both,
        "forward_frac": timing.fraction((count + 1) * one_pass, forward, ceiling),
        "both_frac": timing.fraction((3 * count + 2) * one_pass, both, ceiling),
    }


def line(row: Row) -> str:
    text = f"{row['who']:<14} S {row['S']:2} N {row['N']} D {row['D']}"
    if row["status"] != "timed":
        return f"{text}: {row['status']}: {row['reason']}"
    over = "" if row["within_budget"] else "  over the error budget"
    return (
        f"{text}: error x{row['budget']:.2f}, forward {row['forward_ms']:.4f} ms "
        f"({row['forward_frac']:.3f}), with backward {row['both_ms']:.4f} ms "
        f"({row['both_frac']:.3f}){over}"
    )
