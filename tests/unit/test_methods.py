"""A method has one name: what it stands for, and back."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.fuzz.strategies import ROUTING

from depthroute import presets
from depthroute.cli.options import RoutingOptions
from depthroute.config import RoutingConfig, parse_methods
from depthroute.errors import ConfigError
from depthroute.methods import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_named_method_builds_on_the_tiny_preset_and_keeps_its_name(name):
    routing = RoutingConfig.named(name)
    assert routing.name == name
    presets.build("tiny", routing, device="meta")


@st.composite
def routings(draw):
    """Configurations with a few settings each; those that exclude each other are drawn again."""
    keys = draw(st.lists(st.sampled_from([k for k in ROUTING if k != "method"]), max_size=4))
    values = {key: draw(ROUTING[key]) for key in ("method", *keys)}
    try:
        return RoutingConfig.from_dict(values)
    except ConfigError:
        assume(False)


@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(routings())
def test_a_name_and_its_routing_are_each_others_inverse(routing):
    assert RoutingConfig.named(routing.name) == routing
    assert RoutingConfig.named(routing.name).name == routing.name


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("attnres", "attnres-full"),
        ("attnres:num_blocks=4", "attnres-block"),
        ("attnres:num_blocks=8", "attnres-block:num_blocks=8"),
        ("attnres-full:init=complete", "attnres-full:init=complete"),
        ("attnres-full:block_size=2", "attnres-block:block_size=2"),
        ("delta:num_blocks=4", "delta-block"),
        ("delta-block:num_blocks=8:heads=4", "delta:heads=4:num_blocks=8"),
        ("delta-block:num_blocks=null", "delta"),
        ("delta:heads=1", "delta"),
        ("delta-block:include_partial=true", "delta-block:include_partial=true"),
        ("depth_attention", "depth-attention"),
        ("value_residual", "value-residual"),
        ("attnres:value_reads=true", "attnres-full-roles"),
        ("attnres-block:value_reads=true", "attnres-block-roles"),
        ("attnres-full-roles:num_blocks=8", "attnres-block-roles:num_blocks=8"),
        ("delta:value_reads=true", "delta:value_reads=true"),
        ("x0_skip:learned=true", "x0-skip-learned"),
    ],
)
def test_however_a_method_is_spelled_it_is_shown_by_one_name(spelled, name):
    routing = RoutingConfig.named(spelled)
    assert routing.name == name and RoutingConfig.named(name) == routing
    assert [method.label for method in parse_methods(spelled)] == [name]


def test_a_method_takes_changes_to_its_routing():
    routing = RoutingConfig.named("attnres-block:block_size=2:heads=4:init=complete")
    assert (routing.block_size, routing.num_blocks, routing.heads) == (2, None, 4)
    assert routing.init == "complete"
    assert RoutingConfig.named("delta-block", num_blocks=2) == RoutingConfig("delta", num_blocks=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("standrad", r"unknown method 'standrad'; did you mean 'standard'"),
        ("delta,delta", r"method 'delta' is named twice"),
        ("delta-block,delta:num_blocks=4", r"'delta-block' is named twice"),
        ("delta:heads", r"'heads' must be key=value"),
        ("delta:heads=2:heads=4", r"heads is given twice"),
        ("delta:method=attnres", r"its name says the method"),
        ("attnres-block:block_size=2:num_blocks=3", r"both say how long a block is"),
        ("delta:head=2", r"unknown routing setting 'head'; did you mean 'heads'"),
        (" , ", r"no methods in"),
    ],
)
def test_a_bad_method_is_refused_with_a_hint(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_methods(text)


def test_a_setting_in_the_name_and_beside_it_is_refused():
    with pytest.raises(ConfigError, match="heads is given twice, in the name and beside it"):
        RoutingConfig.named("delta:heads=2", heads=4)


@pytest.mark.parametrize(
    "options",
    [
        RoutingOptions(method="delta-block"),
        RoutingOptions(method="delta", num_blocks=4),
        RoutingOptions(num_blocks=4),  # of the default
        RoutingOptions(method="delta-block", num_blocks=4),
        RoutingOptions(method="delta", routing=["num_blocks=4"]),
    ],
)
def test_the_options_of_train_finetune_and_convert_say_the_same_as_a_name(options):
    assert options.chosen("delta").name == "delta-block"


def test_an_option_may_not_say_again_what_the_name_says():
    with pytest.raises(ConfigError, match="heads is given twice"):
        RoutingOptions(method="delta:heads=2", routing=["heads=4"]).chosen()
    with pytest.raises(ConfigError, match="num_blocks is given twice"):
        RoutingOptions(method="delta:num_blocks=2", num_blocks=4).chosen()
    with pytest.raises(ConfigError, match="did you mean 'delta-block'"):
        RoutingOptions(method="delta-blok").chosen()
