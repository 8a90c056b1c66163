"""The depth mix beside everyone else who computes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench import peers, precompile
from depthroute.bench import accuracy, operators
from depthroute.bench.operators import OURS, Shape
from depthroute.bench.record import Record

PRECOMPILE_SHARE = 0.5
"""Of the time limit; what is not compiled by then is compiled when it is measured."""


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
    contenders, record.values["contenders"] = peers.find(names)
    for note in record.values["contenders"]:
        if "missing" in note:
            record.say(f"{note['name']}: not measured, {note['missing']}")
    jobs = [(name, shape) for shape in peer_shapes for name in contenders]
    if num_processes > 0:
        rows = [[name, *shape] for name, shape in [*((OURS, s) for s in shapes), *jobs]]
        record.values["precompiled"] = precompile.operators(
            rows, num_processes, record.say, seconds * PRECOMPILE_SHARE
        )
    if not operators.run(record, device, shapes):
        return
    tuned: dict[tuple[str, int, int], int] = {}
    for name, shape in jobs:
        contender = contenders[name]
        row = operators.row_of(name, shape)
        row |= {"version": contender.version, "stacks": contender.stacks}
        if time.monotonic() - started > seconds:
            row |= {"status": "not reached", "reason": f"--seconds {seconds:g} had passed"}
            record.say(operators.line(record.add(row)))
            continue
        ceiling = record.values["ceiling"]
        figures = partial(measure, contender, shape[0], row["N"], shape[1], ceiling, device, tuned)
        if not operators.add(record, row, figures):
            return


def measure(
    contender: peers.Contender,
    sources: int,
    tokens: int,
    width: int,
    ceiling: float,
    device: torch.device,
    tuned: dict[tuple[str, int, int], int] | None = None,
) -> dict[str, Any]:
    """Figures of one row, or why it has none; ``tuned`` knows what its settings were found for."""
    reason = contender.refuses(sources, tokens, width)
    if reason is not None:
        return {"status": "refused", "reason": reason}
    torch.compiler.reset()  # Dynamo compiles one function for eight shapes at most
    draw = partial(accuracy.draw, sources, tokens, width, device, query_dtype=contender.query_dtype)
    row = operators.measure(contender.mix, draw, ceiling, device, is_ours=contender.name == OURS)
    if tuned is not None and row["status"] in ("timed", "wrong"):
        first = tuned.setdefault((contender.name, contender.tuned_for(sources), width), sources)
        row |= {"tuned_at_sources": first} if first != sources else {}
    return row
