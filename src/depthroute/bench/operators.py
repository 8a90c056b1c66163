"""The depth mix at one site, shape by shape, beside everyone else who computes it.

One pass is one read or write of an [N, D] activation; the fewest are S + 1 forward and 2S + 1
backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from depthroute.bench import gate, peers, precompile, timing
from depthroute.bench.record import Record, one_line
from depthroute.errors import ConfigError

SOURCES = (5, 9, 17, 33, 57)
WIDTHS = (1024, 2048, 4096, 7168)
PRECOMPILE_SHARE = 0.5
"""Of the time limit; what is not compiled by then is compiled when it is measured."""

Shape = tuple[int, int]
"""Sources and width."""


def num_tokens(sources: int) -> int:
    return 16384 if sources <= 17 else 8192


def all_shapes() -> list[Shape]:
    return [(sources, width) for width in WIDTHS for sources in SOURCES]


def parse_shapes(text: str, everything: Sequence[Shape]) -> list[Shape]:
    """``"all"`` or sources x width, such as ``5x2048``, separated by commas."""
    if text == "all":
        return list(everything)
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


def run(
    record: Record,
    device: torch.device,
    *,
    shapes: Sequence[Shape],
    peer_shapes: Sequence[Shape],
    names: Sequence[str],
    seconds: float,
    num_processes: int = 0,
) -> None:
    """This library on every shape first, then shape by shape every peer, so that a limit costs
    shapes of all peers and no peer all of its shapes."""
    started = time.monotonic()
    contenders, record.values["contenders"] = peers.find([peers.OURS, *names])
    for note in record.values["contenders"]:
        if "missing" in note:
            record.say(f"{note['name']}: not measured, {note['missing']}")
    jobs = in_order(list(contenders), shapes, peer_shapes)
    if num_processes > 0:
        wanted = [[name, *shape] for name, shape in jobs]
        record.values["precompiled"] = precompile.operators(
            wanted, num_processes, record.say, seconds * PRECOMPILE_SHARE
        )
    ceiling = record.values["ceiling"] = timing.copy_ceiling(device)
    record.say(f"copy ceiling {ceiling / 1e12:.2f} TB/s")
    tuned: dict[tuple[str, int, int], int] = {}
    for name, (sources, width) in jobs:
        row: dict[str, Any] = {"who": name, "version": contenders[name].version, "S": sources}
        row |= {"N": num_tokens(sources), "D": width, "stacks": contenders[name].stacks}
        if name != peers.OURS and time.monotonic() - started > seconds:
            row |= {"status": "not reached", "reason": f"--seconds {seconds:g} had passed"}
        else:
            began = time.monotonic()
            try:
                row |= measure(contenders[name], sources, row["N"], width, ceiling, device)
            except RuntimeError as error:  # after an error that the device does not survive
                record.add(row | {"status": "failed", "reason": one_line(error)})
                record.fail(f"{name}, S {sources} D {width} lost the device: {one_line(error)}")
                return
            row["seconds"] = time.monotonic() - began  # tuning and compilation, mostly
            if row["status"] in ("timed", "wrong"):
                key = name, contenders[name].tuned_for(sources), width
                if tuned.setdefault(key, sources) != sources:
                    row["tuned_at_sources"] = tuned[key]
        record.say(line(row))
        if name == peers.OURS and row["status"] != "timed":
            record.fail(f"S {sources} D {width}: {row['reason']}")
        if max(row.get("forward_frac", 0.0), row.get("both_frac", 0.0)) > timing.READS_OVER_COPIES:
            record.fail(
                f"{name}, S {sources} D {width}: faster than memory, so the timing is wrong"
            )
        record.add(row)
        timing.forget()


def in_order(
    names: Sequence[str], shapes: Sequence[Shape], peer_shapes: Sequence[Shape]
) -> list[tuple[str, Shape]]:
    ours = [(name, shape) for name in names if name == peers.OURS for shape in shapes]
    return ours + [(n, shape) for shape in peer_shapes for n in names if n != peers.OURS]


def measure(
    contender: peers.Contender,
    sources: int,
    tokens: int,
    width: int,
    ceiling: float,
    device: torch.device,
) -> dict[str, Any]:
    """One row: a status, with figures if it is ``timed`` and a reason if it is not.

    A peer that computes the same with more rounding than the budget allows is timed, and its row
    says so; this library then is not.
    """
    reason = contender.refuses(sources, tokens, width)
    if reason is not None:
        return {"status": "refused", "reason": reason}
    torch.compiler.reset()  # Dynamo compiles one function for eight shapes at most
    try:
        given = gate.draw(sources, tokens, width, device, query_dtype=contender.query_dtype)
        verdict = gate.check(contender.mix, given)
        row: dict[str, Any] = {"budget": verdict.ratio, "error": verdict.error}
        row["within_budget"] = verdict.holds
        is_ours = contender.name == peers.OURS
        if not verdict.is_same_formula or (is_ours and not verdict.holds):
            return row | {"status": "wrong", "reason": str(verdict)}
        if not verdict.holds:
            row["reason"] = str(verdict)
        return row | {"status": "timed"} | time_mix(contender.mix, given, ceiling, device)
    except Exception as error:
        timing.synchronise(device)  # raises if the device was lost, which ends the run
        return {"status": "failed", "reason": one_line(error)}


def time_mix(
    mix: gate.Mix, given: gate.Draw, ceiling: float, device: torch.device
) -> dict[str, float]:
    count, one_pass = len(given.sources), given.grad.nbytes
    with torch.no_grad():
        forward = timing.median_ms(lambda: mix(given.sources, given.query), device)
    both = timing.median_ms(
        lambda: gate.run_both(mix, given.sources, given.query, given.grad), device
    )
    return {
        "forward_ms": forward,
        "both_ms": both,
        "forward_frac": timing.fraction((count + 1) * one_pass, forward, ceiling),
        "both_frac": timing.fraction((3 * count + 2) * one_pass, both, ceiling),
    }


def line(row: dict[str, Any]) -> str:
    text = f"{row['who']:<14} S {row['S']:2} N {row['N']} D {row['D']}"
    if row["status"] != "timed":
        return f"{text}: {row['status']}: {row['reason']}"
    over = "" if row["within_budget"] else "  over the error budget"
    return (
        f"{text}: error x{row['budget']:.2f}, forward {row['forward_ms']:.4f} ms "
        f"({row['forward_frac']:.3f}), with backward {row['both_ms']:.4f} ms "
        f"({row['both_frac']:.3f}){over}"
    )
