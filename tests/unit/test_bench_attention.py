"""The ways to call attention that `python -m bench attention` times, checked before they are."""

from itertools import pairwise

import pytest
import torch

from bench import attention
from depthroute.bench.record import Record

CPU = torch.device("cpu")
SMALL = attention.Shape(batch=2, heads=2, kv_heads=1, tokens=256, width=16)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(attention, "CHECKED", SMALL)
    monkeypatch.setattr(attention, "MEAN_LENGTH", 40)
    monkeypatch.setattr(torch, "compile", lambda function: function)  # a minute
    monkeypatch.setattr(attention.timing, "forget", lambda: None)  # half of one


def test_documents_are_of_mixed_lengths_and_their_bounds_are_those_of_the_rows():
    case = attention.draw("documents", SMALL, CPU)
    starts, longest = attention.bounds(case)
    lengths = starts.diff()
    assert starts[0] == 0 and starts[-1] == 2 * 256 and 256 in starts
    assert len(set(lengths.tolist())) > 5 and lengths.max() == longest
    row = case.documents.flatten()
    assert all((row[a:b] == row[a]).all() for a, b in pairwise(starts))
    assert attention.bounds(attention.draw("causal", SMALL, CPU))[0].tolist() == [0, 256, 512]


def test_the_mask_says_who_sees_whom():
    case = attention.draw("documents", SMALL, CPU)
    seen, (starts, _) = attention.dense(case), attention.bounds(case)
    for row in range(2):
        begun = starts[torch.searchsorted(starts, 256 * row + torch.arange(256), right=True) - 1]
        first = begun - 256 * row
        expected = (torch.arange(256) >= first[:, None]) & torch.ones(256, 256).tril().bool()
        assert torch.equal(seen[row, 0], expected)


def test_what_is_measured_is_saved_and_what_a_device_cannot_do_is_a_failure_of_its_own():
    record = Record("attention", {}, say=lambda text: None)
    attention.run(record, CPU, SMALL, ("causal", "documents"))
    ways = {(row["pattern"], row["how"]): row for row in record.rows}
    assert len(ways) == 7
    for key in (("causal", "is_causal"), ("causal", "dense mask"), ("documents", "dense mask")):
        assert ways[key]["budget"] <= 2 and ways[key]["both_ms"] > 0
    assert "backward on CPU" in ways["documents", "flex"]["error"]
    assert len(record.values["failures"]) == 4


def test_a_way_that_sees_too_much_is_not_timed(monkeypatch):
    open_mask = lambda case: torch.ones_like(attention.dense(case))  # noqa: E731
    monkeypatch.setitem(attention.WAYS, "dense mask", (open_mask, attention.with_mask))
    with pytest.raises(ArithmeticError, match="not timed: the"):
        attention.measure("dense mask", "documents", SMALL, CPU)
