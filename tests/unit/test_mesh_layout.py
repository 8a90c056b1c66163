"""A mesh of ranks is checked, against the model and the batch, before there is either."""

import re

import pytest
import torch
from tests.families import family_config
from tests.support import llama_config

import depthroute as dr
from depthroute.cli.options import MeshOptions
from depthroute.errors import ConfigError
from depthroute.parallel import tensor
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.world import SINGLE
from depthroute.train import launch
from depthroute.train.settings import TrainSettings


def meta_model(layers=8, family="llama", **settings):
    config = llama_config(layers, **settings)
    if family != "llama":
        config = family_config(family, **settings)
    with torch.device("meta"):
        return dr.from_config(config, dr.RoutingConfig("delta", num_blocks=2))


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        ({"dp": 2, "tp": 2, "pp": 2}, 6, "takes 8 processes and there are 6; .*per-node 8"),
        ({"dp": 2, "tp": 2}, 8, "takes 4 processes and there are 8; .*or use --dp 4"),
        (
            {"tp": 4},
            6,
            "in multiples of 4 and there are 6; start 4 with torchrun .*, or .*divides 6",
        ),
        (
            {"tp": 2},
            1,
            "in multiples of 2 and there is 1; start 2 with torchrun --nproc-per-node 2$",
        ),
    ],
)
def test_a_wrong_number_of_processes_is_refused_with_one_that_fits(layout, ranks, message):
    with pytest.raises(ConfigError, match=message):
        MeshLayout(**layout).over(ranks)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, r"--tp 3 does not divide 4 \(attention heads\).*; use 1, 2$"),
        ({"tp": 4}, r"--tp 4 does not divide 2 \(key-value heads\) of this llama model; use 1, 2$"),
        ({"pp": 16}, "16 stages, and the model has 8 layers.*use at most 8 ranks of 1 chunks"),
        ({"pp": 2, "chunks": 5}, "10 stages, and the model has 8 .*use at most 4 chunks a rank"),
        ({"pp": 6, "chunks": 2}, "12 stages, .*use at most 4 ranks of 2 chunks"),
        ({"pp": 2, "chunks": 2, "schedule": "1f1b"}, "runs 1 chunks a rank, not 2; use chunks=1"),
        ({"pp": 4, "micro_batches": 2}, "leave some of the 4 ranks"),
        ({"pp": 4, "chunks": 2, "micro_batches": 9}, "cannot go round 4 ranks.*use 8 or 10"),
        ({"pp": 2, "layers": (1, 1)}, "need 2 numbers that sum to the model's 8 layers"),
        (
            {"pp": 2, "micro_batches": 5},
            r"batch_size=16 .* 5 micro-batches; use a multiple of 5, or .*--micro",
        ),
        ({"dp": 3}, "batch_size=16 does not split over 3 ranks .*use a multiple of 3"),
    ],
)
def test_what_does_not_fit_the_model_or_the_batch_is_refused_with_what_would(layout, message):
    layout = MeshLayout(**{"dp": 1} | layout)
    with pytest.raises(ConfigError, match=message) as refusal:
        layout.check(meta_model(), batch_size=16, accumulation=1, length=12)
    assert "\n" not in str(refusal.value)


def test_tokens_that_do_not_split_over_tensor_parallel_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"sequence_length=13 .*use a multiple of 2"):
        MeshLayout(dp=1, tp=2).check(meta_model(), batch_size=4, accumulation=1, length=13)


def test_a_family_without_a_plan_of_tensor_parallel_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^gpt2 has no plan of tensor parallel .*use --pp or"):
        MeshLayout(dp=1, tp=2).check(meta_model(family="gpt2"), 4, 1, 8)


def test_a_plan_whose_styles_ranks_cannot_share_is_refused_before_weights_are_there():
    with pytest.raises(ConfigError, match=r"^llama4_text shares .*experts.* as 'packed_rowwise'"):
        MeshLayout(dp=1, tp=2).check(meta_model(family="llama4_text"), 4, 1, 8)


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_what_ranks_put_together_again_has_to_be_in_even_parts(family):
    model = meta_model(family=family, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"^--tp 3 does not divide .*32 \(inputs of o_proj\)"):
        MeshLayout(dp=1, tp=3).check(model, 4, 1, 9)


def test_heads_that_ranks_do_not_share_need_not_divide(monkeypatch):
    monkeypatch.setattr(tensor, "SHARES_PACKED", (2, 0))
    MeshLayout(dp=1, tp=8).check(meta_model(family="deepseek_v3"), 4, 1, 8)


def test_experts_that_this_torch_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(tensor, "SHARES_PACKED", (99, 0))
    with pytest.raises(ConfigError, match=r"^mixtral packs gate and up .*use torch 99\.0, or --pp"):
        MeshLayout(dp=1, tp=2).check(meta_model(family="mixtral"), 4, 1, 8)


@pytest.mark.parametrize(
    "given", [{"chunks": 2}, {"schedule": "zbv"}, {"layers": (1, 2)}, {"cache": False}]
)
def test_what_belongs_to_a_pipeline_is_refused_without_one(given):
    with pytest.raises(ConfigError, match=r"is for a pipeline; add --pp"):
        MeshLayout(**given)


def test_ranks_of_a_replica_have_one_part_of_the_batch_and_replicas_all_of_it():
    layout = MeshLayout(tp=2, pp=2).over(12)
    assert layout.dp == 3
    parts = [layout.part(rank) for rank in range(12)]
    assert parts == [(i // 2 % 3, 3) for i in range(12)]


def test_options_of_the_command_make_the_layout():
    options = MeshOptions(tp=2, pp=2, stage_layers="3,2,2,1", chunks=2, pipeline_cache=False)
    layout = options.layout()
    assert layout == MeshLayout(tp=2, pp=2, layers=(3, 2, 2, 1), chunks=2, cache=False)
    pipeline = layout.pipeline(meta_model().plan)
    assert (pipeline.schedule, pipeline.layers, pipeline.cache) == (
        "interleaved",
        (3, 2, 2, 1),
        False,
    )
    with pytest.raises(ConfigError, match=re.escape("'3,x' is no list of numbers")):
        MeshOptions(pp=2, stage_layers="3,x").layout()


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_compiled_step_over_a_mesh_is_refused_before_text_is_read(monkeypatch, tmp_path, axis):
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = launch.Request(
        "nowhere.txt",
        out=tmp_path / "run",
        layout=MeshLayout(**{axis: 2}),
        changes={"steps": 1, "compile": "aot_eager"},
    )
    wanted = "^--set compile=aot_eager is not for a model over .*leave it"
    with pytest.raises(ConfigError, match=wanted):
        launch.train(request, "tiny")
    assert not list(tmp_path.iterdir())


def test_a_mesh_of_one_is_no_mesh_and_costs_nothing():
    model, settings = meta_model(), TrainSettings(steps=1, batch_size=1, sequence_length=8, lr=1.0)
    layout = MeshLayout(dp=1, tp=1, pp=1).over(1)
    assert layout.is_plain
    assert launch._placed(model, layout, SINGLE, settings) is model
