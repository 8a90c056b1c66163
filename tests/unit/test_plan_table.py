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
