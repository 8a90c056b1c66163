"""The figures of README and docs are those of the data files, and the pages hold together."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = sorted((ROOT / "bench" / "results").glob("*.json"))
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,12}\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
DATA_NAME = re.compile(r"`(?:bench/results/)?(\w+_(?:h200|cpu)[\w.]*\.json)`")

sys.path.insert(0, str(ROOT / "docs"))

import generate_results as generator  # noqa: E402
import results_data  # noqa: E402
import results_speed as speed  # noqa: E402

PAGES = generator.PAGES


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Changes the row of a data file that is meant, for what reads it in this test."""
    folder = shutil.copytree(ROOT / "bench" / "results", tmp_path / "results")
    monkeypatch.setattr(results_data, "RESULTS", folder)
    results_data.load.cache_clear()

    def change(name, is_meant, **values):
        path = folder / f"{name}.json"
        data = json.loads(path.read_text())
        next(row for row in data["rows"] if is_meant(row)).update(values)
        path.write_text(json.dumps(data))

    yield change
    results_data.load.cache_clear()


def outside_regions(text):
    return generator.REGION.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_the_data_say(page):
    text = page.read_text()
    assert generator.rendered(text) == text, "run `python docs/generate_results.py`"


def test_every_table_is_marked_properly_and_shown_somewhere():
    text = "\n".join(page.read_text() for page in PAGES)
    assert {match[2] for match in generator.REGION.finditer(text)} == set(generator.REGIONS)
    assert not re.search("<!-- /?results:", outside_regions(text)), "a mark without its other half"


def test_another_figure_or_commit_in_the_data_is_another_page(changed):
    pages = [page.read_text() for page in PAGES]
    changed("step_h200_7.57b", lambda row: row["method"] == "delta-block", relative_speed=0.912)
    now = [generator.rendered(page) for page in pages]
    assert now != pages
    assert "0.912" in speed.largest_steps() and "0.912x" in generator.measured()
    results_data.load("decode_h200_0.6b")["machine"]["commit"] = "another"
    assert "commit another" in speed.decode() and "commit another" in generator.measured()


def test_a_missed_target_is_marked_and_is_a_limit(changed):
    changed("op_h200", lambda row: (row["S"], row["D"]) == (9, 4096), both_frac=0.849)
    assert "1.00 / *0.85*" in speed.depth_mix()
    assert "Missed on an H200" in speed.limits()
    assert "9 sources of width 4096, with backward" in speed.limits()


def test_a_peer_is_compared_with_this_library_in_the_same_run(changed):
    shape = 5, 7168  # its peers are in the third file
    changed(
        "op_h200_part3",
        lambda row: row["who"] == "depthroute" and (row["S"], row["D"]) == shape,
        both_ms=1.0,
    )
    peer, own = speed.pairs("fla")[shape]
    assert own["both_ms"] == 1.0
    assert peer["both_ms"] / own["both_ms"] in speed.ratios("fla", "both_ms")


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_a_data_file_is_shown_and_says_where_it_comes_from(path):
    pages = {page: page.read_text() for page in (*PAGES, ROOT / "bench" / "results" / "README.md")}
    shown_by = [page.name for page, text in pages.items() if path.name in text]
    assert len(shown_by) >= 2, f"{path.name} is history: no page shows it"
    text = path.read_text()
    for needed in ('"commit":', '"torch":', '"device'):
        assert needed in text, f"{path.name} does not hold {needed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_no_diary(page):
    """Commits stand beside figures that came from the data; what was before is in git."""
    assert not COMMIT.findall(outside_regions(page.read_text()))


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(path), f"{path.name} has no heading #{anchor}"
    for name in DATA_NAME.findall(page.read_text()):
        assert (ROOT / "bench" / "results" / name).exists(), f"{page.name} names {name}"
