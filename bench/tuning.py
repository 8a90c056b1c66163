"""Launch settings, timed one by one.

The setting in use comes first. Every other one has to give what it gives, but for the order of its
sums, before it is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.kernels import Case, Job, Setting
from depthroute.bench import timing
from depthroute.bench.record import Record, one_line

SAME_RESULT = 0.01
"""Relative; two orders of summation, rounded to bf16, differ by some 0.002."""
IN_USE: Setting = {}


def run(record: Record, device: torch.device, *, jobs: Sequence[Job], seconds: float) -> None:
    ends = time.monotonic() + seconds
    ceiling = record.values["ceiling"] = timing.copy_ceiling(device)
    for job in jobs:
        if not tune(record, job, device, ceiling, ends):
            record.values["cut_short"] = f"--seconds {seconds:g} had passed"
            record.say(record.values["cut_short"])
            record.save()
            return
        timing.forget()


def tune(record: Record, job: Job, device: torch.device, ceiling: float, ends: float) -> bool:
    """Every kernel at one shape; whether time was left for all of them."""
    try:
        cases = job.cases()
    except Exception as error:
        record.fail(f"{job.name}: not tuned: {one_line(error)}")
        return True
    return all(sweep(record, case, device, ceiling, ends) for case in cases)


def sweep(record: Record, case: Case, device: torch.device, ceiling: float, ends: float) -> bool:
    """A row for each setting; whether time was left for all of them."""
    try:
        with unwritten_is_nan():
            expected = case.launch()
    except Exception as error:
        record.fail(f"{case.kernel}, {case.shape}: not tuned: {one_line(error)}")
        return True
    rows: list[dict[str, Any]] = []
    for setting in (IN_USE, *case.settings):
        if time.monotonic() > ends:
            break
        row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "setting": setting}
        try:
            row["ms"] = time_setting(case, setting, expected, device)
            row["frac"] = timing.fraction(case.num_bytes, row["ms"], ceiling)
        except Exception as error:  # a setting that does not fit the chip is a result, too
            row["error"] = one_line(error, 120)
        if setting == IN_USE and "error" in row:
            record.fail(f"{case.kernel}, {case.shape}, as it is launched: {row['error']}")
        rows.append(row)
        record.rows.append(row)
    record.say(line(case, rows))
    record.save()
    return len(rows) == 1 + len(case.settings)


def time_setting(
    case: Case, setting: Setting, expected: Sequence[Tensor], device: torch.device
) -> float:
    from depthroute.ops._triton import layout

    with layout.forced(case.forces, **setting):
        with unwritten_is_nan():
            require_same(case.launch(), expected)
        return timing.median_ms(case.launch, device, 20.0)


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New memory is filled first: else what a kernel does not write may be an earlier result."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def require_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        off = ((g.float() - e.float()).norm() / e.float().norm()).item()
        if not off <= SAME_RESULT:
            raise ArithmeticError(f"its result is {off:.1e} off, so it is not timed")


def described(setting: Setting) -> str:
    """Such as ``warps 4, stages 3``."""
    return ", ".join(f"{name} {value}" for name, value in setting.items()) or "in use"


def line(case: Case, rows: Sequence[dict[str, Any]]) -> str:
    timed = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"])
    usual = next((row for row in timed if row["setting"] == IN_USE), None)
    shown = ([] if usual is None else [usual]) + [row for row in timed if row is not usual][:4]
    text = "; ".join(f"{described(row['setting'])}: {row['frac']:.3f}" for row in shown)
    return f"{case.kernel}, {case.shape}: {text or 'nothing was timed'}"


def best_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest setting of each kernel and shape, with the time of the one in use."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    in_use: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["kernel"], row["shape"]
        if "ms" not in row:
            continue
        if row["setting"] == IN_USE:
            in_use[key] = row["ms"]
        if key not in best or row["ms"] < best[key]["ms"]:
            best[key] = row
    return [
        row | {"setting": described(row["setting"]), "in_use_ms": in_use.get(key)}
        for key, row in best.items()
    ]
