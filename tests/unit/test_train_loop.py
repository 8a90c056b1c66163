import math
from dataclasses import replace

import pytest
import torch
from tests.training import SETTINGS, SMALL, build, take_steps, words
from transformers import LlamaConfig, LlamaForCausalLM

from depthroute.data.batches import Batch
from depthroute.train.loss import loss_sum
from depthroute.train.trainer import DivergenceError, Trainer


def test_the_standard_method_trains_as_the_plain_hugging_face_model_bit_for_bit():
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SMALL.model))
    losses = [
        [r.loss for r in take_steps(Trainer(model, settings), words())]
        for model, settings in (
            (plain, SETTINGS),
            (build("standard"), replace(SETTINGS, loss_chunk=0)),
            (build("standard"), SETTINGS),
        )
    ]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)  # a plain model has no chunks


@pytest.mark.parametrize(
    "method",
    [
        "standard",
        "attnres",
        "delta",
        "static",
        "x0_skip",
        "depth_attention",
        "value_residual",
        "mhc",
    ],
)
def test_the_loss_falls_from_that_of_a_uniform_guess(method):
    trainer = Trainer(build(method), replace(SETTINGS, steps=40))
    losses = [result.loss for result in take_steps(trainer, words())]
    assert losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.validate(words().validation_batches(16)) < 0.6 * losses[0]


def test_results_name_their_step_rate_and_tokens():
    trainer = Trainer(build(), SETTINGS)
    results = list(take_steps(trainer, words()))
    assert [r.step for r in results] == list(range(12))
    assert {r.tokens for r in results} == {64}
    assert all(r.seconds > 0 and r.gradient_norm > 0 for r in results)
    assert results[0].lr == pytest.approx(5e-3) and results[2].lr == pytest.approx(1e-2)
    assert results[-1].lr == pytest.approx(0.0, abs=1e-12)
    assert trainer.is_done and list(take_steps(trainer, words())) == []


def test_gradients_are_clipped_to_the_setting(monkeypatch):
    """Looked at where the optimiser is about to use them."""
    trainer = Trainer(build(), replace(SETTINGS, clip=1e-3))
    seen = []
    original = trainer.optimizer.step

    def spy(*args, **kwargs):
        norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
        seen.append(torch.stack(norms).norm().item())
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer.optimizer, "step", spy)
    result = trainer.take_step(words().batch(0, 0))
    assert result.gradient_norm > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-2)]


def test_a_loss_that_is_not_a_number_names_its_step_and_changes_nothing():
    trainer = Trainer(build(), SETTINGS)
    for step in range(3):
        trainer.take_step(words().batch(step, 0))
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("inf")
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    pattern = r"loss is inf at step 3 \(lr .*\), first in parameter model.embed.*; .* Lower lr"
    with pytest.raises(DivergenceError, match=pattern):
        trainer.take_step(words().batch(3, 0))
    assert trainer.completed == 3
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_validation_weighs_a_short_last_batch_by_its_tokens():
    trainer = Trainer(build(), SETTINGS)
    batches = words().validation_batches(6)
    assert [len(b.inputs) for b in batches] == [4, 2]
    together = Batch(*(torch.cat([b[i] for b in batches]) for i in (0, 1)))
    expected = (loss_sum(trainer.model, together) / together.num_targets).item()
    heard = []
    loss = trainer.validate(batches, lambda done, parts: heard.append((done, parts)))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert heard == [(0, 2), (1, 2), (2, 2)]
    assert trainer.model.training
