"""Checkpoints: bit for bit, through the ecosystem's own doors."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import depthroute as dr
from tests.support import METHODS, plain_model, routed_model, tokens


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
    with pytest.raises(dr.ConfigError, match=r"unknown routing setting 'block'"):
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
