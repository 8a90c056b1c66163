"""The page of promises names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_promise_is_held_by_a_test_that_exists(file, name):
    assert (ROOT / file).exists()
    assert not name or f"def {name}(" in (ROOT / file).read_text()


def test_every_promise_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "held by" not in line]
    counts = re.compile(r"\| [^|]+ \| (?:operations|[\d,]+) \|")
    promises = [row for row in rows if not counts.match(row)]
    assert promises and all("`tests/" in row for row in promises)
