"""Routing saved alone, atomic saving, and damaged checkpoints."""

import json
import os
import signal

import pytest
import torch

import depthroute as dr
from depthroute import files
from tests.processes import Forked
from tests.support import disturb_routing, plain_model, routed_model, tokens


@pytest.fixture
def routed(tmp_path):
    plain = plain_model()
    plain.save_pretrained(tmp_path / "base")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    return disturb_routing(dr.convert(base, dr.RoutingConfig("delta", num_blocks=3)))


def test_an_adapter_holds_kilobytes_and_attaches_to_an_untouched_base(routed, tmp_path):
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    files = {f.name: f.stat().st_size for f in (tmp_path / "adapter").iterdir()}
    assert files.keys() == {"README.md", "routing.safetensors", "routing_config.json"}
    assert sum(files.values()) < 20_000
    again = dr.load_adapter(plain_model(), tmp_path / "adapter")
    assert torch.equal(again(tokens()).logits, routed(tokens()).logits)
    by_name = dr.from_pretrained(tmp_path / "adapter")
    assert torch.equal(by_name.eval()(tokens()).logits, routed(tokens()).logits)


def test_an_adapter_refuses_another_base(routed, tmp_path):
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    with pytest.raises(dr.CheckpointError, match=r"num_hidden_layers=6 and this model has 4"):
        dr.load_adapter(plain_model(layers=4), tmp_path / "adapter")
    with pytest.raises(dr.CheckpointError, match=r"'llama' model and this is 'qwen3'"):
        dr.load_adapter(plain_model("qwen3"), tmp_path / "adapter")
    with pytest.raises(dr.CheckpointError, match="not a routing adapter"):
        dr.load_adapter(plain_model(), tmp_path / "base")
    path = tmp_path / "adapter" / "routing_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(dr.CheckpointError, match="adapter format 9"):
        dr.load_adapter(plain_model(), tmp_path / "adapter")


def test_an_adapter_refuses_other_weights_of_the_same_shape(routed, tmp_path):
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    other = plain_model(seed=1)
    with pytest.raises(dr.CheckpointError, match=r"trained on other weights .*any_base=True"):
        dr.load_adapter(other, tmp_path / "adapter")
    attached = dr.load_adapter(other, tmp_path / "adapter", any_base=True)
    pairs = zip(attached.routing_parameters(), routed.routing_parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_adapter_saved_of_a_trained_base_is_not_put_on_the_untrained_one(routed, tmp_path):
    with torch.no_grad():
        for parameter in dr.revert(routed).parameters():
            parameter.mul_(1.05)
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    with pytest.raises(dr.CheckpointError, match=r"save the whole model where the base was"):
        dr.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_knows_its_base_in_another_dtype(routed, tmp_path, dtype):
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    attached = dr.load_adapter(plain_model().to(dtype), tmp_path / "adapter")
    assert {p.dtype for p in attached.parameters()} == {dtype}


def test_an_adapter_of_before_that_holds_no_numbers_of_its_base_loads(routed, tmp_path):
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    path = tmp_path / "adapter" / "routing_config.json"
    description = json.loads(path.read_text())
    assert all(len(v) == 8 for v in description.pop("base_sample").values())
    path.write_text(json.dumps(description))
    dr.load_adapter(plain_model(seed=1), tmp_path / "adapter")
    for damage in ([], 3, {"a": 1}, {"a": ["b"]}, {"a": [None]}):
        path.write_text(json.dumps(description | {"base_sample": damage}))
        with pytest.raises(dr.CheckpointError, match=r"base_sample .* damaged"):
            dr.load_adapter(plain_model(), tmp_path / "adapter")


def test_merging_says_why_it_cannot_be_done(routed):
    with pytest.raises(dr.DepthrouteError, match="weights of each token's own"):
        routed.merge()


def test_saving_again_replaces_weights_and_keeps_other_files(tmp_path):
    first, second = routed_model("delta", seed=1), routed_model("delta", seed=2)
    first.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    assert torch.equal(
        dr.from_pretrained(tmp_path / "m").eval()(tokens()).logits, first(tokens()).logits
    )
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    second.save_pretrained(tmp_path / "m")
    assert not list((tmp_path / "m").glob("model-*.safetensors"))
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    loaded = dr.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(tokens()).logits, second(tokens()).logits)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_failing_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    first = routed_model("delta", seed=1)
    first.save_pretrained(tmp_path / "m")

    def full_disk(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("depthroute.files.sync", full_disk)
    with pytest.raises(dr.CheckpointError, match=r"cannot save to .*: No space left"):
        routed_model("delta", seed=2).save_pretrained(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    loaded = dr.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(tokens()).logits, first(tokens()).logits)


def test_a_save_killed_midway_leaves_the_old_checkpoint(tmp_path):
    """kill -9 while the new weights are on disk but not yet in place."""
    first = routed_model("delta", seed=1)
    first.save_pretrained(tmp_path / "m")

    def save_until_killed():
        files.sync = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
        routed_model("delta", seed=2).save_pretrained(tmp_path / "m")

    process = Forked(save_until_killed)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    loaded = dr.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(tokens()).logits, first(tokens()).logits)
    # what the dead process left behind is cleared by the next save
    assert len(list(tmp_path.iterdir())) == 3  # half a model, and a lock that nobody holds
    first.save_pretrained(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_saving_onto_a_file_or_nowhere_gives_one_clear_error(tmp_path):
    model = routed_model("delta")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(dr.CheckpointError, match="it is a file; give a folder"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(dr.CheckpointError, match="cannot save to"):
        model.save_pretrained(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_truncated_checkpoint_gives_one_clear_error(tmp_path):
    routed_model("delta").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    with pytest.raises(dr.CheckpointError, match=r"cannot be read.*copy it again"):
        dr.from_pretrained(tmp_path)


def test_a_checkpoint_without_its_routing_is_not_loaded_silently(tmp_path):
    from safetensors.torch import load_file, save_file

    routed_model("delta").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if "layers_3_mlp" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dr.CheckpointError, match=r"missing keys .*layers_3_mlp"):
        dr.from_pretrained(tmp_path)
    extra = tensors | {"model.stranger": torch.zeros(1)}
    save_file(extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dr.CheckpointError, match=r"unexpected keys model\.stranger"):
        dr.from_pretrained(tmp_path)


def test_foreign_folders_are_named_as_such(tmp_path):
    plain_model().save_pretrained(tmp_path / "plain")
    with pytest.raises(dr.CheckpointError, match=r"plain 'llama' model.*convert"):
        dr.from_pretrained(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(dr.CheckpointError, match="cannot load"):
        dr.from_pretrained(tmp_path / "empty")


def test_verified_conversion_measures_and_refuses():
    plain = plain_model()
    routed = dr.convert(plain, dr.RoutingConfig("delta", num_blocks=3), verify=tokens())
    assert routed.identity.max_difference < 1e-5
    with pytest.raises(dr.IdentityError, match=r"not an identity.*--allow-drift") as caught:
        dr.convert(plain, dr.RoutingConfig("delta", num_blocks=3, init="paper"), verify=tokens())
    assert caught.value.report.max_difference > 0.01


def test_a_conversion_that_yields_nan_is_refused():
    plain = plain_model()
    with torch.no_grad():
        plain.model.norm.weight.fill_(float("nan"))
    with pytest.raises(dr.IdentityError):
        dr.convert(plain, dr.RoutingConfig("delta"), verify=tokens())
