"""What a setting may hold: asked in one place, whether it came from Python, JSON or a shell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from depthroute.errors import ConfigError, shown, unknown

LARGEST = 2**63 - 1
"""What a tensor's sizes, and most formats, can count to."""


def check_whole(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """``True`` is an int to Python and a mistake to us."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={shown(value)} must be a whole number of at least {least}")
    if value > LARGEST:
        raise ConfigError(f"{name}={shown(value)} is too large; use at most {LARGEST}")


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> None:
    """A finite number within its bounds; neither ``True`` nor a text that looks like one."""
    if optional and value is None:
        return
    bounds = {"greater than": above, "at least": least, "at most": most, "below": below}
    words = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    is_inside = is_finite(value) and (above is None or value > above)
    is_inside = is_inside and (least is None or value >= least)
    is_inside = is_inside and (most is None or value <= most)
    if not is_inside or not (below is None or value < below):
        raise ConfigError(f"{name}={shown(value)} must be a finite number {' and '.join(words)}")


def is_finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def check_switch(name: str, value: Any, *, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ConfigError(f"{name}={shown(value)} must be true or false")


def check_choice(name: str, value: Any, allowed: Iterable[str], *, optional: bool = False) -> None:
    if not (optional and value is None) and value not in (names := tuple(allowed)):
        raise unknown(name, value, names)


def check_object(what: str, values: Any, known: Iterable[str]) -> None:
    """``values`` as JSON gives them: an object whose every name is known."""
    if not isinstance(values, dict):
        raise ConfigError(f"{what}s must be an object of names and values, not {shown(values)}")
    names = list(known)
    for name in values:
        if name not in names:
            raise unknown(what, name, names)


def check_betas(name: str, value: Any) -> tuple[float, float]:
    """Of Adam: as a tuple, which JSON does not have."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name}={shown(value)} must be two numbers, such as [0.9, 0.95]")
    for beta in value:
        check_number(f"each of {name}", beta, least=0.0, below=1.0)
    return (float(value[0]), float(value[1]))
