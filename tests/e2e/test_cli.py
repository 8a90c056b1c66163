"""The command line as a user meets it: what it prints, what it leaves, how it ends."""

import json
import signal
import subprocess
import sys
import time

import pytest
from tests.processes import PATIENCE, forked_command

from depthroute.cli import app

SHORT = ["--seeds", "1", "--methods", "standard,delta,static-block,depth-attention,value-residual"]
SHORT += ["--set", "batch_size=2"]
SHORT += ["--set", "sequence_length=16", "--set", "validation_sequences=4"]


def command(*arguments):
    return [sys.executable, "-m", "depthroute", *arguments]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("the depth of a model is what it reads\n" * 200)
    return str(path)


def test_compare_prints_one_table_and_leaves_a_run_directory(
    depthroute, tmp_path, book, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    status, out, err = depthroute("compare", *SHORT, "--steps", "4", "--data", book)
    assert status == 0, err
    for text in ("standard", "delta", "depth-attention", "Validation loss", "tokens/s", "bigram"):
        assert text in out
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name in err
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["event"] == "step"]
    assert len(steps) == 5 * 4
    routing = {r["method"]: r["mean_normalised_max"] for r in records if r["event"] == "routing"}
    assert routing["standard"] is None
    assert 0 <= routing["delta"] <= 1
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 4


SWEEP = [
    "compare",
    "--methods",
    "standard",
    "--seeds",
    "1",
    "--steps",
    "4",
    "--set",
    "batch_size=2",
]
SWEEP += ["--set", "sequence_length=16", "--set", "validation_sequences=4"]
SWEEP += ["--model", "num_hidden_layers=1", "--model", "hidden_size=16"]


@pytest.mark.slow
def test_a_sweep_side_by_side_comes_to_the_result_of_one_run_after_the_other(
    depthroute, tmp_path, book
):
    arguments = [*SWEEP, "--data", book, "--sweep", "schedule=cosine,wsd"]
    status, out, err = depthroute(*arguments, "--out", str(tmp_path / "turns"), "--json")
    assert status == 0, err
    assert "runs of 128 tokens" in err
    expected = json.loads(out)
    beside = [*arguments, "--out", str(tmp_path / "beside"), "--jobs", "3", "--json"]
    status, out, err = depthroute(*beside)
    assert status == 0, err
    found = json.loads(out)
    assert found["sweep"] == expected["sweep"]
    losses = [s["rows"][0]["validation_loss"] for s in (found, expected)]
    assert losses[0] == losses[1] is not None
    status, out, err = depthroute(*beside[:-1], "--resume", "auto")  # nothing is left to run
    assert status == 0, err
    assert "schedule chosen for each method on seeds that are not reported" in out


def test_a_ladder_prints_every_size_and_the_law(depthroute, tmp_path, book):
    arguments = [word for word in SWEEP if word not in ("--steps", "4")]
    arguments += ["--data", book, "--ladder", "num_hidden_layers=1,num_hidden_layers=2"]
    arguments += ["--out", str(tmp_path / "run")]
    status, out, err = depthroute(*arguments, "--tokens-per-parameter", "0.02")
    assert status == 0, err
    assert "Several sizes" in out and "num_hidden_layers=2" in out
    assert err.count("runs of") == 2
    status, _, err = depthroute(*arguments, "--steps", "4")
    assert (status, err.count("\n")) == (2, 1) and "use --tokens-per-parameter" in err
    for number in ("inf", "nan", "0"):
        status, _, err = depthroute(*arguments, "--tokens-per-parameter", number)
        assert (status, err.count("\n")) == (2, 1) and "must be a finite number greater than" in err
    status, _, err = depthroute("compare", "--tokens-per-parameter", "2")
    assert (status, err.count("\n")) == (2, 1) and "add --ladder" in err
    arguments[arguments.index("--methods") + 1] = "standard,delta:num_blocks=3"
    arguments[-1] += "-2"
    status, _, err = depthroute(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: --ladder num_hidden_layers=1: ") and "num_blocks=3 is" in err
    assert not (tmp_path / "run-2").exists()


def test_a_sweep_whose_best_value_is_at_an_end_says_which_to_add(depthroute, tmp_path, book):
    arguments = [*SWEEP, "--data", book, "--sweep", "lr=1e-6,1e-5", "--extend", "0"]
    status, _, err = depthroute(*arguments, "--out", str(tmp_path / "run"))
    assert status == 2
    assert "error: standard is best at 1e-05, the highest lr (add 0.0001)" in err
    status, _, err = depthroute("compare", "--jobs", "2")
    assert (status, err.count("\n")) == (2, 1) and "add --sweep" in err
    status, _, err = depthroute("compare", "--sweep", "lr=1,2", "--equal", "time")
    assert (status, err.count("\n")) == (2, 1) and "leave out --equal time" in err


def test_compare_as_json_prints_the_summary_alone(depthroute, tmp_path, book):
    path = str(tmp_path / "run")
    arguments = ["compare", *SHORT, "--steps", "2", "--data", book, "--out", path]
    status, out, err = depthroute(*arguments, "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads((tmp_path / "run" / "summary.json").read_text())
    status, out, err = depthroute(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {path} already holds a run")
    assert len(err.splitlines()) == 1


def test_an_interrupt_says_so_and_keeps_what_was_finished(tmp_path, book):
    arguments = [*SHORT, "--steps", "100000", "--set", "validate_every=2"]
    arguments += ["--data", book, "--out", str(tmp_path / "run")]
    process = forked_command("compare", *arguments)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not (metrics.exists() and metrics.read_text().count('"validation"') >= 6):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert "Validation loss" in stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not summary["is_complete"] and summary["rows"][1]["validation_loss"]["mean"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tyni"], "unknown preset 'tyni'; did you mean 'tiny'?"),
        (["--methods", "dleta"], "unknown method 'dleta'; did you mean 'delta'?"),
        (["--data", "/nowhere/text"], "/nowhere/text does not exist"),
        (["--set", "lr=fast"], "train.lr='fast' must be a finite number"),
        (["--equal", "energy"], "unknown --equal 'energy'"),
        (["--tokenizer", "bytes"], "need the text; add --data"),
        (["--resume", "auto"], "continues the run in --out; name it"),
        (["--preset", "100m"], "needs text of its own; give it with --data"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(depthroute, arguments, message):
    status, out, err = depthroute("compare", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1


def test_env_and_presets_as_json_are_json(depthroute):
    environment = json.loads(depthroute("env", "--json")[1])
    assert {b["op"] for b in environment["backends"]} >= {"depth_mix", "depth_attention_mix"}
    assert all(b["reason"] for b in environment["backends"])
    assert environment["devices"][0]["device"] == "cpu"
    names = [p["name"] for p in json.loads(depthroute("presets", "--json")[1])]
    assert "tiny" in names and "delta-7.57b" in names


def test_env_and_presets_print_tables(depthroute):
    assert "depth_mix: torch (" in depthroute("env")[1]
    printed = depthroute("presets")[1]
    assert (
        "delta-7.57b" in printed and "delta-block" in printed and "delta:num_blocks=28" in printed
    )


COMMANDS = sorted(c.name or c.callback.__name__ for c in app.registered_commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(depthroute, name):
    status, out, _ = depthroute(name, "--help")
    assert status == 0
    assert f"Example: depthroute {name}" in " ".join(out.split())


def test_the_version_is_printed_also_by_the_package_itself(depthroute):
    from depthroute import __version__

    assert depthroute("--version") == (0, f"depthroute {__version__}\n", "")
    printed = subprocess.run(command("--version"), capture_output=True, text=True, check=True)
    assert printed.stdout == f"depthroute {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "No such command 'trian'. Did you mean 'train'?; see depthroute --help"),
        ("train", "Missing option '--data'; see depthroute train --help"),
        ("bench stp", "No such command 'stp'. Did you mean 'step'?; see depthroute bench --help"),
        ("train --steps many", "Invalid value for '--steps': "),
        ("presets --stepz 3", "No such option: --stepz"),
    ],
)
def test_what_is_no_command_line_is_one_line_too(depthroute, words, message):
    status, out, err = depthroute(*words.split())
    assert (status, out) == (2, "") and err.startswith(f"error: {message}"), err
    assert err.count("\n") == 1 and "--help\n" in err


@pytest.mark.parametrize("words", [("presets",), ("presets", "--json"), ("--version",)])
def test_an_output_on_a_full_disk_is_one_line(words):
    """However much is written: a little waits in a buffer until the end."""
    command = [sys.executable, "-m", "depthroute", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "error: cannot write: No space left on device; free some space\n"
