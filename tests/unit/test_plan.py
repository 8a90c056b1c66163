"""Plans against numbers worked out by hand, and every combination that is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields

import pytest

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, NothingToShare
from depthroute.plan import Resolved
from depthroute.schedule import FIRST_PASSES, Schedule, cut, phase_1_passes


def plan(num_layers: int, *, width: int | None = None, **settings):
    return RoutingConfig(**settings).resolve(num_layers, width=width)


def counts(resolved) -> list[int]:
    return [place.num_sources for place in resolved.places]


def test_sources_of_a_three_layer_model_by_hand():
    assert counts(plan(3, method="attnres")) == [1, 2, 3, 4, 5, 6, 7]
    assert counts(plan(3, method="delta")) == [1, 2, 3, 4, 5, 6, 7]
    # blocks of 4 and 2: [h0], [h0 p] x3, [h0 b1], [h0 b1 p], and all at the end
    assert counts(plan(3, method="attnres", block_size=4)) == [1, 2, 2, 2, 2, 3, 3]
    assert counts(plan(3, method="delta", block_size=4))[:-1] == [1, 1, 1, 1, 2, 2]
    assert counts(plan(3, method="delta", block_size=2, init="reference"))[:-1] == [
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert counts(plan(3, method="attnres", sources="cumulative")) == [1, 2, 3, 4, 5, 6, 7]
    assert counts(plan(3, method="x0_skip")) == [1] * 7
    assert counts(plan(3, method="standard")) == [0] * 7


def test_the_7_billion_delta_block_states_its_parameters():
    """4*D*L = 589,824 less the 18 places of the first block, which have one source each."""
    resolved = plan(36, width=4096, method="delta", num_blocks=4)
    assert resolved.block_size == 18
    assert 4 * 4096 * 36 == 589_824
    assert resolved.num_parameters(4096) == 589_824 - 18 * 2 * 4096 == 442_368
    assert len(resolved.site_names()) == 54


@pytest.mark.parametrize(
    ("settings", "queries"),
    [
        ({"method": "attnres"}, 24),  # 23 sublayers after the first, and the final site
        ({"method": "attnres", "num_blocks": 4}, 24),
        ({"method": "delta"}, 23),  # no final site
        ({"method": "delta", "num_blocks": 4}, 18),  # nothing to choose in the first block
        ({"method": "delta", "num_blocks": 4, "init": "complete"}, 23),
        ({"method": "delta", "num_blocks": 1}, 0),
        ({"method": "x0_skip"}, 0),
        ({"method": "standard"}, 0),
        ({"method": "depth_attention"}, 0),
        ({"method": "attnres", "num_blocks": 4, "value_reads": True}, 24 + 11 / 2),  # and no gain
    ],
)
def test_routing_parameters_of_the_220m_shape(settings, queries):
    assert plan(12, width=768, **settings).num_parameters(768) == 2 * 768 * queries


def test_a_learned_skip_has_one_scalar_a_place_after_the_first():
    assert plan(12, method="x0_skip", learned=True).num_parameters(768) == 23


def test_gates_are_left_out_where_they_would_be_dead():
    resolved = plan(2, method="delta", block_size=2, init="gate")
    # places 1 and 3 are inside blocks; at 2 the sources [h0, b1] sum to the state
    assert list(resolved.site_names()) == [1, 3]
    assert [resolved.places[i].chooses for i in (1, 3)] == [False, True]


def test_depth_attention_reads_117_values_in_the_papers_48_layer_models():
    """Summed over the 47 layers that mix (layer 0 is plain attention), their own value included:
    anchors at 0 and 24 give 24 layers of two and 23 of three. The text's l-24, l-48, ... would
    give 23 layers of one and 24 of two."""
    resolved = plan(48, method="depth_attention")
    assert resolved.stride == 24
    read = [1 + len(resolved.depth[layer].sources) for layer in range(1, 48)]
    assert read == [2] * 24 + [3] * 23
    assert sum(read) == 117
    assert resolved.depth[24].sources == (0,) and resolved.depth[25].sources == (0, 24)


def test_only_anchors_outlive_their_layer():
    resolved = plan(8, method="depth_attention", stride=4)
    assert [resolved.depth[layer].kept for layer in range(8)] == [
        *[(0,)] * 4,
        *[(0, 4)] * 3,
        (),
    ]


def test_a_recent_window_adds_the_layers_just_below():
    resolved = plan(8, method="depth_attention", stride=4, recent_window=2)
    assert resolved.depth[7].sources == (0, 4, 5, 6)
    assert resolved.depth[6].kept == (0, 4, 5, 6)


def test_a_looped_stack_counts_every_visit_as_a_layer():
    resolved = plan(12, method="depth_attention", loops=3)
    assert resolved.stride == 2
    assert resolved.depth[3].sources == (0, 2)
    assert resolved.depth[7].sources == (3, 4, 6)  # its first visit; anchors of this visit
    assert resolved.depth[8].sources == (0, 4)


def test_settings_left_out_follow_the_method():
    attnres, delta = plan(4, method="attnres"), plan(4, method="delta")
    assert (attnres.routing, attnres.init, attnres.include_partial) == (
        "replacement",
        "paper",
        True,
    )
    assert (delta.routing, delta.init, delta.include_partial) == ("additive", "paper", False)
    released = plan(4, method="delta", num_blocks=2, init="reference")
    assert released.sources == "reference" and released.block_size == 4


@pytest.mark.parametrize(
    ("settings", "init"),
    [
        ({"method": "attnres", "block_size": 4}, "complete"),
        ({"method": "delta"}, "complete"),
        ({"method": "delta", "num_blocks": 4}, "complete"),
        ({"method": "delta", "num_blocks": 4, "include_partial": False}, "centered"),
        ({"method": "delta", "sources": "cumulative"}, "centered"),
        ({"method": "attnres", "embedding_source": False}, "centered"),
        ({"method": "x0_skip"}, "gate"),
        ({"method": "depth_attention"}, "gate"),
        ({"method": "value_residual"}, "gate"),
        ({"method": "standard"}, "paper"),
        ({"method": "delta", "init": "paper"}, "paper"),
    ],
)
def test_conversion_without_an_init_chooses_an_identity(settings, init):
    assert RoutingConfig(**settings).resolve(8, converting=True).init == init


def test_blocks_of_the_released_code_are_whole_layers():
    assert plan(5, method="delta", num_blocks=2, init="reference").block_size == 6
    assert plan(5, method="delta", num_blocks=2).block_size == 5


def test_a_parallel_layer_is_one_sublayer():
    resolved = RoutingConfig(method="delta").resolve(4, sublayers=("attention",))
    assert resolved.num_sublayers == 4
    assert list(resolved.site_names().values()) == [f"layers.{i}.attention" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("settings", "value_and_remedy"),
    [
        (
            {"block_size": 17},
            r"block_size=17 is larger than the model's 16 sublayers .*use 1 to 16",
        ),
        ({"block_size": 24}, r"Kimi K3 and Megatron.*must be multiplied by 2"),
        ({"num_blocks": 17}, r"num_blocks=17 is more than the 16 sublayers .*use 1 to 16"),
        (
            {"num_blocks": 7},
            r"num_blocks=7 cannot be made from 16 sublayers.*possible: 1, 2, 3, 4, 6, 8, 16",
        ),
        (
            {"heads": 5},
            r"heads=5 does not divide the hidden width 96; use one of 1, 2, 3, 4, 6, 8, 12",
        ),
        ({"init": "gate"}, r"init='gate' is dead with complete sources.*use init='complete' or"),
        (
            {"init": "gate", "num_blocks": 4, "include_partial": True},
            r"'gate' is dead with complete sources.*block_size=4.*use init='complete' or",
        ),
        (
            {"init": "gate", "routing": "replacement", "num_blocks": 4},
            r"'gate' scales what routing adds, and routing='replacement'.*use routing='additive'",
        ),
        (
            {"init": "complete", "sources": "cumulative"},
            r"init='complete' needs.*sources='cumulative'.*use init='centered'",
        ),
        (
            {"init": "complete", "num_blocks": 4, "include_partial": False},
            r"init='complete' needs.*include_partial=False.*use init='centered'",
        ),
        (
            {"init": "complete", "embedding_source": False},
            r"init='complete' needs.*embedding_source=False do not; use init='centered'",
        ),
        (
            {"sources": "cumulative", "include_partial": True},
            r"include_partial=true needs sources='delta'; 'cumulative' .*Leave it out",
        ),
        ({"include_partial": True}, r"include_partial=true needs blocks of more than one .*give"),
        (
            {"init": "centered", "evaluation": "two_phase"},
            r"'two_phase' would lose .*init='centered'; use evaluation='one_pass' or 'auto'",
        ),
        (
            {"method": "depth_attention", "stride": 9},
            r"stride=9 is larger than the 8 layers.*use 1 to 8",
        ),
        (
            {"method": "depth_attention", "stride": 5, "loops": 2},
            r"stride=5 is larger than the 4 layers.*use 1 to 4",
        ),
        (
            {"loops": 3},
            r"loops=3 does not divide the 8 layers.*counts every visit, so use a multiple",
        ),
    ],
)
def test_a_combination_without_meaning_names_the_value_and_the_remedy(settings, value_and_remedy):
    with pytest.raises(ConfigError, match=value_and_remedy) as caught:
        plan(8, width=96, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "layers", "value_and_remedy"),
    [
        ({"num_blocks": 1}, 8, "value_reads=true does nothing: no attention of 16"),
        ({"method": "attnres"}, 1, "value_reads=true .*; leave it out, or have more"),
        ({"num_blocks": 1, "heads": 4, "value_reads": False}, 8, "heads=4 .*: no place of 16 "),
    ],
)
def test_a_way_to_choose_where_nothing_chooses_is_refused(settings, layers, value_and_remedy):
    with pytest.raises(ConfigError, match=value_and_remedy):
        plan(layers, **{"value_reads": True} | settings)


def test_values_that_one_attention_alone_can_choose_are_read():
    chosen = plan(2, method="attnres", num_blocks=1, value_reads=True)
    assert [len(place.reads) for place in chosen.places] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1"),
        ({"num_layers": 4.0}, "num_layers=4.0 must be a whole number of at least 1"),
        ({"width": 8.0}, "width=8.0 must be a whole number of at least 1"),
        ({"eps": -1.0}, "eps=-1.0 must be a finite number at least 0"),
        ({"sublayers": "attention"}, "sublayers='attention' must be the names"),
        ({"sublayers": ()}, r"sublayers=\(\) must be the names"),
        ({"sublayers": ("a.b", "a_b")}, r"sublayers=\('a.b', 'a_b'\) must be the names"),
        ({"sublayers": ("mlp", "mlp")}, r"sublayers=\('mlp', 'mlp'\) has a name twice"),
    ],
)
def test_a_model_that_is_none_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        RoutingConfig(method="delta").resolve(**{"num_layers": 2} | given)


def test_a_plan_says_how_it_evaluates_and_why():
    asked = plan(8, method="delta", evaluation="two_phase")
    assert asked.groups == (8,) and "two phases in 1 group of 8: asked for" in asked.reason
    sized = plan(8, method="delta", evaluation="two_phase", group_size=6)
    assert sized.groups == (6, 12) and "two phases in 2 groups of 4 to 6" in sized.reason
    blocks = plan(8, method="attnres", block_size=4, evaluation="two_phase")
    assert blocks.groups == (4, 8, 12) and "in 3 groups of 4: asked for; as" in blocks.reason
    assert plan(28, method="attnres", num_blocks=8).groups == ()
    deep = plan(28, method="delta")
    assert deep.groups == (6, 12, 19, 27, 36, 46)
    assert "two phases in 6 groups of 6 to 10: as long as about 48 passes" in deep.reason
    several = plan(28, method="delta", heads=4)
    assert several.groups == () and "one head only" in several.reason
    assert plan(28, method="delta", heads=4, evaluation="two_phase").groups == deep.groups
    shallow = plan(28, method="delta", num_blocks=4)
    assert shallow.groups == () and "one pass: two phases" in shallow.reason
    single = plan(8, method="delta", evaluation="one_pass")
    assert single.groups == () and "asked for" in single.reason
    centered = plan(8, method="delta", init="centered")
    assert centered.groups == () and "centred" in centered.reason
    assert "no softmax" in plan(8, method="standard").reason


@pytest.mark.parametrize("method", ["delta", "attnres"])
def test_no_other_groups_take_fewer_passes(method):
    """Counted from the places of the plans."""
    best = plan(5, method=method, evaluation="two_phase")
    assert best.groups
    rules = Schedule(**{field.name: getattr(best, field.name) for field in fields(Resolved)})

    def passes(groups: tuple[int, ...]) -> int:
        total = 0
        for place in rules.plan(groups, "").places[:10]:
            total += 4 * (place.num_sources - place.num_grouped) + (8 if place.num_grouped else 4)
            if place.opens_group is not None:
                total += phase_1_passes(place.num_finished) + FIRST_PASSES
        return total

    every = [some for n in range(1, 10) for some in itertools.combinations(range(1, 10), n)]
    assert passes(best.groups) == min(map(passes, every)) < passes((2,))


def test_two_phases_that_are_asked_for_share_something_wherever_anything_can_be_shared():
    for layers in range(1, 6):
        asked = plan(layers, method="attnres", evaluation="two_phase")
        assert asked.groups and asked.places[asked.groups[0]].opens_group is not None
        assert plan(layers, method="attnres").groups == ()
    assert plan(2, method="delta").reason == "one pass: two phases would take longer"


def test_two_phases_that_could_share_nothing_are_refused():
    with pytest.raises(NothingToShare, match=r"group_size=8 leaves.*; leave group_size out$"):
        plan(4, method="delta", evaluation="two_phase", group_size=8)
    with pytest.raises(NothingToShare, match=r"leave out evaluation, or use more layers"):
        plan(1, method="attnres", block_size=2, evaluation="two_phase")


ROUTINGS = [
    {"method": "delta", "num_blocks": 1},
    {"method": "delta", "block_size": 3, "init": "gate"},
    {"method": "delta", "block_size": 2, "sources": "reference"},
    {"method": "attnres", "block_size": 5},
    {"method": "attnres", "value_reads": True},
    {"method": "delta"},
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_two_phases_that_are_asked_for_share_something_or_say_what_would(routing):
    for layers, size in itertools.product((3, 4, 5, 8), (None, *range(1, 20))):
        asked = routing | {"evaluation": "two_phase", "group_size": size}
        try:
            found = plan(layers, **asked)
        except NothingToShare as error:
            for name in re.search("leave (?:out )?(.*?)(?: out|, or)", str(error))[1].split(
                " and "
            ):
                asked.pop(name)
            found = plan(layers, **asked)
            if "evaluation" not in asked:
                assert found.groups == ()
                continue
        assert found.groups
        assert all(found.places[start].opens_group is not None for start in found.groups)


def test_groups_that_do_not_begin_with_blocks_are_found_where_those_share_nothing():
    """The released sources of two blocks: at no block's start are two of them finished."""
    released = {"method": "delta", "num_blocks": 2, "sources": "reference"}
    groups = plan(4, **released, evaluation="two_phase").groups
    assert groups and plan(4, **released).groups == ()


@pytest.mark.parametrize("size", range(1, 13))
def test_a_group_size_is_taken_where_a_multiple_of_it_can_share(size):
    shared = {"method": "attnres", "block_size": 5, "evaluation": "two_phase", "group_size": size}
    starts = [start for start in range(0, 12, size) if start >= 5]
    if starts:
        assert [*plan(6, **shared).groups] == starts
    else:
        with pytest.raises(NothingToShare, match=r"leave group_size out$"):
            plan(6, **shared)


def test_a_plan_that_is_cut_names_the_groups_that_it_has():
    whole = plan(12, method="delta")
    parts = cut(whole, (10,))
    assert whole.groups == (7, 15) and parts.groups == (7, 10, 15)
    opened = [place.index for place in parts.places if place.opens_group is not None]
    assert opened == [*parts.groups]
