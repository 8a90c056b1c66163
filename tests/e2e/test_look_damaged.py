"""`inspect`, `generate` and `eval` on models and texts that hold no numbers or no words."""

import io
import json
import sys

import pytest
import torch
from tests.checkpoints import TEXT, byte_tokenizer, save
from tests.runs import write_run

import depthroute as dr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model whole, and with finite weights that overflow: where it routes, in attention,
    and in the head. (Weights that are no numbers are refused when they are loaded.)"""
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT)
    save(root / "whole", "delta")
    changes = {
        "nan routing": lambda m: [p.mul_(0).add_(3e38) for p in m.routing_parameters()],
        "nan": lambda m: [
            p.mul_(1e37) for n, p in m.named_parameters() if "v_proj" in n or "o_proj" in n
        ],
        "huge": lambda m: m.get_output_embeddings().weight.mul_(1e6),
    }
    for name, change in changes.items():
        model = dr.from_pretrained(root / "whole")
        with torch.no_grad():
            change(model)
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    write_run(root / "run", ("delta",), layers=2, steps=20)
    return root


def last_line(depthroute, *arguments):
    """The error of a command that fails, which ends in it."""
    status, _, err = depthroute(*map(str, arguments))
    assert status == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert err.endswith(line + "\n")
    return line


@pytest.mark.parametrize("name", ["nan routing", "nan"])
def test_inspect_names_the_site_whose_weights_are_no_numbers(depthroute, folders, name):
    arguments = ("inspect", folders / name, "--text", folders / "text.txt")
    assert "are no numbers at layers.0.mlp" in last_line(depthroute, *arguments)
    assert "are no numbers" in last_line(depthroute, *arguments, "--json")


@pytest.mark.parametrize(
    "more", [(), ("--temperature", "1", "--seed", "0")], ids=["greedy", "drawn"]
)
def test_generate_refuses_logits_that_are_no_numbers(depthroute, folders, more):
    arguments = ("generate", folders / "nan", "--prompt", "the", *more)
    assert "logits are not finite after 3 tokens" in last_line(depthroute, *arguments)


def test_a_perplexity_beyond_all_numbers_is_infinite_and_null_in_json(depthroute, folders):
    arguments = ["eval", str(folders / "huge"), "--perplexity", str(folders / "text.txt")]
    status, out, err = depthroute(*arguments)
    assert status == 0 and out.startswith("perplexity inf ("), err
    found = json.loads(depthroute(*arguments, "--json")[1])["perplexity"]
    assert found["perplexity"] is None and found["nats_per_token"] > 1000
    arguments[1] = str(folders / "nan")
    status, out, err = depthroute(*arguments, "--json")
    assert status == 0 and "NaN" not in out, err
    assert json.loads(out)["perplexity"]["nats_per_token"] is None


@pytest.mark.parametrize("text", ["", "a"])
def test_inspect_needs_two_tokens(depthroute, folders, tmp_path, text):
    (tmp_path / "short.txt").write_text(text)
    line = last_line(depthroute, "inspect", folders / "whole", "--text", tmp_path / "short.txt")
    assert f"holds {len(text)} tokens" in line and "needs at least 2" in line


def test_a_prompt_that_is_no_text_is_refused(depthroute, folders, monkeypatch):
    line = last_line(depthroute, "generate", folders / "whole", "--prompt", "a\udcff")
    assert "no UTF-8" in line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    line = last_line(depthroute, "generate", folders / "whole", "--prompt", "-")
    assert "standard input is no text" in line


def test_a_text_with_tokens_that_the_model_does_not_know_is_refused(depthroute, folders, tmp_path):
    text = folders / "text.txt"
    commands = [
        ("inspect", "small", "--text", text),
        ("generate", "small", "--prompt", TEXT[:40]),
        ("eval", "small", "--perplexity", text),
        ("convert", "--base", "plain", "--text", text, "--out", tmp_path / "out"),
    ]
    places = {"small": save(tmp_path / "small", "delta", vocab_size=99)}
    places["plain"] = save(tmp_path / "plain", None, vocab_size=99)
    for command in commands:
        line = last_line(depthroute, *(places.get(word, word) for word in command))
        assert "the tokenizer makes token " in line and "the model knows the first 99" in line


@pytest.mark.parametrize("command", ["inspect", "generate", "eval"])
def test_a_run_directory_in_place_of_a_model_is_one_line(depthroute, folders, command):
    text = {"inspect": "--text", "eval": "--perplexity", "generate": "--prompt"}[command]
    line = last_line(depthroute, command, folders / "run", text, folders / "text.txt")
    assert "cannot load" in line and "it is a run" in line
