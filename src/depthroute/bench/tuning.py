"""Launch settings of the depth-mix kernels, timed one by one.

The settings in use pass the gate first; every other one has to give what they give, but for the
order of its sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute import ops
from depthroute.bench import gate, timing
from depthroute.bench.operators import Shape, num_tokens
from depthroute.bench.record import Record, one_line

Setting = tuple[int, int, int, int]
"""Sources at a time, warps, stages, programs per multiprocessor."""
Launched = Callable[[], Sequence[Tensor]]
SAME_RESULT = 0.01
"""Relative; two orders of summation, rounded to bf16, differ by some 0.002."""


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def forward_settings(width: int) -> Iterator[Setting]:
    few = max(1, power_of_two(width) // 2048)
    for warps in sorted({max(1, few // 2), few, 2 * few}):
        for at_once in (1, 2, 4):
            if warps <= 16 and at_once * width <= warps * 4096:
                for stages in (1, 3):
                    yield at_once, warps, stages, 0
                yield at_once, warps, 3, max(1, 16 // warps)


def backward_settings(width: int) -> Iterator[Setting]:
    """Up to 8 columns a thread; kernels that hold all sources have no use for ``at_once``."""
    few = max(1, power_of_two(width) // 1024)
    for warps in (few, 2 * few, 4 * few):
        for at_once in (1, 2):
            if warps <= 16 and at_once * width <= warps * 2048:
                for stages in (1, 2, 3):
                    for programs in sorted({max(1, 8 // warps), max(1, 16 // warps)}):
                        yield at_once, warps, stages, programs


def triton_mix(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    return ops.depth_mix(sources, query, backend="triton")


def launches(given: gate.Draw, device: torch.device) -> dict[str, Launched]:
    """One launch of each direction, as autograd makes it, through the public operator."""
    stream = timing.capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = triton_mix(given.sources, given.query)
    torch.cuda.current_stream().wait_stream(stream)

    @torch.no_grad()
    def forward() -> Sequence[Tensor]:
        return [triton_mix(given.sources, given.query)]

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(x, [*given.sources, given.query], given.grad, retain_graph=True)

    return {"forward": forward, "backward": backward}


def run(record: Record, device: torch.device, *, shapes: Sequence[Shape], seconds: float) -> None:
    started = time.monotonic()
    record.values["ceiling"] = timing.copy_ceiling(device)
    for sources, width in shapes:
        given = gate.draw(sources, num_tokens(sources), width, device)
        verdict = gate.check(triton_mix, given)
        if not verdict.holds:
            record.fail(f"S {sources} D {width}: not tuned: {verdict}")
            continue
        one_pass = num_tokens(sources) * width * 2
        for kernel, function in launches(given, device).items():
            expected = function()
            is_forward = kernel == "forward"
            passes = sources + 1 if is_forward else 2 * sources + 1
            timed: list[tuple[float, Setting]] = []
            for setting in (forward_settings if is_forward else backward_settings)(width):
                if time.monotonic() - started > seconds:
                    record.values["cut_short"] = f"--seconds {seconds:g} had passed"
                    record.say(record.values["cut_short"])
                    return
                row: dict[str, Any] = {"S": sources, "D": width, "kernel": kernel}
                row["setting"] = list(setting)
                try:
                    row["ms"] = time_setting(function, setting, expected, device)
                    row["frac"] = timing.fraction(
                        passes * one_pass, row["ms"], record.values["ceiling"]
                    )
                    timed.append((row["frac"], setting))
                except Exception as error:  # a setting that does not fit the chip is a result, too
                    row["error"] = one_line(error, 120)
                record.rows.append(row)
            best = sorted(timed, reverse=True)[:4]
            text = "  ".join(f"{setting} {frac:.3f}" for frac, setting in best)
            record.say(f"S {sources} D {width} {kernel}: {text}")
            record.save()
        timing.forget()


def time_setting(
    function: Launched, setting: Setting, expected: Sequence[Tensor], device: torch.device
) -> float:
    from depthroute.ops._triton import layout

    with layout.forced(layout.Launch(*setting)):
        require_same(function(), expected)
        return timing.median_ms(function, device, 20.0)


def require_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        off = ((g.float() - e.float()).norm() / e.float().norm()).item()
        if not off <= SAME_RESULT:
            raise ArithmeticError(f"its result is {off:.1e} off, so it is not timed")


def best_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest setting of each shape and kernel."""
    best: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["S"], row["D"], row["kernel"]
        if "ms" in row and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    return list(best.values())
