"""A comparison whose files were lost, damaged or never written."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.formats import TENSORS, as_format_3, sealed

from depthroute import diagnostics, presets
from depthroute.config import parse_methods
from depthroute.data.batches import TokenData
from depthroute.errors import CheckpointError, ConfigError
from depthroute.runs.directory import RunDirectory, RunError, refuse_another
from depthroute.train.compare import Comparison, run_comparison
from depthroute.train.settings import TrainSettings

SMALL = replace(
    presets.get("tiny"),
    model=presets.get("tiny").model
    | {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32},
)
SETTINGS = TrainSettings(
    steps=6,
    batch_size=4,
    sequence_length=16,
    lr=1e-2,
    validate_every=3,
    validation_sequences=8,
    save_every=1,
)


def small(seeds=(0,)):
    tokens = np.frombuffer(b"def route(depth): return depth * 2\n" * 300, dtype=np.uint8)
    data = TokenData("words", tokens[:6000], tokens[6000:], 4, 16)
    methods = parse_methods("standard,delta")
    return Comparison(SMALL, methods, seeds, SETTINGS, data, torch.device("cpu"))


def compare(run, seeds=(0,), **options):
    return run_comparison(
        small(seeds),
        run,
        look=lambda model, tokens, *_: diagnostics.record(diagnostics.trace(model, tokens)),
        **options,
    )


def timeless(run):
    kept = [r for r in run.records() if r["event"] != "resumed"]
    return [{k: v for k, v in r.items() if k not in ("seconds", "memory_bytes")} for r in kept]


def die_at(step):
    def on_step(progress):
        if progress.result.step == step and progress.method == "delta":
            raise RuntimeError("killed")

    return on_step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("whole") / "run")
    return run, compare(run)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """In the fifth step: checkpoints of three and four are there."""
    run = RunDirectory.create(tmp_path_factory.mktemp("killed") / "run")
    with pytest.raises(RuntimeError):
        compare(run, on_step=die_at(4))
    return run


def copy(run, path):
    shutil.copytree(run.path, path, ignore=shutil.ignore_patterns(".depthroute-lock"))
    return RunDirectory.reopen(path)


def test_a_summary_that_is_missing_is_written_and_nothing_is_trained(tmp_path, whole):
    run = copy(whole[0], tmp_path / "run")
    (run.path / "summary.json").unlink()
    summary = compare(run, is_resumed=True, on_step=pytest.fail)
    assert run.read_json("summary.json") == summary == whole[1]


def test_every_record_is_on_the_disk_before_the_summary_that_makes_checkpoints_needless(
    tmp_path, monkeypatch
):
    run, synced, fsync = RunDirectory.create(tmp_path / "run"), [], os.fsync

    def spy(handle):
        is_metrics = os.path.samestat(os.fstat(handle), run.metrics.stat())
        synced.append(os.fstat(handle).st_size if is_metrics else 0)
        fsync(handle)

    def write_json(name, values):
        if name == "summary.json":
            assert max(synced) == run.metrics.stat().st_size
        RunDirectory.write_json(run, name, values)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(run, "write_json", write_json)
    assert compare(run)["is_complete"]


def test_killed_between_the_last_validation_and_the_last_look_it_is_looked_at(
    tmp_path, whole, monkeypatch
):
    from depthroute.train.loop import Experiment

    run = RunDirectory.create(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "traces", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare(run)
    taken = []
    compare(run, is_resumed=True, on_step=taken.append)
    assert {p.result.step for p in taken} == {5}  # from the last checkpoint
    assert timeless(run) == timeless(whole[0])
    assert run.read_json("traces.json") == whole[0].read_json("traces.json")


def test_seeds_in_any_order_keep_their_traces(tmp_path):
    seeds = (3, 1)
    whole, cut = (RunDirectory.create(tmp_path / name) for name in ("whole", "cut"))
    compare(whole, seeds)

    def die(progress):
        if (progress.seed, progress.result.step) == (1, 3):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        compare(cut, seeds, on_step=die)
    compare(cut, seeds, is_resumed=True)
    assert cut.read_json("traces.json") == whole.read_json("traces.json")


def test_the_newest_good_checkpoint_is_used_and_a_line_says_which_is_not(tmp_path, killed, whole):
    run = copy(killed, tmp_path / "run")
    _, newest = sorted((run.path / "checkpoints").iterdir())
    (newest / TENSORS).unlink()
    (run.path / "checkpoints" / "step_notes").mkdir()  # somebody's own
    notes, taken = [], []
    compare(run, is_resumed=True, note=notes.append, on_step=taken.append)
    assert len(notes) == 1
    assert newest.name in notes[0] and f"{TENSORS} cannot be read" in notes[0]
    assert min(p.result.step for p in taken) == 3
    assert timeless(run) == timeless(whole[0])
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step_notes"]


def as_format_2(folder):
    """A comparison's checkpoint was named by the lines before it and counted no steps."""
    new = ("step", "data", "data_position", "validation_loss", "best", "ranks")
    state = {k: v for k, v in as_format_3(folder).items() if k not in new}
    sealed(folder, state | {"format": 2})
    return folder.rename(folder.with_name(f"at_{state['lines']:09d}"))


def test_a_comparison_of_the_format_before_goes_on_bit_for_bit(tmp_path, killed, whole):
    run = copy(killed, tmp_path / "run")
    earlier, newest = map(as_format_2, sorted((run.path / "checkpoints").iterdir()))
    (newest / "0" / "model.safetensors").unlink()
    notes, taken = [], []
    compare(run, is_resumed=True, note=notes.append, on_step=taken.append)
    assert len(notes) == 1 and newest.name in notes[0] and not earlier.exists()
    assert min(p.result.step for p in taken) == 3
    assert timeless(run) == timeless(whole[0])
    assert run.read_json("traces.json") == whole[0].read_json("traces.json")
    assert not (run.path / "checkpoints").exists()


def test_a_run_keeps_the_names_of_methods_that_it_was_begun_with(tmp_path, killed, whole):
    """Names were others in earlier versions; what is run is what must be the same."""
    run = copy(killed, tmp_path / "run")
    config = run.read_json("config.json")
    config["methods"]["earlier"] = config["methods"].pop("delta")
    run.write_json("config.json", config)
    run.metrics.write_text(run.metrics.read_text().replace('"delta"', '"earlier"'))
    names = {"standard": "standard", "delta": "earlier"}
    for folder in (run.path / "checkpoints").iterdir():
        state = json.loads((folder / "state.json").read_text())
        sealed(folder, state | {"methods": {names[k]: v for k, v in state["methods"].items()}})
    summary = compare(run, is_resumed=True)
    assert [row["method"] for row in summary["rows"]] == ["standard", "earlier"]
    theirs = [r | {"method": r.get("method")} for r in timeless(run)]
    mine = [r | {"method": r.get("method")} for r in timeless(whole[0])]
    assert theirs == [r | {"method": names.get(r["method"])} for r in mine]


def test_a_run_from_before_a_setting_was_there_goes_on(tmp_path, killed, whole):
    run = copy(killed, tmp_path / "run")
    config = run.read_json("config.json")
    del config["train"]["loss_chunk"]
    run.write_json("config.json", config)
    compare(run, is_resumed=True)
    assert timeless(run) == timeless(whole[0])


@pytest.mark.parametrize("kind", ["compare", "sweep", "train", "finetune"])
def test_what_is_compared_goes_on_with_the_validation_text_it_was_begun_with(
    tmp_path, killed, kind
):
    run = copy(killed, tmp_path / "run")
    config = run.read_json("config.json") | {"kind": kind}
    run.write_json("config.json", config)
    changed = config | {"train": config["train"] | {"validation_sequences": 1}}
    if kind in ("train", "finetune"):
        assert refuse_another(run, changed) == config
        return
    with pytest.raises(ConfigError, match=r"train.validation_sequences 8 and now has 1; resume"):
        refuse_another(run, changed)


def test_without_a_good_checkpoint_nothing_is_changed(tmp_path, killed):
    run = copy(killed, tmp_path / "run")
    for path in (run.path / "checkpoints").iterdir():
        data = bytearray((path / TENSORS).read_bytes())
        data[-1] ^= 1
        (path / TENSORS).write_bytes(data)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"no checkpoint of the run is good.*rank_0"):
        compare(run, is_resumed=True)
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "compare"}', '{"data": 3}'])
def test_a_damaged_configuration_is_one_clear_error(tmp_path, killed, text):
    run = copy(killed, tmp_path / "run")
    (run.path / "config.json").write_text(text)
    with pytest.raises(RunError, match=r"config\.json"):
        compare(run, is_resumed=True)


def test_records_that_were_lost_are_not_left_out_of_the_table_in_silence(tmp_path, killed):
    run = copy(killed, tmp_path / "run")
    run.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(RunError, match=r"metrics.jsonl has 3 lines and had \d+ when .*step_0"):
        compare(run, is_resumed=True)
