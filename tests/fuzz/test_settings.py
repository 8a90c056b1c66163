"""Settings from JSON: refused in one line, or kept exactly as they were given."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.models.settings import make_config
from depthroute.presets import Preset
from depthroute.train.settings import TrainSettings, from_preset
from tests.fuzz import strategies

CI = settings(max_examples=300)
LARGE = settings(max_examples=20_000)
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}


def refusal(function: Any, *arguments: Any, **options: Any) -> tuple[Any, str | None]:
    """What came back, or the one line that says why nothing did."""
    try:
        return function(*arguments, **options), None
    except ConfigError as error:
        line = str(error)
    assert line and "\n" not in line and len(line) < 1200, line
    return None, line


def check_routing(values: Any, layers: int) -> None:
    config, _ = refusal(RoutingConfig.from_dict, values)
    if config is None:
        return
    for name, value in values.items():
        held = getattr(config, name)
        assert held == value and type(held) is type(value), name
    assert RoutingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    default = RoutingConfig(config.method)
    changed = {name for name, value in values.items() if value != getattr(default, name)}
    assert set(config.to_dict()) == changed | {"method"}
    for converting in (False, True):
        plan, _ = refusal(config.resolve, layers, width=8, converting=converting)
        if plan is not None:
            assert all(plan.places[i].num_sources >= 0 for i in range(plan.num_sublayers + 1))
            assert math.isfinite(plan.eps) and plan.eps > 0


def check_training(values: Any) -> None:
    made, _ = refusal(TrainSettings.from_dict, values)
    if made is not None:
        for name, value in values.items():
            held = getattr(made, name)
            assert held == (tuple(value) if name == "betas" else value), name
        assert TrainSettings.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    made, _ = refusal(from_preset, presets.get("tiny"), values)
    if made is not None and values is not None:  # none at all are the preset's own
        assert all(getattr(made, n) == v for n, v in values.items() if n != "betas")


@torch.no_grad()
def check_model(values: dict[str, Any], family: str) -> None:
    start = presets.get("tiny" if family == "llama" else "delta-220m")
    shape, _ = refusal(presets.with_model, start, SMALL | values)
    if shape is None:
        return
    config = make_config(shape.model_type, shape.model)
    for name, value in values.items():
        held = getattr(config, name, None)
        if name == "rope_theta":
            held = config.rope_parameters["rope_theta"]
        assert value is None or held == value or isinstance(value, dict), name
    if max(config.hidden_size, config.intermediate_size, config.vocab_size) > 20_000:
        return  # what fits no memory is refused where the device is known
    model = presets.build(shape)
    logits = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    assert logits.shape == (1, 3, config.vocab_size)
    assert torch.isfinite(logits).all()


REQUIRED = {"steps": 1, "batch_size": 4, "sequence_length": 8, "lr": 0.01}
routings = strategies.settings(strategies.ROUTING) | strategies.JUNK
trainings = strategies.settings(strategies.TRAINING).map(lambda v: REQUIRED | v) | strategies.JUNK
models = strategies.settings(strategies.MODEL)
families = st.sampled_from(["llama", "qwen3"])


@CI
@given(routings, st.integers(1, 5))
def test_a_routing_is_kept_as_given_or_refused_in_one_line(values, layers):
    check_routing(values, layers)


@CI
@given(trainings)
def test_training_settings_are_kept_as_given_or_refused_in_one_line(values):
    check_training(values)


@settings(max_examples=120)
@given(models, families)
def test_a_model_is_what_was_asked_for_and_runs_or_is_refused_in_one_line(values, family):
    check_model(values, family)


@CI
@given(strategies.JUNK, st.sampled_from(["name", "model", "model_type", "routing", "recipe", None]))
@example({}, "routing")
@example({}, "recipe")
def test_a_preset_from_json_is_whole_or_refused_in_one_line(junk, place):
    values = presets.get("tiny").to_dict()
    preset, _ = refusal(Preset.from_dict, junk if place is None else values | {place: junk})
    if preset is not None:
        assert preset.to_dict()[place] == junk


@CI
@given(strategies.JUNK, st.sampled_from(sorted(presets.get("tiny").to_dict()["recipe"])))
def test_a_recipe_from_json_is_kept_as_given_or_refused_in_one_line(junk, name):
    values = presets.get("tiny").to_dict()
    values["recipe"] |= {name: junk}
    preset, _ = refusal(Preset.from_dict, values)
    if preset is not None:
        assert preset.to_dict()["recipe"][name] == junk


@pytest.mark.slow
@LARGE
@given(routings, st.integers(1, 5))
def test_many_routings(values, layers):
    check_routing(values, layers)


@pytest.mark.slow
@LARGE
@given(trainings)
def test_many_training_settings(values):
    check_training(values)


@pytest.mark.slow
@settings(max_examples=5_000)
@given(models, families)
def test_many_models(values, family):
    check_model(values, family)


def test_examples_are_the_same_whatever_was_loaded_before(tmp_path, monkeypatch):
    """Workers run tests in an order that nobody knows, and some load modules."""
    seen: list[str] = []

    @settings(max_examples=300)
    @given(st.text())
    def see(text):
        seen.append(text)

    see()
    before = seen.copy()
    place = tmp_path / "constants.py"
    place.write_text(f"WORDS = {[f'{number}' * 5 for number in range(100)]}")
    spec = importlib.util.spec_from_file_location("constants", place)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "constants", importlib.util.module_from_spec(spec))
    seen.clear()
    see()
    assert seen == before
