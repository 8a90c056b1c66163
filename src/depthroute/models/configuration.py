"""The configuration of a routed model: the family's own with one more field, ``routing``.

On disk its ``model_type`` reads ``depthroute`` (with the family under ``base_model_type``), so that
a plain transformers refuses it instead of loading the weights and silently dropping the routing.
"""

from __future__ import annotations

from typing import Any

from depthroute.config import RoutingConfig
from depthroute.errors import CheckpointError, ConfigError
from depthroute.models.architecture import ARCHITECTURES

MODEL_TYPE = "depthroute"
SHIM = "depthroute_shim"
"""The module that a folder may hold for ``trust_remote_code=True``."""


class RoutedConfigMixin:
    """Mixed into a family's configuration."""

    routing: dict[str, Any]
    model_type: str

    def routing_config(self) -> RoutingConfig:
        return RoutingConfig.from_dict(self.routing)

    @classmethod
    def is_custom_code(cls) -> bool:
        """The family's own names are meant. Of a configuration that is not one of its own,
        transformers 5.17 would rename the types of the layers, and lfm2 then not know them."""
        return False

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        values["base_model_type"] = self.model_type
        values["model_type"] = MODEL_TYPE
        return values

    def base_dict(self) -> dict[str, Any]:
        """The family's own configuration, as if never routed."""
        values = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        values.pop("routing")
        if has_shim(self):
            values.pop("auto_map")
        names = values.get("architectures") or ()
        values["architectures"] = [name.removeprefix("Routed") for name in names]
        return values


def has_shim(config: Any) -> bool:
    """Whether it is that of a folder with a shim, which a model is then saved with again."""
    return SHIM in str(getattr(config, "auto_map", None))


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
