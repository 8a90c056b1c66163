"""The plan's counts against sets of terms gathered by a loop that follows the definitions."""

from __future__ import annotations

import pytest
from definitions import EMBEDDING, places_of
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute import nn
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError

WIDTH = 6


@st.composite
def configs(draw):
    layers = draw(st.integers(1, 9))
    method = draw(st.sampled_from(["attnres", "delta", "static"]))
    values = {
        "method": method,
        "sources": draw(st.sampled_from([None, "delta", "cumulative", "reference"])),
        "routing": draw(st.sampled_from([None, "additive", "replacement"])),
        "init": draw(st.sampled_from([None, "paper", "complete", "centered", "gate"])),
        "block_size": draw(st.integers(1, 2 * layers)),
        "include_partial": draw(st.sampled_from([None, True, False])),
        "embedding_source": draw(st.booleans()),
    }
    if values["sources"] == "reference":
        values["block_size"] = 2 * ((values["block_size"] + 1) // 2)  # whole layers
        values["embedding_source"] = True
    config = RoutingConfig(**values)
    try:
        return config, config.resolve(layers, width=WIDTH), layers
    except ConfigError:
        return None


def owns(plan, place: int, places, routing: str, init: str) -> tuple[bool, bool]:
    """Whether a place has a query, and a gate, from the text alone."""
    terms = places[place]
    is_end = place == len(places) - 1
    so_far = [EMBEDDING, *range(place)]
    if place == 0 or (is_end and routing == "additive"):
        return False, False
    if init == "gate" and sorted(t for source in terms for t in source) == so_far:
        return False, False  # dead: the sources sum to the state
    return len(terms) > 1, init == "gate" and len(terms) > 0


@settings(max_examples=200)
@given(configs().filter(lambda drawn: drawn is not None))
def test_counts_of_sources_sites_and_parameters_follow_the_definitions(drawn):
    config, plan, layers = drawn
    routing = config.routing or ("replacement" if config.method == "attnres" else "additive")
    init = config.init or "paper"
    sources = config.sources or "delta"
    if sources == "reference" and (routing == "replacement" or plan.block_size == 1):
        sources = "delta"  # the released code differs from the paper in additive blocks alone
    partial = config.include_partial
    if partial is None:
        partial = sources == "delta" and (config.method == "attnres" or init == "complete")
    places = places_of(
        config.method,
        layers,
        config.block_size,
        sources=sources,
        include_partial=partial,
        embedding=config.embedding_source,
    )
    assert (plan.routing, plan.init, plan.sources) == (routing, init, sources)
    assert [place.num_sources for place in plan.places] == [len(p) for p in places]
    expected = [owns(plan, i, places, routing, init) for i in range(2 * layers + 1)]
    assert [(place.chooses, place.has_gate) for place in plan.places] == expected
    named = [
        "final" if i == 2 * layers else f"layers.{i // 2}.{('attention', 'mlp')[i % 2]}"
        for i, owned in enumerate(expected)
        if any(owned)
    ]
    assert list(plan.site_names().values()) == named
    sizes = [len(p) if config.method == "static" else 2 * WIDTH for p in places]
    count = sum(
        size * chooses + gate for size, (chooses, gate) in zip(sizes, expected, strict=True)
    )
    assert plan.num_parameters(WIDTH) == count
    sites = nn.Sites(plan, WIDTH)
    assert list(sites) == named
    assert sum(p.numel() for p in sites.parameters()) == count


@given(st.integers(1, 40), st.data())
def test_anchors_are_absolute_and_only_needed_layers_are_kept(layers, data):
    stride = data.draw(st.integers(1, layers))
    window = data.draw(st.integers(0, 4))
    config = RoutingConfig(method="depth_attention", stride=stride, recent_window=window)
    plan = config.resolve(layers)
    used = []
    for layer in range(layers):
        anchors = {j for j in range(layer) if j % stride == 0}
        recent = {j for j in range(layer) if layer - j <= window}
        assert plan.depth[layer].sources == tuple(sorted(anchors | recent))
        used.append(anchors | recent)
    for layer in range(layers):
        needed_later = {j for later in used[layer + 1 :] for j in later if j <= layer}
        assert plan.depth[layer].kept == tuple(sorted(needed_later))


@given(st.integers(1, 8), st.integers(2, 4), st.data())
def test_a_looped_stack_adds_the_layers_own_earlier_visits(depth, loops, data):
    stride = data.draw(st.integers(1, depth))
    plan = RoutingConfig(method="depth_attention", stride=stride, loops=loops).resolve(
        depth * loops
    )
    for visit in range(loops):
        for position in range(depth):
            earlier = [(v, position) for v in range(visit)]
            anchors = [(visit, j) for j in range(position) if j % stride == 0]
            expected = tuple(v * depth + j for v, j in earlier + anchors)
            assert plan.depth[visit * depth + position].sources == expected


@given(st.integers(1, 40), st.integers(1, 80))
def test_a_number_of_blocks_gives_that_many_or_says_which_are_possible(layers, blocks):
    total = 2 * layers
    possible = {-(-total // size) for size in range(1, total + 1)}
    config = RoutingConfig(method="attnres", num_blocks=blocks)
    if blocks in possible:
        assert config.resolve(layers).places[total].num_sources == blocks + 1  # and the embedding
    else:
        with pytest.raises(ConfigError, match=f"num_blocks={blocks} "):
            config.resolve(layers)
