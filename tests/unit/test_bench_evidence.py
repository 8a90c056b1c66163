"""Runs of one model each as evidence: one comparison, and what the tasks said of it."""

import json
import shutil

import pytest
from tests.evidence import empty_results, put
from tests.runs import write_run

from bench import evidence as distilling
from depthroute.errors import DepthrouteError

import results_evidence as evidence  # isort: skip


@pytest.fixture
def results(tmp_path, monkeypatch):
    with empty_results(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def finetuned(tmp_path):
    """Runs of one model each, as `finetune` writes them, with what the tasks said."""
    runs = []
    for method in ("standard", "delta"):
        for seed in (0, 1, 2):
            run = write_run(tmp_path / f"{method}-{seed}", (method,), seeds=(seed,))
            config = json.loads((run / "config.json").read_text())
            del config["preset"]
            config |= {"kind": "finetune", "base": "/models/smol", "freeze_base": False}
            (run / "config.json").write_text(json.dumps(config))
            value = 0.5 + 0.01 * seed + (0.02 if method == "delta" else 0.0)
            rows = [{"task": t, "metric": "acc", "value": value} for t in evidence.TASKS]
            rows.append({"task": "piqa", "metric": "acc_norm", "value": 0.0})
            rows = [row | {"num_items": 100} for row in rows]
            (run / "scores.json").write_text(json.dumps({"tasks": rows}))
            runs.append(run)
    return runs


def test_runs_of_one_model_each_are_one_comparison(results, finetuned):
    data = put(results, "e", *finetuned)
    assert len(data["runs"]) == 1 and data["runs"][0]["summary"]["seeds"] == [0, 1, 2]
    (field,) = evidence.fields("e")
    assert field.words.startswith("smol fine-tuned, ")
    assert len(evidence.difference(field, "delta", "standard")["by_seed"]) == 3
    better = evidence.difference(field, "delta", "standard", "score")
    assert list(better["by_seed"].values()) == pytest.approx([2.0] * 3)
    grids = evidence.grids()
    assert "The same for every method and seed." in grids
    assert "| standard | 51.00 |" in grids and "published law" not in grids


def test_runs_that_differ_in_more_than_method_and_seed_are_no_comparison(finetuned):
    config = json.loads((finetuned[-1] / "config.json").read_text())
    config["train"]["steps"] = 41
    (finetuned[-1] / "config.json").write_text(json.dumps(config))
    with pytest.raises(DepthrouteError, match="differ in train, so they are not one comparison"):
        distilling.distil(finetuned)


def test_half_of_the_tasks_is_no_score(results, finetuned):
    for run in finetuned[:1]:
        judged = json.loads((run / "scores.json").read_text())
        judged["tasks"] = judged["tasks"][1:]
        (run / "scores.json").write_text(json.dumps(judged))
    put(results, "e", *finetuned)
    (field,) = evidence.fields("e")
    better = evidence.difference(field, "delta", "standard", "score")
    assert list(better["by_seed"]) == ["1", "2"]


def test_one_run_added_to_a_data_file_keeps_its_scores(results, finetuned):
    at_once = {s["method"]: s["scores"] for s in put(results, "e", *finetuned)["series"]}
    put(results, "e", *finetuned[:3])
    in_parts = put(results, "e", results / "evidence_e.json", finetuned[3])["series"]
    assert in_parts[-1]["scores"] == {"0": at_once["delta"]["0"]}


def test_a_seed_that_comes_twice_is_refused(finetuned, tmp_path):
    again = shutil.copytree(finetuned[0], tmp_path / "again")
    with pytest.raises(DepthrouteError, match=r"again' is seed 0 of standard again; give it once"):
        distilling.distil([*finetuned, again])
    compared = write_run(tmp_path / "compared")
    with pytest.raises(DepthrouteError, match=r"'compared.*' is there already; give it once"):
        distilling.distil([compared, compared])


def test_scores_of_other_numbers_of_items_are_not_set_beside_each_other(finetuned):
    path = finetuned[-1] / "scores.json"
    path.write_text(path.read_text().replace('"num_items": 100', '"num_items": 3'))
    with pytest.raises(DepthrouteError, match=r"is of 3 items of .*, and that of another run of 1"):
        distilling.distil(finetuned)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("metrics.jsonl", None),
        ("metrics.jsonl", "[]\n"),
        ("traces.json", '{"traces": 3}'),
        ("scores.json", "[]"),
        ("scores.json", '{"tasks": [{"task": "piqa"}]}'),
    ],
)
def test_a_damaged_run_is_one_clear_error(finetuned, name, text):
    (finetuned[1] / name).unlink()
    if text is not None:
        (finetuned[1] / name).write_text(text)
    with pytest.raises(DepthrouteError, match=r"standard-1"):
        distilling.distil(finetuned)


@pytest.mark.parametrize("text", ["[", "3", '{"kind": "evidence"}'])
def test_a_damaged_data_file_is_one_clear_error(finetuned, tmp_path, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DepthrouteError, match=r"data.json' is no evidence that runs can be added"):
        distilling.distil([tmp_path / "data.json", *finetuned])
