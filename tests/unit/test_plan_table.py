"""The plan is a table: made once, looked up afterwards, readable."""

import pytest
import torch
from tests.support import METHODS, routed_model, tokens

import depthroute as dr
from depthroute import schedule


def test_a_printed_plan_shows_every_place():
    plan = dr.RoutingConfig("delta", num_blocks=2).resolve(num_layers=2)
    assert str(plan).splitlines()[1:] == [
        "place               reads            sources",
        "layers.0.attention  state                                starts a block",
        "layers.0.mlp        state + source   embedding",
        "layers.1.attention  state + softmax  embedding, block.0  starts a block",
        "layers.1.mlp        state + softmax  embedding, block.0",
        "final               state",
    ]


def remade(method, layers=4, **settings):
    plan = dr.RoutingConfig(method, **settings).resolve(layers, width=32)
    assert all(place.fuses for place in plan.places if place.remakes)
    return [place.index for place in plan.places if place.remakes]


def test_inputs_are_made_again_in_the_first_half_of_the_blocks_of_attention_residuals():
    """There a sublayer has its input and the block's sum kept, and few sources to make one of."""
    assert remade("attnres", 28, num_blocks=8) == [*range(1, 28)]
    assert remade("attnres", block_size=3) == [1, 2, 3, 4, 5]  # the second of three is half in it
    assert remade("attnres", num_blocks=2, init="complete") == [1, 2, 3]
    delta = {"routing": "replacement", "include_partial": True}
    assert remade("delta", num_blocks=2, **delta) == [1, 2, 3]
    assert remade("attnres", num_blocks=2, value_reads=True) == [1, 3]  # attention reads twice
    assert remade("attnres", num_blocks=4, evaluation="two_phase") == [1]  # before the first group
    deep = remade("attnres", 28, num_blocks=14, evaluation="one_pass")
    assert deep[-1] == 4 * (schedule.FEW_REMADE - 1)  # a block's start, where none is unfinished


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("delta", {"num_blocks": 2}),  # backward takes the norm's input from what was read
        ("attnres", {"num_blocks": 2, "init": "centered"}),
        ("attnres", {}),  # the same tensors are sources and all there is
        ("attnres", {"num_blocks": 1}),
        ("attnres", {"num_blocks": 2, "include_partial": False}),  # the sum so far is not kept
        ("attnres", {"num_blocks": 2, "sources": "cumulative"}),
        ("static", {"num_blocks": 2}),
        ("standard", {}),
    ],
    ids=str,
)
def test_nowhere_else_are_inputs_made_again(method, settings):
    assert remade(method, **settings) == []


def test_a_printed_plan_shows_what_is_made_again():
    rows = str(dr.RoutingConfig("attnres", num_blocks=2).resolve(num_layers=2)).splitlines()[2:]
    again = "kernels read it again in backward"
    assert [row.endswith(again) for row in rows] == [False, True, False, False, False]


def test_a_printed_plan_of_depth_attention_shows_whose_values_are_mixed():
    plan = dr.RoutingConfig("depth_attention", stride=1).resolve(num_layers=3)
    rows = str(plan).splitlines()[2:]
    assert "values of layers 0, 1" in rows[4]
    assert all("softmax" not in row for row in rows)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_names_as_many_sources_as_it_reads(method):
    plan = METHODS[method].resolve(num_layers=6, width=32)
    assert len(plan.places) == 13
    for index, place in enumerate(plan.places):
        assert place.index == index
        assert len(place.source_names) == place.num_sources
        assert len(set(place.source_names)) == place.num_sources


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_works_nothing_out_again(method, monkeypatch):
    model = routed_model(method)
    names = [name for name, value in vars(schedule.Schedule).items() if callable(value)]
    for name in names:
        if not name.startswith("__"):
            monkeypatch.setattr(schedule.Schedule, name, None)
    with torch.no_grad():
        model(tokens())
