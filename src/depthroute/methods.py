"""What a method is, and what it is called: one name in every command, preset, run and report.

A name is one of :data:`NAMES`, and ``:key=value`` for every routing setting beyond what it stands
for: ``delta-block``, ``attnres-full:init=complete``, ``delta:heads=4:num_blocks=8``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from depthroute.errors import ConfigError, shown, unknown

INITS = ("complete", "centered", "gate", "paper", "reference")
_SOURCES = ("block_size", "num_blocks", "sources", "routing", "include_partial", "embedding_source")
_QUERY = ("heads", "head_norm", "eps", "evaluation", "group_size", "value_reads")


class Kind(NamedTuple):
    """What is particular to a method; whoever needs to know asks here."""

    settings: tuple[str, ...] = ()
    """Those that mean something to it, besides ``loops`` and ``init``."""
    inits: tuple[str, ...] = INITS
    identity: str | None = None
    """The ``init`` of a converted model where none is given; None: it depends on the sources."""
    softmax: str | None = None
    """What a site weights its sources by, if it does: a key of :data:`SITE_SIZES`."""
    values: str | None = None
    """What weights attention's values over layers, if they are mixed: its ``"keys"``, or learned
    ``"numbers"``."""
    routing: str = "additive"
    reads_partial: bool = False
    """Whether the block in progress is a source unless settings say otherwise."""


METHODS = {
    "standard": Kind((), ("paper", "complete"), "paper"),
    "attnres": Kind(_SOURCES + _QUERY, softmax="query", routing="replacement", reads_partial=True),
    "delta": Kind(_SOURCES + _QUERY, softmax="query"),
    "static": Kind(_SOURCES, tuple(i for i in INITS if i != "reference"), softmax="logits"),
    "x0_skip": Kind(("learned",), ("paper", "gate"), "gate"),
    "depth_attention": Kind(
        ("stride", "recent_window", "key_norm"), ("paper", "gate"), "gate", values="keys"
    ),
    "value_residual": Kind((), ("paper", "gate"), "gate", values="numbers"),
    "mhc": Kind(("streams", "eps"), ("paper",), "paper"),
}
SITE_SIZES: dict[str, Callable[[int, int], int]] = {
    "query": lambda width, num_sources: 2 * width,  # and the gain of its keys
    "logits": lambda width, num_sources: num_sources,
    # projection and bias of pre, post and res, and a factor for each
    "streams": lambda width, n: (2 * n + n * n) * (n * width + 1) + 3,
}
"""How many numbers give the weights of a place; kernels and two phases are for queries alone."""

NAMES: dict[str, dict[str, Any]] = {
    "standard": {"method": "standard"},
    "attnres-block": {"method": "attnres", "num_blocks": 4},
    "attnres-full": {"method": "attnres"},
    "delta": {"method": "delta"},
    "delta-block": {"method": "delta", "num_blocks": 4},
    "depth-attention": {"method": "depth_attention"},
    "x0-skip": {"method": "x0_skip"},
    "x0-skip-learned": {"method": "x0_skip", "learned": True},
    "static": {"method": "static"},
    "static-block": {"method": "static", "num_blocks": 4},
    "value-residual": {"method": "value_residual"},
    "attnres-block-roles": {"method": "attnres", "num_blocks": 4, "value_reads": True},
    "attnres-full-roles": {"method": "attnres", "value_reads": True},
    "mhc": {"method": "mhc"},
}
"""Where several would do, the first with the fewest settings is the one that is shown."""
BASELINE = "standard"
_UNDERSTOOD = NAMES | {"attnres": {"method": "attnres"}}
_BLOCKS = {"block_size", "num_blocks"}  # they say the same thing, each in its own way


def settings_of(text: str, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The routing settings that a name stands for, with those given ``beside`` it."""
    name, *assignments = text.split(":")
    name = name.strip().replace("_", "-")
    if name not in _UNDERSTOOD:
        raise unknown("method", name, NAMES)
    where = f"method {shown(text)}"
    changes, beside = parse_assignments(assignments, where), beside or {}
    if "method" in changes:
        raise ConfigError(f"{where}: its name says the method; leave out method=...")
    for key in changes.keys() & beside.keys():
        raise ConfigError(f"{where}: {key} is given twice, in the name and beside it; give it once")
    changes |= beside
    return _meant_by(_UNDERSTOOD[name], changes) | changes


def name_of(settings: Mapping[str, Any]) -> str:
    """The inverse: of settings that differ from their defaults, the name with the fewest."""
    names = []
    for name, own in NAMES.items():
        meant = _meant_by(own, settings)
        if meant.items() <= settings.items():
            changes = sorted((k, v) for k, v in settings.items() if k not in meant)
            names.append(":".join([name, *(f"{k}={_spelled(v)}" for k, v in changes)]))
    return min(names, key=lambda name: name.count(":"))


def _meant_by(own: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the blocks, where ``settings`` say other ones."""
    if own.items() <= settings.items() or not _BLOCKS & settings.keys():
        return own
    return {key: value for key, value in own.items() if key not in _BLOCKS}


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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
