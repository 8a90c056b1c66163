"""A comparison at several sizes."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from tests.training import SETTINGS, SMALL, words

from depthroute import presets
from depthroute.config import parse_methods
from depthroute.diagnostics.report import write_report
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.runs import ladder as layout
from depthroute.runs.directory import open_run
from depthroute.runs.inference import PUBLISHED, fit_law
from depthroute.train import ladder as climbing
from depthroute.train import sweep as sweeping
from depthroute.train.compare import Comparison
from depthroute.train.sweep import Runner, Watch


def loss(compute, floor=1.7, scale=60.0, exponent=0.12):
    return floor + scale * compute**-exponent


def test_a_law_is_found_again_from_three_sizes_and_says_how():
    computes = [1e14, 1e15, 1e16]
    law = fit_law(computes, [loss(c) for c in computes], "token")
    assert law is not None
    assert law.floor == pytest.approx(1.7, abs=0.01)
    assert law.exponent == pytest.approx(0.12, abs=0.002)
    assert "fitted to standard's 3 sizes" in law.source and "few" in law.source


def test_two_sizes_give_the_exponent_alone_and_say_so():
    computes = [1e14, 1e15]
    law = fit_law(computes, [loss(c, floor=PUBLISHED.floor) for c in computes], "token")
    assert law is not None and law.floor == PUBLISHED.floor
    assert law.exponent == pytest.approx(0.12)
    assert "two sizes determine the exponent alone, so the floor is set to 1.6" in law.source
    of_bytes = fit_law(computes, [2.0, 1.0], "byte")
    assert of_bytes is not None and (of_bytes.floor, of_bytes.exponent) == (
        0.0,
        pytest.approx(0.30103),
    )


def test_losses_that_do_not_fall_with_compute_have_no_law():
    assert fit_law([1e14, 1e15], [2.0, 2.5], "token") is None
    assert fit_law([1e14], [2.0], "token") is None
    assert fit_law([1e14, 1e14], [2.0, 2.1], "token") is None
    assert fit_law([], [], "token") is None
    assert fit_law([1e14, 1e15, 1e16], [3.0, 2.9, 2.95], "token") is None


def test_losses_that_hardly_fall_any_more_are_no_floor_to_measure_a_better_one_by():
    assert fit_law([1e14, 1e15, 1e16], [3.0, 2.5, 2.49], "token") is None


@pytest.mark.parametrize("preset", ["tiny", "100m"])
@pytest.mark.parametrize("size", [2.5e6, 8e6])
def test_a_size_is_met_in_the_presets_proportions(preset, size):
    chosen = presets.get(preset)
    shape = climbing.shape_of(size, chosen, {})
    model = presets.with_model(chosen, shape)
    assert climbing.num_parameters(model) == pytest.approx(size, rel=climbing.NEAR)
    base = chosen.model
    aspects = [m["hidden_size"] / m["num_hidden_layers"] for m in (base, shape)]
    assert 0.4 < aspects[1] / aspects[0] < 2.5
    ratio = base["hidden_size"] / base["num_attention_heads"]
    assert shape["hidden_size"] / shape["num_attention_heads"] == ratio
    shared = base["num_attention_heads"] // base["num_key_value_heads"]
    assert shape["num_attention_heads"] // shape["num_key_value_heads"] == shared


def test_parameters_are_counted_without_embedding_and_head():
    count = climbing.num_parameters(presets.with_model(SMALL, {"vocab_size": 1000}))
    assert count == climbing.num_parameters(SMALL)
    assert climbing.num_flops(SMALL.model, count, 10) == 60 * (count + 256 * 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2.5M", "give at least two sizes, each once"),
        ("2.5M,2.5M", "give at least two sizes, each once"),
        ("0M,1M", "--ladder 0M=0.0 must be a finite number at least 1000"),
        ("99999999999B,1M", "at most 1e\\+12"),
        ("big,small", r"'big' is no size; give parameters with K, M or B, such as 2.5M,8M"),
        ("hidden_size=16,hidden=3", "unknown model setting 'hidden'"),
    ],
)
def test_a_ladder_that_has_no_meaning_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        climbing.parse(text, SMALL, {})


RUNGS = "num_hidden_layers=1,num_hidden_layers=2:intermediate_size=64"


def climb(path, *, resume=False, steps=2, sizes=RUNGS, clip=1.0, **watch):
    rungs = climbing.parse(sizes, SMALL, {})

    def sweep(rung):
        steps_ = steps * len(rung.shape)
        settings = replace(SETTINGS, steps=steps_, warmup_steps=0, lr=0.05, clip=clip)
        preset = presets.with_model(SMALL, rung.shape)
        methods = parse_methods("standard,delta")
        return sweeping.unswept(
            Comparison(preset, methods, (0, 1), settings, words(), torch.device("cpu"))
        )

    sweeps = climbing.prepare(rungs, sweep)
    run, _ = open_run(path, resume=resume)
    return climbing.run_ladder(rungs, sweeps, run, Runner(watch=Watch(**watch)), 20.0)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    path, notes = tmp_path_factory.mktemp("ladder") / "run", []
    return path, climb(path, note=notes.append), notes


def test_every_size_is_announced_before_the_first_run_and_ends_in_one_fit(climbed):
    _, summary, notes = climbed
    assert sum("runs of" in note for note in notes) == 2
    ladder = summary["ladder"]
    assert summary["is_complete"] and [r["tokens"] for r in ladder["rungs"]] == [128, 256]
    first, second = ladder["methods"]["standard"]["points"]
    assert first["loss"]["mean"] > second["loss"]["mean"]
    assert "two sizes determine the exponent alone" in ladder["law"]["source"]
    delta = ladder["methods"]["delta"]
    assert [p["difference"]["interval"] is not None for p in delta["points"]] == [True, True]
    # by its own law, and charged for its speed
    for point, one in zip(delta["points"], summary["summaries"], strict=True):
        loss = point["loss"]["mean"]
        standard = loss - point["difference"]["mean"]
        by_loss = (standard / loss) ** (1 / ladder["law"]["exponent"])
        assert point["speed_up"]["by_loss"] == pytest.approx(by_loss)
        speed = one["rows"][1]["relative_speed"]
        assert point["speed_up"]["by_wall_clock"] == pytest.approx(by_loss * speed)
    assert delta["trend"] is not None


def test_a_finished_ladder_is_only_read_again(climbed):
    path, summary, _ = climbed
    again = climb(path, resume=True, on_step=pytest.fail)
    assert again == summary == json.loads((path / "summary.json").read_text())


def test_a_directory_of_another_kind_is_not_made_a_ladder(climbed):
    path, _, _ = climbed
    with pytest.raises(ConfigError, match=r"holds a sweep and no ladder; give another --out"):
        climb(path / "rungs" / "num_hidden_layers=1", resume=True)


def test_the_page_of_a_ladder_shows_loss_against_compute_and_the_law(climbed, tmp_path):
    path, _, _ = climbed
    data = write_report([path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert data["ladder"]["methods"].keys() == {"standard", "delta"}
    panel = page.split('id="panel-ladder"')[1].split("</section>")[0]
    assert "training compute, FLOPs" in panel and "fitted to standard&#x27;s 2 sizes" in panel
    assert "Difference to standard, paired by seed" in panel
    assert "through so few sizes a guess" in panel
    table = page.split('id="panel-results"')[1].split("</section>")[0]
    assert table.count("<tr>") == 1 + 4 and "speed-up by loss" in table
    assert table.count('class="best"') == 2  # one a size
    with pytest.raises(DepthrouteError, match=r"is a ladder, which has a page of its own"):
        write_report([path, path], tmp_path / "two.html")


def test_a_ladder_without_standard_takes_the_published_law():
    row = {"method": "delta", "validation_loss": {"mean": 3.0}, "difference": None, "diverged": []}
    rungs = [{"name": n, "flops": f, "tokens": 10} for n, f in (("a", 1e14), ("b", 1e15))]
    summaries = [{"unit": "token", "tokens": 10, "rows": [dict(row)]} for _ in rungs]
    fitted = layout.fit(rungs, summaries)
    assert fitted["law"] == PUBLISHED.to_dict() and fitted["methods"]["delta"]["trend"] is None


def test_what_is_half_trained_or_diverged_has_no_place_on_a_ladder(climbed):
    _, summary, _ = climbed
    rungs, summaries = summary["ladder"]["rungs"], copy.deepcopy(summary["summaries"])
    summaries[1]["tokens"] -= 64
    fitted = layout.fit(rungs, summaries)
    assert [p["rung"] for p in fitted["methods"]["delta"]["points"]] == [rungs[0]["name"]]
    assert "fitted" not in fitted["law"]["source"] if fitted["law"] else True
    summaries = copy.deepcopy(summary["summaries"])
    (row,) = (row for row in summaries[0]["rows"] if row["method"] == "delta")
    row["diverged"] = [{"seed": 1, "step": 2}]
    fitted = layout.fit(rungs, summaries)
    assert [p["rung"] for p in fitted["methods"]["delta"]["points"]] == [rungs[1]["name"]]
    assert len(fitted["methods"]["standard"]["points"]) == 2


def test_a_ladder_that_would_train_on_something_else_is_refused_and_stays_as_it_is(climbed):
    path, _, _ = climbed
    before = (path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"started with 128 tokens at .* and now has 192"):
        climb(path, resume=True, steps=3)
    with pytest.raises(ConfigError, match=r"started with train.clip 1.0 and now has 0.5"):
        climb(path, resume=True, sizes=f"{RUNGS},num_hidden_layers=3", clip=0.5)
    assert (path / "config.json").read_bytes() == before
