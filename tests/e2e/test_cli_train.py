"""`train` and `finetune` as a user meets them, interruptions included."""

import json
import logging
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tests.processes import forked_command, signal_oneself
from tests.support import llama_config
from transformers import AutoTokenizer, LlamaForCausalLM

import depthroute as dr
from depthroute.data.documents import open_corpus
from depthroute.data.tokenise import choose_vocabulary
from depthroute.runs.directory import RunDirectory

SMALL = ["--model", "num_hidden_layers=2", "--model", "hidden_size=16"]
SMALL += ["--set", "batch_size=4", "--set", "sequence_length=16", "--set", "validation_sequences=8"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [f"The depth of model {i} is what it reads, and it reads {i * 7}." for i in range(200)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    return str(path)


def losses(path):
    return [r["loss"] for r in RunDirectory(path).records() if r["event"] == "step"]


def test_train_leaves_a_run_directory_whose_model_loads(depthroute, tmp_path, texts):
    out = tmp_path / "run"
    arguments = ["--data", texts, *SMALL, "--steps", 12, "--tokenizer", "train:300", "--out", out]
    arguments += ["--method", "delta", "--num-blocks", 2, "--set", "document_masking=true"]
    status, printed, err = depthroute("train", *arguments, "--json")
    assert status == 0, err
    outcome = json.loads(printed)
    assert outcome["steps"] == 12 and outcome["validation_loss"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["kind"] == "train" and config["methods"] == {
        "delta:num_blocks=2": {"method": "delta", "num_blocks": 2}
    }
    assert config["preset"]["model"]["vocab_size"] == config["data"]["tokenizer"]["size"] == 300
    assert config["train"]["validate_every"] == 1
    assert len(losses(out)) == 12
    records = list(RunDirectory(out).records())
    (routing,) = [r for r in records if r["event"] == "routing"]
    assert 0 <= routing["mean_normalised_max"] <= 1
    assert {(r["method"], r["seed"]) for r in records} == {("delta:num_blocks=2", 0)}
    (trace,) = RunDirectory(out).read_json("traces.json")["traces"]
    assert (trace["method"], trace["seed"]) == ("delta:num_blocks=2", 0)
    assert trace["mean_normalised_max"] == routing["mean_normalised_max"]
    assert trace["peak_memory_bytes"] is None and len(trace["sublayers"]) == 4
    page = tmp_path / "report.html"
    assert depthroute("report", out, "--out", page)[0] == 0
    for panel in ("curves", "maps", "sharpness", "magnitudes"):
        assert f'id="panel-{panel}"' in page.read_text()
    assert (out / "checkpoints" / "best" / "state.json").is_file()
    model = dr.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("The depth", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0).shape[1] == ids.shape[1] + 3
    status, _, err = depthroute("train", *arguments)
    assert status == 2 and "already holds a run" in err
    status, _, err = depthroute("train", *arguments, "--resume", "auto", "--set", "lr=0.5")
    assert status == 2
    assert err == (
        f"error: {out} was started with train.lr 0.006 and now has 0.5; resume with the same, or "
        "start a new run with another --out\n"
    )


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_finished_run_says_so_and_stays_as_it_is(depthroute, tmp_path, texts, has_checkpoints):
    out = tmp_path / "run"
    command = ["train", "--data", texts, *SMALL, "--steps", 2, "--out", out, "--json"]
    printed = depthroute(*command)[1]
    if not has_checkpoints:  # which a finished run needs no more
        shutil.rmtree(out / "checkpoints")
    folder = (out / "model").stat().st_ino
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    status, again, err = depthroute(*command, "--resume", "auto")
    assert (status, again) == (0, printed)
    assert f"{out} is finished: nothing is left to do" in err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert (out / "model").stat().st_ino == folder


def test_a_finished_run_whose_model_or_summary_is_lost_writes_it_again(depthroute, tmp_path, texts):
    out = tmp_path / "run"
    command = ["train", "--data", texts, *SMALL, "--steps", 2, "--out", out, "--json"]
    printed = depthroute(*command)[1]
    for lost, damage in (("summary.json", "{"), ("summary.json", "[]"), ("model", None)):
        if damage is None:
            shutil.rmtree(out / lost)
        else:
            (out / lost).write_text(damage)
        assert depthroute(*command, "--resume", "auto")[:2] == (0, printed)
        assert (out / "model" / "config.json").is_file()
        assert json.loads((out / "summary.json").read_text()) == json.loads(printed)


def signalled(number, records, *arguments, seconds=0.0):
    """A command that gets the signal on the way; what it said of errors."""
    process = forked_command(
        *arguments, first=lambda: signal_oneself(number, records, seconds=seconds)
    )
    err = process.communicate()[1]
    ends = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM}
    assert process.returncode == ends[number], err
    return err


def test_a_killed_run_resumes_on_the_same_curve(depthroute, tmp_path, texts):
    """kill -9 at whatever moment it comes, and SIGTERM once more on the way."""
    arguments = ["--data", texts, *SMALL, "--steps", 250, "--set", "save_every=7"]
    arguments += ["--set", "validate_every=50"]
    cut = [*arguments, "--out", tmp_path / "cut", "--resume", "auto"]
    signalled(signal.SIGKILL, 20, "train", *cut, seconds=random.random() / 10)
    err = signalled(signal.SIGTERM, 20, "train", *cut)
    command = err.partition("saved; resume with:\n  depthroute ")[2].splitlines()[0]
    assert command.startswith("train --config ") and command.endswith(" --resume auto")
    status, _, err = depthroute(*shlex.split(command))
    assert status == 0, err
    status, _, err = depthroute("train", *arguments, "--out", tmp_path / "straight")
    assert status == 0, err
    assert len(losses(tmp_path / "cut")) == 250
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")


@pytest.fixture
def base(tmp_path, texts):
    """A plain checkpoint with a tokenizer, as it comes from a hub."""
    folder = tmp_path / "base"
    LlamaForCausalLM(llama_config(vocab_size=300)).save_pretrained(folder)
    choose_vocabulary("train:300", open_corpus(texts), tmp_path).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("freeze", [False, True])
def test_finetune_converts_and_trains_with_the_published_rates(
    depthroute, tmp_path, texts, base, freeze
):
    out = tmp_path / "run"
    arguments = ["--base", base, "--method", "delta", "--num-blocks", 3, "--data", texts]
    arguments += ["--steps", 6, "--set", "batch_size=4", "--set", "sequence_length=16"]
    status, printed, err = depthroute(
        "finetune", *arguments, "--out", out, *(["--freeze-base"] if freeze else [])
    )
    assert status == 0, err
    assert "6 steps, validation loss" in printed and f"model: {out / 'model'}" in printed
    train = json.loads((out / "config.json").read_text())["train"]
    rates = {name: train[name] for name in ("lr", "routing_lr", "min_lr", "routing_min_lr")}
    assert rates == {"lr": 5e-5, "routing_lr": 5e-3, "min_lr": 3e-5, "routing_min_lr": 3e-5}
    trained = dr.from_pretrained(out / "model")
    plain = LlamaForCausalLM.from_pretrained(base)
    assert any(site.query.abs().max() > 1e-4 for site in trained.sites.values())
    is_same = [torch.equal(p, trained.get_parameter(name)) for name, p in plain.named_parameters()]
    assert all(is_same) if freeze else not any(is_same)
    assert AutoTokenizer.from_pretrained(out / "model")("The depth").input_ids
    (trace,) = RunDirectory(out).read_json("traces.json")["traces"]
    assert trace["sites"] and all(s["gradient_rms"] > 0 for s in trace["sublayers"])
    tells_the_story(out, printed, err, base, texts)


def test_finetune_killed_before_its_first_checkpoint_proves_its_start_again(
    depthroute, tmp_path, texts, base
):
    """What goes on without a checkpoint converts anew: it has an identity to show, and to keep."""
    out, again = tmp_path / "run", tmp_path / "again"
    words = ["finetune", "--base", base, "--method", "delta", "--data", texts, "--steps", 2]
    words += ["--set", "batch_size=2", "--set", "sequence_length=16", "--seed", 3]
    assert depthroute(*words, "--out", out)[0] == 0
    later = shutil.ignore_patterns("step_*", "best", "start.json", "model", "summary.json")
    shutil.copytree(out, again, ignore=later)
    (again / "metrics.jsonl").write_text("")
    status, _, err = depthroute(*words, "--out", again, "--resume", "auto")
    assert status == 0 and "no checkpoint yet" in err, err
    for name in ("summary.json", "start.json"):
        one, other = (RunDirectory(folder).read_json(name) for folder in (out, again))
        assert one["identity"] == other["identity"]
    shutil.rmtree(again / "model")
    for step in (again / "checkpoints").glob("step_*"):
        shutil.rmtree(step)
    status, _, err = depthroute(*words, "--tolerance", "1e-30", "--out", again, "--resume", "auto")
    assert status == 2 and "is not an identity" in err, err


def tells_the_story(out, printed, err, base, texts):
    """Identity before the first step, validation before and after, what changed, what to do."""
    summary = RunDirectory(out).read_json("summary.json")
    assert summary["identity"]["max_difference"] < 1e-5
    assert err.index("identity over") < err.index("validation loss before the first step")
    first = next(r for r in RunDirectory(out).records() if r["event"] == "validation")
    assert first["step"] == 0 and first["loss"] == summary["validation_loss_before"]
    assert f"before the first step it was {first['loss']:.4f}: a change of " in printed
    start = RunDirectory(out).read_json("start.json")["trace"]
    (end,) = RunDirectory(out).read_json("traces.json")["traces"]
    for change in summary["routing"]["changed_most"]:
        before, after = (
            next(s["weights"] for s in t["sites"] if s["name"] == change["site"])
            for t in (start, end)
        )
        moved = sum(abs(b - a) for a, b in zip(before, after, strict=True)) / 2
        assert change["moved"] == pytest.approx(moved) and 0 < moved < 1
        assert f"{change['site']}: {moved:.1%} of its weight lies elsewhere" in printed
    assert "routing: normalised max weight" in printed
    commands = printed.partition("next:\n")[2].splitlines()
    assert [line.split()[1] for line in commands] == ["report", "inspect", "generate", "eval"]
    assert str(texts) in commands[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "nowhere.txt"], "nowhere.txt does not exist; --data takes text"),
        (["train", "--data", "X", "--resume", "yes"], "unknown --resume 'yes'"),
        (["train", "--data", "X", "--resume", "auto"], "continues the run in --out; name it"),
        (["train", "--data", "X", "--num-blocks", "4"], "add --method"),
        (["train", "--data", "X", "--preset", "tinny"], "did you mean 'tiny'"),
        (["train", "--data", "X", "--preset", "delta-220m"], "needs a tokenizer: give --tokenizer"),
        (["train", "--data", "X", "--set", "speed=3"], "unknown training setting 'speed'"),
        (["train", "--data", "X", "--parallel", "tp"], "unknown --parallel 'tp'; known: ddp, fsdp"),
        (["train", "--data", "X", "--parallel", "fsdp"], "fsdp is for several processes"),
        (["train", "--data", "tokens:X"], "holds no prepared tokens"),
        (["train", "--data", "tokens:X", "--tokenizer", "bytes"], "holds tokens already; leave it"),
        (["train", "--data", "X", "--validation", "X", "--held-out", "3"], "give one of them"),
        (["train", "--data", "X", "--held-out", "0"], "--held-out=0.0 must be a finite number"),
        (["train", "--data", "X", "--set", "sequence_length=4096"], "the train part has"),
        (["train", "--data", "X", "--wandb", "p"], "--wandb needs wandb; install it with"),
        (["train", "--data", "X", "--tensorboard"], "--tensorboard needs tensorboard; install"),
        (
            ["finetune", "--data", "X", "--base", "."],
            "cannot load '.': it has no config.json",
        ),
    ],
)
def test_a_mistake_is_one_line(depthroute, texts, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for module in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    status, _, err = depthroute(*[texts if a == "X" else a for a in arguments])
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(lines) == 1 and message in lines[0], err


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_help_has_an_example(depthroute, command):
    status, out, _ = depthroute(command, "--help")
    assert status == 0
    assert f"Example: depthroute {command}" in " ".join(out.split())


def test_validation_from_a_file_of_its_own_and_tokens_that_are_carried(depthroute, tmp_path, texts):
    judged = tmp_path / "judged.txt"
    judged.write_text("Nothing but this is judged by. " * 9)
    options = ["--data", texts, "--validation", judged, "--tokenizer", "train:300", *SMALL]
    options += ["--steps", 2, "--json"]
    status, printed, err = depthroute("train", *options, "--out", tmp_path / "text")
    assert status == 0, err
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["data"]["train_documents"] == 200
    assert config["data"]["validation_documents"] == 1
    (tokens,) = (tmp_path / "cache" / "tokens").iterdir()
    carried = tokens.rename(tmp_path / "carried")
    os.remove(texts)
    options = ["--data", f"tokens:{carried}", *SMALL, "--steps", 2, "--json"]
    status, again, err = depthroute("train", *options, "--out", tmp_path / "tokens")
    assert status == 0, err
    assert json.loads(again)["validation_loss"] == json.loads(printed)["validation_loss"]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokens" / "model")
    assert loaded.decode(loaded("The depth").input_ids) == "The depth"
    options += ["--methods", "standard,delta", "--seeds", 1]
    status, table, err = depthroute("compare", *options, "--out", tmp_path / "compared")
    assert status == 0, err
    summary = json.loads(table)
    assert summary["unit"] == "token" and set(summary["baselines"]) == {"unigram"}


def test_compare_reads_what_train_reads(depthroute, tmp_path, texts):
    options = ["--methods", "standard,delta", "--seeds", 1, "--steps", 2, *SMALL, "--data", texts]
    out = tmp_path / "run"
    options += ["--set", "document_masking=true", "--max-tokens", 4000, "--held-out", 20]
    status, printed, err = depthroute("compare", *options, "--out", out)
    assert status == 0, err
    assert "nats per byte" in " ".join(printed.split()) and "bigram" in printed
    config = json.loads((out / "config.json").read_text())
    assert config["preset"]["model"]["num_hidden_layers"] == 2
    assert config["data"]["tokenizer"]["name"] == "bytes"
    assert 3000 < config["data"]["train_tokens"] < 4000


def test_an_interrupted_comparison_prints_the_command_that_goes_on(tmp_path, texts, depthroute):
    out = tmp_path / "run"
    options = ["--methods", "standard,delta", "--seeds", 1, "--steps", 40, *SMALL]
    options += ["--data", texts, "--set", "validate_every=5"]
    err = signalled(signal.SIGTERM, 12, "compare", *options, "--out", out)
    assert f"--out {out} --resume auto" in err
    status, _, err = depthroute(*shlex.split(err.partition("  depthroute ")[2].splitlines()[0]))
    assert status == 0, err
    status, _, err = depthroute("compare", *options, "--out", tmp_path / "straight")
    assert status == 0, err
    assert losses(out) == losses(tmp_path / "straight")
    assert not (out / "checkpoints").exists()


def test_commands_say_nothing_but_their_own_words(tmp_path, base):
    """No bars, warnings or log lines of other libraries, which --verbose asks for."""
    process = forked_command(
        "convert", "--base", base, "--method", "delta", "--out", tmp_path / "routed"
    )
    out, err = process.communicate()
    assert process.returncode == 0 and err == "" and "identity over" in out


def test_libraries_that_are_imported_later_are_quiet_too():
    code = """
import logging
from depthroute.cli.terminal import quiet
names = ("transformers", "huggingface_hub", "datasets")
with quiet(verbose=False):
    for name in names:
        __import__(name)
    print([logging.getLogger(name).getEffectiveLevel() for name in names])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"{[logging.ERROR] * 3}\n", ended.stderr
