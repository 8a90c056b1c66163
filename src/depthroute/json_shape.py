"""What a JSON file must hold, as data: one check for every file that may be damaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from depthroute.errors import shown

LARGEST = 1e30
"""Beyond it a loss or a magnitude is none any more, and sums of such numbers overflow."""


def is_finite(value: float) -> bool:
    return abs(value) < LARGEST  # of nan this is False too


def jsonable(value: Any) -> Any:
    """With null for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


@dataclass(frozen=True)
class Leaf:
    is_right: Callable[[Any], bool]
    words: str

    def or_null(self) -> Leaf:
        return Leaf(lambda value: value is None or self.is_right(value), f"{self.words} or null")


TEXT = Leaf(lambda value: isinstance(value, str), "text")
WHOLE = Leaf(_is_whole, "a whole number")
NUMBER = Leaf(_is_number, "a number")
"""Whatever its size: a diverged run may have written nan."""
TIME = Leaf(lambda v: _is_number(v) and is_finite(v) and v >= 0, "a number of at least 0")
SCALAR = Leaf(lambda v: v is None or isinstance(v, str | int | float), "a number, text or null")
OBJECT = Leaf(lambda value: isinstance(value, dict), "an object")
ANYTHING = Leaf(lambda value: True, "anything")

Shape = Leaf | list[Any] | dict[str, Any]
"""A leaf, a list of one shape, or an object: by name, a name that ends in ``?`` may be missing, and
``*`` stands for every name."""


def check(value: Any, shape: Shape, where: str) -> None:
    """A ValueError says which part of ``value`` is not of this shape."""
    if isinstance(shape, Leaf):
        if not shape.is_right(value):
            raise ValueError(f"{where} is {shown(value)} and must be {shape.words}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {shown(value)} and must be a list")
        for position, item in enumerate(value):
            check(item, shape[0], f"{where}[{position}]")
    else:
        check(value, OBJECT, where)
        for name, inner in shape.items():
            key = name.removesuffix("?")
            for each in value if name == "*" else [key]:
                if each in value:
                    check(value[each], inner, f"{where}.{each}")
                elif key == name:
                    raise ValueError(f"{where} has no {each!r}")
