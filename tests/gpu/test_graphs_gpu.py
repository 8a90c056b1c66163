"""Steps that are replayed as CUDA graphs are the steps without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from depthroute import presets
from depthroute.bench.step import PlainTrainer, plain
from depthroute.config import RoutingConfig
from depthroute.data.batches import Batch
from depthroute.errors import ConfigError
from depthroute.train import pace
from depthroute.train.graphs import WARM_UP, Hooks
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer
from tests import replays
from tests.training import SETTINGS, build, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def of_words(step):
    return words().batch(step, 0)


def history(trainer, batch=of_words, steps=12):
    """Losses, norms and rates of every step, validation after every fourth, and the parameters."""
    found = []
    for step in range(steps):
        result = trainer.take_step(batch(step))
        found.append((result.loss, result.gradient_norm, result.lr))
        if step % 4 == 3:
            found.append(trainer.validate([batch(100)]))
    return found, [p.detach().clone() for p in trainer.model.parameters()]


def assert_near(found, expected, rel=1e-4):
    """The gradient of an embedding is added up in an order of its own every time."""
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, rel=rel)


@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "precision": "bf16"},
        {"optimizer": "muon", "clip": 1e-3},
        {"loss_chunk": 0, "schedule": "wsd"},
    ],
    ids=str,
)
def test_captured_steps_are_the_steps_without_a_graph(changes, compiler):
    """On batches without a token that comes twice, or Muon, which rounds to bf16, would make ever
    more of the order in which the gradients of an embedding are added up."""

    def run(cuda_graph):
        torch._dynamo.reset()
        settings = replace(SETTINGS, compile=compiler, cuda_graph=cuda_graph, **changes)
        trainer = Trainer(build("attnres").to("cuda"), settings)
        return trainer, history(trainer, replays.distinct)

    captured, (figures, parameters) = run(cuda_graph=True)
    _, (expected, exact) = run(cuda_graph=False)
    assert captured.graphs.obstacle is None
    assert len(captured.graphs._captured) == min(2, captured.settings.accumulation)
    assert len(captured.graphs._endings) == (captured.settings.optimizer == "adamw")
    assert_near(figures, expected, rel=1e-3 if "optimizer" in changes else 1e-4)
    for mine, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["delta", "standard", "depth_attention", "x0_skip", "static"])
def test_every_method_can_be_captured(method):
    def run(cuda_graph):
        torch._dynamo.reset()
        return history(Trainer(build(method).to("cuda"), replace(SETTINGS, cuda_graph=cuda_graph)))

    assert_near(run(True)[0], run(False)[0])


def test_two_trainers_take_turns_in_the_memory_of_one():
    data = words()
    trainers = [
        Trainer(build(m, seed).to("cuda"), SETTINGS)
        for m in ("delta", "attnres")
        for seed in (0, 1)
    ]
    alone = [history(Trainer(build(m, s).to("cuda"), SETTINGS))[0]
             for m in ("delta", "attnres") for s in (0, 1)]  # fmt: skip
    found = [[] for _ in trainers]
    for step in range(12):
        for trainer, mine in zip(trainers, found, strict=True):
            result = trainer.take_step(data.batch(step, 0))
            mine.append((result.loss, result.gradient_norm, result.lr))
            if step % 4 == 3:
                mine.append(trainer.validate([data.batch(100, 0)]))
    for mine, other in zip(found, alone, strict=True):
        assert_near(mine, other)


def test_a_state_that_was_cleared_is_not_that_of_an_update_captured_before():
    """As a comparison does that timed some steps before it begins."""
    data, trainer = words(), Trainer(build().to("cuda"), SETTINGS)
    with pace._restored({"delta": trainer}):
        for step in range(WARM_UP + 3):
            trainer.take_step(data.batch(step, 1))
    assert len(trainer.graphs._endings) == 1
    found, parameters = history(trainer)
    expected, exact = history(Trainer(build().to("cuda"), replace(SETTINGS, cuda_graph=False)))
    assert_near(found, expected)
    for mine, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def made(settings, *, replays, **changes):
    return Trainer(build().to("cuda"), replace(settings, cuda_graph=replays, **changes))


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("reason", replays.BAD)
def test_a_bad_replayed_step_changes_nothing_and_says_why(reason, policy):
    replays.check_a_bad_step(made, reason, policy)


def test_a_loaded_state_is_not_that_of_an_update_captured_before():
    replays.check_a_loaded_state(made)


def test_rates_and_settings_of_the_optimiser_may_change_between_steps():
    replays.check_other_settings_of_the_optimiser(made)


def test_hooks_of_any_kind_are_called():
    replays.check_hooks(made)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_replayed_step_waits_once(monkeypatch, is_on_device):
    """For an event, which is no wait that torch would name."""
    trainer = made(replays.settings(spike=1.0), replays=True)
    batches = [words().batch(step, 0) for step in range(2 * WARM_UP)]
    if is_on_device:
        batches = [batch.to(trainer.device) for batch in batches]
    for batch in batches[:-1]:
        trainer.take_step(batch)
    waits, synchronize = [], torch.cuda.Event.synchronize
    monkeypatch.setattr(
        torch.cuda.Event, "synchronize", lambda event: (waits.append(event), synchronize(event))
    )
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer.take_step(batches[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.is_replayed and len(waits) == 1


def test_a_hook_that_comes_later_is_called_and_a_new_shape_is_captured_anew():
    data, calls = words(), []
    trainer = Trainer(build().to("cuda"), SETTINGS)
    for step in range(WARM_UP + 2):
        trainer.take_step(data.batch(step, 0))
    handle = trainer.inner.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    trainer.take_step(data.batch(5, 0))
    assert calls == [1]
    handle.remove()
    batch = data.batch(6, 0)
    trainer.take_step(Batch(batch.inputs[:2], batch.targets[:2]))
    assert calls == [1]
    assert len(trainer.graphs._captured) == 2


def test_a_model_that_waits_for_the_device_is_left_as_it_is():
    class Waiting(torch.nn.Module):
        def forward(self, x):
            return x * (1 + 0 * x.sum().item())

    trainer = Trainer(build().to("cuda"), SETTINGS)
    embedding = trainer.inner.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, output: Waiting()(output))
    trainer.graphs.hooks = Hooks(trainer.inner)
    history(trainer)
    assert "waits for the device" in trainer.graphs.obstacle
    assert not trainer.graphs._captured


def test_what_cannot_be_captured_is_refused_where_it_is_asked_for():
    settings = replace(SETTINGS, cuda_graph=True, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="cuda_graph=true cannot be: gradient_checkpointing"):
        Trainer(build().to("cuda"), settings)


def test_fifty_compiled_bf16_steps_of_standard_are_as_near_to_fp32_as_those_of_transformers():
    """Neither the attention without a mask, nor the loss in chunks, nor regions, nor graphs."""
    preset = presets.get("delta-0.6b")
    preset = replace(preset, model=preset.model | {"num_hidden_layers": 4, "vocab_size": 32000})
    ids = torch.randint(0, 32000, (4, 512), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids.cuda(), ids.roll(-1, 1).cuda())

    def losses(*, is_plain, dtype):
        torch.manual_seed(0)
        model = presets.build(preset, RoutingConfig("standard"), dtype=torch.float32)
        model = (plain(model) if is_plain else model).to("cuda", dtype)
        scope = {"compile_scope": "whole", "loss_chunk": 0, "cuda_graph": False} if is_plain else {}
        settings = TrainSettings(50, 4, 512, lr=1e-4, compile="inductor", **scope)
        torch._dynamo.reset()
        trainer = (PlainTrainer if is_plain else Trainer)(model, settings)
        return torch.tensor([trainer.take_step(batch).loss for _ in range(50)])

    exact = losses(is_plain=True, dtype=torch.float32)
    theirs, ours = (losses(is_plain=p, dtype=torch.bfloat16) for p in (True, False))
    distances = [(x - exact).abs().max().item() for x in (theirs, ours)]
    print(f"furthest from fp32: transformers {distances[0]:.2e}, ours {distances[1]:.2e}")
    assert distances[1] <= 2 * distances[0] + 1e-3
