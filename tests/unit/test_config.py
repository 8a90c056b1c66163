"""A configuration is frozen, equal to itself after JSON, and refuses what has no meaning."""

from __future__ import annotations

import dataclasses
import json

import pytest

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError

CHANGED = {
    "method": {"method": "attnres"},
    "block_size": {"block_size": 3},
    "num_blocks": {"num_blocks": 4},
    "sources": {"sources": "cumulative"},
    "routing": {"routing": "replacement"},
    "init": {"init": "centered"},
    "heads": {"heads": 4},
    "head_norm": {"head_norm": "slice", "heads": 2},
    "include_partial": {"include_partial": False},
    "embedding_source": {"embedding_source": False},
    "learned": {"method": "x0_skip", "learned": True},
    "stride": {"method": "depth_attention", "stride": 3},
    "recent_window": {"method": "depth_attention", "recent_window": 2},
    "key_norm": {"method": "depth_attention", "key_norm": "after_rope"},
    "streams": {"method": "mhc", "streams": 2},
    "value_reads": {"method": "attnres", "value_reads": True},
    "loops": {"loops": 2},
    "eps": {"eps": 1e-5},
    "evaluation": {"evaluation": "two_phase"},
    "group_size": {"group_size": 5, "evaluation": "two_phase"},
}


def test_every_field_is_covered_here():
    assert set(CHANGED) == {field.name for field in dataclasses.fields(RoutingConfig)}


@pytest.mark.parametrize("field", CHANGED)
def test_a_field_survives_json(field):
    config = RoutingConfig(**CHANGED[field])
    assert getattr(config, field) != getattr(RoutingConfig(), field)
    text = json.dumps(config.to_dict())
    assert field in json.loads(text)
    assert RoutingConfig.from_dict(json.loads(text)) == config


def test_only_what_differs_from_the_defaults_is_written():
    assert RoutingConfig().to_dict() == {"method": "delta"}
    assert RoutingConfig(num_blocks=4).to_dict() == {"method": "delta", "num_blocks": 4}


def test_a_configuration_is_frozen_and_hashable():
    config = RoutingConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 2
    assert hash(config) == hash(RoutingConfig())


def test_our_errors_are_value_errors():
    assert issubclass(ConfigError, DepthrouteError) and issubclass(DepthrouteError, ValueError)


@pytest.mark.parametrize(
    ("settings", "value_and_remedy"),
    [
        ({"method": "detla"}, r"routing\.method 'detla'; did you mean 'delta'\? known: standard,"),
        ({"method": "attention"}, r"'attention'; did you mean 'depth_attention'\?"),
        ({"method": "zzz"}, r"unknown routing\.method 'zzz'; known: standard, attnres, delta"),
        ({"sources": "deltas"}, r"routing\.sources 'deltas'; did you mean 'delta'\?"),
        ({"routing": "add"}, r"routing\.routing 'add'; .*known: additive, replacement"),
        ({"init": "papers"}, r"routing\.init 'papers'; did you mean 'paper'\?"),
        ({"head_norm": "slices"}, r"routing\.head_norm 'slices'; did you mean 'slice'\?"),
        ({"evaluation": "twophase"}, r"'twophase'; did you mean 'two_phase'\?"),
        ({"num_blocks": 0}, r"routing\.num_blocks=0 must be a whole number of at least 1"),
        ({"block_size": 0}, r"routing\.block_size=0 must be a whole number of at least 1"),
        ({"block_size": -2}, r"routing\.block_size=-2 must be a whole number of at least 1"),
        ({"block_size": 2.5}, r"routing\.block_size=2\.5 must be a whole number"),
        ({"heads": 0}, r"routing\.heads=0 must be a whole number of at least 1"),
        ({"loops": 0}, r"routing\.loops=0 must be a whole number of at least 1"),
        ({"group_size": 0}, r"routing\.group_size=0 must be a whole number of at least 1"),
        (
            {"method": "depth_attention", "stride": 0},
            r"routing\.stride=0 must be a whole number of at least 1",
        ),
        (
            {"method": "depth_attention", "recent_window": -1},
            r"routing\.recent_window=-1 must be a whole number of at least 0",
        ),
        *(
            ({"eps": eps}, rf"routing\.eps={shown} must be a finite number at least 1e-20 and at")
            for eps, shown in (
                (0.0, r"0\.0"),
                (float("nan"), "nan"),
                (float("inf"), "inf"),
                ("abc", "'abc'"),
                (True, "True"),
                (-1, "-1"),
                (1e-40, "1e-40"),  # zero in fp32
                (2.0, r"2\.0"),
                (10**400, r"10+\.\.\."),
            )
        ),
        ({"include_partial": "maybe"}, r"include_partial='maybe' must be true or false"),
        ({"include_partial": 1}, r"include_partial=1 must be true or false"),
        ({"method": "x0_skip", "learned": "no"}, r"learned='no' must be true or false"),
        ({"embedding_source": None}, r"embedding_source=None must be true or false"),
        ({"heads": True}, r"heads=True must be a whole number of at least 1"),
        ({"heads": 10**5000}, r"heads=a whole number of 16610 bits is too large; use at most"),
        ({"method": ["delta"]}, r"unknown routing\.method \['delta'\]; known"),
        ({"head_norm": "slice"}, r"head_norm='slice' says .*heads=1 is one; set heads, or leave"),
        ({"group_size": 3}, r"group_size=3 is the size of two-phase groups.*add evaluation="),
        (
            {"block_size": 4, "num_blocks": 3},
            r"block_size=4 and routing\.num_blocks=3 both .*give one of them",
        ),
        (
            {"method": "standard", "block_size": 4},
            r"block_size=4 has no meaning for method='standard'; it belongs to attnres and delta",
        ),
        ({"method": "x0_skip", "heads": 2}, r"heads=2 has no meaning for .*Leave it out"),
        ({"stride": 3}, r"stride=3 has no meaning for method='delta'; .*depth_attention\. Leave"),
        ({"recent_window": 1}, r"recent_window=1 has no meaning .*depth_attention\. Leave it out"),
        ({"learned": True}, r"learned=True has no meaning .*belongs to x0_skip\. Leave it out"),
        (
            {"method": "standard", "init": "gate"},
            r"init='gate' does not apply to method='standard'; use 'paper' or 'complete'",
        ),
        (
            {"method": "depth_attention", "init": "complete"},
            r"init='complete' does not apply to method='depth_attention'; use 'paper' or 'gate'",
        ),
    ],
)
def test_a_mistake_names_the_value_and_the_remedy(settings, value_and_remedy):
    with pytest.raises(ConfigError, match=value_and_remedy) as caught:
        RoutingConfig(**settings)
    assert "\n" not in str(caught.value)


def test_an_unknown_setting_in_a_file_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"'blocksize'; did you mean 'block_size'\?"):
        RoutingConfig.from_dict({"method": "delta", "blocksize": 2})


@pytest.mark.parametrize("setting", ["heads", "loops", "recent_window", "evaluation"])
def test_null_for_a_setting_that_needs_a_value_is_refused(setting):
    with pytest.raises(ConfigError, match=rf"{setting}.*None"):
        RoutingConfig.from_dict({"method": "delta", setting: None})


@pytest.mark.parametrize("values", [None, 3, "delta", ["method", "delta"]])
def test_what_is_no_object_is_refused(values):
    with pytest.raises(ConfigError, match="routing settings must be an object"):
        RoutingConfig.from_dict(values)


def test_the_released_sources_always_have_the_embedding():
    config = RoutingConfig("delta", block_size=4, init="reference", embedding_source=False)
    with pytest.raises(ConfigError, match=r"embedding_source=false has no meaning .*'reference'"):
        config.resolve(4)
