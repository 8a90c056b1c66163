"""The report page without a browser: well-formed, complete, and true to the runs."""

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from tests.runs import METHODS, write_run

from depthroute.diagnostics.figures import COLORS, SPARE, figures, palette
from depthroute.diagnostics.report import PANELS, write_report
from depthroute.diagnostics.report_data import collect
from depthroute.diagnostics.svg import log_ticks, nice_ticks
from depthroute.diagnostics.svg_map import LEVELS, level_of, ramp, short_name
from depthroute.methods import NAMES

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order; keeps ids, links and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.scripts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self._keep(dict(attributes))
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attributes):
        self._keep(dict(attributes))

    def _keep(self, attributes):
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[k] for k in ("src", "href") if k in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Six methods of 96 layers, and the page."""
    root = tmp_path_factory.mktemp("deep")
    run = write_run(root / "run", layers=96, memory=True)
    data = write_report([run], root / "report.html")
    return run, data, (root / "report.html").read_text()


def test_the_page_is_well_formed_and_needs_nothing_else(deep):
    _, _, text = deep
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert page.links and all(link[1:] in page.ids for link in page.links)  # within the page
    assert "{{" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert len(text.encode()) < 5e6


def test_every_panel_is_there(deep):
    page = Page(deep[2])
    for name in (*PANELS, "results", "settings"):
        is_drawn = name not in ("sweep", "ladder")  # a comparison at one value and size has none
        assert (f"panel-{name}" in page.ids) == is_drawn
    assert {"curves", "sharpness", "magnitudes", "cost"} <= set(page.ids)
    maps = [name for name in page.ids if name.startswith("map-")]
    assert len(maps) == 10  # standard chooses nothing; each is drawn wide and narrow
    assert sum(name.endswith("-narrow") for name in maps) == 5


def test_the_embedded_data_are_the_runs(deep):
    run, data, text = deep
    embedded = json.loads(Page(text).scripts[0])
    assert {key: embedded[key] for key in data} == json.loads(json.dumps(data))
    config = json.loads((run / "config.json").read_text())
    assert embedded["runs"][0]["config"] == config
    assert [s["method"] for s in embedded["series"]] == list(METHODS)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    traces = json.loads((run / "traces.json").read_text())["traces"]
    for series in embedded["series"]:
        for step, mean in zip(
            series["validation"]["steps"], series["validation"]["mean"], strict=True
        ):
            losses = [
                r["loss"]
                for r in records
                if (r["event"], r["method"], r.get("step"))
                == ("validation", series["method"], step)
            ]
            assert len(losses) == 2 and mean == pytest.approx(statistics.fmean(losses), rel=1e-5)
        mine = [t for t in traces if t["method"] == series["method"]]
        for position, site in enumerate(series["trace"]["sites"]):
            pairs = zip(*(t["sites"][position]["weights"] for t in mine), strict=True)
            assert site["weights"] == pytest.approx([sum(p) / 2 for p in pairs], rel=1e-3)
        assert series["cost"]["peak_memory_bytes"] == mine[0]["peak_memory_bytes"]


def test_paired_differences_subtract_the_standard_model_of_the_same_seed(tmp_path):
    data = collect([write_run(tmp_path / "run", ("standard", "delta"))])
    standard, delta = data["series"]
    assert standard["difference"] is None
    expected = [b - a for a, b in zip(*(s["validation"]["mean"] for s in data["series"]))]  # noqa: B905
    assert delta["difference"]["mean"] == pytest.approx(expected, abs=1e-4)


def test_every_figure_is_an_svg_file_of_its_own(deep):
    for figure in figures(deep[1]):
        root = ElementTree.fromstring(figure.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in figure.svg and "nan" not in figure.svg.lower()


def test_runs_of_one_name_are_told_apart_and_methods_keep_their_colours(tmp_path):
    paths = [write_run(tmp_path / x / "run", ("standard", "delta")) for x in ("a", "b")]
    data = collect(paths)
    labels = [s["label"] for s in data["series"]]
    assert labels == [f"{m} · run ({n})" for n in (1, 2) for m in ("standard", "delta")]
    colors = palette(data)
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]


def test_a_run_without_traces_or_memory_still_gives_its_curves(tmp_path):
    run = write_run(tmp_path / "run", ("delta", "delta:heads=4", "delta:init=gate"), seeds=(0,))
    (run / "traces.json").unlink()
    data = write_report([run], tmp_path / "out" / "page.html")
    assert len(set(palette(data))) == 3
    page = Page((tmp_path / "out" / "page.html").read_text())
    assert "panel-curves" in page.ids and "panel-maps" not in page.ids
    assert all(s["difference"] is None for s in data["series"])


def test_runs_of_one_model_each_are_set_beside_the_standard_one(tmp_path):
    """What `train` leaves: one method, no preset where it was fine-tuned, no baselines."""
    runs = [write_run(tmp_path / m, (m,), seeds=(0,)) for m in ("standard", "delta")]
    for run in runs:
        config = json.loads((run / "config.json").read_text())
        config |= {"kind": "finetune", "base": "some/model", "preset": None}
        del config["data"]["baselines"]
        (run / "config.json").write_text(json.dumps(config))
    data = write_report(runs, tmp_path / "page.html")
    assert [s["label"] for s in data["series"]] == ["standard · standard", "delta · delta"]
    assert [s["cost"]["relative_speed"] for s in data["series"]] == [1.0, 1.0]
    config = json.loads((runs[1] / "config.json").read_text())
    config["environment"]["devices"] = [{"device": "cpu", "name": "another"}]
    (runs[1] / "config.json").write_text(json.dumps(config))
    assert [s["cost"]["relative_speed"] for s in collect(runs)["series"]] == [1.0, None]
    assert "some/model" in Page((tmp_path / "page.html").read_text()).scripts[0]


def test_magnitudes_of_zero_and_unknown_ones_are_drawn_and_left_out(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"), seeds=(0,))
    traces = json.loads((run / "traces.json").read_text())
    for trace in traces["traces"]:
        trace["sublayers"][0] |= {"output_rms": 0.0, "gradient_rms": None}
        trace["sublayers"][2]["gradient_rms"] = None
    (run / "traces.json").write_text(json.dumps(traces))
    data = write_report([run], tmp_path / "page.html")
    (magnitudes,) = [f for f in figures(data) if f.name == "magnitudes"]
    facets = {f["title"]: f for f in magnitudes.hover["facets"]}
    assert facets["Attention: output rms"]["lines"][0]["y"][0] == 0
    assert len(facets["Attention: gradient rms at the output"]["lines"][0]["x"]) == 4


def test_names_cannot_break_out_of_the_page(tmp_path):
    run = write_run(tmp_path / "<b>run", ("standard", "delta"))
    write_report([run], tmp_path / "page.html", title="</script><script>alert(1)</script>")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert len(page.scripts) == 2 and "<b>run" not in text.replace("<b>&lt;b&gt;run", "")
    assert json.loads(page.scripts[0])["runs"][0]["name"] == "<b>run"


def test_mistakes_are_one_line(depthroute, tmp_path):
    status, _, err = depthroute("report", str(tmp_path))
    assert status == 2 and "is not a run directory" in err and len(err.splitlines()) == 1
    run = write_run(tmp_path / "run", ("standard",))
    (run / "traces.json").write_text("{")
    status, _, err = depthroute("report", str(run), "--out", str(tmp_path / "x.html"))
    assert status == 2 and "cannot read the run" in err


def test_the_command_writes_the_page_and_the_figures(depthroute, tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    arguments = ["report", str(run), "--out", str(tmp_path / "r.html")]
    status, out, err = depthroute(*arguments, "--figures", str(tmp_path / "figures"))
    assert status == 0, err
    assert "2 methods of 1 run" in out
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"curves.svg", "map-1.svg", "sharpness.svg", "magnitudes.svg", "cost.svg"}


def test_one_seed_is_said_and_no_spread_is_spoken_of(tmp_path):
    one = write_run(tmp_path / "one", ("standard", "delta"), seeds=(0,))
    two = write_run(tmp_path / "two", ("standard", "delta"), seeds=(0, 1))
    write_report([one], tmp_path / "one.html")
    write_report([two], tmp_path / "two.html")
    pages = [(tmp_path / name).read_text().split("<script")[0] for name in ("one.html", "two.html")]
    said = [" ".join(re.findall(r"<p>(.*?)</p>", page)) for page in pages]
    assert "one seed" in said[0] and "no band" in said[0] and "±" not in said[0]
    assert "± is the sample" in said[1] and "one seed" not in said[1].lower()
    assert not any("{seeds}" in page for page in pages)


def test_the_loss_charts_share_their_axis_from_the_start_of_training(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))  # first validated at step 10 of 40
    drawn = next(f for f in figures(collect([run])) if f.name == "curves")
    assert [f["x_range"] for f in drawn.hover["facets"]] == [[0, 40 * 64]] * 3


def test_large_counts_among_the_settings_have_separators(tmp_path):
    run = write_run(tmp_path / "run", ("standard",))
    edit(run / "config.json", lambda c: c | {"data": c["data"] | {"train_tokens": 54265304}})
    write_report([run], tmp_path / "page.html")
    assert "<td>54,265,304</td>" in (tmp_path / "page.html").read_text()


def test_shades_and_ticks():
    assert level_of(0) == 0 and level_of(1) == LEVELS - 1
    levels = [level_of(w / 100) for w in range(101)]
    assert levels == sorted(levels) and level_of(0.01) > 0
    assert len(ramp()) == len(ramp(is_dark=True)) == LEVELS
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert nice_ticks(3, 3) == [3]
    assert log_ticks(0.5, 20) == pytest.approx([0.5, 1, 2, 5, 10, 20])
    assert log_ticks(0.15, 0.9) == pytest.approx([0.2, 0.3, 0.5, 0.7])  # 0.2 and 0.5 say too little
    names = ("embedding", "layers.3.attention", "layers.3.mlp", "block.2", "partial", "layers.4")
    assert [short_name(n) for n in names] == ["E", "3a", "3m", "b2", "now", "4"]


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_run_without_traces_says_whose_routing_is_missing(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    routing = {"event": "routing", "seed": 0, "method": "delta", "step": 40}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(routing | {"mean_normalised_max": 0.3}) + "\n")
    (run / "traces.json").unlink()
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    Page(page)
    assert "No routing was recorded for delta:" in page
    assert 'id="panel-cost"' in page and 'id="panel-sharpness"' not in page


def test_a_trace_of_a_run_of_one_model_need_not_name_it(tmp_path):
    run = write_run(tmp_path / "run", ("delta",), seeds=(0,))
    bare = ("method", "seed", "peak_memory_bytes")
    edit(
        run / "traces.json",
        lambda t: {"traces": [{k: v for k, v in t["traces"][0].items() if k not in bare}]},
    )
    (series,) = collect([run])["series"]
    assert series["trace"]["num_layers"] == 6 and series["cost"]["peak_memory_bytes"] is None


def test_without_a_standard_model_cost_is_shown_as_measured(tmp_path):
    run = write_run(tmp_path / "run", ("delta", "delta-block"), memory=True)
    cost = next(f for f in figures(collect([run])) if f.name == "cost")
    assert "Training tokens per second<" in cost.svg and "Peak memory of a step<" in cost.svg
    assert "relative" not in cost.svg and 'class="zero"' not in cost.svg


def test_the_lowest_loss_is_marked_among_runs_on_the_same_text_only(tmp_path):
    runs = [write_run(tmp_path / n, (m,)) for n, m in (("a", "standard"), ("b", "delta"))]
    other = write_run(tmp_path / "c", ("x0-skip",))
    edit(other / "config.json", lambda c: c | {"data": {"name": "other", "baselines": {}}})
    write_report([*runs, other], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert len(re.findall('<td class="best"', page)) == 1
    row = re.search(r"<tr>(?:(?!</tr>).)*x0-skip</td>(.*?)</tr>", page)[1]
    assert ">c</a></td>" in row and 'class="best"' not in row


def test_runs_that_differ_in_methods_alone_share_their_settings(tmp_path):
    runs = [write_run(tmp_path / n, (m,)) for n, m in (("a", "standard"), ("b", "delta"))]
    again = write_run(tmp_path / "c", ("delta",))
    edit(again / "config.json", lambda c: c | {"methods": {"delta": {"method": "other"}}})
    write_report([*runs, again], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h3>Training</h3>") == 1 and page.count("<h3>Methods</h3>") == 1
    for number, name in enumerate("abc"):
        assert f'<span id="run-{number}"><b>{name}</b> <code>{tmp_path / name}</code>' in page
    assert "<td>delta · c</td><td>method other</td>" in page


def test_a_layer_has_the_same_height_in_every_map(tmp_path):
    data = collect([write_run(tmp_path / "run", ("delta",))])
    (routing,) = [f for f in figures(data) if f.name.startswith("map-")]
    attention, mlp = routing.hover["maps"]
    assert attention["sites"][:2] == [None, "layers.1.attention"]
    assert mlp["sites"][:2] == ["layers.0.mlp", "layers.1.mlp"] and mlp["sites"][-1] == "final"
    sizes = [box["box"][3] / len(box["sites"]) for box in (attention, mlp)]
    assert sizes[0] == pytest.approx(sizes[1]) and attention["box"][1] == mlp["box"][1]


def test_every_method_has_a_colour_of_its_own_and_some_are_left_for_settings():
    assert COLORS.keys() == NAMES.keys()
    assert len({*COLORS.values(), *SPARE}) == len(COLORS) + len(SPARE) and len(SPARE) >= 3
