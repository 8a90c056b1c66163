"""`report` on directories that are damaged, unfinished, foreign or hostile: a page or one line."""

import contextlib
import json
import math
import os
import random
import re
import threading

import pytest
from tests.runs import write_run

from depthroute.diagnostics.report import write_figures, write_report
from depthroute.diagnostics.report_data import collect
from depthroute.errors import DepthrouteError

JUNK = [None, True, -1, 2.5, "x", "", [], {}, [1], {"a": 1}, math.nan, math.inf, 1e308, 10**30]
NUMBERS = [0, 1, 7, 2**62, 0.0, -0.5, 1e-310, 1e25, 1e29, 1e31, math.nan, -math.inf]
WORDS = ["", "\x1b[2J", "standard", "delta", "mlp", "final", "layers.1.mlp", "x" * 500]
FILES = ("config.json", "metrics.jsonl", "traces.json")


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def add_line(run, text):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def failure(depthroute, tmp_path, run):
    """The one line of a command that fails."""
    status, out, err = depthroute("report", str(run), "--out", str(tmp_path / "page.html"))
    assert (status, out) == (2, "") and len(err.splitlines()) == 1, err
    assert not (tmp_path / "page.html").exists()
    return err


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", ("standard", "delta"), layers=2, steps=20)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "", "Expecting value"),
        ("config.json", "[]", "must be an object"),
        ("config.json", "{}", "has no 'data'"),
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("config.json", '{"data": {"a": ' + "[" * 500 + "]" * 500 + "}}", "has no"),
        ("metrics.jsonl", '{"event": "step"}\n', "line 1: the step record has no"),
        ("metrics.jsonl", "[]\n", "line 1: the record is [] and must be an object"),
        ("metrics.jsonl", '{"event": 3}\n', "event is 3 and must be text"),
        ("metrics.jsonl", "\x00\x01\n", "line 1"),
        ("metrics.jsonl", '{"event": "resumed"}\n', "neither 'lines' nor 'step'"),
        ("traces.json", "[]", "must be an object"),
        ("traces.json", '{"traces": {}}', "must be a list"),
        ("traces.json", '{"traces": [{}]}', "has no 'num_layers'"),
        ("traces.json", '{"tra', "cannot read the run"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(depthroute, tmp_path, run, file, content, words):
    (run / file).write_text(content)
    err = failure(depthroute, tmp_path, run)
    assert "cannot read the run in" in err and words in err


def test_a_damaged_line_between_good_ones_is_named_by_its_number(depthroute, tmp_path, run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[6] = lines[6][:20]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "metrics.jsonl, line 7:" in failure(depthroute, tmp_path, run)


def test_a_line_that_is_being_written_is_left_out(run):
    whole = collect([run])
    add_line(run, '{"event": "step", "seed": 0, "met')
    assert collect([run]) == whole


def test_a_directory_that_is_no_run_says_which_files_are_missing(depthroute, tmp_path, run):
    (run / "config.json").unlink()
    err = failure(depthroute, tmp_path, run)
    assert "is not a run directory, config.json is missing" in err
    assert "config.json and metrics.jsonl are missing" in failure(depthroute, tmp_path, tmp_path)
    err = failure(depthroute, tmp_path, run / "metrics.jsonl")
    assert "is not a run directory" in err


def test_a_pipe_in_place_of_a_file_is_not_waited_for(depthroute, tmp_path, run):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "metrics.jsonl is missing" in failure(depthroute, tmp_path, run)


@pytest.mark.parametrize("file", ["metrics.jsonl", "traces.json"])
def test_files_that_name_other_methods_are_not_of_one_run(depthroute, tmp_path, run, file):
    """A configuration from one run beside the records of another."""
    text = (run / file).read_text()
    (run / file).write_text(text.replace('"delta"', '"delta-block"'))
    err = failure(depthroute, tmp_path, run)
    assert "'delta-block'" in err and "'standard', 'delta'" in err and "not of one run" in err


def test_a_seed_that_was_not_asked_for_is_not_of_the_run(depthroute, tmp_path, run):
    edit(run / "config.json", lambda c: c | {"seeds": [0]})
    assert "has seed 1 and config.json only 0" in failure(depthroute, tmp_path, run)


def test_an_unfinished_run_gives_the_page_of_what_there_is(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "traces.json").unlink()
    for count in (0, 1, 3, 12, 30, 60):
        (run / "metrics.jsonl").write_text("".join(lines[:count]))
        write_report([run], tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "<b>run</b></a> (unfinished)" in page
        validated = any('"validation"' in line for line in lines[:count])
        assert validated or "not validated yet" in page
    assert "No run was validated yet" not in page


def test_a_run_of_no_steps_has_its_settings(run, tmp_path):
    edit(run / "config.json", lambda c: c | {"train": c["train"] | {"steps": 0}})
    (run / "metrics.jsonl").write_text("")
    (run / "traces.json").unlink()
    write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "No run was validated yet" in page and 'id="panel-settings"' in page


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "1e300"])
def test_a_loss_that_is_no_number_is_shown_as_divergence(run, tmp_path, bad):
    text = (run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for record in lines:
        if record["event"] == "validation" and record["method"] == "delta":
            record["loss"] = "BAD"
    new = "".join(json.dumps(record) + "\n" for record in lines).replace('"BAD"', bad)
    (run / "metrics.jsonl").write_text(new)
    data = write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "diverged (seed 0 step 20, seed 1 step 20)" in page and "best" not in cells(page)
    assert data["series"][1]["validation"]["steps"] == []
    assert data["series"][1]["row"]["validation_loss"] is None
    json.loads(json.dumps(data, allow_nan=False))


def cells(page):
    return re.search(r"<tbody>.*?</tbody>", page)[0]


def test_weights_that_are_no_numbers_are_not_drawn_and_said(run, tmp_path):
    def spoil(traces):
        for trace in traces["traces"]:
            for site in trace["sites"]:
                site["weights"][0] = math.nan
        return traces

    edit(run / "traces.json", spoil)
    routing = {"event": "routing", "method": "delta", "mean_normalised_max": 0.3}
    add_line(run, json.dumps(routing) + "\n")
    data = write_report([run], tmp_path / "page.html")
    assert data["series"][1]["trace"] is None
    assert "No routing was recorded for delta" in (tmp_path / "page.html").read_text()


def test_names_that_no_page_or_drawing_may_hold_are_spelled_out(tmp_path):
    name = "a\x1b[31m\u202eb\udcff{{body}}{{data}}"
    run = write_run(tmp_path / name, ("standard", "delta"), layers=2, steps=20)
    for file in FILES:
        text = (run / file).read_text()
        (run / file).write_text(text.replace('"delta"', '"\\u0000\\ud800"'))
    write_report([run, run], tmp_path / "page.html", title="\x07{{style}}\udcff")
    page = (tmp_path / "page.html").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
    assert page.count("<style>") == 1 and r"a\x1b[31m\u202eb\udcff{{body}}{{data}}" in page
    for path in write_figures([run, run], tmp_path / "figures"):
        assert not re.search("[\x00-\x08\x0b-\x1f]", path.read_text())


def test_a_run_can_be_looked_at_while_it_is_written(run, tmp_path):
    """Read-only: a page of a run that is going on leaves it as it is."""
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("")
    (run / "traces.json").unlink()
    before = sorted(p.name for p in run.iterdir())

    def write():
        with (run / "metrics.jsonl").open("a") as file:
            for start in range(0, len(lines), 7):
                file.write(lines[start : start + 7])
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    pages = 0
    while writer.is_alive() or not pages:
        write_report([run], tmp_path / "page.html")
        pages += 1
    writer.join()
    assert sorted(p.name for p in run.iterdir()) == before
    assert (run / "metrics.jsonl").read_text() == lines


def test_a_run_that_may_only_be_read_is_enough(run, tmp_path):
    for path in [*run.iterdir(), run]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    write_report([run], tmp_path / "page.html")
    run.chmod(0o755)


def places(value, path=()):
    """Every place inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from places(inner, (*path, key))


def spoiled(value, draw):
    """One place of ``value`` replaced, removed or doubled."""
    path = draw.choice(list(places(value)))
    if not path:
        return draw.choice(JUNK)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if draw.random() < 0.25:
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw.choice(_others(inner[path[-1]], draw))
    return value


def _others(value, draw):
    """Junk, or something of the same kind."""
    if draw.random() < 0.3 or not isinstance(value, int | float | str):
        return JUNK
    return WORDS if isinstance(value, str) else NUMBERS


def spoil(run, draw):
    file = run / draw.choice(FILES)
    content = file.read_bytes()
    how = draw.random()
    if how < 0.15:
        file.write_bytes(content[: draw.randrange(len(content))])
    elif how < 0.3:
        at = draw.randrange(len(content))
        file.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
        )
    elif file.suffix == ".json":
        file.write_text(json.dumps(spoiled(json.loads(content), draw)))
    else:
        lines = content.decode().splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(spoiled(json.loads(lines[at]), draw))
        file.write_text("\n".join(lines) + "\n")


def try_damage(tmp_path, seeds):
    """How many of the damaged runs gave a page; the others gave an error of ours."""
    pages = 0
    for seed in seeds:
        draw = random.Random(seed)
        methods = ("standard", "delta", "depth-attention")
        run = write_run(tmp_path / f"run{seed}", methods, layers=2, seeds=(0, 1), steps=20)
        for _ in range(draw.choice((1, 1, 3))):
            if all((run / file).stat().st_size for file in FILES):
                with contextlib.suppress(ValueError):  # damaged already, so that it is no JSON
                    spoil(run, draw)
        with contextlib.suppress(DepthrouteError):
            data = write_report([run], tmp_path / "page.html")
            json.dumps(data, allow_nan=False)
            pages += 1
    return pages


def test_damage_of_any_kind_gives_a_page_or_one_line(tmp_path):
    pages = try_damage(tmp_path, range(120))
    assert 15 < pages < 100  # both happen


@pytest.mark.slow
def test_damage_of_any_kind_gives_a_page_or_one_line_thousands_of_times(tmp_path):
    assert try_damage(tmp_path, range(1000, 5000)) > 500
