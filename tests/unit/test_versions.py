"""``make test-versions``: which pairs, what is installed for them, and what is said of them."""

import argparse

import pytest
from tests import versions
from tests.versions import Outcome, Pair

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">
<testsuite name="pytest" errors="2" failures="1" skipped="3" tests="10" time="0.1"/></testsuites>"""


def test_every_pair_of_the_table_can_be_asked_for_by_name():
    pairs = versions.known_pairs()
    assert len(pairs) == len(set(pairs)) >= 5
    assert [versions.pair(str(one)) for one in pairs] == pairs


@pytest.mark.parametrize("text", ["2.15.0", "2.15+5.22.2", "5.22.2-2.15.0", "newest", ""])
def test_what_is_no_pair_is_refused_with_an_example(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"2\.15\.0\+5\.22\.2"):
        versions.pair(text)


def test_constraints_pin_all_but_what_a_pair_decides():
    pinned = (versions.ROOT / "constraints.txt").read_text()
    left = versions.unpinned(pinned)
    names = {line.partition("==")[0] for line in left.splitlines()}
    assert not names & versions.UNPINNED
    assert len(pinned.splitlines()) - len(left.splitlines()) == len(versions.UNPINNED)
    assert names >= {"pytest", "hypothesis", "typer"}


def test_errors_are_failures_and_fail_the_pair(tmp_path):
    (tmp_path / "counts.xml").write_text(REPORT)
    outcome = Outcome(Pair("2.13.0+cpu", "5.22.2"), *versions.counted(tmp_path / "counts.xml"), 5.4)
    assert outcome[1:4] == (4, 3, 3) and not outcome.is_good
    assert versions.table([outcome])[1].split() == ["2.13.0+cpu", "5.22.2", *"4335", "FAILED"]


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([{"passed": 5}, {"passed": 5, "skipped": 1}], 0),
        ([{"passed": 5, "failed": 1}, {"passed": 5}], 1),
        ([{"passed": 5}, {"note": "not installed"}], 1),
        ([{"passed": 5}, {"skipped": 5}], 1),
    ],
    ids=str,
)
def test_every_pair_is_tried_and_any_that_fails_fails_all(monkeypatch, capsys, outcomes, status):
    left = iter(outcomes)
    monkeypatch.setattr(versions, "tried", lambda one, tests: Outcome(one, **next(left)))
    command = ["versions", "2.13.0+5.22.2", "2.15.0+newest", "--tests", "tests/unit"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        versions.main()
    assert int(end.value.code) == status
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["torch", "transformers", "passed", "failed", "skipped", "seconds"]
    assert [row.split()[:2] for row in rows] == [["2.13.0", "5.22.2"], ["2.15.0", "newest"]]


def test_an_installation_that_fails_is_said_and_the_next_pair_still_tried(monkeypatch, capsys):
    def refused(one):
        raise SystemExit("No matching distribution found")

    monkeypatch.setattr(versions, "installed", refused)
    outcome = versions.tried(Pair("9.9.9", "5.22.2"), ["tests/unit"])
    assert outcome.note == "not installed" and not outcome.is_good
    assert "No matching distribution" in capsys.readouterr().out
