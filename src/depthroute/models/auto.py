"""Configuration and model classes, and their place in transformers' Auto classes.

A routed configuration is the family's own configuration with one more field, ``routing``. On disk
its ``model_type`` reads ``depthroute`` (with the family under ``base_model_type``), so that a plain
transformers refuses it instead of loading the weights and silently dropping the routing.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from depthroute.config import RoutingConfig
from depthroute.errors import CheckpointError, ConfigError
from depthroute.models.architecture import ARCHITECTURES, Architecture

MODEL_TYPE = "depthroute"


class RoutedConfigMixin:
    """Mixed into a family's configuration."""

    routing: dict[str, Any]
    model_type: str
    model_class: ClassVar[Any]

    def routing_config(self) -> RoutingConfig:
        return RoutingConfig.from_dict(self.routing)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        values["base_model_type"] = self.model_type
        values["model_type"] = MODEL_TYPE
        return values

    def base_dict(self) -> dict[str, Any]:
        """The family's own configuration, as if never routed."""
        values = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        values.pop("routing")
        values["architectures"] = [ARCHITECTURES[self.model_type].causal_lm]
        return values


def check_routing(values: dict[str, Any], where: str) -> None:
    """A configuration that says it is routed names a family and a routing that are known."""
    base, routing = values.get("base_model_type"), values.get("routing")
    if not isinstance(base, str) or base not in ARCHITECTURES or not isinstance(routing, dict):
        raise CheckpointError(
            f"{where} says model_type {MODEL_TYPE!r} but its base_model_type is {base!r} and its "
            f"routing {routing!r}; it needs one of {', '.join(sorted(ARCHITECTURES))} and a "
            "routing section. Was it written by a newer depthroute?"
        )
    routing_from(routing, where)


def routing_from(values: dict[str, Any], where: str) -> RoutingConfig:
    """The routing section of a file, which the error names."""
    missing = [name for name in {"method": None} | values if values.get(name) is None]
    if missing:  # a default is written by leaving it out, so this was never written
        raise CheckpointError(
            f"{where} has a routing section without a value for {missing[0]!r}; it is damaged"
        )
    try:
        return RoutingConfig.from_dict(values)
    except ConfigError as error:
        raise CheckpointError(
            f"{where} has a routing section that is not understood: {error}. Was it written by a "
            "newer depthroute?"
        ) from error


class DepthrouteConfig(PreTrainedConfig):
    """What ``AutoConfig`` finds for a routed checkpoint; hands over to the family's class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        check_routing(config_dict, "this configuration")
        values = dict(config_dict)
        base = values["model_type"] = values.pop("base_model_type")
        return routed_config_class(ARCHITECTURES[base]).from_dict(values, **kwargs)


@cache
def routed_config_class(architecture: Architecture) -> Any:
    base = CONFIG_MAPPING[architecture.model_type]
    name = f"Routed{base.__name__}"
    config_class = type(name, (RoutedConfigMixin, base), {"__module__": __name__})
    setattr(sys.modules[__name__], name, config_class)
    from depthroute.models.causal_lm import routed_model_class

    config_class.model_class = routed_model_class(architecture, config_class)
    # not before: this file is imported while transformers is still importing its Auto classes
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.register(config_class, config_class.model_class, exist_ok=True)
    return config_class


def __getattr__(name: str) -> Any:
    """Classes are made when first needed; unpickling in a new process needs them by name."""
    for architecture in ARCHITECTURES.values():
        if name == f"Routed{CONFIG_MAPPING[architecture.model_type].__name__}":
            return routed_config_class(architecture)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(MODEL_TYPE, DepthrouteConfig, exist_ok=True)
