"""Counters of Nsight Compute: what it prints becomes rows, and what goes wrong is said."""

from __future__ import annotations

import csv
import io
import stat
from pathlib import Path

import pytest

from bench import counters
from bench.widths import Shape
from depthroute.errors import DepthrouteError

NARROW, HEADS = Shape(25, 576), Shape(9, 2048, "bfloat16", 4)


def printed(*kernels: str, value: str = "1,250.5") -> str:
    """As `ncu --csv --page raw` prints: remarks, names, units, a line a kernel."""
    metrics = [metric for metric, _ in counters.METRICS.values()]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", "Grid Size", "Block Size", *metrics])
    writer.writerow(["", "", "", "", *("unit" for _ in metrics)])
    for number, name in enumerate(kernels):
        writer.writerow([number, name, "(264, 1, 1)", "(32, 1, 1)", *(value for _ in metrics)])
    return f"==PROF== Connected\n{text.getvalue()}==PROF== Disconnected\n"


def test_a_kernel_is_a_row_with_its_shape_and_the_least_it_can_move() -> None:
    text = printed(*["mix_forward_kernel", "mix_backward_kernel"] * 2)
    rows = counters.rows_of(text, [NARROW, HEADS])
    assert [(row["S"], row["D"], row["heads"]) for row in rows] == [(25, 576, 1)] * 2 + [
        (9, 2048, 4)
    ] * 2
    row_bytes = NARROW.tokens * 576 * 2
    assert [row["least_bytes"] for row in rows[:2]] == [26 * row_bytes, 51 * row_bytes]
    assert rows[0]["us"] == pytest.approx(1.2505)
    assert rows[0]["memory_busy"] == pytest.approx(12.505)
    assert rows[0]["registers"] == pytest.approx(1250.5)


def test_a_metric_that_is_not_there_is_left_out() -> None:
    rows = counters.rows_of(printed("resident_forward_kernel", "b", value=""), [NARROW])
    assert "us" not in rows[0]
    assert rows[0]["kernel"] == "resident_forward_kernel"


def test_kernels_and_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(DepthrouteError, match="1 kernels of 1 shapes"):
        counters.rows_of(printed("mix_forward_kernel"), [NARROW])


def test_what_goes_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DepthrouteError, match="ncu is not on the PATH"):
        counters.read([NARROW], 1.0)
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== no counters'\nexit 9\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(DepthrouteError, match=r"status 9: ==ERROR== no counters"):
        counters.read([NARROW], 5.0)
    program.write_text("#!/bin/sh\nwhile :; do :; done\n")
    with pytest.raises(DepthrouteError, match=r"longer than 0\.5 s"):
        counters.read([NARROW], 0.5)
