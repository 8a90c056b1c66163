"""Muon beside AdamW, and how output projections start."""

import math
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.dispatch import Operations
from tests.families import family_config
from tests.training import SETTINGS, SMALL, build, take_steps, words
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from depthroute import presets
from depthroute.config import RoutingConfig, parse_methods
from depthroute.errors import CheckpointError, ConfigError
from depthroute.models.architecture import (
    ARCHITECTURES,
    decoder_layers,
    initialise_outputs,
    output_projections,
)
from depthroute.models.convert import from_config
from depthroute.models.loading import from_pretrained
from depthroute.parallel.mesh import MeshLayout
from depthroute.runs.directory import RunDirectory, refuse_another
from depthroute.train import compare, launch, muon
from depthroute.train.compare import Comparison
from depthroute.train.loop import Experiment, Interrupted
from depthroute.train.muon import orthogonalised
from depthroute.train.optim import build_optimizer, set_rates
from depthroute.train.trainer import Trainer

DELTA = RoutingConfig("delta")
MUON = replace(SETTINGS, optimizer="muon", warmup_steps=0)


def with_gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_parameter_is_in_exactly_one_optimiser_and_the_layers_matrices_in_muon(family):
    torch.manual_seed(0)
    model = from_config(family_config(family), RoutingConfig("delta"))
    optimizer = build_optimizer(model, MUON)
    adamw, muon = (
        [id(p) for group in part.param_groups for p in group["params"]] for part in optimizer.parts
    )
    assert sorted(adamw + muon) == sorted({id(p) for p in model.parameters()})
    inside = [p for layer in decoder_layers(model) for p in layer.parameters()]
    assert set(muon) == {id(p) for p in inside if p.ndim == 2}
    outside = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    outside += model.routing_parameters()
    assert {id(p) for p in outside} <= set(adamw)


def test_three_steps_are_torchs_muon_on_matrices_and_its_adamw_on_the_rest():
    model = build()
    optimizer = build_optimizer(model, MUON)
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters() if p.ndim == 2}
    expected = {}
    for name, parameter in model.named_parameters():
        alone = parameter.detach().clone().requires_grad_()
        is_decayed = parameter.ndim > 1 and "routing" not in name
        options = {"lr": MUON.lr, "weight_decay": MUON.weight_decay if is_decayed else 0.0}
        if id(parameter) in inside:
            other = torch.optim.Muon([alone], adjust_lr_fn="match_rms_adamw", **options)
        else:
            other = torch.optim.AdamW([alone], betas=MUON.betas, fused=True, **options)
        expected[name] = alone, other
    for seed in range(3):
        with_gradients(model, seed)
        for name, parameter in model.named_parameters():
            alone, other = expected[name]
            alone.grad = parameter.grad.clone()
            other.step()
        optimizer.step()
    for name, parameter in model.named_parameters():
        alone, other = expected[name]
        if id(parameter) in inside:  # a product of many matrices may round otherwise than one
            budget = 2**-8 * MUON.lr
            torch.testing.assert_close(parameter, alone, rtol=0.0, atol=budget, msg=name)
            torch.testing.assert_close(
                optimizer.state[parameter]["momentum_buffer"],
                other.state[alone]["momentum_buffer"],
            )
        else:
            assert torch.equal(parameter, alone), name


def exactly_orthogonalised(matrix, coefficients):
    (a, b, c), x = coefficients, matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (1, 7), (33, 5), (96, 96)])
def test_matrices_taken_together_are_as_exact_as_torchs_one_by_one(shape):
    torch.manual_seed(0)
    matrices = 3.0 * torch.randn(4, *shape)
    one_by_one = [matrix.clone().requires_grad_() for matrix in matrices]
    muon = torch.optim.Muon(one_by_one, lr=1.0, weight_decay=0.0, momentum=0.0)
    settings = muon.param_groups[0]
    mine = orthogonalised(matrices, settings["ns_coefficients"], 5, settings["eps"])
    for matrix, alone in zip(matrices, one_by_one, strict=True):
        alone.grad = matrix.clone()
    muon.step()
    scale = math.sqrt(max(1.0, shape[0] / shape[1]))
    for matrix, alone, update in zip(matrices, one_by_one, mine, strict=True):
        exact = exactly_orthogonalised(matrix, settings["ns_coefficients"])
        native = (matrix - alone.detach()) / scale
        assert (update - exact).norm() <= 2 * (native - exact).norm()


def test_a_matrix_of_zeros_stays_as_it_is():
    (update,) = orthogonalised(torch.zeros(1, 4, 6), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(update, torch.zeros(4, 6, dtype=torch.bfloat16))


def count_operations(num_layers, make=muon.Muon):
    shape = SMALL.model | {"num_hidden_layers": num_layers}
    model = with_gradients(presets.build(replace(SMALL, model=shape), RoutingConfig("standard")))
    (group,) = build_optimizer(model, MUON).parts[1].param_groups
    optimizer = make(group["params"], MUON.lr)
    with Operations() as ran:
        optimizer.step()  # makes the averages
        first = ran.count
        optimizer.step()
    return ran.count - first


def test_a_step_takes_no_more_operations_in_a_deeper_model():
    assert count_operations(2) == count_operations(6) < 200
    assert count_operations(6, torch.optim.Muon) > 6 * 190


def test_matrices_too_large_to_be_copied_together_are_taken_apart(monkeypatch):
    steps = []
    for most in (2**24, 600, 1):
        monkeypatch.setattr(muon, "TOGETHER_ON_CPU", most)
        model = with_gradients(build())
        build_optimizer(model, MUON).step()
        steps.append((count_operations(2), list(model.parameters())))
    (few, whole), (more, parts), (most, alone) = steps
    assert few < more < most
    for parameters in (parts, alone):
        torch.testing.assert_close(parameters, whole, rtol=0.0, atol=2**-8 * MUON.lr)


def test_a_step_takes_a_closure_and_matrices_without_numbers():
    weights = [torch.ones(shape, requires_grad=True) for shape in ((4, 6), (0, 4))]
    optimizer = muon.Muon([{"params": weights}], lr=0.1)

    def closure():
        loss = sum(weight.square().sum() for weight in weights)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 24.0 and weights[0].max() < 1.0


def test_matrices_of_several_dtypes_are_updated_each_in_its_own():
    weights = [torch.ones(4, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 2]
    for weight in weights:
        weight.grad = torch.eye(4, 6, dtype=weight.dtype)
    muon.Muon([{"params": weights, "weight_decay": 0.0}], lr=0.1).step()
    for one, other in ((0, 2), (1, 3)):
        assert torch.equal(weights[one], weights[other]) and weights[one][0, 0] < 1
    torch.testing.assert_close(weights[1].float(), weights[0], rtol=2**-7, atol=0.0)


def test_what_has_no_gradient_is_left_alone():
    model = with_gradients(build())
    frozen = model.model.layers[0].mlp.up_proj.weight
    frozen.grad, before = None, frozen.detach().clone()
    optimizer = build_optimizer(model, MUON)
    optimizer.step()
    assert torch.equal(frozen, before) and frozen not in optimizer.state


def test_muons_updates_are_as_large_as_adamws():
    """0.2 to 0.4 is what AdamW's are measured to be in training, over the rate."""
    model = with_gradients(build())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    build_optimizer(model, replace(MUON, weight_decay=0.0)).step()
    name = "model.layers.0.mlp.up_proj.weight"
    update = (dict(model.named_parameters())[name] - before[name]) / MUON.lr
    assert 0.1 < update.square().mean().sqrt() < 0.4


def test_the_schedule_reaches_muon_at_every_step():
    moved = []
    for step in (0, MUON.steps // 2):
        model = with_gradients(build())
        optimizer = build_optimizer(model, replace(MUON, weight_decay=0.0))
        set_rates(optimizer, step, MUON)
        weight = model.model.layers[0].mlp.up_proj.weight
        before = weight.detach().clone()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        moved.append((weight - before).norm().item() / rate)
        assert {group["lr"] for group in optimizer.param_groups} == {rate}
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)


def test_training_with_muon_falls_and_accumulates_to_the_same_step():
    def losses(**changes):
        trainer = Trainer(build(), replace(MUON, **changes))
        return [result.loss for result in take_steps(trainer, words())]

    whole = losses()
    assert whole[-1] < whole[0] - 1
    assert losses(accumulation=2) == pytest.approx(whole, abs=2e-2)  # bf16 inside Muon


def fit(path, **options):
    run = RunDirectory.reopen(path) if path.exists() else RunDirectory.create(path)
    settings = replace(MUON, steps=8, validation_sequences=4)
    return Experiment({"delta": build}, settings, words(), run, **options)


def test_eight_steps_equal_four_and_four_more_bit_for_bit(tmp_path):
    straight = fit(tmp_path / "straight")
    straight()

    def stop(progress):
        if progress.result.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", on_step=stop)()
    again = fit(tmp_path / "cut")
    assert again.resume() == 4
    again()
    expected = dict(straight.trainer.model.named_parameters())
    for name, parameter in again.trainer.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_checkpoint_of_the_other_optimiser_is_refused(tmp_path):
    fit(tmp_path / "run")()
    other = fit(tmp_path / "run")
    other.settings = replace(other.settings, optimizer="adamw")
    with pytest.raises(CheckpointError, match=r"missing from the optimiser's state"):
        other.resume()


def test_a_run_from_before_there_was_a_choice_goes_on_with_adamw_and_no_other(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    about = {"data": {}, "methods": {}}
    new = SETTINGS.to_dict()
    old = {k: v for k, v in new.items() if k not in ("optimizer", "output_init")}
    run.write_json("config.json", about | {"train": old})
    refuse_another(run, about | {"train": new})
    with pytest.raises(ConfigError, match=r"started with train.optimizer adamw and now has muon"):
        refuse_another(run, about | {"train": MUON.to_dict()})


def test_muon_without_matrices_to_train_is_refused():
    model = build()
    model.freeze_base()
    with pytest.raises(ConfigError, match=r"none of them is trained; use adamw"):
        build_optimizer(model, MUON)


def test_muon_with_sharded_matrices_is_refused(tmp_path, monkeypatch):
    changes = {"optimizer": "muon", "steps": 2}
    layout = MeshLayout(mode="fsdp", dp=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = launch.Request(
        "book.txt", out=tmp_path / "run", layout=layout, changes=changes, device="cpu"
    )
    with pytest.raises(ConfigError, match=r"orthogonalises whole matrices, and --parallel fsdp"):
        launch.train(request, "tiny")


def test_a_model_with_sharded_matrices_is_refused_before_it_is_trained():
    model = build()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(model.model.layers[0].mlp.up_proj.weight.data, mesh)
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight)
        with pytest.raises(ConfigError, match=r"those of this model are sharded; use adamw"):
            build_optimizer(model, MUON)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_with_zero_outputs_no_token_sees_another_and_with_scaled_ones_the_std_is_that_of_depth(
    family,
):
    torch.manual_seed(0)
    model = from_config(family_config(family), RoutingConfig("standard")).eval()
    layers = decoder_layers(model)
    assert len(output_projections(model)) >= 2 * len(layers)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 4]])
    with torch.no_grad():
        assert not torch.equal(*model(input_ids=ids, use_cache=False).logits[:, -1])
        initialise_outputs(model, is_zero=True)
        first, second = model(input_ids=ids, use_cache=False).logits[:, -1]
    assert torch.equal(first, second)
    initialise_outputs(model, is_zero=False)
    drawn = torch.cat([weight.flatten() for weight in output_projections(model)])
    expected = model.config.initializer_range / math.sqrt(2 * model.config.num_hidden_layers)
    assert drawn.std().item() == pytest.approx(expected, rel=0.05)


def test_the_setting_reaches_every_way_to_train_from_scratch(tmp_path):
    settings = replace(SETTINGS, output_init="zero")
    compared = Comparison(
        SMALL, parse_methods("delta"), (0,), settings, words(), torch.device("cpu")
    )
    (tmp_path / "book.txt").write_text("the depth of a model is what it reads\n" * 200)
    request = launch.Request(
        str(tmp_path / "book.txt"),
        out=tmp_path / "run",
        changes={"output_init": "zero", "steps": 1, "lr": 1e-9, "batch_size": 2},
        cache=tmp_path / "cache",
        device="cpu",
    )
    launch.train(request, "tiny", shape={"num_hidden_layers": 1, "hidden_size": 16})
    trained = from_pretrained(tmp_path / "run" / "model")
    for model in (
        presets.build(SMALL, output_init="zero"),
        compare.build(compared, DELTA),
        trained,
    ):
        assert all(weight.abs().max() < 1e-8 for weight in output_projections(model))
    with pytest.raises(ConfigError, match=r"unknown output_init 'nil'"):
        presets.build(SMALL, output_init="nil")


def test_fine_tuning_has_no_initialisation(tmp_path):
    request = launch.Request("book.txt", out=tmp_path / "run", changes={"output_init": "zero"})
    with pytest.raises(ConfigError, match=r"fine-tuning starts from a checkpoint; leave it out"):
        launch.finetune(request, "base", RoutingConfig("delta"))
