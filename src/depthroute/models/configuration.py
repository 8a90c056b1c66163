"""The configuration of a routed model: the family's own with one more field, ``routing``.

On disk its ``model_type`` reads ``depthroute`` (with the family under ``base_model_type``), so that
the Auto classes of a plain transformers refuse it instead of silently dropping the routing.
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
        if not hasattr(self, "routing"):
            raise ConfigError(
                f"this {type(self).__name__} has no routing, as that of a plain model; convert the "
                "model (depthroute.convert), or start anew with depthroute.from_config"
            )
        return RoutingConfig.from_dict(self.routing)

    @classmethod
    def is_custom_code(cls) -> bool:
        """The family's own names are meant. Of a configuration that is not one of its own,
        transformers 5.17 would rename the types of the layers, and lfm2 then not know them."""
        return False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        values = cls._of_family(config_dict)
        return super().from_dict(values, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found: Any = super()
        values, rest = found.get_config_dict(*args, **kwargs)
        return cls._of_family(values), rest

    @classmethod
    def _of_family(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What :meth:`to_dict` gives, with the family's ``model_type``."""
        if values.get("model_type") != MODEL_TYPE:
            return values
        check_routing(values, "this configuration")
        base = values["base_model_type"]
        if base != cls.model_type:
            raise CheckpointError(
                f"this configuration is that of a routed {base!r} model and {cls.__name__} is for "
                f"{cls.model_type!r}; load it with AutoConfig or AutoModelForCausalLM"
            )
        values = values | {"model_type": base}
        del values["base_model_type"]
        return values

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
