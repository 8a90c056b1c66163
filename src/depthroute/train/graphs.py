"""Forward and backward as CUDA graphs, so that a small model does not wait for its launches.

A graph is a fixed list of kernels on fixed memory: it is captured for one shape of batch, is given
its tokens by copying them into place, and leaves loss and gradients where it always leaves them.
The first part of a step writes the gradients and the others add to them, so there is a graph for
each. Clipping, the learning rate, the update and validation stay outside.

Nothing is captured before the step has run a few times as it is: then everything is compiled, tuned
and allocated, and the last of these steps is watched for anything that waits for the device, which
no graph can hold.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor, nn

from depthroute.data.batches import Batch
from depthroute.errors import ConfigError

WARM_UP = 3
"""Steps before the one that is captured."""
WAITS = "called a synchronizing CUDA operation"
"""How torch says that something waited."""
PROTOTYPE = "Synchronization debug mode is a prototype"

Run = Callable[[Batch, Tensor], Tensor]
"""The loss of a part of a step, whose gradients are added to the parameters'."""


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    count: Tensor
    """Targets of the whole step, by which the loss is divided."""
    loss: Tensor

    def replay(self, batch: Batch, count: Tensor) -> Tensor:
        """Its loss, which the next replay overwrites."""
        for place, given in zip((*self.batch, self.count), (*batch, count), strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        self.graph.replay()
        return self.loss


class GradientGraphs:
    """``run`` on the parts of steps, replayed from the fourth step on."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.run, self.model = run, model
        self.steps = 0
        self.obstacle: str | None = None
        """Why nothing is captured, once that is known."""
        self._captured: dict[tuple[Any, ...], Captured] = {}
        self._gradients: dict[tuple[Any, ...], list[tuple[nn.Parameter, Tensor]]] = {}
        self._hooks = _num_hooks(model)

    def __call__(self, parts: Sequence[Batch], count: Tensor) -> Tensor:
        """The summed loss of ``parts``; the parameters hold the gradients and held none before."""
        self.steps += 1
        if self.steps == WARM_UP:
            with _watched() as waits:
                total = self._as_it_is(parts, count)
            self.obstacle = waits[0] if waits else None
            return total
        # a hook is Python, which a graph leaves out
        if self.steps < WARM_UP or self.obstacle or _num_hooks(self.model) != self._hooks:
            return self._as_it_is(parts, count)
        total = torch.zeros_like(count)
        for index, part in enumerate(parts):
            total += self._replayed(part, count, is_first=index == 0)
        return total

    def _as_it_is(self, parts: Sequence[Batch], count: Tensor) -> Tensor:
        total = torch.zeros_like(count)
        for part in parts:
            total += self.run(part, count)
        return total

    def _replayed(self, part: Batch, count: Tensor, *, is_first: bool) -> Tensor:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        shapes = (*(x is not None and tuple(x.shape) for x in part), len(trained))
        key = (is_first, *shapes)
        if key not in self._captured:
            self._captured[key] = self._capture(part, count)
            if is_first:
                held = [(p, p.grad) for p in trained]
                self._gradients[shapes] = [(p, grad) for p, grad in held if grad is not None]
        loss = self._captured[key].replay(part, count)
        if is_first:
            for parameter, gradient in self._gradients[shapes]:
                parameter.grad = gradient
        return loss

    def _capture(self, part: Batch, count: Tensor) -> Captured:
        batch = Batch(*(None if x is None else x.clone() for x in part))  # pyright: ignore
        graph, count = torch.cuda.CUDAGraph(), count.clone()
        try:
            with torch.cuda.graph(graph, pool=_pool(count.device)):
                loss = self.run(batch, count)
        except RuntimeError as error:
            raise ConfigError(
                f"the step cannot be captured as a CUDA graph ({error}); set cuda_graph=false"
            ) from error
        _living[count.device].add(graph)
        return Captured(graph, batch, count, loss)


_living: dict[torch.device, WeakSet[torch.cuda.CUDAGraph]] = defaultdict(WeakSet)


def _pool(device: torch.device) -> Any:
    """Memory of all graphs that a process holds: no two are replayed at the same time, and what
    outlives a replay is never given to another. A pool ends with the last of its graphs."""
    pools = [graph.pool() for graph in _living[device]]
    return pools[0] if pools else torch.cuda.graph_pool_handle()


def _num_hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


@contextmanager
def _watched() -> Iterator[list[str]]:
    """What waits for the device though told that it is being captured, once the context is left.

    Transformers reads its positions, and whoever asks as it does reads nothing in a capture.
    """
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            told = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
            with told:
                yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if WAITS in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno} waits for the device")
        elif PROTOTYPE not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
