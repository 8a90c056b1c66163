"""Routed classes, each made once from a family's own, and modules that become one of them.

No class is changed on a finished object: a module of another class takes over what the first one
holds, its very parameters and submodules, under the same names.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import nn

HOME = "depthroute.models.families"
"""Where pickle looks for the classes."""


@cache
def routed_class(base: type, mixin: Any) -> Any:
    """``base`` with ``mixin`` in front: ``RoutedLlamaDecoderLayer`` for a LlamaDecoderLayer."""
    name = f"{getattr(mixin, 'prefix', 'Routed')}{base.__name__}"
    return type(name, (mixin, base), {"__module__": HOME, "__doc__": mixin.__doc__})


def plain_class(routed: type, mixin: type) -> Any:
    """The family's own class that ``routed`` was made from."""
    behind = routed.__mro__[routed.__mro__.index(mixin) :]
    return next(cls for cls in behind if cls not in mixin.__mro__)


def adopted(cls: Any, module: nn.Module) -> Any:
    """A module of class ``cls`` with all that ``module`` holds.

    Tables of parameters, submodules and hooks are its own, what stands in them is the same.
    """
    new = cls.__new__(cls)
    for name, value in vars(module).items():
        new.__dict__[name] = copy.copy(value) if isinstance(value, dict | set) else value
    return new
