"""The methods a comparison can name, and how a name becomes a routing configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, unknown

METHODS: dict[str, dict[str, Any]] = {
    "standard": {"method": "standard"},
    "attnres-block": {"method": "attnres", "num_blocks": 4},
    "attnres-full": {"method": "attnres"},
    "delta": {"method": "delta"},
    "delta-block": {"method": "delta", "num_blocks": 4},
    "depth-attention": {"method": "depth_attention"},
    "x0-skip": {"method": "x0_skip"},
    "x0-skip-learned": {"method": "x0_skip", "learned": True},
}
DEFAULT = ("standard", "attnres-block", "delta", "delta-block", "depth-attention")
BASELINE = "standard"
_ALIASES = {"attnres": "attnres-block"}


@dataclass(frozen=True)
class Method:
    label: str
    routing: RoutingConfig


def parse_methods(text: str) -> tuple[Method, ...]:
    """``"standard,delta:heads=4:init=complete"`` as methods, each named once."""
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise ConfigError(f"no methods in {text!r}; known: {', '.join(METHODS)}")
    methods = tuple(parse_method(label) for label in labels)
    for method in methods:
        if sum(m.label == method.label for m in methods) > 1:
            raise ConfigError(f"method {method.label!r} is named twice; name each method once")
    return methods


def parse_method(text: str) -> Method:
    """One name from :data:`METHODS`, with ``:key=value`` changes to its routing settings."""
    name, *changes = text.split(":")
    name = name.strip().replace("_", "-")
    name = _ALIASES.get(name, name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    values = dict(METHODS[name])
    for change in changes:
        key, value = parse_assignment(change, f"method {text!r}")
        if key in ("block_size", "num_blocks"):
            # they say the same thing; the one given last counts
            values.pop("block_size", None)
            values.pop("num_blocks", None)
        values[key] = value
    return Method(":".join([name, *changes]), RoutingConfig.from_dict(values))


def parse_assignment(text: str, where: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON, or as a string where it is none."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{where}: {text!r} is not of the form key=value")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return key.strip(), parsed
