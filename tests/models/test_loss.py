"""The loss of a step without whole logits: every family's, and where it must not be taken."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close

import depthroute as dr
from depthroute import ops
from depthroute.data.batches import IGNORED, Batch
from depthroute.errors import ConfigError
from depthroute.models.architecture import ARCHITECTURES
from depthroute.train.loss import loss_sum, obstacle
from depthroute.train.trainer import Trainer
from tests.dispatch import Largest
from tests.families import family_model
from tests.support import disturb_routing, plain_model, tokens
from tests.training import SETTINGS, build, take_steps, words

LOSS = "linear_cross_entropy", "torch"


def routed(family="llama", method="delta", **overrides):
    model = dr.convert(family_model(family, **overrides), dr.RoutingConfig(method))
    return disturb_routing(model)


def batch(length=9):
    ids = tokens(length=length + 1)
    targets = ids[:, 1:].clone()
    targets[0, 2:4] = IGNORED
    return Batch(ids[:, :-1], targets)


def loss_and_gradients(model, chunk):
    model.zero_grad(set_to_none=True)
    with ops.record_backends() as ran:
        loss = loss_sum(model, batch(), chunk)
    (loss / 18).backward()
    assert ran[LOSS] == (chunk != 0)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same_loss(model, chunk, rel=1e-5):
    loss, grads = loss_and_gradients(model, chunk)
    expected, expected_grads = loss_and_gradients(model, 0)
    assert_close(loss, expected, rtol=1e-6, atol=0.0)
    assert grads.keys() == expected_grads.keys()
    largest = max(grad.norm() for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        assert grads[name].dtype == grad.dtype
        # a gate's gradient is a sum that cancels: its rounding is that of what is summed
        scale = max(grad.norm(), 1e-2 * largest)
        assert (grads[name] - grad).norm() <= rel * scale, name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_familys_loss_and_all_gradients_are_those_of_its_logits(family):
    caps = {"final_logit_softcapping": 1.5} if family.startswith("gemma") else {}
    model = routed(family, **caps)
    assert obstacle(model) is None
    assert_same_loss(model, chunk=5)


@pytest.mark.parametrize("method", ["standard", "attnres", "depth_attention", "static"])
def test_every_methods_loss_is_that_of_its_logits(method):
    assert_same_loss(routed(method=method), chunk=None)


def test_a_tied_head_a_bias_and_a_frozen_head():
    tied = routed(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert_same_loss(tied, chunk=4)
    model = routed()
    model.lm_head.bias = nn.Parameter(torch.randn(97))
    assert obstacle(model) is None
    assert_same_loss(model, chunk=4)
    model.lm_head.requires_grad_(False)
    assert_same_loss(model, chunk=4)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("granite", "logit_divisor"),
        ("cohere2", "logit_scale"),
        ("gemma2", "logit_softcap"),
    ],
)
def test_a_family_whose_row_forgets_what_becomes_of_logits_trains_on_its_logits(
    family, field, monkeypatch, caplog
):
    model = routed(family)
    with torch.no_grad():  # as at the start of training: too small for a softcap to be seen
        model.lm_head.weight.mul_(1e-3)
    assert obstacle(model) is None
    row = replace(model.architecture, **{field: None})
    monkeypatch.setattr(type(model), "architecture", row)
    assert "not what the architecture" in obstacle(model)
    with caplog.at_level(logging.WARNING, logger="depthroute"), ops.record_backends() as ran:
        loss = Trainer(model, SETTINGS)._loss_sum(batch())
    assert LOSS not in ran
    assert loss == loss_sum(model, batch(), 0)
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"loss_chunk=8 cannot be: its logits are not what"):
        Trainer(model, replace(SETTINGS, loss_chunk=8))


def test_a_softcap_that_nobody_listed_is_found():
    class Capped(type(routed())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 50 * torch.tanh(output.logits / 50)
            return output

    model = routed()
    model.__class__ = Capped
    assert "not what the architecture" in obstacle(model)


def replaced_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def hooked_head_before(model):
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def hooked_model(model):
    def doubled(module, inputs, output):
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(doubled)


def own_forward(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def head_with_a_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 2


def lora_head(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"])).base_model.model


def saved_head(model):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(model, config).base_model.model


CHANGES = [
    replaced_head,
    hooked_head,
    hooked_head_before,
    hooked_model,
    own_forward,
    head_with_a_forward,
    lora_head,
    saved_head,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_head_that_is_no_plain_linear_layer_and_a_changed_forward_give_whole_logits(change):
    model = routed(tie_word_embeddings=False)
    assert obstacle(model) is None
    model = change(model) or model
    assert obstacle(model)
    with ops.record_backends() as ran:
        Trainer(model, SETTINGS)._loss_sum(batch())
    assert LOSS not in ran


def test_a_plain_model_gives_whole_logits():
    plain = plain_model()
    assert "no routed model" in obstacle(plain)


def test_a_hook_on_the_head_is_called_though_it_came_after_the_first_step():
    trainer = Trainer(build(), SETTINGS)
    trainer.take_step(words().batch(0, 0))
    seen = []
    trainer.model.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].shape[-1]))
    trainer.take_step(words().batch(1, 0))
    assert seen == [256]


def test_a_step_never_holds_the_logits_of_more_tokens_than_a_chunk():
    tokens, vocabulary = SETTINGS.tokens_per_step, 256
    found = {}
    for chunk in (8, 0):
        trainer = Trainer(build(), replace(SETTINGS, loss_chunk=chunk))
        with Largest() as largest:
            trainer.take_step(words().batch(0, 0))
            trainer.validate(words().validation_batches(4))
        found[chunk] = largest.count
    assert found[0] == tokens * vocabulary
    assert found[8] < tokens * vocabulary / 2


def curve(**changes):
    trainer = Trainer(build(), replace(SETTINGS, **changes))
    return [r.loss for r in take_steps(trainer, words())], trainer.validate(
        words().validation_batches(4)
    )


@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"gradient_checkpointing": True}])
def test_training_takes_the_same_steps_without_whole_logits(changes):
    losses, validation = curve(loss_chunk=7, **changes)
    expected, expected_validation = curve(loss_chunk=0, **changes)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert validation == pytest.approx(expected_validation, rel=1e-5)


def test_in_bf16_it_is_no_further_from_fp32_than_whole_logits_are():
    exact, _ = curve(loss_chunk=0)
    distance = {
        chunk: sum(abs(a - b) for a, b in zip(curve(**settings)[0], exact, strict=True))
        for chunk in (7, 0)
        for settings in [{"loss_chunk": chunk, "precision": "bf16"}]
    }
    assert 0 < distance[7] <= 2 * distance[0]


def test_a_compiled_model_gives_its_loss_in_one_graph():
    torch._dynamo.reset()
    model, given = build("standard"), words().batch(0, 0)
    results = []
    for function in (
        loss_sum,
        torch.compile(loss_sum, backend="aot_eager", fullgraph=True, dynamic=False),
    ):
        model.zero_grad(set_to_none=True)
        loss = function(model, given, 5)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, rtol=1e-4, atol=1e-6)
