"""Several runs on one page: which step, which row is best, and whose row it is."""

import base64
import hashlib
import html
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.runs import write_run

from depthroute.diagnostics.figures import figures, palette
from depthroute.diagnostics.finding import finding
from depthroute.diagnostics.report import write_report
from depthroute.runs.display import comparison_table
from depthroute.runs.summary import summarise


class Table(HTMLParser):
    """The results: one dictionary a row, with ``best`` where the loss is bold."""

    def __init__(self, page):
        super().__init__()
        self.names, self.rows, self.cell = [], [], None
        self.feed(page[page.index('<section id="panel-results"') :].partition("</section>")[0])
        self.rows = [
            dict(zip(self.names, [t for t, _ in row], strict=True))
            | {"best": any(b for _, b in row)}
            for row in self.rows
        ]

    def handle_starttag(self, tag, attributes):
        if tag == "tr" and self.names:
            self.rows.append([])
        if tag in ("th", "td"):
            self.cell, self.is_best = "", ("class", "best") in attributes

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag == "th":
            self.names.append(self.cell)
        if tag == "td":
            self.rows[-1].append((self.cell, self.is_best))
        if tag in ("th", "td"):
            self.cell = None


def report(tmp_path, *runs):
    """The data, the table and what the results say above it."""
    data = write_report(list(runs), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    section = page[page.index('<section id="panel-results"') :].partition("<table")[0]
    words = " ".join(re.findall(r"<p[^>]*>(.*?)</p>", section))
    return data, Table(page).rows, words


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def set_losses(run, losses):
    """``losses`` by method and step; None where the method was not validated."""
    lines = []
    for record in records(run):
        if record["event"] == "validation":
            record["loss"] = losses.get((record["method"], record["step"]), record["loss"])
        if record.get("loss", 0) is not None:
            lines.append(json.dumps(record) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))


def validated(run, method, step):
    losses = [
        r["loss"]
        for r in records(run)
        if (r["event"], r["method"], r.get("step")) == ("validation", method, step)
    ]
    return f"{sum(losses) / len(losses):.4f}"


def test_runs_of_different_lengths_are_compared_at_the_last_step_both_have(tmp_path):
    short = write_run(tmp_path / "short", ("standard", "delta"), steps=20)
    long = write_run(tmp_path / "long", ("standard", "delta"), steps=40)
    _, rows, words = report(tmp_path, short, long)
    assert "at step 20, the last that all methods were validated at" in words
    assert "long went on to step 40" in words and "short went on" not in words
    assert "at step" not in rows[0]
    for row, run in zip(rows, (short, short, long, long), strict=True):
        assert row["validation loss"].startswith(validated(run, row["method"], 20))
    assert sum(row["best"] for row in rows) >= 1


def test_the_best_row_is_of_the_shared_step_and_not_of_the_longer_run(tmp_path):
    short = write_run(tmp_path / "short", ("standard", "delta"), steps=20)
    long = write_run(tmp_path / "long", ("standard", "delta"), steps=40)
    set_losses(short, {("standard", 20): 2.0, ("delta", 20): 1.9})
    set_losses(
        long,
        {("standard", 20): 2.0, ("delta", 20): 1.95, ("standard", 40): 1.1, ("delta", 40): 1.0},
    )
    _, rows, _ = report(tmp_path, short, long)
    assert [row["best"] for row in rows] == [False, True, False, False]


def test_runs_that_share_no_step_say_theirs_and_are_not_compared(tmp_path):
    one = write_run(tmp_path / "one", ("standard", "delta"), steps=20)
    other = write_run(tmp_path / "other", ("standard", "delta"), steps=40)
    lines = [r for r in records(other) if r["event"] != "validation" or r["step"] == 40]
    (other / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    _, rows, words = report(tmp_path, one, other)
    assert [row["at step"] for row in rows] == ["20", "20", "40", "40"]
    assert "at the step in its row" in words and "cannot be compared" in words
    assert sum(row["best"] for row in rows[:2]) == sum(row["best"] for row in rows[2:]) == 1


def test_a_run_that_has_no_validation_yet_keeps_the_others_compared(tmp_path):
    runs = [write_run(tmp_path / name, ("standard",), steps=20) for name in ("a", "b")]
    new = write_run(tmp_path / "new", ("delta",), steps=20)
    (new / "metrics.jsonl").write_text("")
    (new / "traces.json").unlink()
    _, rows, _ = report(tmp_path, *runs, new)
    assert [row["validation loss"] == "-" for row in rows] == [False, False, True]
    assert any(row["best"] for row in rows[:2]) and not rows[2]["best"]


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"name": "other", "baselines": {}}},
        {"data": {"name": "<words> & more", "tokenizer": {"name": "mine"}}},
        {"data": {"name": "<words> & more", "unit": "token"}},
        {"train": {"steps": 40, "batch_size": 8, "sequence_length": 16}},
        {"equal": "time"},
    ],
    ids=["text", "tokenizer", "unit", "batch", "time"],
)
def test_other_text_tokens_units_and_batches_are_not_compared(tmp_path, change):
    one = write_run(tmp_path / "one", ("standard", "delta"))
    other = write_run(tmp_path / "other", ("standard", "delta"))
    set_losses(other, {("standard", 40): 1.5, ("delta", 40): 1.4})
    edit(other / "config.json", lambda c: c | change)
    _, rows, words = report(tmp_path, one, other)
    assert sum(row["best"] for row in rows[:2]) == sum(row["best"] for row in rows[2:]) == 1
    assert "cannot be compared" in words
    units = [row.get("nats per") for row in rows]
    has_tokens = "unit" in change.get("data", {}) or "tokenizer" in change.get("data", {})
    assert units == (["byte", "byte", "token", "token"] if has_tokens else [None] * 4)


def test_the_same_text_at_another_place_is_compared(tmp_path):
    """`compare` keeps n-gram losses and the unit beside it, `train` does not."""
    about = {"sha256": "ab", "validation_sha256": None, "tokenizer": {"name": "bytes"}}
    one, other = (write_run(tmp_path / n, ("standard",)) for n in ("one", "other"))
    extra = {"name": "/a/book.txt", "unit": "byte", "baselines": {"unigram": 3.0}}
    edit(one / "config.json", lambda c: c | {"data": about | extra})
    edit(other / "config.json", lambda c: c | {"data": about | {"name": "book.txt"}})
    set_losses(one, {("standard", 40): 1.5})
    _, rows, _ = report(tmp_path, one, other)
    assert [row["best"] for row in rows] == [True, False]


def test_losses_that_are_shown_alike_are_marked_alike(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta", "delta-block"))
    set_losses(run, {("standard", 40): 2.00001, ("delta", 40): 2.00002, ("delta-block", 40): 2.1})
    _, rows, _ = report(tmp_path, run)
    assert [row["best"] for row in rows] == [True, True, False]


def diverge(run, method, seed, step):
    lines = [
        r
        for r in records(run)
        if (r["method"], r["seed"]) != (method, seed) or r.get("step", 0) < step
    ]
    lines.append({"event": "diverged", "seed": seed, "method": method, "step": step})
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))


def test_a_method_that_diverged_for_one_seed_has_no_mean_of_the_others_and_is_not_best(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    set_losses(run, {("delta", 40): 0.5})
    diverge(run, "delta", 0, 15)
    _, rows, _ = report(tmp_path, run)
    assert rows[1]["validation loss"] == "diverged (seed 0 step 15)"
    assert rows[1]["vs standard"] == "-" and not any(row["best"] for row in rows)
    summary = summarise(json.loads((run / "config.json").read_text()), records(run))
    page = io.StringIO()
    Console(file=page, width=100).print(comparison_table(summary))
    assert "diverged (seed 0 step 15)" in page.getvalue() and "-1." not in page.getvalue()


def test_differences_say_where_standard_diverged(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    diverge(run, "standard", 0, 15)
    _, rows, words = report(tmp_path, run)
    assert "Standard diverged for seed 0" in words
    assert rows[0]["validation loss"].startswith("diverged")
    assert "±" in rows[1]["validation loss"] and "±" not in rows[1]["vs standard"]
    summary = summarise(json.loads((run / "config.json").read_text()), records(run))
    page = io.StringIO()
    Console(file=page, width=300).print(comparison_table(summary))
    assert "Standard diverged for seed 0" in " ".join(page.getvalue().split())


def test_rows_legends_figures_and_hovers_name_the_run(tmp_path):
    runs = [write_run(tmp_path / n, (m,)) for n, m in (("a", "standard"), ("b", "delta"))]
    data, rows, _ = report(tmp_path, *runs)
    assert [(row["method"], row["run"]) for row in rows] == [("standard", "a"), ("delta", "b")]
    assert [s["label"] for s in data["series"]] == ["standard · a", "delta · b"]
    drawn = {figure.name: figure.svg for figure in figures(data)}
    for name in ("curves", "cost"):
        assert "standard · a<" in drawn[name] and "delta · b<" in drawn[name]
    assert "delta · b<" in drawn["sharpness"] and "Routing of delta · b" in drawn["map-1"]
    _, rows, _ = report(tmp_path, runs[0])
    assert "run" not in rows[0]


def test_every_run_has_a_name_of_its_own_that_fits_a_legend(tmp_path):
    names = ["a/run", "b/run", "c/run (2)", "d/" + "long" * 50, "e/" + "long" * 50]
    data, _, _ = report(tmp_path, *(write_run(tmp_path / n, ("standard",)) for n in names))
    found = [run["name"] for run in data["runs"]]
    assert len(set(found)) == 5 and max(map(len, found)) < 50
    (cost,) = [f for f in figures(data) if f.name == "cost"]
    assert "…" in cost.svg


def test_one_routing_has_one_name_and_colour_whatever_a_run_calls_it(tmp_path):
    one = write_run(tmp_path / "compared", ("standard", "delta-block"))
    two = write_run(tmp_path / "trained", ("delta:num_blocks=4",))
    routing = {"method": "delta", "num_blocks": 4}
    edit(one / "config.json", lambda c: c | {"methods": c["methods"] | {"delta-block": routing}})
    edit(two / "config.json", lambda c: c | {"methods": {"delta:num_blocks=4": routing}})
    data, rows, words = report(tmp_path, two, one)
    assert [row["method"] for row in rows] == ["delta-block", "standard", "delta-block"]
    assert "delta-block is delta:num_blocks=4 in trained" in words
    colors = palette(data)
    assert colors[0] == colors[2] != colors[1]
    assert data["series"][0]["trace"] is not None


def test_one_name_of_two_routings_is_spelled_out(tmp_path):
    runs = [write_run(tmp_path / name, ("standard", "delta")) for name in ("a", "b")]
    for run, settings in zip(runs, ({}, {"heads": 4}), strict=True):
        methods = {"standard": {"method": "standard"}, "delta": {"method": "delta"} | settings}
        edit(run / "config.json", lambda c, methods=methods: c | {"methods": methods})
    data, rows, words = report(tmp_path, *runs)
    assert [row["method"] for row in rows] == ["standard", "delta", "standard", "delta:heads=4"]
    assert "delta:heads=4 is delta in b" in words
    assert len(set(palette(data))) == 3


def test_two_methods_of_one_run_stay_two(tmp_path):
    run = write_run(tmp_path / "run", ("delta", "delta:heads=1"))
    same = {"delta": {"method": "delta"}, "delta:heads=1": {"method": "delta"}}
    edit(run / "config.json", lambda c: c | {"methods": same})
    _, rows, _ = report(tmp_path, run)
    assert [row["method"] for row in rows] == ["delta", "delta:heads=1"]


def test_the_unit_is_the_tokenizers(tmp_path):
    run = write_run(tmp_path / "run", ("standard",))
    data, _, words = report(tmp_path, run)
    assert "nats per byte" in words
    assert "Validation loss, nats per byte" in figures(data)[0].svg
    edit(
        run / "config.json",
        lambda c: c | {"data": {"name": "book", "tokenizer": {"name": "train:512"}}},
    )
    data, _, words = report(tmp_path, run)
    assert "nats per token" in words and "nats per token" in figures(data)[0].svg


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else(tmp_path):
    write_report([write_run(tmp_path / "run", ("standard", "delta"))], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)"/>', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == "'none'"
    assert rules.pop("form-action") == "'none'" and rules.pop("img-src") == "data:"
    for directive, pattern in (
        ("style-src", "<style>(.*?)</style>"),
        ("script-src", "<script>(.*?)</script>"),
    ):
        (text,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(directive) == f"'sha256-{digest}'"
    assert rules == {}
    assert page.index("Content-Security-Policy") < page.index("<title>")
    body = page[page.index("<body>") : page.index("<script>")]
    assert not re.search(r"<[^>]*\s(style|on\w+)=", body)  # the policy would refuse them


@pytest.mark.parametrize(
    ("losses", "seeds", "words"),
    [
        (
            {"standard": [2.0, 2.1, 1.9], "delta": [1.8, 1.9, 1.71]},
            3,
            "delta has the lowest loss of 2 models, 1.8033 nats per byte: 0.1967 below standard",
        ),
        ({"standard": [2.0, 2.1, 1.9], "delta": [1.8, 1.9, 1.71]}, 3, "Likely real: over 3 seeds"),
        ({"standard": [2.0, 2.1], "delta": [1.8, 2.09]}, 2, "It may be chance: over 2 seeds"),
        ({"standard": [2.0], "delta": [1.8]}, 1, "One seed: how much of it is chance is not known"),
        ({"standard": [1.5], "delta": [1.8]}, 1, "no routing is below it, the nearest is delta"),
        ({"delta": [1.5], "x0-skip": [1.8]}, 1, "Without standard beside it"),
        ({"delta": [1.5]}, 1, "There is nothing beside it to compare it with."),
    ],
)
def test_the_page_begins_with_what_was_found_and_how_sure_it_is(tmp_path, losses, seeds, words):
    run = write_run(tmp_path / "run", tuple(losses), seeds=tuple(range(seeds)))
    by_seed = {(m, n): loss for m, many in losses.items() for n, loss in enumerate(many)}
    lines = [
        r | {"loss": by_seed[r["method"], r["seed"]]} if r["event"] == "validation" else r
        for r in records(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    data, _, _ = report(tmp_path, run)
    page = (tmp_path / "page.html").read_text()
    assert words in finding(data)
    assert finding(data) in html.unescape(page.partition('<p class="finding">')[2])


def test_the_first_sentence_says_what_fine_tuning_began_with(tmp_path):
    run = write_run(tmp_path / "run", ("delta",), seeds=(0,))
    first = next(r for r in records(run) if r["event"] == "validation")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(first | {"step": 0, "loss": 2.5}) + "\n")
    assert ", 2.5000 before the first step. There" in finding(report(tmp_path, run)[0])


def test_the_first_sentence_does_not_hide_divergence_other_data_or_an_unfinished_run(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta", "x0-skip"))
    diverge(run, "x0-skip", 0, 20)
    data, _, _ = report(tmp_path, run)
    assert "lowest loss of 2 models" in finding(data) and "Diverged: x0-skip." in finding(data)
    cut = write_run(tmp_path / "cut", ("standard", "delta"))
    edit(cut / "config.json", lambda c: c | {"train": c["train"] | {"steps": 400}})
    data, _, _ = report(tmp_path, cut)
    assert finding(data).endswith("The run is not finished, so this may change.")
    other = write_run(tmp_path / "other", ("delta",))
    edit(other / "config.json", lambda c: c | {"data": {"name": "other", "baselines": {}}})
    data, _, _ = report(tmp_path, run, other)
    assert "are not compared with it" in finding(data)
    apart = [write_run(tmp_path / m, (m,)) for m in ("standard", "delta")]
    data, _, _ = report(tmp_path, *apart)
    assert "They are of different runs, so how much of it is chance is not known." in finding(data)
    assert "went on" not in finding(data)
    longer = write_run(tmp_path / "longer", ("x0-skip",), steps=300)
    data, _, _ = report(tmp_path, *apart, longer)
    assert "That is at step 40, the last that all have; longer went on." in finding(data)
    (cut / "metrics.jsonl").write_text("")
    data, _, _ = report(tmp_path, cut)
    assert finding(data).startswith("No method has a validation loss yet.")


def test_plus_and_minus_is_explained_in_the_terminal_only_where_it_is_shown(tmp_path):
    for seeds in ((0,), (0, 1)):
        run = write_run(tmp_path / f"{len(seeds)}", ("standard", "delta"), seeds=seeds)
        summary = summarise(json.loads((run / "config.json").read_text()), records(run))
        page = io.StringIO()
        Console(file=page, width=300).print(comparison_table(summary))
        assert page.getvalue().count("±") == (0 if len(seeds) == 1 else 4)
