"""What a step can be told: parts, precision, recomputation, compilation, and what is a bad one."""

from dataclasses import replace

import pytest
import torch
from tests.training import SETTINGS, SMALL, build, take_steps, words

from depthroute import presets
from depthroute.bench import step
from depthroute.bench.record import Record
from depthroute.config import RoutingConfig
from depthroute.data.batches import IGNORED, Batch
from depthroute.errors import DepthrouteError
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import DivergenceError, Trainer

METHODS = ["standard", "attnres", "delta", "static", "x0_skip", "depth_attention"]
METHODS += ["value_residual", "mhc"]


def curve(method="delta", **changes):
    trainer = Trainer(build(method), replace(SETTINGS, **changes))
    return [r.loss for r in take_steps(trainer, words())]


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_parts_is_the_step(parts):
    assert curve(accumulation=parts) == pytest.approx(curve(), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_recomputing_activations_changes_no_loss(method):
    assert curve(method, gradient_checkpointing=True, steps=5, warmup_steps=0) == pytest.approx(
        curve(method, steps=5, warmup_steps=0), rel=1e-6
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "backend", "scope"),
    [
        ("standard", "eager", "whole"),
        ("delta", "eager", "whole"),
        ("standard", "eager", "regions"),
        ("delta", "inductor", "regions"),
    ],
)
def test_a_compiled_model_takes_the_same_steps(method, backend, scope):
    compiled = curve(method, compile=backend, compile_scope=scope, steps=4, warmup_steps=0)
    assert compiled == pytest.approx(curve(method, steps=4, warmup_steps=0), rel=1e-5)


def test_a_whole_model_that_torch_would_run_uncompiled_is_refused():
    """Models of a kind share their code, and torch counts compilations by that."""
    torch._dynamo.reset()
    settings = replace(SETTINGS, compile="eager", compile_scope="whole")
    with torch._dynamo.config.patch(recompile_limit=2):
        trainer = Trainer(build("delta"), settings)
        trainer.take_step(words().batch(0, 0))
        trainer.validate(words().validation_batches(4))
        with pytest.raises(DepthrouteError, match=r"there are 2, torch's limit.*regions"):
            Trainer(build("attnres"), settings).take_step(words().batch(0, 0))
        trainer.take_step(words().batch(1, 0))
    torch._dynamo.reset()


@pytest.mark.parametrize("method", METHODS)
def test_bf16_keeps_parameters_gradients_and_optimiser_in_fp32(method):
    trainer = Trainer(build(method), replace(SETTINGS, precision="bf16"))
    losses = [r.loss for r in take_steps(trainer, words())]
    exact = curve(method)
    assert losses == pytest.approx(exact, rel=0.03)
    assert losses != exact
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    norm = trainer.model.model.layers[-1].input_layernorm
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    trainer.validate(words().validation_batches(1))
    assert seen == [torch.bfloat16]
    moments = [m for s in trainer.optimizer.state.values() for m in s.values()]
    assert {m.dtype for m in moments} == {torch.float32}


def test_targets_that_are_no_predictions_count_for_nothing():
    whole = words().batch(0, 0)
    padded = Batch(
        torch.cat([whole.inputs, torch.zeros_like(whole.inputs)]),
        torch.cat([whole.targets, torch.full_like(whole.targets, IGNORED)]),
    )
    one, other = (Trainer(build(), SETTINGS).take_step(b) for b in (whole, padded))
    assert (one.loss, one.gradient_norm) == pytest.approx((other.loss, other.gradient_norm))
    assert one.tokens == other.tokens == 64


def spoilt(trainer, name, value=float("inf")):
    with torch.no_grad():
        trainer.model.get_parameter(name).view(-1)[0] = value
    return trainer


def test_a_bad_step_can_be_skipped_and_says_where_it_went_bad():
    trainer = Trainer(build(), replace(SETTINGS, on_bad_step="skip"))
    list(zip(range(2), take_steps(trainer, words()), strict=False))
    name = "model.layers.1.mlp.down_proj.weight"
    kept = trainer.model.get_parameter(name).flatten()[0].item()
    before = {n: p.clone() for n, p in spoilt(trainer, name).model.named_parameters()}
    result = trainer.take_step(words().batch(2, 0))
    assert result.skipped is not None and f"first in parameter {name}" in result.skipped
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    spoilt(trainer, name, kept)
    assert trainer.completed == 3
    assert trainer.take_step(words().batch(3, 0)).skipped is None


def test_the_first_module_whose_output_overflows_is_the_site():
    trainer = Trainer(build("attnres"), SETTINGS)
    with torch.no_grad():  # finite, but its products are not
        trainer.model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    with pytest.raises(DivergenceError) as caught:
        trainer.take_step(words().batch(0, 0))
    assert caught.value.site == "first in the output of model.layers.1.mlp.up_proj"


def test_a_gradient_that_overflows_names_its_parameter():
    trainer = Trainer(build(), SETTINGS)
    weight = trainer.model.model.layers[0].mlp.down_proj.weight
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(
        DivergenceError, match=r"the gradient norm is (inf|nan) at step 0"
    ) as caught:
        trainer.take_step(words().batch(0, 0))
    assert caught.value.site == "first in the gradient of model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_far_above_the_recent_ones_is_a_spike(policy):
    settings = TrainSettings(
        steps=40, batch_size=4, sequence_length=16, lr=1e-2, spike=1.0, on_bad_step=policy
    )
    trainer = Trainer(build(), settings)
    for _, result in zip(range(20), take_steps(trainer, words()), strict=False):
        assert result.skipped is None
    batch = words().batch(20, 0)
    strange = Batch(batch.inputs, torch.randint(128, 256, batch.targets.shape))
    if policy == "stop":
        with pytest.raises(DivergenceError, match=r"step 20 .* above the recent median"):
            trainer.take_step(strange)
    else:
        assert "above the recent median" in (trainer.take_step(strange).skipped or "")
        assert trainer.take_step(words().batch(21, 0)).skipped is None


def test_two_phase_reading_trains_like_one_pass():
    def losses(evaluation):
        torch.manual_seed(0)
        routing = RoutingConfig("delta", num_blocks=2, init="complete", evaluation=evaluation)
        trainer = Trainer(presets.build(SMALL, routing), SETTINGS)
        return [r.loss for r in take_steps(trainer, words())]

    assert losses("two_phase") == pytest.approx(losses("one_pass"), rel=1e-4)


def test_a_benchmark_of_the_step_times_the_very_step_of_training(monkeypatch):
    taken, take_step = [], Trainer.take_step

    def counted(trainer, batch):
        taken.append(trainer.inner.plan.method)
        return take_step(trainer, batch)

    monkeypatch.setattr(Trainer, "take_step", counted)
    settings = step.Settings("tiny", 1, 8, layers=1, eager=True, device="cpu", dtype="float32")
    record = Record("step", {}, say=lambda text: None)
    step.run(record, settings, step.jobs("standard,delta"), steps=2)
    assert set(taken) == {"standard", "delta"} and len(taken) > 2 * 2
