"""Whole command lines: each ends well, or in one line that says what to change; never otherwise."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute import cli, methods
from tests import checkpoints
from tests.fuzz import strategies
from tests.fuzz.strategies import assignments, once_in

SMALL = ["--model", "num_hidden_layers=2", "--set", "batch_size=2", "--set", "sequence_length=8"]
SMALL += ["--set", "validation_sequences=2", "--device", "cpu"]


@pytest.fixture(scope="module")
def place():
    """A folder with a plain model, a routed one and texts of all kinds, and where runs are made."""
    folder = Path(tempfile.mkdtemp())
    checkpoints.save(folder / "plain", None, layers=2)
    checkpoints.save(folder / "routed", "delta", layers=2)
    (folder / "text.txt").write_text(checkpoints.TEXT * 4)
    rows = [json.dumps({"text": f"row {i} is read", "other": i}) for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "deep.jsonl").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "empty.txt").write_text("")
    (folder / "bytes.txt").write_bytes(bytes(range(1, 256)) * 20)
    (folder / "bad.jsonl").write_text('{"text": 3}\n')
    (folder / "bad.jsonl.gz").write_text("not gzip")
    (folder / "bad.parquet").write_text("not parquet")
    (folder / "loop").symlink_to("loop")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "fifo")
    environment = {"DEPTHROUTE_CACHE": str(folder / "cache"), "COLUMNS": "120", "TERM": "dumb"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        contextlib.chdir(folder),
    ):
        yield folder
    shutil.rmtree(folder)


def run(words: list[str]) -> tuple[int, str, str]:
    """The entry point in this process; anything but an exit is a traceback to a user."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["depthroute", *words]),
        mock.patch.object(sys, "stdin", io.StringIO("")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return ended.value.code or 0, out.getvalue(), err.getvalue()  # pyright: ignore


def check(words: list[str]) -> str:
    code, out, err = run(words)
    assert code in (0, 2), (words, code, err)  # 1 is a measurement that failed
    assert "Traceback" not in out + err, (words, err)
    if code == 2 and "Usage:" not in out:  # the help, where no command was given
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ") and len(last) < 1500, (words, err)
    return out if code == 0 else ""


GOOD = ["text.txt", "rows.jsonl"]
BAD = ["deep.jsonl", "empty.txt", "bytes.txt", "bad.jsonl", "bad.jsonl.gz", "bad.parquet", "loop"]
BAD += ["empty", "fifo", "nosuch", "", "hf:", ".", "/dev/zero", "/dev/null", "tokens:", "~x"]
BAD += ["tokens:empty", "hf::::", "a" * 300, "hf:no/such"]
DATA = once_in(4).flatmap(lambda is_bad: st.sampled_from(BAD if is_bad else GOOD))
NUMBER = st.sampled_from(["0", "1", "2", "-1", "nan", "inf", "1e999", "abc", "", "2.5", "9" * 30])


def option(name: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """Seldom given."""
    return once_in(16).flatmap(
        lambda is_given: values.map(lambda value: [name, value]) if is_given else st.just([])
    )


def flag(name: str) -> st.SearchStrategy[list[str]]:
    return once_in(4).map(lambda is_given: [name] if is_given else [])


def line(*parts: Any) -> st.SearchStrategy[list[str]]:
    strategies_ = [p if isinstance(p, st.SearchStrategy) else st.just([p]) for p in parts]
    return st.tuples(*strategies_).map(lambda found: [word for part in found for word in part])


METHOD = st.sampled_from(["detla", *methods.METHODS])
ROUTING = {k: v for k, v in strategies.ROUTING.items() if k != "method"}
TRAINING = {
    k: v
    for k, v in strategies.TRAINING.items()
    if k not in ("steps", "warmup_steps", "batch_size", "sequence_length", "validation_sequences")
}
MODEL = {k: v for k, v in strategies.MODEL.items() if k != "num_hidden_layers"}
READING = line(
    option("--held-out", NUMBER),
    option("--max-tokens", NUMBER),
    option("--workers", NUMBER.filter(lambda n: n != "2")),
    option("--text-field", st.sampled_from(["text", "other", "", "txt"])),
    option("--validation", DATA),
    option(
        "--tokenizer", st.sampled_from(["bytes", "train:300", "train:", "train:1", "nosuch", ""])
    ),
    option("--seed", NUMBER),
    option("--parallel", st.sampled_from(["fsdp", "tp", "ddp"])),
    option("--device", st.sampled_from(["cpu", "cuda:99", "meta", "gpu", "", "auto"])),
    option("--resume", st.sampled_from(["auto", "yes", "never"])),
)
ROUTED = line(
    METHOD.map(lambda name: ["--method", name]),
    option("--num-blocks", NUMBER),
    option("--block-size", NUMBER),
    option("--init", st.sampled_from(["gate", "paper", "x", "centered"])),
    assignments("--routing", ROUTING, junk_once_in=12, most=2),
)
TRAIN = line(
    "train",
    DATA.map(lambda name: ["--data", name]),
    *(st.just(part) for part in ([*SMALL], ["--model", "hidden_size=16"], ["--steps", "1"])),
    ROUTED,
    assignments("--set", TRAINING, junk_once_in=12, most=2),
    READING,
)
SHAPES = line(
    "train",
    st.just(["--data", "text.txt", *SMALL, "--steps", "1"]),
    assignments("--model", MODEL, junk_once_in=6, most=3),
)
BASE = (
    once_in(8)
    .flatmap(
        lambda is_bad: st.sampled_from(["routed", "nosuch", "empty", ""] if is_bad else ["plain"])
    )
    .map(lambda name: ["--base", name])
)
FINETUNE = line(
    "finetune",
    BASE,
    st.just(["--data", "text.txt", "--steps", "1", *SMALL[2:]]),
    ROUTED,
    option("--tolerance", NUMBER),
    flag("--allow-drift"),
    flag("--freeze-base"),
    assignments("--set", TRAINING, junk_once_in=12, most=2),
)
METHODS = once_in(5).flatmap(
    lambda is_bad: st.sampled_from(
        ["", ",", "delta:", "a:b", "delta:heads=0", ":", "delta,delta", "delta:heads=2:heads=1"]
        if is_bad
        else ["standard", "standard,delta", "delta:heads=2", "x0-skip,attnres-full"]
    )
)
COMPARE = line(
    "compare",
    st.just([*SMALL, "--model", "hidden_size=16"]),
    option("--data", DATA).map(lambda given: given or ["--data", "text.txt"]),
    METHODS.map(lambda names: ["--methods", names]),
    option("--seeds", NUMBER).map(lambda given: given or ["--seeds", "1"]),
    option("--steps", st.just("0")).map(lambda given: given or ["--steps", "1"]),
    option("--set", st.just("steps=1")),
    option("--equal", st.sampled_from(["tokens", "time", "x"])),
    option("--sweep", st.sampled_from(["lr=1e-3,2e-3", "lr", "lr=1,a", "x=1,2", "clip=[1],2", ""])),
    option("--sweep-seeds", st.sampled_from(["1", "0", "x"])),
    option("--extend", st.sampled_from(["0", "-1", "1"])),
    option("--ladder", st.sampled_from(["2K,4K", "2K", "hidden_size=8,x=1", "0M,1M", "a,b", ""])),
    option("--tokens-per-parameter", st.sampled_from(["0.01", "0", "x"])),
    option("--precompile", st.sampled_from(["0", "-1", "x"])),
    assignments("--set", TRAINING, junk_once_in=12, most=2),
    option("--preset", st.sampled_from(["tiny", "tyni", "delta-7.57b", ""])),
)
FOLDER = once_in(8).flatmap(
    lambda is_bad: st.sampled_from(["empty", "nosuch", "text.txt", ""] if is_bad else ["routed"])
)
GENERATE = line(
    "generate",
    FOLDER.map(lambda name: [name]),
    st.sampled_from(["", "-", "a", "the model", "b", "c d"]).map(lambda text: ["--prompt", text]),
    st.just(["--max-new-tokens", "2", "--device", "cpu"]),
    option("--temperature", NUMBER),
    option("--top-k", NUMBER),
    option("--top-p", NUMBER),
    option("--seed", NUMBER),
)
READ = st.sampled_from(["text.txt", "text.txt", "bytes.txt", "empty.txt", "nosuch"])
INSPECT = line(
    "inspect",
    FOLDER.map(lambda name: [name]),
    READ.map(lambda name: ["--text", name]),
    option("--tokens", NUMBER),
    flag("--gradients"),
    flag("--json"),
)
EVAL = line(
    "eval",
    FOLDER.map(lambda name: [name]),
    READ.map(lambda name: ["--perplexity", name]),
    option("--window", NUMBER),
    option("--stride", NUMBER),
    option("--batch-size", NUMBER),
    option("--limit", NUMBER),
    flag("--add-bos"),
    flag("--json"),
)
CONVERT = line(
    "convert",
    BASE,
    st.just(["--out", "converted"]),
    ROUTED,
    option("--tokens", NUMBER),
    option("--tolerance", NUMBER),
    flag("--allow-drift"),
    option("--text", st.sampled_from(["text.txt", "bytes.txt", "empty.txt", "nosuch", ".", ""])),
)
TIMED = line(
    st.sampled_from([["bench", "step", "--eager", "--steps", "1"], ["bench", "decode"]]),
    st.just(["--device", "cpu", "--preset", "tiny"]),
    METHODS.map(lambda names: ["--methods", names]),
    option("--layers", NUMBER).map(lambda given: given or ["--layers", "1"]),
    option("--vocab-size", NUMBER),
    option("--dtype", st.sampled_from(["fp8", "float32", ""])),
    option("--preset", st.sampled_from(["tyni", ""])),
    option("--device", st.sampled_from(["gpu", "cuda"])),
)
ABOUT = line(
    st.sampled_from([["presets"], ["env"], ["report"], ["bench", "ops"], ["bench", "tune"], []]),
    st.lists(
        st.sampled_from(["--json", "nosuch", "empty", "--x", "--version", "--help"]), max_size=2
    ),
)


def check_run(words: list[str], folder: Path) -> None:
    """A run that was accepted wrote down everything that was asked for."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    if not check([*words, "--out", "run"]) or "--help" in words:
        return
    config = json.loads((out / "config.json").read_text())
    model = config["preset"]["model"] if "preset" in config else {}
    (routing,) = config["methods"].values() if len(config["methods"]) == 1 else ({},)
    places = {"--set": config["train"], "--model": model, "--routing": routing}
    for name, assigned in itertools.pairwise(words):
        key, _, text = assigned.partition("=")
        if name not in places:
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        held = places[name].get(key, getattr(cli_default(name), key, None))
        assert held == value, (words, key, held)


def cli_default(option_name: str) -> Any:
    """A routing setting that equals its default is not written."""
    from depthroute.config import RoutingConfig

    return RoutingConfig() if option_name == "--routing" else None


@pytest.mark.parametrize("name", ["TRAIN", "SHAPES", "FINETUNE", "COMPARE"])
def test_a_run_holds_what_was_asked_for_or_is_refused_in_one_line(name, place):
    @settings(max_examples=14)
    @given(globals()[name])
    def every(words):
        check_run(words, place)

    every()


@pytest.mark.parametrize("name", ["GENERATE", "INSPECT", "EVAL", "CONVERT", "TIMED", "ABOUT"])
def test_a_command_ends_well_or_in_one_line(name, place):
    @settings(max_examples=14)
    @given(globals()[name])
    def every(words):
        shutil.rmtree(place / "converted", ignore_errors=True)
        check(words)

    every()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TRAIN", "SHAPES", "FINETUNE", "COMPARE"])
def test_many_runs(name, place):
    @settings(max_examples=500)
    @given(globals()[name])
    def every(words):
        check_run(words, place)

    every()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GENERATE", "INSPECT", "EVAL", "CONVERT", "TIMED", "ABOUT"])
def test_many_commands(name, place):
    @settings(max_examples=500)
    @given(globals()[name])
    def every(words):
        shutil.rmtree(place / "converted", ignore_errors=True)
        check(words)

    every()
