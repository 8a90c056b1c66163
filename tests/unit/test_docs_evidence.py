"""The evidence page: what a verdict is, and that it says what the runs say."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from tests.evidence import METHODS, ROOT, empty_results, of_text, put
from tests.runs import write_ladder, write_run, write_sweep

from bench import evidence as distilling
from depthroute.config import parse_methods
from depthroute.data import sources
from depthroute.errors import DepthrouteError
from depthroute.methods import BASELINE
from depthroute.runs.directory import RunDirectory
from depthroute.runs.inference import Law
from depthroute.runs.summary import over_seeds, summarise

import generate_evidence as generator  # isort: skip
import results_data  # isort: skip
import results_evidence as evidence  # isort: skip


@pytest.fixture
def results(tmp_path, monkeypatch):
    with empty_results(tmp_path, monkeypatch) as folder:
        yield folder


def outcome(*values, null=0.0, diverged=()):
    found = over_seeds(dict(enumerate(values)))
    return evidence.Outcome("a", "", found, null, diverged)


@pytest.mark.parametrize(
    ("values", "direction", "size", "expected"),
    [
        ((-0.10, -0.11, -0.12), "lower", (), "confirmed"),
        ((-0.10, -0.11, -0.12), "higher", (), "contradicted"),
        ((0.10, 0.11, 0.12), "lower", (), "contradicted"),
        ((0.10, 0.11, 0.12), "higher", (), "confirmed"),
        ((-0.10, -0.11, 0.10), "lower", (), "not confirmed"),
        ((-0.01, -0.11, -0.30), "lower", (), "not confirmed"),  # all below zero, yet too far apart
        ((0.0, 0.0, 0.0), "lower", (), "not confirmed"),
        ((-0.10, -0.11, -0.12), "lower", (-0.11,), "confirmed"),
        ((-0.10, -0.11, -0.12), "lower", (-0.5, -0.115), "confirmed"),
        ((-0.10, -0.11, -0.12), "lower", (-0.5, -0.4), "confirmed, but smaller than they said"),
        ((-0.10, -0.11, -0.12), "lower", (-0.01,), "confirmed, and larger than they said"),
        ((0.10, 0.11, 0.12), "higher", (0.4,), "confirmed, but smaller than they said"),
        ((-0.10, -0.11, -0.12), "higher", (0.4,), "contradicted"),
        ((-0.10, -0.11), "lower", (), "no verdict: 2 of 3 seeds"),
        ((-0.10,), "lower", (), "no verdict: 1 of 3 seeds"),
        ((), "lower", (), "no verdict: 0 of 3 seeds"),
    ],
)
def test_a_verdict_is_what_the_whole_interval_allows(values, direction, size, expected):
    assert evidence.verdict(outcome(*values), direction, size) == expected


def test_an_interval_that_touches_the_point_between_confirms_nothing():
    for ends in ([-0.2, 0.0], [0.0, 0.2]):
        found = {"mean": 0.0, "interval": ends, "by_seed": {"0": 0, "1": 0, "2": 0}}
        for direction in ("lower", "higher"):
            result = evidence.Outcome("a", "", found, 0.0)
            assert evidence.verdict(result, direction) == "not confirmed"


def test_a_factor_is_held_against_one():
    up = outcome(1.10, 1.11, 1.12, null=1.0)
    assert evidence.verdict(up, "higher", [1.11]) == "confirmed"
    assert evidence.verdict(up, "higher", [1.25]) == "confirmed, but smaller than they said"
    assert evidence.verdict(outcome(0.9, 0.91, 0.92, null=1.0), "higher") == "contradicted"
    assert up.number.startswith("1.11x [")


def test_a_method_that_diverged_has_no_verdict():
    result = outcome(-0.10, -0.11, -0.12, diverged=("delta",))
    assert evidence.verdict(result, "lower") == "no verdict: delta diverged"


def test_the_plan_names_methods_measures_and_grids_that_exist():
    plan = evidence.plan()
    for claim in plan["claim"]:
        assert {"paper", "said"} <= claim.keys()
        if "not_testable" in claim:
            continue
        first, second = claim["methods"]
        assert [m.label for m in parse_methods(f"{first},{second}")] == [first, second]
        assert claim["measure"] in {*evidence.MEASURES, *evidence.WORTH, evidence.GROWTH}
        assert claim["direction"] in ("lower", "higher")
        null = 1.0 if claim["measure"] in evidence.WORTH else 0.0
        is_higher = claim["direction"] == "higher"
        assert all((size > null) == is_higher for size in claim.get("size", ()))
        assert set(claim["grids"]) <= plan["grid"].keys()
        if claim["measure"] in evidence.WORTH:
            assert second == BASELINE, "what a method is worth is beside standard"


def test_pictures_and_data_are_those_that_the_page_names():
    drawn = generator.pictures()
    kept = {path.name: path.read_text() for path in generator.PICTURES.glob("evidence_*.svg")}
    assert kept == drawn, "run `python docs/generate_evidence.py`"
    page = generator.PAGE.read_text()
    assert set(re.findall(r"\((?:images/)(evidence_\w+\.svg)\)", page)) == set(drawn)
    for name in re.findall(r"Data: `(bench/results/\w+\.json)`", page):
        assert (ROOT / name).is_file()


def test_no_data_give_no_verdict(results):
    page = evidence.claims() + evidence.grids()
    assert "confirmed" not in page and "contradicted" not in page
    assert page.count("not yet run") == sum("grids" in claim for claim in evidence.plan()["claim"])


def test_the_numbers_of_the_page_are_those_of_the_run(results, tmp_path):
    run = write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2))
    put(results, "a", run)
    directory = RunDirectory(run)
    rows = summarise(directory.read_json("config.json"), directory.records())["rows"]
    delta = next(row for row in rows if row["method"] == "delta")
    (field,) = evidence.fields("a")
    assert evidence.difference(field, "delta", "standard") == delta["difference"]
    low, high = delta["difference"]["interval"]
    shown = f"{delta['difference']['mean']:+.4f} [{low:+.4f}, {high:+.4f}]"
    assert shown in evidence.claims() and shown in evidence.grids()
    assert f"{delta['validation_loss']['by_seed']['2']:.4f}" in evidence.grids()
    assert "3 seeds" in evidence.grids() and "[grid a](#grid-a)" in evidence.claims()


def test_the_summary_tells_apart_what_the_intervals_do(results, tmp_path):
    assert evidence.in_short() == ""
    put(results, "a", write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2)))
    data = results_data.load("evidence_a")

    def said(**losses):
        for series in data["series"]:
            values = losses[series["method"].replace("-", "_")]
            found = over_seeds(dict(enumerate(values)))
            series["row"]["validation_loss"] = json.loads(json.dumps(found))
        return " ".join(evidence.in_short().split())

    text = said(standard=(3.0, 3.1, 3.2), delta=(2.9, 3.01, 3.1), attnres_full=(2.5, 3.2, 3.0))
    assert "better by 95% intervals are delta (-0.097); not told apart" in text
    assert "from it are attnres-full (-0.200)." in text and "worse" not in text
    text = said(standard=(3.0, 3.1, 3.2), delta=(3.1, 3.21, 3.3), attnres_full=(3.0, 3.11, 3.2))
    assert "are none; worse delta (+0.103); not told apart" in text
    text = said(standard=(3.0, 3.1), delta=(2.9, 3.01), attnres_full=(2.5, 3.2))
    assert text == "", "two seeds say nothing, of any method"


def test_a_grid_names_what_is_still_to_be_run(results, tmp_path):
    put(results, "c", write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2)))
    assert "Still to be run" in evidence.grids() and "x0-skip" not in METHODS
    (field,) = evidence.fields("c")
    grid = evidence.plan()["grid"]["c"]
    planned, *others = grid["commands"]
    methods = re.search(r"--methods (\S+)", planned)[1].split(",")
    whole = evidence.Field("c", field.run, dict.fromkeys(methods, field.series["delta"]))
    assert evidence._missing(grid, [whole]) == others
    first, *rest = evidence._missing(grid, [field])
    absent = [method for method in methods if method not in METHODS]
    narrowed = planned.replace(",".join(methods), ",".join(absent)).replace("grid_c", "grid_c_more")
    assert first == narrowed
    named = [re.search(r"--methods (\S+)", command)[1] for command in rest]
    assert named == ["delta:sources=cumulative", "attnres-full:sources=cumulative"]


STANDS_FOR = {"CHOSEN": "zero", "DELTA-BLOCK": "1e-3", "ATTNRES-BLOCK": "1e-3"}
"""What the plan writes for a value that another grid chooses."""


def test_what_is_still_to_be_run_is_taken_by_compare(depthroute, monkeypatch):
    """Up to where it would read the text."""

    def read(*_):
        raise DepthrouteError("all was understood")

    monkeypatch.setattr(sources, "prepare", read)
    planned = [
        command
        for name, grid in evidence.plan()["grid"].items()
        for command in (*evidence._missing(grid, evidence.fields(name)), *grid["commands"])
    ]
    for command in planned:
        _, *words = re.sub("|".join(STANDS_FOR), lambda m: STANDS_FOR[m[0]], command).split()
        if words[0] == "compare":
            _, _, err = depthroute(*words)
            assert "all was understood" in err, f"{command}: {err}"


def test_a_grid_asks_for_the_seeds_that_its_methods_lack(results, tmp_path):
    put(results, "a", write_sweep(tmp_path / "sweep", METHODS))
    grid = evidence.plan()["grid"]["a"]
    few = [c for c in evidence._missing(grid, evidence.fields("a")) if "--seeds 2-2" in c]
    (command,) = few
    words = command.split()
    assert words[words.index("--methods") + 1] == "standard,attnres-full,delta"
    assert not {"--sweep", "--jobs"} & {*words}
    assert words[words.index("--seeds") - 1] == "lr=0.003"
    assert words[-2:] == ["--out", "runs/grid_a_0.003"]
    again = write_run(tmp_path / "again", METHODS, seeds=(2,), steps=10)
    settings = json.loads((again / "config.json").read_text())
    sweep = json.loads((tmp_path / "sweep" / "config.json").read_text())
    for config, path in ((settings, again), (sweep, tmp_path / "sweep")):
        config["data"]["sha256"] = "1"
        (path / "config.json").write_text(json.dumps(config))
    settings["train"]["lr"] = 0.003
    (again / "config.json").write_text(json.dumps(settings))
    put(results, "a", tmp_path / "sweep", again)
    (field,) = evidence.fields("a")
    assert not any("2-2" in command for command in evidence._missing(grid, [field]))


def test_what_a_difference_is_worth_is_judged_where_two_laws_agree(results, tmp_path, monkeypatch):
    run = of_text(write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2)))
    config = json.loads((run / "config.json").read_text())
    config["data"]["unit"] = "token"  # whose losses have a published law
    (run / "config.json").write_text(json.dumps(config))
    put(results, "a", run)
    claim = {"methods": ["delta", "standard"], "grids": ["a"], "measure": "speed-up"}
    (alone,) = evidence.outcomes(claim)
    assert evidence.verdict(alone, "higher") == "no verdict: no law of this text is known yet"
    own = {"floor": 0.0, "exponent": 0.2, "source": "fitted"}
    monkeypatch.setattr(evidence, "own_law", lambda: own)
    (both,) = evidence.outcomes(claim)
    assert both.statistics["mean"] != both.also["mean"]
    assert both.also == alone.statistics
    higher = {"mean": 1.2, "interval": [1.1, 1.3], "by_seed": dict.fromkeys("012", 1.2)}
    unsure = higher | {"interval": [0.9, 1.5]}
    lower = higher | {"interval": [0.7, 0.9]}
    for one, other, expected in (
        (higher, higher | {"interval": [1.01, 1.02]}, "confirmed"),
        (higher, unsure, "not confirmed"),
        (lower, higher, "not confirmed"),
        (lower, lower, "contradicted"),
        (higher, higher | {"by_seed": {}}, "not confirmed"),
    ):
        judged = evidence.Outcome("a", "", one, 1.0, also=other)
        assert evidence.verdict(judged, "higher", [1.25]) == expected
    claim["measure"] = "speed-up by time"
    data = results_data.load("evidence_a")
    for series in data["series"]:
        series["row"]["relative_speed"] = None
    (timeless,) = evidence.outcomes(claim)
    assert evidence.verdict(timeless, "higher") == "no verdict: its speed was not measured"


def test_a_method_that_diverged_is_not_summed_up_and_says_so_beside_its_losses(results, tmp_path):
    data = put(results, "a", of_text(write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2))))
    assert "delta (" in evidence.in_short()
    for series in data["series"]:
        if series["method"] == "delta":
            series["row"]["diverged"] = [{"seed": 3, "step": 7}]
    (results / "evidence_a.json").write_text(json.dumps(data))
    results_data.load.cache_clear()
    assert "delta (" not in evidence.in_short() and "attnres-full (" in evidence.in_short()
    rows = [row for row in evidence.grids().splitlines() if "diverged in seed 3" in row]
    assert len(rows) == 1 and re.match(r"\| delta \| \d\.\d+, .*, diverged in seed 3 \|", rows[0])


def test_methods_that_were_not_tuned_are_not_said_to_be(results, tmp_path):
    """As where rates are carried over from another size, or a look has one seed."""
    orders = dict.fromkeys("012", "same")

    def said(*runs, seeds):
        data = put(results, "a", *runs)
        for run in data["runs"]:
            run["summary"] |= {"data_order": orders, "base_parameters": 1000}
        for series in data["series"]:
            count = seeds.get(series["method"], 3)
            losses = over_seeds({seed: 3.0 + 0.01 * seed**2 for seed in range(count)})
            series["row"]["validation_loss"] = json.loads(json.dumps(losses))
        (results / "evidence_a.json").write_text(json.dumps(data))
        results_data.load.cache_clear()
        assert len(evidence.fields("a")) == 1
        return " ".join(evidence.in_short().split())

    sweep = write_sweep(tmp_path / "sweep", ("standard", "delta"))
    carried = write_run(tmp_path / "run", ("attnres-full",), steps=10)
    best = "**At 640 tokens, 3 seeds**, each method at its own best learning rate"
    assert said(sweep, seeds={}).startswith(f"{best} (")
    assert said(sweep, carried, seeds={"attnres-full": 1}).startswith(f"{best} (")
    assert said(sweep, carried, seeds={}).startswith(f"{best} except attnres-full (")
    alone = write_run(tmp_path / "alone", METHODS, steps=10)
    assert said(alone, seeds={}).startswith("**At 640 tokens, 3 seeds** (")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("train", {"optimizer": "muon"}),
        ("train", {"weight_decay": 0.5}),
        ("train", {"precision": "bf16"}),
        ("train", {"validation_sequences": 1}),
        (None, {"equal": "time"}),
        (None, {"base": "another"}),
        ("data", {"sha256": "2"}),
        ("data", {"validation_sha256": "2"}),
        ("data", {"tokenizer": {"name": "bytes"}}),
    ],
)
def test_runs_that_were_trained_or_judged_otherwise_are_not_set_beside_each_other(
    results, tmp_path, part, change
):
    one = batched(tmp_path / "one", ("standard",), 1)
    other = batched(tmp_path / "other", ("delta",), 1)
    put(results, "a", one, other)
    assert len(evidence.fields("a")) == 1
    before = {"equal": "tokens", "base": "one"}
    for path, values in ((one, {name: before.get(name) for name in change}), (other, change)):
        config = json.loads((path / "config.json").read_text())
        (config if part is None else config[part]).update(values)
        (path / "config.json").write_text(json.dumps(config))
    put(results, "a", one, other)
    assert len(evidence.fields("a")) == 2


def test_seeds_that_saw_other_batches_do_not_continue_a_field(results, tmp_path):
    first = of_text(batched(tmp_path / "first", ("standard", "delta"), 1))
    more = of_text(batched(tmp_path / "more", ("standard",), 2, seeds=(3, 4)))
    again = of_text(batched(tmp_path / "again", ("delta",), 3, seeds=(3, 4)))
    put(results, "a", first, more, again)
    joined, apart = evidence.fields("a")
    assert len(joined.series["standard"]["row"]["validation_loss"]["by_seed"]) == 5
    assert len(joined.series["delta"]["row"]["validation_loss"]["by_seed"]) == 3
    assert apart.series.keys() == {"delta"}


def test_two_seeds_are_shown_and_not_judged(results, tmp_path):
    put(results, "a", write_sweep(tmp_path / "sweep", METHODS))
    rows = [row for row in evidence.claims().splitlines() if "delta less standard" in row]
    assert rows and all("no verdict: 2 of 3 seeds" in row for row in rows)
    grids = evidence.grids()
    assert "best lr" in grids and "| 0.003 |" in grids
    tried = results_data.load("evidence_a")["runs"][0]["config"]["sweep"]["methods"]["delta"]
    for point in tried["points"]:
        assert f"{point['value']}: {point['loss']:.3f}" in grids
    for file, (_, svg) in evidence.pictures("a").items():
        assert f"images/{file}" in grids
        ElementTree.fromstring(svg)


def batched(path, methods, crc, seeds=(0, 1, 2)):
    """A run of which it is known which batches it saw."""
    write_run(path, methods, seeds=seeds)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["event"] == "step":
            record["batch_crc32"] = crc + record["step"]
        if record["event"] == "start":
            record["parameters"] = 1000 + record["routing_parameters"]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_methods_are_compared_across_runs_only_if_they_saw_the_same_batches(results, tmp_path):
    first = batched(tmp_path / "first", ("standard",), 7)
    put(results, "a", first, batched(tmp_path / "same", ("delta",), 7))
    (field,) = evidence.fields("a")
    assert evidence.difference(field, "delta", "standard")["interval"] is not None
    put(results, "a", first, batched(tmp_path / "other", ("delta",), 8))
    assert len(evidence.fields("a")) == 2
    another = batched(tmp_path / "another", ("delta",), 7)
    config = json.loads((another / "config.json").read_text())
    config["preset"]["model"]["initializer_range"] = 0.5
    (another / "config.json").write_text(json.dumps(config))
    put(results, "a", first, another)
    assert len(evidence.fields("a")) == 2, "models that start otherwise are not set side by side"
    assert "delta less standard" not in evidence.claims()


def test_methods_with_more_seeds_stand_beside_those_with_fewer(results, tmp_path):
    """And get the seeds of a third run, each method as where it was trained first."""
    first = batched(tmp_path / "first", ("standard",), 7, (0, 1))
    more = batched(tmp_path / "more", ("delta",), 7, (0, 1, 2))
    last = batched(tmp_path / "last", ("delta",), 7, (3,))
    rates = {first: 0.001, more: 0.003, last: 0.003}
    put(results, "a", *(of_text(path, lr=rate) for path, rate in rates.items()))
    (field,) = evidence.fields("a")
    assert [*evidence.losses_of(field.series["delta"])] == [*"0123"]
    found = evidence.difference(field, "delta", "standard")
    assert [*found["by_seed"]] == [*"01"]
    assert field.words.endswith("2 to 4 seeds") and field.compared(found).endswith(", 2 seeds")
    apart = batched(tmp_path / "apart", ("delta",), 7, (2, 3))
    put(results, "a", first, apart)
    assert len(evidence.fields("a")) == 2


def test_runs_are_added_to_what_a_data_file_has(results, tmp_path):
    one = batched(tmp_path / "one", ("standard", "delta"), 7)
    two = batched(tmp_path / "two", ("attnres-full",), 7)
    at_once = put(results, "a", one, two)
    put(results, "a", one)
    file = results / "evidence_a.json"
    in_parts = put(results, "a", file, two)
    for name in ("run", "method", "label"):
        assert [s[name] for s in in_parts["series"]] == [s[name] for s in at_once["series"]]
    (field,) = evidence.fields("a")
    assert [*field.series] == ["standard", "delta", "attnres-full"]
    assert len(evidence.difference(field, "attnres-full", "delta")["by_seed"]) == 3
    with pytest.raises(DepthrouteError, match=r"run 'two' is there already"):
        put(results, "a", file, two)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DepthrouteError, match=r"other.json' is no evidence"):
        put(results, "a", tmp_path / "other.json", two)


def test_more_seeds_join_what_a_sweep_chose(results, tmp_path):
    methods = "standard", "delta"
    swept = of_text(write_sweep(tmp_path / "swept", methods), lr="by method")
    put(results, "a", swept)
    (before,) = evidence.fields("a")

    def fields(name, seeds=(2, 3), sha256="a text", lr=0.003):
        run = write_run(tmp_path / name, methods, seeds=seeds, steps=10)
        put(results, "a", swept, of_text(run, sha256, lr=lr))
        return evidence.fields("a")

    (after,) = fields("more")
    assert after.series["delta"]["row"]["relative_speed"] == 950 / 1000, "that of the sweep"
    assert "2 seeds" in before.words and "4 seeds" in after.words
    few, many = (evidence.difference(f, "delta", "standard")["by_seed"] for f in (before, after))
    assert few.items() <= many.items() and [*many] == [*"0123"]
    assert [len(f.series["delta"]["by_seed"]) for f in (before, after)] == [2, 4]
    assert len(fields("known seeds", seeds=(1, 2))) == 2
    assert len(fields("another rate", lr=0.001)) == 2
    assert len(fields("another text", sha256="another")) == 2
    with (swept / "metrics.jsonl").open("a") as records:  # stopped before it measured others
        records.write('{"event": "speed", "tokens_per_second": {"standard": 1000.0}}\n')
    (timed,) = fields("with its speed")
    assert timed.series["delta"]["row"]["relative_speed"] == pytest.approx(1 / 1.1)


def test_runs_of_different_length_are_each_judged_at_their_end(results, tmp_path):
    short = write_run(tmp_path / "short", METHODS, seeds=(0, 1, 2), steps=20)
    long = write_run(tmp_path / "long", METHODS, seeds=(0, 1, 2), steps=40)
    put(results, "a", long, short)
    found = {field.run["name"]: field for field in evidence.fields("a")}
    for run in (short, long):
        directory = RunDirectory(run)
        rows = summarise(directory.read_json("config.json"), directory.records())["rows"]
        ours = found[run.name].series
        assert [ours[row["method"]]["row"] for row in rows] == rows


def test_what_a_loss_is_worth_is_averaged_as_a_logarithm(results, tmp_path):
    run = write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2))
    data = put(results, "a", run)
    law = Law(1.5, 0.1, "here")
    data["runs"][0]["summary"]["law"] = law.to_dict()
    (results / "evidence_a.json").write_text(json.dumps(data))
    results_data.load.cache_clear()
    (field,) = evidence.fields("a")
    losses = [field.series[m]["row"]["validation_loss"]["by_seed"] for m in ("standard", "delta")]
    ups = [law.speed_up(losses[0][s], losses[1][s]) for s in ("0", "1", "2")]
    found = evidence.worth(field, "delta", by_time=False)
    assert found["mean"] == pytest.approx((ups[0] * ups[1] * ups[2]) ** (1 / 3))
    slower = evidence.worth(field, "delta", by_time=True)
    speed = field.series["delta"]["row"]["relative_speed"]
    assert slower["mean"] == pytest.approx(found["mean"] * speed)


def test_growth_is_from_the_smallest_size_to_the_largest(results, tmp_path):
    put(results, "a", write_ladder(tmp_path / "ladder", METHODS))
    found = evidence.fields("a")
    assert len(found) == 3
    for number, field in enumerate(found):
        field.run["parameters"] = 10**number
    (result,) = evidence._grown(found[::-1], "delta", "standard")
    small, *_, large = (evidence.difference(f, "delta", "standard")["by_seed"] for f in found)
    assert result.statistics["by_seed"] == {s: large[s] - small[s] for s in large}
    assert evidence._grown(found[:1], "delta", "standard") == []


def test_depth_is_judged_by_seed_and_by_its_last_third(results, tmp_path):
    run = write_run(tmp_path / "run", METHODS, seeds=(0, 1, 2), layers=6)
    traces = json.loads((run / "traces.json").read_text())["traces"]
    put(results, "b", run)
    (field,) = evidence.fields("b")
    mine = next(t for t in traces if t["method"] == "delta" and t["seed"] == 1)
    deep = [site["max_weight"] for site in mine["sites"] if site["layer"] >= 4]
    measure, _ = evidence.MEASURES["max weight"]
    assert measure(field.series["delta"])["1"] == pytest.approx(sum(deep) / len(deep))
    assert measure(field.series["standard"]) == {}  # nothing chooses there
    everyone = [t for t in traces if t["method"] == "delta"]
    deep = [s["max_weight"] for t in everyone for s in t["sites"] if s["layer"] >= 4]
    row = next(n for n in evidence._depth(field).splitlines() if n.startswith("| delta |"))
    assert f"| {sum(deep) / len(deep):.3f} / " in row.rpartition(" / ")[0] + " / "
    growth, _ = evidence.MEASURES["output growth"]
    assert min(growth(field.series["standard"]).values()) > 0  # as the runs are written
    uneven, _ = evidence.MEASURES["gradient unevenness"]
    assert set(uneven(field.series["standard"])) == {"0", "1", "2"}


def test_a_data_file_is_small_and_has_no_paths(tmp_path):
    run = write_sweep(tmp_path / "sweep", METHODS)
    (run / "run.toml").write_text(f'out = "{run.resolve()}"\ndata = "tokens:/home/me/papers"\n')
    data = distilling.distil([run])
    text = json.dumps(data)
    assert str(tmp_path) not in text and "/home" not in text
    assert 'data = "tokens:papers"' in data["runs"][0]["options"]
    assert data["machine"]["command"] == ["depthroute", "compare", "--out", "sweep"]
    assert len(text) < 100_000
    delta = next(s for s in data["series"] if s["method"] == "delta")
    assert set(delta["by_seed"]) == {"0", "1"} and delta["training"] is None


def test_epochs_are_tokens_over_those_of_the_text(tmp_path):
    run = write_run(tmp_path / "run", METHODS)
    config = json.loads((run / "config.json").read_text())
    config["data"]["train_tokens"] = 1280
    (run / "config.json").write_text(json.dumps(config))
    assert distilling.distil([run])["runs"][0]["epochs"] == 2.0  # 40 steps of 64


def test_a_run_without_one_whole_seed_is_no_evidence(tmp_path):
    run = write_run(tmp_path / "run", METHODS, seeds=(0, 1))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    whole = [r.get("seed") == 0 for r in records]
    (run / "metrics.jsonl").write_text(
        "".join(n for n, is_kept in zip(lines, whole, strict=True) if is_kept)
    )
    shutil.copytree(run, tmp_path / "less")
    assert distilling.distil([run])["runs"][0]["summary"]["seeds"] == [0]
    half = [n for n, r in zip(lines, records, strict=True) if r.get("step", 0) < 35]
    (tmp_path / "less" / "metrics.jsonl").write_text("".join(half))
    with pytest.raises(DepthrouteError, match="no seed with all methods at step 40, only at step"):
        distilling.distil([tmp_path / "less"])


def test_a_size_says_what_it_was_trained_with(results, tmp_path):
    run = of_text(write_run(tmp_path / "run"), optimizer="muon")
    put(results, "m", run)
    (field,) = evidence.fields("m")
    assert field.words.startswith("Muon, ")
