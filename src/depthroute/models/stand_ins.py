"""A model of which only the residual stream is computed, to find out what it launches there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.models.model import RoutedDecoder


class StandIns:
    """In place of :class:`~depthroute.models.regions.Regions`: a sublayer is run once of each kind,
    to see its output's dtype, and a tensor of that stands for it."""

    def __init__(self) -> None:
        self._dtypes: dict[tuple[str, torch.dtype], torch.dtype] = {}
        self._weight: Tensor | None = None

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        layer, (x, *others) = args[0], [a for a in args if isinstance(a, Tensor)]
        assert not others, f"{name} is no sublayer of one input"
        if (name, x.dtype) not in self._dtypes:
            try:
                with torch.no_grad():
                    dtype = function(*args).dtype
            except (RuntimeError, NotImplementedError, ValueError):  # experts look at numbers
                dtype = x.dtype
            self._dtypes[name, x.dtype] = dtype
        if self._weight is None:
            self._weight = x.new_empty(()).requires_grad_()
        is_trained = any(p.requires_grad for p in layer.parameters())
        weight = self._weight if is_trained else None
        return _StandIn.apply(x, weight, self._dtypes[name, x.dtype])

    def sees_all_of(self, layer: nn.Module) -> bool:
        return True


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *[torch.empty_like(t) if is_wanted else None for t, is_wanted in wanted], None


def without_sublayers(model: nn.Module) -> None:
    """Have the sublayers of ``model``, a copy that is thrown away, run once of each kind: all but
    those that read more than one input, as with depth attention."""
    stand_ins: Any = StandIns()
    for decoder in model.modules():
        if isinstance(decoder, RoutedDecoder) and decoder.plan.chooses:
            for layer in getattr(decoder, decoder.architecture.layers):
                layer.regions = None if decoder.plan.changes_values else stand_ins
