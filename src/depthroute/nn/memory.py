"""Values of earlier layers, and for depth attention their keys: explicit and immutable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute import ops
from depthroute.plan import Plan


@dataclass(frozen=True)
class DepthMemory:
    """What later layers may draw on at these tokens; dropped as soon as no layer will."""

    plan: Plan
    layer: int = 0
    """The next layer to run."""
    held: tuple[int, ...] = ()
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    observer: Any = None

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None
    ) -> Tensor:
        """The value of this layer after mixing; layer 0 is plain attention."""
        wanted = self.plan.depth[self.layer].sources
        if not wanted:
            return value
        keys, values = self._read(key, value)
        if self.observer is None:
            return ops.depth_attention_mix(query, keys, values, scaling=scaling)
        mixed, weights = ops.depth_attention_mix(
            query, keys, values, scaling=scaling, return_weights=True
        )
        return self.observer.on_depth_mix(self.layer, wanted, weights, values, mixed)

    def mix_carried(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        *,
        attends: bool = True,
        keeps_mixed: bool = True,
    ) -> tuple[ops.CarriedAttention, DepthMemory]:
        """:meth:`mix` with what is read again handed on (:func:`~depthroute.ops.depth_attention`),
        and this memory with what it holds handed on too: to be pushed onto in its place."""
        row = self.plan.depth[self.layer]
        if not row.sources or self.observer is not None:
            mixed = self.mix(query, key, value, scaling)
            return ops.CarriedAttention(mixed, query, key, [key], [mixed]), self
        handed = ops.depth_attention_carried(
            query,
            *self._read(key, value),
            [layer in row.kept for layer in (*row.sources, self.layer)],
            scaling=scaling,
            attends=attends,
            keeps_mixed=keeps_mixed,
        )
        keys, values = list(self.keys), list(self.values)
        for n, layer in enumerate(row.sources):
            place = self.held.index(layer)
            keys[place], values[place] = handed.keys[n], handed.values[n]
        return handed, replace(self, keys=tuple(keys), values=tuple(values))

    def _read(self, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the layers that this one reads, self last."""
        places = [self.held.index(layer) for layer in self.plan.depth[self.layer].sources]
        return [*(self.keys[p] for p in places), key], [*(self.values[p] for p in places), value]

    def add(self, value: Tensor, weight: Tensor, first_weight: Tensor) -> Tensor:
        """The value of this layer beside that of the first, each times its number."""
        wanted = self.plan.depth[self.layer].sources
        (first,) = (self.values[self.held.index(layer)] for layer in wanted)
        total = ops.value_residual(value, first, weight, first_weight)
        if self.observer is None:
            return total
        sizes = torch.cat([first_weight, weight]).detach().abs().float()
        terms = first_weight.to(first.dtype) * first, weight.to(value.dtype) * value
        return self.observer.on_depth_mix(self.layer, wanted, sizes / sizes.sum(), terms, total)

    def push(self, key: Tensor | None, value: Tensor | None) -> DepthMemory:
        """The memory after this layer, with its key and mixed value if a later layer needs them."""
        held, keys, values = list(self.held), list(self.keys), list(self.values)
        if key is not None and value is not None:
            held, values = [*held, self.layer], [*values, value]
            keys = [*keys, key] if self.plan.values == "keys" else []
        kept = [p for p, layer in enumerate(held) if layer in self.plan.depth[self.layer].kept]
        return replace(
            self,
            layer=self.layer + 1,
            held=tuple(held[p] for p in kept),
            keys=tuple(keys[p] for p in kept if keys),
            values=tuple(values[p] for p in kept),
        )

    @property
    def draws_on_one(self) -> bool:
        """Whether every layer draws on the first alone, so that all but that do the same."""
        return self.plan.values == "numbers"

    def alone(self) -> DepthMemory:
        """For the layer ahead, as if the stack began with it: what it draws on is -1, and it keeps
        its own value if it draws on nothing. Only where it :attr:`draws_on_one`."""
        count = len(self.plan.sublayers)
        plan = self.plan.window(self.layer * count, count)
        return replace(self, plan=plan, layer=0, held=(-1,) * len(self.values))

    def with_values(self, values: list[Tensor]) -> DepthMemory:
        """The memory of as many values, emptied before."""
        return replace(self, values=tuple(values))

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def num_tensors(self, layer: int) -> int:
        """How many the memory holds just before ``layer`` runs."""
        held = len(self.plan.depth[layer - 1].kept) if layer else 0
        return 2 * held if self.plan.values == "keys" else held

    def to(self, device: Any, non_blocking: bool = False) -> DepthMemory:
        """On ``device``, for a layer that is there."""
        keys, values = (
            tuple(t.to(device, non_blocking=non_blocking) for t in tensors)
            for tensors in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)

    def emptied(self) -> DepthMemory:
        """The structure without the tensors."""
        return replace(self, keys=(), values=())

    def with_tensors(self, tensors: list[Tensor], layer: int | None = None) -> DepthMemory:
        layer = self.layer if layer is None else layer
        held = self.plan.depth[layer - 1].kept if layer else ()
        num_keys = len(tensors) - len(held)
        return replace(
            self,
            layer=layer,
            held=held,
            keys=tuple(tensors[:num_keys]),
            values=tuple(tensors[num_keys:]),
        )


pytree.register_pytree_node(
    DepthMemory,
    lambda m: (m.tensors(), m.emptied()),
    lambda leaves, m: m.with_tensors(list(leaves)),
    serialized_type_name="depthroute.nn.DepthMemory",
)
