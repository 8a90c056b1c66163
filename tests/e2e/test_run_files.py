"""Options in a file, the file that a run keeps, and the list of runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from depthroute import files
from depthroute.cli import app
from depthroute.cli.run_file import Chosen
from depthroute.config import RoutingConfig
from depthroute.methods import NAMES
from depthroute.runs import listing
from depthroute.runs.directory import RunDirectory
from depthroute.train.settings import TrainSettings

FILE = """
data = "book.txt"
method = "delta-block"
steps = 3
[set]
batch_size = 2
sequence_length = 16
validation_sequences = 2
lr = 1e-3
[model]
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 32
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text("The depth of a model is what it reads.\n\n" * 200)
    Path("mine.toml").write_text(FILE)
    return tmp_path


def config(path):
    return json.loads(Path(path, "config.json").read_text())


def test_a_run_file_starts_a_run_and_the_command_line_comes_before_it(depthroute, place):
    words = ["--set", "lr=0.5", "--set", "clip=2.0", "--steps", "2"]
    status, _, err = depthroute("train", "--config", "mine.toml", *words, "--out", "run")
    assert status == 0, err
    train = config("run")["train"]
    assert (train["steps"], train["lr"], train["clip"], train["batch_size"]) == (2, 0.5, 2.0, 2)
    kept = tomllib.loads(Path("run/run.toml").read_text())
    assert kept["set"] == {
        "batch_size": 2,
        "sequence_length": 16,
        "validation_sequences": 2,
        "lr": 0.5,
        "clip": 2.0,
    }
    assert kept["steps"] == 2 and kept["method"] == "delta-block" and kept["out"] == "run"
    assert kept["seed"] == 0 and not {"config", "resume", "json"} & kept.keys()

    status, _, err = depthroute("train", "--config", "run/run.toml", "--out", "again")
    assert status == 0, err
    models = [Path(run, "model/model.safetensors").read_bytes() for run in ("run", "again")]
    assert models[0] == models[1]
    again = tomllib.loads(Path("again/run.toml").read_text())
    assert again == kept | {"out": "again"}


@pytest.mark.parametrize(
    ("words", "steps"), [(["--set", "steps=1"], 1), (["--steps", "1"], 1), ([], 3)]
)
def test_a_setting_and_its_short_option_are_the_same_one(place, words, steps):
    """`steps` of the file and --set steps=1 do not contradict each other, nor the other way."""
    text = FILE if words[:1] == ["--set"] else FILE.replace("steps = 3", "").replace("lr", "steps")
    Path("mine.toml").write_text(text.replace("steps = 1e-3", "steps = 3"))
    seen = options_of("train", ["--config", "mine.toml", *words])
    assert seen["options"].changes()["steps"] == steps


def options_of(command, words):
    """The groups of options as the command would be given them."""
    parsed = typer.main.get_command(app).commands[command]
    seen, callback = {}, parsed.callback
    function = callback.__wrapped__.__wrapped__
    frame = [cell for cell in callback.__wrapped__.__closure__ if cell.cell_contents is function]
    cell = frame[0]
    cell.cell_contents = lambda **values: seen.update(values)
    try:
        with parsed.make_context(command, list(words)) as context:
            parsed.invoke(context)
    finally:
        cell.cell_contents = function
    return seen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "unknown option in --config 'bad.toml': 'stepps'; did you mean 'steps'?"),
        ("[set]\nlrr = 3", "unknown training setting 'lrr'; did you mean 'lr'?"),
        ("[routing]\nhead = 3", "unknown routing setting 'head'; did you mean 'heads'?"),
        ("config = 'x'", "unknown option in --config 'bad.toml': 'config'"),
        ("steps = ", "'bad.toml' is not TOML: Invalid value (at end of document)"),
        ("set = 3", "set = 3 must be a table of settings and values"),
        ("tensorboard = 1", "tensorboard = 1 must be true or false"),
        ("preset = true", "preset = True must be a text or a number"),
        ("preset = {a = 1}", "preset = {'a': 1} must be a text or a number"),
        ("held-out = 3\nheld_out = 4", "held_out is given twice, with - and with _"),
        ("resume = 'yes'", "unknown --resume 'yes'"),
        ("seed = 1.5", "--config 'bad.toml': seed = 1.5: "),
    ],
)
def test_a_mistake_in_a_run_file_is_one_line_with_the_nearest_name(
    depthroute, place, text, message
):
    data = "" if "set" in text or "routing" in text else "data = 'book.txt'\nmethod = 'delta'\n"
    beside = ["--data", "book.txt", "--method", "delta"] if not data else []
    Path("bad.toml").write_text(data + text)
    status, out, err = depthroute("train", "--config", "bad.toml", *beside, "--out", "run")
    assert (status, out) == (2, "") and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize("value", ["1.5", "'many'", "[1, 2]"])
def test_a_number_of_a_run_file_is_checked_as_on_the_command_line(depthroute, place, value):
    Path("bad.toml").write_text(f"data = 'book.txt'\nsteps = {value}")
    status, _, err = depthroute("train", "--config", "bad.toml", "--out", "run")
    assert status == 2 and err.startswith(f"error: --config 'bad.toml': steps = {value}: ")
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read_is_one_line(depthroute, place):
    Path("bytes.toml").write_bytes(b"data = '\xff'")
    for name, reason in (("nowhere.toml", "No such file"), (".", "Is a directory")):
        status, _, err = depthroute("train", "--config", name)
        assert status == 2 and f"cannot read --config {name!r}: {reason}" in err
    status, _, err = depthroute("train", "--config", "bytes.toml")
    assert status == 2 and "is not TOML" in err


@pytest.mark.parametrize("command", ["train", "finetune", "compare"])
def test_every_option_may_stand_in_a_file(place, command):
    parsed = typer.main.get_command(app).commands[command]
    names = {p.opts[0][2:] for p in parsed.params} - {"config", "help"}
    values = {"data": "x", "base": "y", "set": {"lr": 1.0}}
    values |= {"steps": 7, "trust-remote-code": True, "held-out": 2.5}
    lines = {name: values.get(name) for name in names if name in values}
    Path("all.toml").write_text(Chosen(command, lines | {"set": ["lr=1.0"]}).text(Path("run")))
    seen = options_of(command, ["--config", "all.toml"])
    assert seen["options"].steps == 7 and seen["options"].settings == ["lr=1.0"]
    assert seen["text"].trust_remote_code and seen["text"].held_out == 2.5
    assert seen["options"].chosen.options.keys() | {"verbose"} == {
        name.replace("-", "_") for name in names
    } | {"config"}


def test_a_list_in_a_file_is_what_commas_separate(place):
    Path("both.toml").write_text("methods = ['standard', 'delta:heads=4']\nladder = '1M,2M'")
    seen = options_of("compare", ["--config", "both.toml"])
    assert seen["methods"] == "standard,delta:heads=4" and seen["swept"].ladder == "1M,2M"


def test_what_is_written_is_read_back_whatever_it_holds():
    options = {
        "text": 'a "quoted" \\ line\n\x7f\x01 é 🙂',
        "number": -1e-07,
        "switch": False,
        "none": None,
        "set": ["betas=[0.9, 0.95]", "lr=1e-3", "compile=eager", 'odd key={"a": "b"}'],
        "routing": ["init=null", "heads=2"],
    }
    kept = tomllib.loads(Chosen("train", options).text(Path("some where")))
    assert kept["text"] == options["text"] and kept["number"] == -1e-07
    assert kept["switch"] is False and "none" not in kept and kept["out"] == "some where"
    assert kept["set"] == {
        "betas": [0.9, 0.95],
        "lr": 0.001,
        "compile": "eager",
        "odd key": {"a": "b"},
    }
    assert kept["routing"] == ["init=null", "heads=2"]  # TOML has no null


def test_a_users_own_file_in_the_run_directory_is_never_replaced(depthroute, place):
    Path("run").mkdir()
    Path("run/run.toml").write_text(FILE)
    status, _, err = depthroute("train", "--config", "run/run.toml", "--out", "run")
    assert status == 2 and "already holds a run or other files" in err
    assert Path("run/run.toml").read_text() == FILE


def test_a_run_stopped_before_its_first_record_can_be_started_again(depthroute, place):
    run = RunDirectory.create("run")
    run.write_run_file("steps = 1\n")
    run.close()
    status, _, err = depthroute("train", "--config", "mine.toml", "--steps", "1", "--out", "run")
    assert status == 0, err
    assert tomllib.loads(Path("run/run.toml").read_text())["method"] == "delta-block"


def test_help_names_every_setting_in_full_in_a_terminal_of_80_columns(depthroute, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("train", "finetune", "compare"):
        _, out, _ = depthroute(command, "--help")
        words = " ".join(out.replace("│", " ").split())
        tables = (TrainSettings,) if command == "compare" else (TrainSettings, RoutingConfig)
        for name in {f.name for settings in tables for f in fields(settings)} - {"method"}:
            assert f" {name}," in words or f" {name}." in words
        for name in (*NAMES, "--config", "--trust-remote-code", "$DEPTHROUTE_CACHE"):
            assert name in words


def begun(path, *records, summary=None, **about):
    run = RunDirectory.create(path)
    about = {"kind": "train", "methods": {"delta": {}}, "train": {"steps": 10}} | about
    run.write_json("config.json", about)
    run.write_run_file("steps = 10\n")
    for record in records:
        run.append(record)
    if summary is not None:
        run.write_json("summary.json", summary)
    run.close()
    return run


def step(number, loss=2.0, method="delta", seed=0):
    record = {"event": "step", "seed": seed, "method": method, "step": number, "loss": loss}
    return record | {"seconds": 1.0, "tokens": 8}


def test_runs_are_listed_with_their_state_and_how_to_go_on(depthroute, place):
    validation = {"event": "validation", "seed": 0, "method": "delta", "step": 1, "loss": 1.5}
    stop = {"event": "interrupted", "seed": 0, "signal": 15}
    diverged = {"event": "diverged", "seed": 0, "method": "delta", "step": 1}
    begun("runs/done", step(0), summary={"steps": 10, "validation_loss": 1.25, "best": None})
    begun("runs/cut", step(0), validation, stop)
    begun("runs/killed", step(0), validation, step(1))
    begun("runs/lost", step(0), diverged)
    begun("runs/deeper/old", step(0)).path.joinpath("run.toml").unlink()
    rows = [
        {"method": name, "validation_loss": {"mean": x}} for name, x in (("a", 2.0), ("b", 1.0))
    ]
    begun("runs/both", kind="compare", summary={"is_complete": True, "steps": 10, "rows": rows})
    begun("runs/odd")
    Path("runs/odd/config.json").write_text("{")
    active = RunDirectory.reopen(begun("runs/now", step(4)).path)

    status, out, err = depthroute("runs", "--json")
    assert status == 0, err
    found = {Path(run["path"]).name: run for run in json.loads(out)}
    assert {name: run["state"] for name, run in found.items() if name != "odd"} == {
        "done": "finished",
        "both": "finished",
        "cut": "interrupted",
        "killed": "stopped",
        "lost": "diverged",
        "old": "stopped",
        "now": "running",
    }
    assert found["odd"]["state"].startswith("damaged: cannot read")
    assert found["now"]["steps"] == 5 and found["now"]["resume"] is None
    assert found["cut"]["loss"] == 1.5 and found["done"]["loss"] == 1.25
    assert (found["both"]["loss"], found["both"]["best_method"]) == (1.0, "b")
    assert found["cut"]["resume"] == (
        "depthroute train --config runs/cut/run.toml --out runs/cut --resume auto"
    )
    assert found["old"]["resume"] == "depthroute train --out runs/deeper/old --resume auto"

    status, out, _ = depthroute("runs")
    assert status == 0 and found["killed"]["resume"] in out and "1 of 10" in out
    status, out, _ = depthroute("runs", "show", "runs/cut")
    assert status == 0 and "interrupted" in out and found["cut"]["resume"] in out
    assert depthroute("runs", "show", "cut")[1] == out, "by the name that the list gives it"
    active.close()
    assert not files.is_locked(Path("runs/now", files.LOCK))


def test_the_command_of_an_older_run_is_made_of_the_words_it_was_begun_with(tmp_path):
    words = ["depthroute", "train", "--out", "a", "--data", "x y", "--resume=never", "--out=b"]
    command = listing.resume_command(tmp_path, "train", processes=2, was=words)
    assert shlex.split(command) == [
        *("torchrun", "--nproc-per-node", "2", "-m", "depthroute", "train", "--data", "x y"),
        *("--out", str(tmp_path), "--resume", "auto"),
    ]


def test_a_folder_without_runs_and_one_that_is_none_are_told_apart(depthroute, place):
    Path("empty").mkdir()
    status, out, _ = depthroute("runs", "--folder", "empty")
    assert status == 0 and "no runs in 'empty'" in out
    status, _, err = depthroute("runs", "--folder", "nowhere")
    assert status == 2 and "'nowhere' is no folder" in err
    status, _, err = depthroute("runs", "show", "empty")
    assert status == 2 and "is no run directory" in err


def test_the_shell_completes_commands_options_presets_and_methods():
    def answer(*words, **environment):
        called = [sys.executable, "-m", "depthroute", *words]
        environment = os.environ | environment
        return subprocess.run(called, env=environment, capture_output=True, text=True).stdout

    def completed(line):
        asked = {"_DEPTHROUTE_COMPLETE": "complete_bash", "COMP_WORDS": line}
        return answer(**asked, COMP_CWORD=str(len(line.split(" ")) - 1)).split()

    detection = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = answer("--show-completion", "bash", **detection)
    assert "complete -o default -F _depthroute_completion depthroute" in script

    assert completed("depthroute fine") == ["finetune"]
    assert "tiny" in completed("depthroute train --preset t")
    assert completed("depthroute convert --method delta") == ["delta", "delta-block"]
