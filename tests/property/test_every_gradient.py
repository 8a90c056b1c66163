"""Whatever configuration is accepted, every parameter of the model learns; all others are refused.

Two families stand for all: qwen3 (attention, then MLP, and a key norm) and gpt_neox (both at once:
one sublayer a layer).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import depthroute as dr
from depthroute.config import EVALUATIONS, HEAD_NORMS, INITS, KEY_NORMS, METHODS, ROUTINGS, SOURCES
from depthroute.errors import ConfigError
from depthroute.models.convert import routed_config

FAMILIES = ("qwen3", "gpt_neox")
LAYERS = range(2, 8)
SHAPE = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
BLOCKS: list[dict[str, Any]] = [{}]
BLOCKS += [{"block_size": k} for k in (1, 2, 3, 4, 5, 7, 14, 15)]
BLOCKS += [{"num_blocks": n} for n in (1, 2, 3, 4, 5)]
WHAT: dict[str, tuple[Any, ...]] = {
    "sources": (None, *SOURCES),
    "routing": (None, *ROUTINGS),
    "init": (None, *INITS),
    "include_partial": (None, True, False),
    "embedding_source": (True, False),
}
"""What is read. All of them are combined."""
HOW: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2, 8),
    "head_norm": HEAD_NORMS,
    "eps": (None, 1e-5),
    "loops": (1, 2, 3),
}
"""How it is computed. Drawn anew for each of the others, so that all pairs meet."""
EVALUATED: list[dict[str, Any]] = [{"evaluation": name} for name in EVALUATIONS]
EVALUATED += [{"evaluation": "two_phase", "group_size": size} for size in (1, 2, 3, 20)]
DEPTH: dict[str, tuple[Any, ...]] = {
    "init": (None, *INITS),
    "learned": (False, True),
    "stride": (None, 1, 2, 3, 5, 9),
    "recent_window": (0, 1, 3, 9),
    "key_norm": KEY_NORMS,
    "loops": (1, 2, 3),
}


def combined(fields: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*fields.values()):
        yield dict(zip(fields, values, strict=True))


def combinations(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    for method in METHODS:
        if method in ("attnres", "delta"):
            for what, blocks in itertools.product(combined(WHAT), BLOCKS):
                how = {name: draws.choice(values) for name, values in HOW.items()}
                yield {"method": method} | what | blocks | how | draws.choice(EVALUATED)
        else:
            for depth in combined(DEPTH):
                yield {"method": method} | depth


def model_of(family: str, layers: int, settings: dict[str, Any]) -> Any:
    """A model with routing away from its start, or None where the settings are refused."""
    config = CONFIG_MAPPING[family](**SHAPE, num_hidden_layers=layers)
    try:
        routing = dr.RoutingConfig.from_dict(settings)
        routed_config(config, routing)  # the plan alone, which is cheap to refuse
        model = dr.from_config(config, routing)
    except ConfigError:
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def without_gradient(model: Any) -> list[str]:
    """Parameters that learn nothing: none at all, or exactly zero where that is no accident.

    A bias of the keys shifts every logit alike, so zero is its gradient; matrices and all
    routing have one.
    """
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 4))
    model(input_ids=ids, labels=ids).loss.backward()
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None
        or ((parameter.ndim > 1 or "routing" in name) and not parameter.grad.any())
    ]


def dead(cases: list[tuple[str, int, dict[str, Any]]]) -> tuple[int, list[str]]:
    """How many of ``cases`` were accepted, and what is wrong with any of them."""
    accepted, wrong = 0, []
    for family, layers, settings in cases:
        model = model_of(family, layers, settings)
        if model is None:
            continue
        accepted += 1
        names = without_gradient(model)
        if names:
            given = {key: value for key, value in settings.items() if value is not None}
            wrong.append(f"{family}, {layers} layers, {given}: {', '.join(names[:4])}")
    return accepted, wrong


@pytest.mark.parametrize("layers", [4, 7])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["delta", "attnres"])
@pytest.mark.parametrize("embedding_source", [True, False])
def test_a_final_site_reads_an_unfinished_block_of_states(method, embedding_source, family, layers):
    settings = {"method": method, "block_size": 3, "sources": "cumulative"}
    settings |= {"routing": "replacement", "embedding_source": embedding_source}
    assert dead([(family, layers, settings)]) == (1, [])


def test_every_parameter_of_an_accepted_configuration_has_a_gradient():
    draws = random.Random(0)
    cases = [
        (draws.choice(FAMILIES), draws.choice(LAYERS), settings)
        for settings in draws.sample(list(combinations(seed=0)), 700)
    ]
    accepted, wrong = dead(cases)
    assert not wrong, "\n".join(wrong)
    assert accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination_of_settings_trains_whole_or_is_refused(family, layers):
    cases = [(family, layers, settings) for settings in combinations(seed=layers)]
    accepted, wrong = dead(cases)
    assert not wrong, "\n".join(wrong[:20])
    assert accepted > 1000
