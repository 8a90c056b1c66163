"""Mistakes in settings and text: one line that says what to change, before any work is done."""

from __future__ import annotations

import json
import os

import pytest
from tests import checkpoints
from tests.families import family_model

from depthroute import presets
from depthroute.errors import ConfigError
from depthroute.models.settings import make_config, setting_names


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("what a model reads and what it says\n" * 200)
    return path


def refused(depthroute, *words) -> str:
    code, out, err = depthroute(*map(str, words))
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


MODEL_MISTAKES = {
    "num_hidden_layer=2": "unknown model setting 'num_hidden_layer'; did you mean 'num_hidden_la",
    "num_hidden_layers=2.5": "expected int, got float",
    "num_hidden_layers=0": "model.num_hidden_layers=0 must be a whole number of at least 1",
    "num_hidden_layers=-1": "must be a whole number of at least 1",
    "num_hidden_layers=1000000": "is more than 10,000 layers",
    "hidden_size=33": "model settings hidden_size=33 make no llama model: The hidden size (33)",
    "hidden_size=1000000000": "GB to train, and cpu has",
    "hidden_size=true": "expected int, got bool",
    "num_attention_heads=7": "num_attention_heads=7 make no llama model",
    "num_key_value_heads=3": "does not divide num_attention_heads=2",
    "head_dim=7": "head_dim",
    "head_dim=1": "use an even number",
    "hidden_act=zzz": "unknown model.hidden_act 'zzz'; known: gelu",
    "hidden_act=sliu": "did you mean 'silu'?",
    "vocab_size=-5": "model.vocab_size=-5 must be a whole number of at least 1",
    "intermediate_size=0": "must be a whole number of at least 1",
    "rope_theta=abc": "model.rope_theta='abc' must be a finite number greater than 0",
    "rms_norm_eps=NaN": "model.rms_norm_eps=nan must be a finite number",
    "initializer_range=Infinity": "must be a finite number",
    "attention_dropout=1.5": "must be a finite number at least 0 and below 1",
    "tie_word_embeddings=maybe": "expected bool, got str",
    "eos_token_id=3": "model.eos_token_id is the tokenizer's",
    "model_type=gpt2": "unknown model setting 'model_type'",
    "dtype=float16": "unknown model setting 'dtype'",
    "use_cache=false": "unknown model setting 'use_cache'",
}


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("setting", MODEL_MISTAKES)
def test_a_model_setting_is_refused_before_text_is_read(
    depthroute, text, tmp_path, command, setting
):
    words = [command, "--data", text, "--out", tmp_path / "run", "--device", "cpu"]
    line = refused(depthroute, *words, "--steps", "1", "--model", setting)
    assert MODEL_MISTAKES[setting] in line
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


OTHER_MISTAKES = {
    "--routing include_partial=maybe": "routing.include_partial='maybe' must be true or false",
    "--routing eps=NaN": "routing.eps=nan must be a finite number",
    "--routing eps=abc": "routing.eps='abc' must be a finite number",
    "--routing heads=2 --routing heads=4": "--routing: heads is given twice",
    "--routing method=attnres": "method is given twice, with --method and with --routing",
    "--num-blocks 2 --routing num_blocks=4": "num_blocks is given twice",
    "--routing heads": "'heads' must be key=value",
    "--routing =3": "'=3' must be key=value",
    "--set compile=zzz": "unknown train.compile 'zzz'; known: ",
    "--set lr=NaN": "train.lr=nan must be a finite number",
    "--set lr=0.1 --set lr=0.2": "--set: lr is given twice",
    "--model hidden_size=8 --model hidden_size=16": "--model: hidden_size is given twice",
    "--steps 3 --set steps=4": "steps is given twice, with --steps and with --set",
    "--set steps=true": "train.steps=True must be a whole number",
    "--set decay_fraction=0.5": "has no meaning for schedule='cosine'",
    "--held-out nan": "--held-out=nan must be a finite number greater than 0 and below 100",
    "--max-tokens -1": "--max-tokens=-1 must be a whole number of at least 1",
    "--text-field body": "--text-field body names a field of JSONL and Parquet",
    "--parallel fsdp": "--parallel fsdp is for several processes",
    "--pp 2": "takes processes in multiples of 2 and there is 1; start 2 with torchrun",
    "--schedule gpipe": "--schedule is for a pipeline; add --pp 2 or more",
    "--device meta": "--device 'meta' is no device",
}


@pytest.mark.parametrize("options", OTHER_MISTAKES)
def test_an_option_of_train_is_refused(depthroute, text, tmp_path, options):
    words = ["train", "--method", "delta", "--data", text, "--out", tmp_path / "run"]
    words += [] if "steps" in options else ["--steps", "1"]
    assert OTHER_MISTAKES[options] in refused(depthroute, *words, *options.split())
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_tokenizer_is_not_enlarged(depthroute, text, tmp_path):
    words = ["train", "--data", text, "--tokenizer", "bytes", "--out", tmp_path / "run"]
    code, _, err = depthroute(*map(str, words), "--model", "vocab_size=100")
    last = err.strip().splitlines()[-1]  # after the bar of the tokens
    assert code == 2 and last.startswith("error: model.vocab_size=100 has no room for the 256 tok")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--data", "--out", "--cache", "--tokenizer", "--set"])
def test_a_name_that_is_not_utf_8_is_refused(depthroute, text, tmp_path, option):
    """A whole training would else end without its model, which is written last."""
    words = ["train", "--data", text, "--steps", "1", "--out", tmp_path / "run"]
    line = refused(depthroute, *words, option, str(tmp_path / "caf\udce9"))
    assert f"{option} '" in line and "caf\\udce9' holds bytes that are no UTF-8; rename" in line
    assert not (tmp_path / "run").exists()


def test_learned_is_a_switch(depthroute, text):
    words = ["train", "--method", "x0_skip", "--routing", "learned=no", "--data", text]
    words += ["--steps", "1"]
    assert "routing.learned='no' must be true or false" in refused(depthroute, *words)


def test_a_comparison_reads_no_option_that_it_would_ignore(depthroute, tmp_path):
    line = refused(depthroute, "compare", "--cache", tmp_path)
    assert "options that say how text is read need the text; add --data" in line


DATA_MISTAKES = {
    "hf:": "hf: names no data set; give hf:NAME[:CONFIG[:SPLIT]]",
    "hf:a:b:c:d": "names no data set",
    "deep.jsonl": "deep.jsonl, line 1 is not JSON",
    "/dev/zero": "/dev/zero is neither a file nor a directory",
    "fifo": "fifo is neither a file nor a directory",
    "a" * 300: "File name too long",
    "nosuch.txt": "does not exist",
}


@pytest.mark.parametrize("name", DATA_MISTAKES)
def test_text_that_cannot_be_read_is_one_line(depthroute, text, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "]" * 100_000)
    os.mkfifo(tmp_path / "fifo")
    assert DATA_MISTAKES[name] in refused(depthroute, "train", "--data", name, "--out", "run")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_text_that_is_the_validation_text_too_is_all_held_out(depthroute, text, command):
    line = refused(depthroute, command, "--data", text, "--validation", text)
    assert f"all of {text} is held out" in line


SAMPLING_MISTAKES = {
    "--temperature nan": "temperature=nan must be 0, which takes the most likely token, or a",
    "--temperature -1": "temperature=-1.0 must be 0, which takes the most likely token",
    "--temperature 1e-30": "likely token, or a finite number at least 0.001",
    "--temperature 1 --top-p 0": "top-p=0.0 must be a finite number greater than 0",
    "--temperature 1 --top-p nan": "top-p=nan must be a finite number",
    "--top-k 3": "top-k is for tokens that are drawn",
    "--seed 3": "seed is for tokens that are drawn",
}


@pytest.mark.parametrize("options", SAMPLING_MISTAKES)
def test_how_tokens_are_drawn_is_asked_before_a_model_is_loaded(depthroute, options):
    line = refused(depthroute, "generate", "./nosuch", "--prompt", "a", *options.split())
    assert SAMPLING_MISTAKES[options] in line


def test_options_that_would_be_ignored_are_refused(depthroute, text, tmp_path):
    base = checkpoints.save(tmp_path / "plain", None, layers=2)
    routed = checkpoints.save(tmp_path / "routed", "delta", layers=2)
    words = ["convert", "--base", base, "--out", tmp_path / "out"]
    line = refused(depthroute, *words, "--allow-drift", "--tolerance", "1")
    assert "--tolerance 1 would be ignored" in line
    assert "--tolerance=nan" in refused(depthroute, *words, "--tolerance", "nan")
    line = refused(depthroute, "inspect", routed, "--text", text, "--gradients")
    assert "--gradients are in the JSON alone" in line
    line = refused(depthroute, "eval", routed, "--tasks", "piqa", "--window", "8")
    assert "--window does nothing without --perplexity" in line
    (tmp_path / "empty.txt").write_text("")
    line = refused(depthroute, "inspect", routed, "--text", tmp_path / "empty.txt")
    assert "holds 0 tokens" in line


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_made_of_settings_that_its_family_knows(preset):
    chosen = presets.get(preset)
    assert set(chosen.model) <= set(setting_names(chosen.model_type))
    assert presets.with_model(chosen, {"num_hidden_layers": 2}).model["num_hidden_layers"] == 2
    assert presets.Preset.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"sliding_window": 8}, "sliding_window=8 would be ignored"),
        ("llama", {"rope_theta": 3.0, "rope_parameters": {"rope_theta": 5.0}}, "would be ignored"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "make no llama model: KeyError"),
        ("llama", ["hidden_size"], "must be an object"),
        ("mamba", {}, "unknown model_type 'mamba'"),
    ],
)
def test_a_configuration_that_would_ignore_a_setting_is_not_made(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config(family, settings)


def test_settings_that_a_family_knows_by_two_names_count():
    config = make_config("gpt2", {"hidden_size": 32, "n_layer": 2, "num_attention_heads": 4})
    assert (config.n_embd, config.num_hidden_layers, config.n_head) == (32, 2, 4)
    shape = {"rope_theta": 500.0}
    assert make_config("llama", shape).rope_parameters["rope_theta"] == 500.0
    assert shape == {"rope_theta": 500.0}


RATES = ["--set", "routing_lr=0.1"], ["--set", "routing_min_lr=0.0001"]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("method", ["standard", "x0_skip", "depth_attention"])
def test_a_rate_of_routing_where_no_method_has_parameters(depthroute, tmp_path, text, method, rate):
    out = tmp_path / "run"
    words = ["train", "--data", text, "--method", method, *rate, "--out", out]
    message = refused(depthroute, *words)
    assert f"{rate[1]} is for routing parameters, and {method} as set here has none" in message
    names = f"standard,{method.replace('_', '-')}".replace("standard,standard", "standard")
    words = ["compare", "--data", text, "--methods", names, *rate, "--out", out]
    assert "is for routing parameters, and" in refused(depthroute, *words)
    assert not out.exists() and not (tmp_path / "cache").exists()


def test_finetune_refuses_what_has_no_routing_to_train_before_it_tokenises(
    depthroute, tmp_path, text
):
    base = checkpoints.save(tmp_path / "base", None, layers=1)
    words = ["finetune", "--base", base, "--data", text, "--method", "standard"]
    words += ["--out", tmp_path / "run", "--set", "batch_size=2", "--set", "sequence_length=16"]
    message = refused(depthroute, *words, "--set", "routing_lr=0.1")
    assert "is for routing parameters, and standard as set here has none" in message
    assert "has no parameters; leave it out" in refused(depthroute, *words, "--freeze-base")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cuda_graph=true", "train.cuda_graph=true cannot be: the model is on cpu"),
        ("document_masking=true", "document_masking=true cannot be: lfm2 reads on where"),
    ],
)
def test_what_a_step_cannot_do_is_refused_before_anything_is_written(
    depthroute, tmp_path, text, setting, message
):
    family_model("lfm2").save_pretrained(tmp_path / "base")
    rest = ["--data", text, "--set", setting, "--device", "cpu", "--out", tmp_path / "run"]
    words = ["finetune", "--base", tmp_path / "base", "--method", "delta", "--steps", 1]
    words += ["--set", "sequence_length=16", "--set", "batch_size=2"]
    assert message in refused(depthroute, *words, *rest)
    if setting == "cuda_graph=true":  # presets' families can mask documents
        assert message in refused(depthroute, "train", "--method", "delta", *rest)
        assert message in refused(depthroute, "compare", "--methods", "standard", *rest)
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_finetune_refuses_tokens_that_the_model_does_not_know_and_no_others(
    depthroute, tmp_path, text
):
    """Of its tokenizer's one is in no text, and need not be known."""
    words = ["finetune", "--data", text, "--method", "delta", "--steps", 1, "--allow-drift"]
    words += ["--set", "sequence_length=16", "--set", "batch_size=2", "--out", tmp_path / "run"]
    tokenizer = checkpoints.byte_tokenizer()
    known = len(tokenizer)
    tokenizer.add_tokens(["<never said>"])
    bases = [checkpoints.save(tmp_path / str(n), None, layers=1, vocab_size=n) for n in (99, known)]
    for base in bases:
        tokenizer.save_pretrained(base)
    code, _, err = depthroute(*map(str, [*words, "--base", bases[0]]))
    last = err.strip().splitlines()[-1]  # after the bar of the tokens
    assert code == 2 and last.startswith("error: the tokenizer makes token "), err
    assert f"knows the first 99; save it with resize_token_embeddings({known + 1})" in last
    assert not (tmp_path / "run").exists()
    code, _, err = depthroute(*map(str, [*words, "--base", bases[1]]))
    assert code == 0, err
