"""The ladder of the evidence page: sizes that may be read as one, and what is said of them."""

import json
import math
from xml.etree import ElementTree

import pytest
from tests.evidence import METHODS, empty_results, put
from tests.runs import write_run

from depthroute.runs.inference import Law

import results_data  # isort: skip
import results_evidence as evidence  # isort: skip
import results_ladder as climbing  # isort: skip


@pytest.fixture
def results(tmp_path, monkeypatch):
    with empty_results(tmp_path, monkeypatch) as folder:
        yield folder


def sized(path, width, *, worse=0.0, methods=METHODS, seeds=(0, 1, 2)):
    """A run whose model has a size."""
    write_run(path, methods, seeds=seeds, worse=worse)
    model = {"num_hidden_layers": 6, "vocab_size": 16, "hidden_size": width}
    model["tie_word_embeddings"] = True
    config = json.loads((path / "config.json").read_text())
    text = {"name": "words", "sha256": "1", "unit": "token"}
    config |= {"preset": {"name": "tiny", "model": model}, "data": text}
    (path / "config.json").write_text(json.dumps(config))
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["event"] == "start":
            record["parameters"] += 100 * width
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_grids_of_several_sizes_are_a_ladder(results, tmp_path):
    put(results, "a", sized(tmp_path / "small", 8, worse=1.0))
    assert climbing.WAITS in climbing.section() and climbing.pictures() == {}
    put(results, "b", sized(tmp_path / "large", 24, worse=0.5))
    found = climbing.sizes()
    assert [field.grid for field in found] == ["a", "b"]
    fitted = climbing.fitted(found)
    tokens = found[0].run["summary"]["tokens"]
    for rung, width in zip(fitted["rungs"], (8, 24), strict=True):
        without = 1000 + 100 * width - 16 * width
        assert (rung["parameters"], rung["tokens"]) == (without, tokens)
        assert rung["flops"] == 6 * (without + 16 * width) * tokens
    small, large = (field.series["standard"]["row"]["validation_loss"] for field in found)
    law = Law(**fitted["law"])
    times = fitted["rungs"][1]["flops"] / fitted["rungs"][0]["flops"]
    assert law.floor == 1.6  # two sizes do not say it
    assert law.speed_up(small["mean"], large["mean"]) == pytest.approx(times)
    page = climbing.section()
    for field in found:
        against = evidence.difference(field, "delta", "standard")
        assert evidence.Outcome("a", "", against, 0.0).number in page
        ups = [
            evidence.worth(field, "delta", by_time=False, law=law) for law in (None, fitted["law"])
        ]
        own, ours = (evidence.Outcome("a", "", up, 1.0).number for up in ups)
        assert own != ours and ours in page and own not in page
    ups = [point["speed_up"]["by_loss"] for point in fitted["methods"]["delta"]["points"]]
    trend = (ups[1] / ups[0]) ** (1 / math.log10(times))
    row = next(line for line in page.splitlines() if line.startswith("| delta |"))
    assert row.endswith(f"| {trend:.2f}x |")
    (drawn,) = climbing.pictures().values()
    words = " ".join(ElementTree.fromstring(drawn).itertext())
    assert all(method in words for method in METHODS)


def test_a_ladder_has_methods_with_seeds_enough_and_one_text(results, tmp_path):
    put(results, "a", sized(tmp_path / "small", 8, worse=1.0))
    few = sized(tmp_path / "few", 24, methods=("standard", "delta"), seeds=(0, 1))
    put(results, "b", few)
    assert [field.grid for field in climbing.sizes()] == ["a"]
    put(results, "b", sized(tmp_path / "large", 24, methods=("standard", "delta")))
    rows = [line.split(" | ") for line in climbing.section().splitlines()]
    (lonely,) = (row for row in rows if row[0] == "| attnres-full")
    assert lonely[3:] == ["-", "-", "- |"]
    config = tmp_path / "large" / "config.json"
    config.write_text(config.read_text().replace('"sha256": "1"', '"sha256": "2"'))
    put(results, "b", tmp_path / "large")
    assert [field.grid for field in climbing.sizes()] == ["a"]


def test_a_ladder_has_every_size_once_in_order_on_one_text_with_one_optimiser(results, tmp_path):
    put(results, "a", sized(tmp_path / "large", 24))
    put(results, "b", sized(tmp_path / "small", 8, worse=1.0))
    assert [field.grid for field in climbing.sizes()] == ["b", "a"]

    def again(**changes):
        config = tmp_path / "small" / "config.json"
        before = json.loads(config.read_text())
        config.write_text(json.dumps(before | {k: before[k] | v for k, v in changes.items()}))
        put(results, "b", tmp_path / "small")
        config.write_text(json.dumps(before))
        return [field.grid for field in climbing.sizes()]

    assert again(train={"optimizer": "muon"}) == again(data={"sha256": None}) == ["a"]
    for name in ("sha256", "validation_sha256", "tokenizer"):
        assert again(data={name: "2"}) == ["a"], name
    put(results, "b", sized(tmp_path / "same", 24))
    with pytest.raises(ValueError, match=r"grids a and b both have 3.02K.*every size once"):
        climbing.sizes()


def test_a_ladder_shows_no_method_that_diverged(results, tmp_path):
    put(results, "a", sized(tmp_path / "small", 8, worse=1.0))
    data = put(results, "b", sized(tmp_path / "large", 24))
    for series in data["series"]:
        if series["method"] == "delta":
            series["row"]["diverged"] = [{"seed": 2, "step": 7}]
    (results / "evidence_b.json").write_text(json.dumps(data))
    results_data.load.cache_clear()
    rows = [line.split(" | ") for line in climbing.section().splitlines()]
    (lost,) = (row for row in rows if row[0] == "| delta")
    assert lost[1] != "-" and lost[3:] == ["-", "-", "- |"]


def test_compute_is_said_in_flops(results, tmp_path):
    for grid, width in (("a", 8), ("b", 24)):
        put(results, grid, sized(tmp_path / grid, width))
    flops = [f"{rung['flops']:.2g}" for rung in climbing.fitted(climbing.sizes())["rungs"]]
    assert all(f"at {each} FLOPs" in climbing.section() for each in flops)
    assert f"{1.34e15:.2g}" == "1.3e+15"
