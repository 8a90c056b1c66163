"""Model settings: the names a family knows, the values that make a model, and nothing ignored.

A Hugging Face configuration keeps any name as one more attribute and much nonsense as a value, so a
mistyped setting would train another model than was asked for.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from depthroute.checks import check_choice, check_number, check_object, check_whole
from depthroute.errors import ConfigError, DepthrouteError, shown
from depthroute.models import numberless
from depthroute.models.architecture import ARCHITECTURES

_MISTAKES = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError)
_MISTAKES += (ArithmeticError, AssertionError, RuntimeError)
"""How transformers and torch say that a configuration makes no model."""
_WITHOUT_EFFECT = {"use_cache", "pretraining_tp"}
"""On a model that is trained, or on any."""
_ROPE = ("rope_theta", "rope_scaling")
"""Names from before ``rope_parameters``, which they are moved into."""
MOST_LAYERS = 10_000
"""More would take minutes to lay out, and nobody means them."""


def setting_names(model_type: str) -> list[str]:
    """What a family's configuration knows of its model; how it is run and saved is left out."""
    config_class = CONFIG_MAPPING[model_type]
    names = {f.name for f in fields(config_class)} - {f.name for f in fields(PreTrainedConfig)}
    names -= _WITHOUT_EFFECT
    names |= set(config_class.attribute_map)
    return sorted(names | set(_ROPE if "rope_parameters" in names else ()))


def make_config(
    model_type: str, values: dict[str, Any], changes: dict[str, Any] | None = None
) -> Any:
    """The family's configuration; every one of ``values`` is in it as it was given.

    ``changes`` are those that an error names; left out, all of them.
    """
    check_choice("model_type", model_type, ARCHITECTURES)
    check_object("model setting", values, setting_names(model_type))
    for name, value in values.items():
        _check_value(name, value)
    with meaningful(model_type, changes or values):
        # it writes into the dictionaries that it is given
        config = CONFIG_MAPPING[model_type](**copy.deepcopy(values))
    for name, value in values.items():
        _refuse_ignored(config, name, value)
    _check_heads(config)
    _check_tokens(config)
    return config


@torch.no_grad()
def check_model(model: Any, model_type: str, values: dict[str, Any]) -> None:
    """One step of ``model``, which is on ``meta``: nothing is computed, but parts must fit."""
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, 4, 4, device="meta")  # whole: to make one, transformers reads values
    numberless.use_experts(model)
    with meaningful(model_type, values):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


@contextlib.contextmanager
def meaningful(model_type: str, values: dict[str, Any]) -> Iterator[None]:
    """What others raise in here about ``values`` becomes one line that names them."""
    try:
        yield
    except DepthrouteError:
        raise
    except _MISTAKES as error:
        given = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason = " ".join(str(cause or error).split())
        reason = reason if len(reason) <= 240 else f"{reason[:237]}..."
        if isinstance(error, LookupError | ArithmeticError | AttributeError):
            reason = f"{type(error).__name__}: {reason}"
        raise ConfigError(f"model settings {given} make no {model_type} model: {reason}") from error


def _check_value(name: str, value: Any) -> None:
    what = f"model.{name}"
    if name.endswith(("_act", "activation_function")) and isinstance(value, str):
        check_choice(what, value, ACT2FN)
    elif name.endswith(("_eps", "_epsilon")):
        check_number(what, value, above=0.0, most=1.0)
    elif name.endswith(("dropout", "pdrop")):
        check_number(what, value, least=0.0, below=1.0)
    elif name in ("initializer_range", "rope_theta"):
        check_number(what, value, above=0.0)
    elif isinstance(value, int) and not isinstance(value, bool):
        is_size = name.startswith(("num_", "n_")) or name.endswith(("_size", "_dim", "_embeddings"))
        check_whole(what, value, least=int(is_size))
    elif isinstance(value, float):
        check_number(what, value)
    elif isinstance(value, dict):
        for inner, part in value.items():
            _check_value(f"{name}.{inner}" if inner != "rope_theta" else inner, part)
    if name in ("num_hidden_layers", "n_layer") and isinstance(value, int) and value > MOST_LAYERS:
        raise ConfigError(f"{what}={shown(value)} is more than {MOST_LAYERS:,} layers; use fewer")


def _refuse_ignored(config: Any, name: str, value: Any) -> None:
    held: Any = getattr(config, "rope_parameters" if name == "rope_scaling" else name, None)
    if name == "rope_theta":
        held = _rope(config).get("rope_theta")
    is_kept = held == value
    if isinstance(value, dict) and isinstance(held, dict):  # defaults are filled in
        is_kept = all(held.get(key) == part for key, part in value.items())
    if not is_kept and value is not None:  # None asks for the family's own
        raise ConfigError(
            f"model.{name}={shown(value)} would be ignored: with the other settings a "
            f"{config.model_type} model has {shown(held)}; leave it out, or change those"
        )


def _check_heads(config: Any) -> None:
    heads, shared = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if heads and shared and heads % shared:
        raise ConfigError(
            f"model.num_key_value_heads={shared} does not divide num_attention_heads={heads}; each "
            "key-value head serves as many query heads, so use a divisor"
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = _rope(config)
    rotated = int(width * rope.get("partial_rotary_factor", 1.0)) if "rope_theta" in rope else 2
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"model.head_dim={width} leaves {rotated} dimensions of a head to rotate in pairs; use "
            "an even number"
        )


def _rope(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None)
    return found if isinstance(found, dict) else {}


def _check_tokens(config: Any) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int) and not token < max(config.vocab_size, 3):  # families' defaults
            raise ConfigError(
                f"model.{name}={token} is no token of a vocabulary of {config.vocab_size}; use at "
                f"most {config.vocab_size - 1}"
            )
