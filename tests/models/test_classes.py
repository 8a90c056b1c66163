"""Routed models are classes of their own: made once, complete when built, known to transformers."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import depthroute as dr
from depthroute.models.architecture import ARCHITECTURES
from tests.families import SETTINGS, decoder_of, family_config, family_model
from tests.support import METHODS, disturb_routing, llama_config, routed_model, tokens

SOURCES = sorted(Path(dr.__file__).parent.rglob("*.py"))
DELTA = dr.RoutingConfig("delta", num_blocks=2)


def final_state(decoder, ids):
    with torch.no_grad():
        return decoder.eval()(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_class_is_changed_on_a_finished_object(path):
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [t.attr for t in targets if isinstance(t, ast.Attribute)]
        assert "__class__" not in names, ast.unparse(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setattr":
            assert "__class__" not in ast.unparse(node)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_model_has_the_classes_of_its_family_and_no_other_norm(family):
    spec, plain = ARCHITECTURES[family], family_model(family)
    built = dr.from_config(family_config(family), DELTA)
    for model in (built, dr.convert(plain, DELTA)):
        decoder, original = model.base_model, decoder_of(plain)
        assert type(model).__name__ == f"Routed{spec.causal_lm}"
        assert type(decoder).__name__ == f"Routed{type(original).__name__}"
        assert isinstance(model, type(plain)) and isinstance(decoder, type(original))
        assert type(model) is type(built) and type(decoder) is type(built.base_model)
        for name, module in original.named_children():
            if name != spec.layers:
                assert type(getattr(decoder, name)) is type(module)
        layers = [getattr(part, spec.layers) for part in (decoder, original)]
        for layer, of_family in zip(*layers, strict=True):
            assert type(layer).__name__ == f"Routed{type(of_family).__name__}"
            assert isinstance(layer, type(of_family))
            assert type(layer).__name__ in model._no_split_modules


@pytest.mark.parametrize("family", SETTINGS)
def test_forward_names_its_arguments(family):
    model = dr.convert(family_model(family), DELTA)
    wanted = {"input_ids", "attention_mask", "position_ids", "inputs_embeds"}
    for part in (model, model.base_model):
        plain = next(cls for cls in type(part).__mro__ if cls.__module__.startswith("transformers"))
        assert wanted <= set(inspect.signature(part.forward).parameters)
        assert inspect.signature(type(part).forward) == inspect.signature(plain.forward)


@pytest.mark.parametrize("family", SETTINGS)
def test_auto_model_loads_the_decoder_of_a_causal_checkpoint(family, tmp_path):
    model, ids = disturb_routing(dr.convert(family_model(family), DELTA)), tokens(vocab=60)
    model.save_pretrained(tmp_path)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert type(decoder) is type(model.base_model)
    assert torch.equal(final_state(decoder, ids), final_state(model.base_model, ids))


@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_alone_is_complete_and_saved_and_loaded_again(method, tmp_path):
    model, ids = routed_model(method), tokens()
    torch.manual_seed(0)
    decoder = AutoModel.from_config(model.config)
    assert type(decoder) is type(model.model)
    assert list(decoder.state_dict()) == list(model.model.state_dict())
    assert decoder.plan == model.plan and list(decoder.sites) == list(model.sites)
    decoder.load_state_dict(model.model.state_dict())
    expected = final_state(model.model, ids)
    assert torch.equal(final_state(decoder, ids), expected)
    decoder.save_pretrained(tmp_path)
    assert torch.equal(final_state(AutoModel.from_pretrained(tmp_path), ids), expected)
    with pytest.raises(dr.CheckpointError, match=r"missing keys lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_routed_class_loads_its_own_folder_and_no_other(tmp_path):
    model = routed_model("delta")
    model.save_pretrained(tmp_path / "routed")
    loaded = type(model).from_pretrained(tmp_path / "routed").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    values = model.config.to_dict()
    assert type(model.config).from_dict(values).to_dict() == values
    given = dr.from_pretrained(tmp_path / "routed", config=model.config)
    assert torch.equal(given(tokens()).logits, model(tokens()).logits)
    with pytest.raises(dr.CheckpointError, match=r"routed 'llama' model and RoutedQwen3Config is"):
        type(routed_model("delta", "qwen3")).from_pretrained(tmp_path / "routed")
    dr.revert(model).save_pretrained(tmp_path / "plain")
    with pytest.raises(dr.ConfigError, match=r"has no routing.*convert the model"):
        type(model).from_pretrained(tmp_path / "plain")


def test_a_decoder_starts_like_that_of_a_causal_model():
    config = dr.from_config(llama_config(4), DELTA).config
    decoder = AutoModel.from_config(config)
    for site in decoder.sites.values():
        assert site.query.abs().max() == 0 and torch.equal(site.key_weight, torch.ones(32))
    on_meta = AutoModel.from_config(config, dtype=torch.bfloat16)
    assert {p.dtype for p in on_meta.parameters()} == {torch.bfloat16}


def test_a_decoder_without_some_of_its_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    routed_model("delta").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if "routing" in name)
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dr.CheckpointError, match="missing keys"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_decoder_records_hidden_states_and_attentions(family):
    model = dr.convert(family_model(family, attn_implementation="eager"), DELTA)
    for routing in (DELTA, dr.RoutingConfig("depth_attention")):
        model = dr.convert(family_model(family, attn_implementation="eager"), routing)
        fresh = type(model.base_model)(model.config).eval()
        for decoder in (model.base_model, fresh):
            outputs = decoder(
                input_ids=tokens(vocab=60), output_hidden_states=True, output_attentions=True
            )
            assert [type(t) for t in outputs.hidden_states] == [torch.Tensor] * 5
            assert [t.shape for t in outputs.attentions] == [(2, 4, 17, 17)] * 4


def test_the_configuration_alone_makes_the_classes_known(tmp_path):
    model = routed_model("delta", family="qwen3")
    model.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert transformers.MODEL_MAPPING[type(config)] is type(model.model)
    assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] is type(model)
