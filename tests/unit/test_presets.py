import json
from dataclasses import replace

import pytest
import torch

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError

PUBLISHED = {
    "delta-220m": 220e6,
    "delta-533m": 533e6,
    "delta-1044m": 1044e6,
    "delta-0.6b": 0.6e9,
    "delta-7.57b": 7.57e9,
    "kimi-48b": 49.1e9,  # of the published configuration; the name rounds down
    "da-360m": 360e6,
    "da-500m": 500e6,
    "da-710m": 710e6,
    # The published shapes with 6 and 8 key-value heads give less than the names say. With as many
    # key-value heads as heads they would give 1.51e9 and 3.05e9, so the names count those.
    "da-1.5b": 1_343_774_208,
    "da-3b": 2_747_998_208,
}


def base_size(model):
    routing = sum(p.numel() for p in model.routing_parameters())
    return sum(p.numel() for p in model.parameters()) - routing


def test_every_paper_preset_has_a_published_size_to_be_checked_against():
    assert set(PUBLISHED) | {"tiny", "100m"} == set(presets.PRESETS)


def test_the_preset_for_one_gpu_is_the_published_shape_with_a_smaller_vocabulary():
    own, paper = presets.get("100m").model, presets.get("delta-220m").model
    assert own | {"vocab_size": paper["vocab_size"]} == paper
    assert base_size(presets.build("100m", device="meta")) == pytest.approx(116.4e6, rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_on_the_meta_device_has_its_published_size(name):
    model = presets.build(name, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert base_size(model) == pytest.approx(PUBLISHED[name], rel=0.02)
    assert model.plan.method == presets.get(name).routing.method


@pytest.mark.parametrize(("name", "full"), [("da-1.5b", 1.5e9), ("da-3b", 3e9)])
def test_the_names_of_the_large_depth_attention_shapes_count_full_key_value_heads(name, full):
    preset = presets.get(name)
    heads = preset.model["num_attention_heads"]
    ungrouped = replace(preset, model=preset.model | {"num_key_value_heads": heads})
    assert base_size(presets.build(ungrouped, device="meta")) == pytest.approx(full, rel=0.02)


def test_the_largest_delta_block_states_its_routing_parameters():
    """The paper counts 4*D*L; places with a single source have nothing to choose."""
    model = presets.build("delta-7.57b", device="meta")
    width, layers = 4096, 36
    queries = sum(model.plan.places[i].chooses for i in range(2 * layers + 1))
    assert 4 * width * layers == 589_824
    assert model.plan.num_parameters(width) == 442_368
    assert model.plan.num_parameters(width) == 589_824 - 2 * width * (2 * layers - queries)
    assert sum(p.numel() for p in model.routing_parameters()) == 442_368


def test_depth_attention_presets_anchor_at_half_the_depth():
    model = presets.build("da-360m", device="meta")
    assert model.plan.depth[20].sources == (0, 12)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_survives_a_trip_through_json(name):
    preset = presets.get(name)
    assert presets.Preset.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset


def test_a_preset_with_a_setting_nobody_knows_is_refused():
    values = presets.get("tiny").to_dict()
    with pytest.raises(ConfigError, match=r"unknown preset setting 'widht'"):
        presets.Preset.from_dict(values | {"widht": 3})
    recipe = values["recipe"] | {"learning_rate": 1.0}
    with pytest.raises(ConfigError, match=r"unknown recipe setting 'learning_rate'"):
        presets.Preset.from_dict(values | {"recipe": recipe})


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown preset 'delta-220'; did you mean 'delta-220m'"):
        presets.get("delta-220")


def test_build_takes_another_routing_and_a_dtype():
    routing = RoutingConfig(method="attnres", num_blocks=4)
    model = presets.build("tiny", routing, dtype=torch.bfloat16)
    assert model.plan.method == "attnres"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
