"""Routed decoders by themselves, as for embeddings, and under heads of other kinds."""

import logging
import pickle

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForSequenceClassification,
)

import depthroute as dr
from tests.families import SETTINGS, family_config, family_model
from tests.support import METHODS, disturb_routing, plain_model, tokens, trained_like

DELTA = dr.RoutingConfig("delta", num_blocks=2)
HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "answer": AutoModelForQuestionAnswering,
    "none": AutoModel,
}
WITH_HEADS = [
    (family, head)
    for head, auto in HEADS.items()
    for family in (SETTINGS if head == "sequence" else ("llama", "gpt2", "exaone4", "qwen3_next"))
    if type(family_config(family)) in auto._model_mapping
]


def headed(family, head):
    config = family_config(family)
    config.num_labels = 3
    return trained_like(HEADS[head].from_config(config))


def first(model, ids):
    with torch.no_grad():
        return model(input_ids=ids)[0]


@pytest.mark.parametrize(("family", "head"), WITH_HEADS)
def test_a_head_is_converted_saved_loaded_and_reverted(family, head, tmp_path):
    plain, ids = headed(family, head), tokens()
    routed = dr.convert(plain, DELTA, verify=ids, tolerance=1e-4)
    assert type(routed).__name__ == f"Routed{type(plain).__name__}"
    assert "loss" not in str(routed.identity)
    back = dr.revert(routed)
    assert type(back) is type(plain) and back.config.architectures == [type(plain).__name__]
    assert torch.equal(first(back, ids), first(plain, ids))
    disturb_routing(routed).save_pretrained(tmp_path)
    loaded = HEADS[head].from_pretrained(tmp_path).eval()
    assert type(loaded) is type(routed)
    ours, theirs = loaded.state_dict(), routed.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    torch.testing.assert_close(first(loaded, ids), first(routed, ids), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first(loaded, ids), first(plain, ids), atol=1e-3)


@pytest.mark.parametrize("method", ["attnres two-phase", "mhc", "depth attention", "roles block"])
def test_a_classifier_learns_through_every_kind_of_method(method):
    model = dr.convert(headed("qwen3", "sequence"), METHODS[method]).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(input_ids=tokens(), labels=torch.tensor([0, 2])).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_a_new_head_goes_on_a_routed_language_model_and_says_so(tmp_path, caplog):
    model = disturb_routing(dr.convert(plain_model(), DELTA))
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "depthroute"):
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert "new, to be trained: score.weight" in caplog.text
    states = first(model.model, tokens())
    assert torch.equal(first(classifier.eval().model, tokens()), states)
    assert classifier(input_ids=tokens()).logits.shape == (2, 4)
    classifier.save_pretrained(tmp_path / "classifier")
    with caplog.at_level(logging.WARNING, "depthroute"):
        caplog.clear()
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    assert not caplog.text
    assert torch.equal(first(again, tokens()), first(classifier, tokens()))
    decoder = AutoModel.from_pretrained(tmp_path / "classifier").eval()
    assert torch.equal(first(decoder, tokens()), states)
    assert torch.equal(first(pickle.loads(pickle.dumps(again)), tokens()), first(again, tokens()))


def test_a_head_that_a_checkpoint_should_have_is_missed(tmp_path):
    model = dr.convert(headed("llama", "sequence"), DELTA)
    state = {name: t for name, t in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(dr.DepthrouteError, match=r"missing keys score\.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(dr.DepthrouteError, match=r"missing keys lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_is_no_model_of_the_family_is_refused_with_those_that_are():
    class Other(LlamaForSequenceClassification):
        pass

    plain = Other(family_config("llama"))
    with pytest.raises(dr.ConfigError, match=r"takes LlamaModel, LlamaForCausalLM, LlamaForSeq"):
        dr.convert(plain, DELTA)
    with pytest.raises(dr.ConfigError, match="already routed"):
        dr.convert(dr.convert(family_model("llama").model, DELTA), DELTA)


def test_a_part_of_another_class_is_refused_whatever_its_name():
    """Routed classes are made of the family's own, so what its forward computes would be lost."""
    home = "transformers.models.llama.modeling_llama"
    for path in ("", "model", "model.layers.1"):
        plain = family_model("llama")
        part = plain.get_submodule(path)
        part.__class__ = type(type(part).__name__, (type(part),), {})
        with pytest.raises(dr.ConfigError, match=rf"is no class of {home}.*convert the family's"):
            dr.convert(plain, DELTA)


def test_the_routing_of_a_headed_model_is_looked_at_and_hooked_as_any():
    model, seen = dr.convert(headed("llama", "sequence"), DELTA), []
    model.model.layers[1].register_forward_hook(lambda layer, args, h: seen.append(h.shape))
    trace = dr.trace(model, tokens())
    assert "layers.3.mlp" in trace.sites and seen[0] == (2, 17, 32)
