"""Compiling what repeats: a few graphs that all layers share, in place of one of the whole model.

A region is compiled once for all layers of a kind: where a method chooses among sources, a sublayer
with its norms, and the reads between are kernels of their own; where it does not, a whole layer,
adds, norms and the first layer's values included; in depth attention, which draws on ever more
layers, what lies before and after the attention. Its graph knows neither which layer it stands in
nor the plan, so that a cold start depends on how many kinds of layers there are and not on how deep
the model is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from depthroute.models.architecture import is_as_its_class
from depthroute.models.recording import is_recording
from depthroute.ops.private.regions import compiled_alone

logger = logging.getLogger("depthroute")

NORM = "norm"
"""The region of a norm by itself: the last, and one that no kernel applies where others are."""


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """In place of :meth:`Regions.call`, uncompiled."""
    return function(*args)


class Regions:
    """The compiled functions of one model, each made when it is first called."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._has_warned = False
        self._compiled: dict[str, Callable[..., Any]] = {}

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = compiled_alone(name, function, **self.options)
        return compiled(*args)

    def sees_all_of(self, layer: nn.Module) -> bool:
        """Whether nothing but the classes' own code runs in ``layer``: a graph does not notice
        hooks that come after it, nor is anything recorded in one."""
        if is_recording():
            return False
        waiting = [*layer._modules.values()]
        for module in waiting:  # which grows; every layer pays for this at every call
            if module is None:
                continue
            if not is_as_its_class(module):
                self._warn(module)
                return False
            waiting += module._modules.values()
        return True

    def _warn(self, module: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "layers run uncompiled while their %s has hooks or a forward of its own",
                type(module).__name__,
            )
