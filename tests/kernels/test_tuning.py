"""Settings that are tuned, in Triton's interpreter; started by test_kernels_interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from bench import kernels, tuning
from depthroute.bench import timing
from depthroute.bench.record import Record
from depthroute.ops.private import launcher

pytestmark = pytest.mark.interpreter
CPU = torch.device("cpu")
WAYS = (kernels.ATTNRES, kernels.DELTA, kernels.PHASE_2)
TINY = [
    ("mix", kernels.mix, (3, 48, CPU, 2), {}),
    *((way, kernels.boundary, (way, 3, 64, CPU, 2), {}) for way in WAYS),
    ("group", kernels.group, (19, 3, 64, CPU, 2), {}),
    ("attention", kernels.attention, (2, CPU), {"batch": 1, "length": 2, "head_width": 16}),
]


def some(settings):
    """The first and the last: all give the same grid and warps mean nothing here."""
    return [settings[0], settings[-1]]


@pytest.mark.parametrize(("name", "cases", "shape", "options"), TINY, ids=lambda v: str(v)[:12])
def test_every_kernel_is_swept_and_settings_agree(name, cases, shape, options, monkeypatch):
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e12)
    monkeypatch.setattr(timing, "median_ms", lambda launch, device, budget: 2.0)
    record = Record("tune", {}, say=lambda text: None)
    made = [replace(c, settings=some(c.settings)) for c in cases(*shape, **options)]
    tuning.run(record, CPU, jobs=[kernels.Job(name, lambda: made)], seconds=60)
    assert record.values["failures"] == []
    assert [row["kernel"] for row in record.rows] == [c.kernel for c in made for _ in range(3)]
    for case, rows in zip(made, zip(*[iter(record.rows)] * 3, strict=True), strict=True):
        assert [row["setting"] for row in rows] == [{}, *case.settings]
        assert all(row["ms"] == 2.0 and row["shape"] == case.shape for row in rows), rows
        assert {row["frac"] for row in rows} == {case.num_bytes / 2e-3 / 1e12}


@pytest.mark.parametrize(("name", "cases", "shape", "options"), TINY, ids=lambda v: str(v)[:12])
def test_bytes_are_those_of_the_activations_a_kernel_is_given(
    name, cases, shape, options, monkeypatch
):
    """Each is read or written once. Those that come as tables of addresses are not seen here."""
    given, launch = [], launcher.Prepared.__call__

    def noted(self, programs, lists, tensors, numbers):
        given.clear()
        given.extend(t for listed in lists if listed is not None for t in listed)
        given.extend(t for t in tensors if t is not None)
        launch(self, programs, lists, tensors, numbers)

    monkeypatch.setattr(launcher.Prepared, "__call__", noted)
    monkeypatch.setattr("depthroute.ops._triton.mix_launch.sum_rows", lambda rows: rows.sum(0))
    for case in cases(*shape, **options) if name != "group" else ():
        case.launch()
        activations = [t for t in given if t.dtype == torch.bfloat16 and t.dim() > 1]
        assert sum(t.nbytes for t in activations) == case.num_bytes, case.kernel


def test_group_kernels_count_what_they_read_and_write():
    count, num_queries, tokens, width = 19, 3, 5, 64
    one_pass = tokens * width * 2
    found = {c.kernel: c.num_bytes for c in kernels.group(count, num_queries, width, CPU, tokens)}
    statistics = tokens * count * num_queries * 4  # fp32
    terms = tokens * count * 16 * 2  # bf16, queries padded to 16
    assert found == {
        "group_logits": 19 * one_pass,
        "group_softmax": statistics + 2 * terms,
        "group_outputs": 22 * one_pass,
        "group_products": 22 * one_pass,
        "group_weights": 2 * statistics + 5 * terms,
        "group_sources": (3 * 19 + 3) * one_pass,
    }


def test_the_sources_of_a_group_may_come_in_any_chunks():
    *_, case = kernels.group(19, 3, 64, CPU, 2)
    with tuning.unwritten_is_nan():
        expected = case.launch()
    for chunk in (4, 7, 19):
        setting = {"sources": chunk, "columns": 32}
        assert timed(case, setting, expected) == 1


def timed(case, setting, expected):
    """How often it would be timed; the clock is left out."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "median_ms", lambda *arguments: calls.append(1) or 0.0)
        tuning.time_setting(case, setting, expected, CPU)
    return len(calls)
