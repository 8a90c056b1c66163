"""The methods a comparison can name, and how a name becomes a routing configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, shown, unknown

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
    where = f"method {shown(text)}"
    given = parse_assignments(changes, where)
    if "method" in given:
        raise ConfigError(f"{where}: its name says the method; leave out method=...")
    blocks = {"block_size", "num_blocks"}  # they say the same thing, each in its own way
    values = {k: v for k, v in METHODS[name].items() if k not in blocks or not blocks & {*given}}
    return Method(":".join([name, *changes]), RoutingConfig.from_dict(values | given))


def parse_assignments(texts: Sequence[str], where: str) -> dict[str, Any]:
    """``key=value`` each, the value read as JSON, or as a string where it is none."""
    values: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(f"{where}: {shown(text)} must be key=value")
        if key in values:
            raise ConfigError(f"{where}: {key} is given twice, as in {shown(text)}; give it once")
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value
    return values
