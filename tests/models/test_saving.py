"""Checkpoints: bit for bit, through the ecosystem's own doors."""

import json
import os
import pickle
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import depthroute as dr
from depthroute.errors import ConfigError
from depthroute.models.saving import ADAPTER_CONFIG
from tests.checkpoints import save
from tests.support import METHODS, disturb_routing, plain_model, routed_model, tokens


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_model_loads_bit_for_bit_through_the_auto_class(name, tmp_path):
    model = routed_model(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.plan == model.plan
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)


def test_a_looped_model_saves_its_weights_once(tmp_path):
    from safetensors import safe_open

    model = routed_model(dr.RoutingConfig("delta", loops=2), layers=3)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        layers = {key.split(".")[2] for key in file.keys() if key.startswith("model.layers")}  # noqa: SIM118
    assert layers == {"0", "1", "2"}
    loaded = dr.from_pretrained(tmp_path)
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)


def test_a_converted_model_saved_loaded_and_reverted_equals_the_original(tmp_path):
    plain = plain_model("qwen3", tie_word_embeddings=True)
    dr.convert(plain, dr.RoutingConfig("attnres", block_size=4)).save_pretrained(tmp_path)
    back = dr.revert(dr.from_pretrained(tmp_path))
    ours, theirs = plain.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(back.eval()(tokens()).logits, plain(tokens()).logits)
    assert back.lm_head.weight is back.model.embed_tokens.weight


def test_dtype_is_kept(tmp_path):
    model = routed_model("delta").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = dr.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("adapter_only", [False, True])
def test_what_was_saved_with_two_phases_that_share_nothing_is_read_as_the_plan_would(
    tmp_path, adapter_only
):
    """They are refused where they are asked for, and were not always."""
    plain = plain_model()
    once = dr.RoutingConfig("delta", num_blocks=1)
    dr.convert(plain, once).save_pretrained(tmp_path, adapter_only=adapter_only)
    path = tmp_path / (ADAPTER_CONFIG if adapter_only else "config.json")
    settings = json.loads(path.read_text())
    settings["routing"] |= {"evaluation": "two_phase", "group_size": 3}
    path.write_text(json.dumps(settings))
    loaded = dr.load_adapter(plain, tmp_path) if adapter_only else dr.from_pretrained(tmp_path)
    assert loaded.plan.reason == "one pass: two phases would take longer"
    assert torch.equal(dr.revert(loaded)(tokens()).logits, plain(tokens()).logits)
    with pytest.raises(ConfigError, match="leave out evaluation and group_size"):
        dr.convert(plain, replace(once, evaluation="two_phase", group_size=3))


def test_the_configuration_says_what_ran_and_hides_from_plain_transformers(tmp_path):
    model = dr.convert(plain_model(), dr.RoutingConfig("delta", num_blocks=3))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "depthroute"
    assert written["base_model_type"] == "llama"
    assert written["routing"] == {"method": "delta", "num_blocks": 3, "init": "complete"}
    assert written["architectures"] == ["RoutedLlamaForCausalLM"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "llama"
    assert config.routing_config() == dr.RoutingConfig("delta", num_blocks=3, init="complete")


def test_a_configuration_of_an_unknown_kind_gives_one_clear_error(tmp_path):
    routed_model("delta").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"base_model_type": "newfangled"}))
    with pytest.raises(dr.CheckpointError, match="base_model_type is 'newfangled'"):
        dr.from_pretrained(tmp_path)
    path.write_text(json.dumps(written | {"routing": {"method": "delta", "block": 3}}))
    with pytest.raises(dr.CheckpointError, match=r"unknown routing setting 'block'"):
        dr.from_pretrained(tmp_path)


def test_models_survive_pickle():
    model = routed_model("delta block")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_pickled_models_load_in_another_process(tmp_path):
    """The classes are made at run time, so the other process must find them by name."""
    torch.save(routed_model("depth attention", "qwen3"), tmp_path / "model.pt")
    script = (
        "import sys, torch, depthroute\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(type(model).__name__, type(model.model.layers[0]).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["RoutedQwen3ForCausalLM", "RoutedQwen3DecoderLayer"], done.stderr


def test_hidden_states_are_the_residual_states():
    plain = plain_model()
    for name in ("attnres block", "delta", "depth attention gate"):
        routed = dr.convert(plain, METHODS[name])
        ours = routed(tokens(), output_hidden_states=True).hidden_states
        theirs = plain(tokens(), output_hidden_states=True).hidden_states
        assert len(ours) == len(theirs) == 7
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() < 1e-4
    as_tuple = routed(tokens(), output_hidden_states=True, return_dict=False)
    assert all(isinstance(h, torch.Tensor) for h in as_tuple[-1])


def contents(folder):
    """Every file's bytes, and nothing else may be there."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def base(tmp_path):
    """A stranger's model, with files that only look like weights."""
    save(tmp_path / "base", None)
    (tmp_path / "base" / "pytorch_model_notes.bin.txt").write_text("notes")
    return tmp_path / "base"


def converted(base, seed=0):
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    return disturb_routing(dr.convert(plain, dr.RoutingConfig("delta", num_blocks=3)), seed=seed)


def test_a_full_save_over_an_adapter_is_what_is_loaded(base, tmp_path):
    adapter, full = converted(base, 1), converted(base, 2)
    adapter.save_pretrained(tmp_path / "m", adapter_only=True)
    full.save_pretrained(tmp_path / "m")
    assert not [p for p in (tmp_path / "m").iterdir() if p.name.startswith("routing")]
    loaded = dr.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(tokens()).logits, full(tokens()).logits)


@pytest.mark.parametrize("adapter_only", [True, False])
def test_a_model_that_others_wrote_is_never_lost(base, adapter_only):
    before = contents(base)
    with pytest.raises(dr.CheckpointError, match=r"cannot save to .*lost; give another folder"):
        converted(base).save_pretrained(base, adapter_only=adapter_only)
    assert contents(base) == before
    assert [p.name for p in base.parent.iterdir()] == ["base"]


def test_our_own_whole_model_is_not_lost_to_an_adapter(base, tmp_path):
    converted(base).save_pretrained(tmp_path / "m")
    before = contents(tmp_path / "m")
    with pytest.raises(dr.CheckpointError, match="it holds the weights of a whole model"):
        converted(base).save_pretrained(tmp_path / "m", adapter_only=True)
    assert contents(tmp_path / "m") == before


def test_saving_again_removes_our_shards_and_nobody_elses_files(base, tmp_path):
    folder = tmp_path / "m"
    converted(base).save_pretrained(folder, max_shard_size="20KB")
    own = {
        "pytorch_model_notes.bin.txt": "a",
        "model_card.safetensors.md": "b",
        "model-final.safetensors": "c",
        "tokenizer.json": "d",
    }
    for name, text in own.items():
        (folder / name).write_text(text)
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "model.safetensors").write_text("e")
    converted(base).save_pretrained(folder)
    written = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    written |= {"checkpoint-500"}
    assert {p.name for p in folder.iterdir()} == written | own.keys()
    assert {name: (folder / name).read_text() for name in own} == own
    assert (folder / "checkpoint-500" / "model.safetensors").read_text() == "e"


def test_a_routing_configuration_that_others_wrote_is_kept(base, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "routing_config.json").write_text('{"routes": []}')
    for adapter_only in (True, False):
        with pytest.raises(dr.CheckpointError, match=r"did not write \(routing_config.json\)"):
            converted(base).save_pretrained(tmp_path / "m", adapter_only=adapter_only)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["routing_config.json"]


def test_a_save_follows_links_and_widens_no_permission(base, tmp_path):
    private = tmp_path / "private"
    private.mkdir(0o700)
    (tmp_path / "link").symlink_to("private")
    for _ in range(2):
        converted(base).save_pretrained(tmp_path / "link")
        assert os.readlink(tmp_path / "link") == "private"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    dr.from_pretrained(tmp_path / "link")


@pytest.mark.parametrize("folder", [".", "..", "/", ""])
def test_a_folder_that_cannot_be_meant_gives_one_clear_error(base, tmp_path, monkeypatch, folder):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(dr.CheckpointError, match=r"cannot save to .*give a"):
        converted(base).save_pretrained(folder)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_second_save_into_the_same_folder_is_told_of_the_first(base, tmp_path):
    from depthroute.models import saving

    with saving.replacing(tmp_path / "m") as first:
        with pytest.raises(dr.CheckpointError, match=rf"process {os.getpid()} is writing there"):
            converted(base).save_pretrained(tmp_path / "m")
        converted(base).write_into(first)
    dr.from_pretrained(tmp_path / "m")
