"""The sweep over widths: every shape is checked, timed against its own ceiling, and taken up."""

import json

import pytest
import torch

from bench import widths
from depthroute import ops
from depthroute.bench import timing
from depthroute.bench.record import Record
from depthroute.errors import DepthrouteError

CPU = torch.device("cpu")
SHAPES = [
    widths.Shape(3, 36),
    widths.Shape(2, 40),
    widths.Shape(3, 40, "float32"),
    widths.Shape(3, 40, "bfloat16", 4),
]


@pytest.fixture
def small(monkeypatch):
    """On the CPU, at few tokens, against copies of a terabyte a second."""
    asked = []

    def copy_ceiling(device, num_bytes):
        asked.append(2 * num_bytes)
        return 1e12

    widths.copy_speed.cache_clear()
    monkeypatch.setattr(timing, "copy_ceiling", copy_ceiling)
    monkeypatch.setattr(widths, "ELEMENTS", 1440)
    monkeypatch.setattr(widths, "our_mix", ops.depth_mix)
    yield asked
    widths.copy_speed.cache_clear()


def test_the_sweep_is_that_of_real_models():
    assert len(set(widths.EVERY_SHAPE)) == 225
    assert all(s.tokens * s.width >= 2**25 for s in widths.EVERY_SHAPE)
    assert all((s.tokens - 1) * s.width < 2**25 for s in widths.EVERY_SHAPE)
    assert {(s.dtype, s.heads) for s in widths.OTHERS} == {
        ("float16", 1), ("float32", 1), ("bfloat16", 4)
    }  # fmt: skip
    assert {s.heads for s in widths.SEVERAL_HEADS} == {2, 4, 8}
    assert not set(widths.SEVERAL_HEADS) & set(widths.OTHERS)


def test_a_shape_is_timed_against_a_copy_of_as_many_bytes(small):
    record = Record("widths", {}, say=lambda text: None)
    widths.run(record, CPU, SHAPES, seconds=60)
    assert [widths.key(row) for row in record.rows] == [widths.key(s.row) for s in SHAPES]
    assert all(row["status"] == "timed" and row["within_budget"] for row in record.rows)
    first, _, wide, _ = record.rows
    assert first["N"] == 40
    assert first["forward_frac"] == pytest.approx(
        4 * 40 * 36 * 2 / (first["forward_ms"] / 1e3) / 1e12
    )
    assert wide["both_frac"] == pytest.approx(11 * 36 * 40 * 4 / (wide["both_ms"] / 1e3) / 1e12)
    passes = [(4, 2), (11, 2), (3, 2), (8, 2), (11, 4)]  # others were copied before
    assert small == [count * 1440 * itemsize for count, itemsize in passes]


def test_a_shape_that_is_wrong_or_fails_is_not_timed_and_costs_no_other(small, monkeypatch):
    def broken(sources, query, heads):
        if len(sources) == 2:
            raise RuntimeError("out of resource: shared memory")
        scale = 1.02 if heads == 4 else 1.0
        return ops.depth_mix(sources, query * scale, heads=heads)

    monkeypatch.setattr(widths, "our_mix", broken)
    record = Record("widths", {}, say=lambda text: None)
    widths.run(record, CPU, SHAPES, seconds=60)
    assert [row["status"] for row in record.rows] == ["timed", "failed", "timed", "wrong"]
    assert "forward_ms" not in record.rows[3] and len(record.values["failures"]) == 2


def test_a_sweep_that_was_cut_short_goes_on(small, monkeypatch, tmp_path):
    clock, out = [0.0], tmp_path / "widths.json"
    monkeypatch.setattr(widths.time, "monotonic", lambda: clock[0])
    measured = []

    def measure(shape, device):
        clock[0] += 10
        measured.append(shape)
        fraction = 0.5 + 0.1 * shape.sources
        return {"status": "timed", "budget": 1.0, "within_budget": True, "forward_ms": 1.0,
                "both_ms": 2.0, "forward_frac": fraction, "both_frac": fraction}  # fmt: skip

    monkeypatch.setattr(widths, "measure", measure)
    record = Record("widths", {}, out, say=lambda text: None)
    widths.run(record, CPU, SHAPES, seconds=15)
    assert measured == SHAPES[:2] and "2 shapes" in record.values["cut_short"]
    again = Record("widths", {}, say=lambda text: None)
    widths.run(again, CPU, SHAPES, seconds=100, earlier=widths.read_rows(out))
    assert measured == SHAPES and len(again.rows) == 4 and "cut_short" not in again.values
    worst = again.values["worst"]["forward_frac"]
    assert worst[0]["S"] == 2 and len(worst) == 4
    assert widths.summary(again.rows)[1] == ("both_frac: 1 of 4 shapes below 0.8, the lowest 0.700")


def test_what_is_no_record_cannot_be_resumed(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps([]))
    with pytest.raises(DepthrouteError, match="no record of `python -m bench widths`"):
        widths.read_rows(path)
