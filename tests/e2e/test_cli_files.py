"""Where commands write: links, other processes, and folders that cannot be meant."""

import json
import os
import shutil
import sys
import time

import pytest
from tests.checkpoints import TEXT, save
from tests.formats import as_format_1
from tests.processes import PATIENCE, forked_command
from tests.runs import write_run

from depthroute import cli
from depthroute.runs.directory import RunDirectory
from depthroute.train import launch

SMALL = ["--model", "num_hidden_layers=1", "--model", "hidden_size=16"]
SMALL += ["--set", "batch_size=4", "--set", "sequence_length=16", "--set", "validation_sequences=8"]


FOLDERS = (".", "..", "/", "")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The words of a small `train`."""
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT * 4)
    return ["train", "--data", str(tmp_path / "text.txt"), *SMALL]


def wait_for(path, process):
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.stderr
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)


def test_a_second_process_is_told_of_the_first_and_does_not_disturb_it(tmp_path, depthroute, train):
    out = tmp_path / "run"
    command = [*train, "--steps", "100000", "--out", str(out), "--resume", "auto"]
    first = forked_command(*command)
    wait_for(out / "metrics.jsonl", first)
    status, _, error = depthroute(*command)
    assert status == 2
    assert error.count("\n") == 1
    assert f"{out}: process {first.pid} is writing there" in error
    assert first.poll() is None
    first.kill()
    first.communicate()
    steps = [r["step"] for r in RunDirectory(out).records() if r["event"] == "step"]
    assert steps == list(range(len(steps)))
    RunDirectory.reopen(out).close()  # what a killed process held, nobody holds


def test_a_run_killed_before_its_summary_has_one_routing_record(
    tmp_path, depthroute, train, monkeypatch
):
    out = tmp_path / "run"
    command = [*train, "--method", "delta", "--steps", "4", "--out", str(out)]
    original = RunDirectory.write_json

    def die(run, name, values):
        if name == "summary.json":
            raise ZeroDivisionError
        original(run, name, values)

    with monkeypatch.context() as patch:
        patch.setattr(launch.RunDirectory, "write_json", die)
        patch.setattr(sys, "argv", ["depthroute", *command])
        with pytest.raises(ZeroDivisionError):
            cli.main()
    assert depthroute(*command, "--resume", "auto")[0] == 0
    events = [r["event"] for r in RunDirectory(out).records()]
    assert events.count("routing") == 1 and events.count("step") == 4
    assert json.loads((out / "summary.json").read_text())["steps"] == 4


def test_a_run_that_was_begun_under_another_name_goes_on_under_it(tmp_path, depthroute, train):
    """As before methods had one name everywhere: x0_skip was what is x0-skip now."""
    out = tmp_path / "run"
    command = [*train, "--method", "x0-skip", "--steps", "2", "--out", str(out)]
    assert depthroute(*command)[0] == 0
    run, (checkpoint,) = RunDirectory(out), (out / "checkpoints").glob("step_00000002")
    for file in (out / "config.json", run.metrics):
        file.write_text(file.read_text().replace('"x0-skip"', '"x0_skip"'))
    for path in [*checkpoint.parent.glob("step_00000001"), out / "summary.json"]:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    as_format_1(checkpoint)
    status, _, error = depthroute(*command, "--resume", "auto")
    assert status == 0, error
    assert {r["method"] for r in run.records() if "method" in r} == {"x0_skip"}


def test_a_run_is_written_where_its_link_leads(tmp_path, depthroute, train):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    command = [*train, "--steps", "2", "--out", str(tmp_path / "link")]
    status, _, error = depthroute(*command)
    assert status == 0, error
    assert os.readlink(tmp_path / "link") == "real"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "real" / "model" / "model.safetensors").exists()
    assert not [p for p in (tmp_path / "real").iterdir() if p.name.startswith(".")]


def test_a_damaged_run_is_one_line(tmp_path, depthroute, train):
    out = tmp_path / "run"
    command = [*train, "--steps", "2", "--out", str(out), "--resume", "auto"]
    assert depthroute(*command)[0] == 0
    (out / "checkpoints" / "step_abc").mkdir()
    (out / "metrics.jsonl").write_text("")
    (out / "summary.json").unlink()  # with it, it would be finished
    status, _, error = depthroute(*command)
    assert status == 0 and "metrics.jsonl has lost" in error.replace("\n", " ")
    (out / "config.json").write_text("{")
    status, _, error = depthroute(*command)
    assert status == 2 and error.count("\n") == 1 and "config.json" in error


@pytest.mark.parametrize("out", [".", "..", "/", "", "file", "file/below", "loop"])
def test_a_report_that_cannot_be_written_is_one_line(tmp_path, depthroute, monkeypatch, out):
    write_run(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "file").write_text("precious")
    (tmp_path / "here" / "loop").symlink_to("loop")
    for option in ("--out", "--figures"):
        if (option, out) == ("--out", "file") or (option == "--figures" and out in FOLDERS):
            continue  # these can be meant
        status, _, error = depthroute("report", str(tmp_path / "run"), option, out)
        assert status == 2 and "cannot write" in error, (option, out)
        assert error.count("\n") == 1
    assert (tmp_path / "here" / "file").read_text() == "precious"


def test_a_report_and_a_measurement_are_written_where_their_links_lead(tmp_path, depthroute):
    from depthroute.bench.record import write_json

    write_run(tmp_path / "run")
    for name in ("page.html", "bench.json"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    status, _, error = depthroute(
        "report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")
    )
    assert status == 0, error
    write_json(tmp_path / "bench.json", {"rows": []})
    for name in ("page.html", "bench.json"):
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "far" / name).stat().st_size


def test_a_path_that_a_shell_left_at_home_is_at_home(tmp_path, depthroute, train, monkeypatch):
    """`--out=~/run` reaches a command as it stands, and a folder named ~ is dangerous to remove."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    save(home / "base", None, layers=1)
    (home / "text.txt").write_text(TEXT)
    commands = [
        [*train, "--steps", "2", "--out=~/run", "--cache=~/tokens"],
        ["convert", "--base=~/base", "--out=~/routed", "--text=~/text.txt"],
        ["revert", "~/routed", "--out=~/plain"],
        ["report", "~/run", "--out=~/page.html"],
        ["inspect", "~/routed", "--text=~/text.txt"],
    ]
    for words in commands:
        status, _, err = depthroute(*words)
        assert status == 0, err
    names = ["base", "page.html", "plain", "routed", "run", "text.txt", "tokens"]
    assert sorted(p.name for p in home.iterdir() if not p.name.startswith(".")) == names
    assert not list(here.iterdir())
    status, _, err = depthroute("revert", "~/routed", "--out=~/routed")
    assert status == 2 and "the model is read from there" in err


def test_the_home_of_nobody_is_a_name_like_others(tmp_path, depthroute, train, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert depthroute(*train, "--steps", "1", "--out", "~nobody-at-all/run")[0] == 0
    assert (tmp_path / "~nobody-at-all" / "run" / "model").is_dir()
    status, _, err = depthroute("train", "--data", "~nobody-at-all/text", *SMALL)
    assert status == 2 and "does not exist" in err
