"""What one routed layer hands to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.nn import DepthMemory, ResidualStream, Routing


class LayerState(NamedTuple):
    """The residual stream and, where attention mixes values over depth, those of earlier layers."""

    stream: ResidualStream
    memory: DepthMemory | None

    @classmethod
    def start(cls, embedding: Tensor, routing: Routing) -> LayerState:
        plan, observer = routing.plan, routing.observer
        stream = ResidualStream.start(embedding, plan, sites=routing, observer=observer)
        if plan.values is None:
            return cls(stream, None)
        return cls(stream, DepthMemory(plan, observer=observer))

    @property
    def layer(self) -> int:
        """The next one to run, every visit counted."""
        return self.stream.index // len(self.stream.plan.sublayers)

    def replaced(self, value: Tensor) -> LayerState:
        """With ``value`` as the residual state, as if the last sublayer had put out the rest."""
        now = self.stream.value
        delta, value = (value - now).to(now.dtype), value.to(now.dtype)
        return self._replace(stream=self.stream.edited(delta, value))

    def skipped(self, output: LayerState | Tensor) -> LayerState:
        """After a layer that was not run: its sublayers have put out nothing, and the last one what
        ``output`` has in difference, where that is a tensor."""
        stream, memory = self
        sites = stream.sites
        assert sites is not None
        if memory is not None and self.layer in stream.plan.depth[self.layer].kept:
            raise DepthrouteError(
                f"layer {self.layer} was skipped, and later layers mix in its values (method "
                f"{stream.plan.method!r}); run it and replace its output in a forward hook"
            )
        for _ in stream.plan.sublayers:
            _, stream = stream.read(sites.at(stream.index))
            stream = stream.push(torch.zeros_like(stream.example))
        after = LayerState(stream, memory and memory.push(None, None))
        return after.replaced(output) if isinstance(output, Tensor) else after

    def handed_on(self, num_layers: int) -> LayerState | Tensor:
        """Itself, and after the last layer what the final norm reads. A decoder that is told to run
        the first ``num_layers`` alone, as for ``assistant_early_exit``, has the residual state."""
        stream = self.stream
        if stream.index < stream.plan.num_sublayers:
            return stream.value if self.layer == num_layers else self
        assert stream.sites is not None
        return stream.finish(stream.sites.at(stream.index))

    def tensors(self) -> list[Tensor]:
        tensors = self.stream.tensors()
        if self.memory is not None:
            tensors += self.memory.tensors()
        return tensors

    def emptied(self) -> LayerState:
        return LayerState(self.stream.emptied(), self.memory and self.memory.emptied())

    def with_tensors(self, tensors: list[Tensor], layer: int) -> LayerState:
        """The state before ``layer`` that holds ``tensors``."""
        memory, rest = self.memory, list(tensors)
        if memory is not None:
            split = len(rest) - memory.num_tensors(layer)
            memory, rest = memory.with_tensors(rest[split:], layer), rest[:split]
        index = layer * len(self.stream.plan.sublayers)
        return LayerState(self.stream.with_tensors(rest, index), memory)
