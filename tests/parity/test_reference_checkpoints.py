"""The Delta authors' released code, reproduced from its own checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import depthroute as dr
from depthroute.models.reference import NAMINGS, export_names, import_names

GOLDEN = Path(__file__).parent.parent / "golden"
MODES = ["delta", "delta_block", "block", "full"]


def read(mode):
    with safe_open(GOLDEN / f"reference_{mode}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    parameters = {k: v for k, v in tensors.items() if not k.startswith("__")}
    return parameters, tensors, json.loads(metadata["config"]), json.loads(metadata["grad_norms"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("evaluation", ["one_pass", "two_phase"])
def test_logits_loss_and_every_gradient_norm_match_the_released_code(mode, evaluation):
    parameters, tensors, config, grad_norms = read(mode)
    model = dr.load_reference(parameters, config, dtype=torch.float64, evaluation=evaluation)
    assert (not model.plan.groups) == (evaluation == "one_pass")
    ids = tensors["__input_ids"]
    output = model(input_ids=ids, labels=ids)
    assert (output.logits - tensors["__logits"]).abs().max() < 2e-5
    assert output.loss.item() == pytest.approx(tensors["__loss"].item(), abs=1e-5)
    output.loss.backward()
    gradients = {k: p.grad for k, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    theirs = export_names(gradients, model.plan)
    live = {k: norm for k, norm in grad_norms.items() if k not in model.left_out}
    assert len(live) >= 70
    for key, norm in live.items():
        assert theirs[key].norm().item() == pytest.approx(norm, rel=1e-4), key
    assert all(grad_norms.get(key, 0.0) == 0.0 for key in model.left_out)


def test_dead_entries_are_accepted_and_named():
    parameters, _, config, _ = read("delta_block")
    model = dr.load_reference(parameters, config)
    # layers 0-1 and the first attention of block 2 see the embedding alone, or nothing
    dead = {f"model.layers.{i}.{kind}" for i in (0, 1) for kind in ("attn", "mlp")}
    dead |= {"model.layers.2.attn"}
    assert set(model.left_out) == {f"{d}_res_{p}.weight" for d in dead for p in ("proj", "norm")}


def test_an_incomplete_checkpoint_names_the_missing_key():
    parameters, _, config, _ = read("delta")
    del parameters["model.layers.3.mlp_res_proj.weight"]
    with pytest.raises(dr.CheckpointError, match=r"layers\.3\.mlp_res_proj.*is it complete"):
        dr.load_reference(parameters, config)
    parameters, _, config, _ = read("delta")
    del parameters["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(dr.CheckpointError, match=r"has no 'model\.layers\.3\.mlp\.up_proj"):
        dr.load_reference(parameters, config)


def test_foreign_keys_shapes_and_modes_are_refused():
    parameters, _, config, _ = read("full")
    with pytest.raises(dr.CheckpointError, match="unknown 'surprise'"):
        dr.load_reference(parameters | {"surprise": torch.zeros(1)}, config)
    with pytest.raises(dr.CheckpointError, match="has shape"):
        dr.load_reference(parameters, config | {"vocab_size": 98})
    with pytest.raises(dr.ConfigError, match="did you mean 'delta_block'"):
        dr.load_reference(parameters, config | {"attnres_mode": "deltablock"})
    with pytest.raises(dr.ConfigError, match="needs attnres_num_blocks"):
        dr.load_reference(parameters, config | {"attnres_mode": "block", "attnres_num_blocks": 0})


def test_files_that_cannot_be_read_give_one_clear_error(tmp_path):
    parameters, _, config, _ = read("full")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((GOLDEN / "reference_full.safetensors").read_bytes()[:1000])
    with pytest.raises(dr.CheckpointError, match="cannot read"):
        dr.load_reference(broken, config)
    with pytest.raises(dr.CheckpointError, match="cannot read the configuration"):
        dr.load_reference(parameters, tmp_path / "absent.json")


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("mode", MODES)
def test_names_round_trip_under_every_naming(mode, naming):
    parameters, _, config, _ = read(mode)
    model = dr.load_reference(parameters, config)
    ours = model.state_dict()
    theirs = export_names(ours, model.plan, naming)
    back, left_out = import_names(theirs, model.plan, naming)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[k], ours[k]) for k in ours)
    # exports fill every place, also those for which the original had no entry at all
    assert set(left_out) >= {k for k in model.left_out if naming == "delta"}
    final = f"model.{NAMINGS[naming].final}_proj.weight"
    assert (final in theirs) == (mode in ("block", "full"))
