"""A step as CUDA graphs, so that a small model does not wait for its launches.

A graph is a fixed list of kernels on fixed memory: it is captured for one shape of batch, is given
its tokens by copying them into place, and leaves loss and gradients where it always leaves them.
The first part of a step writes the gradients and the others add to them, so there is a graph for
each, and one for AdamW's update, which is given its rates as the others are given tokens. Clipping,
the judgement of a step, Muon and validation stay outside.

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


@dataclass(frozen=True)
class Update:
    """One of AdamW, on the gradients that the parameters held when it was captured."""

    graph: torch.cuda.CUDAGraph
    optimizer: torch.optim.AdamW
    states: list[tuple[nn.Parameter, dict[str, Any]]]
    """What it was captured with: a state that was loaded or cleared since is another."""
    rates: list[Tensor]

    @classmethod
    def captured(cls, optimizer: torch.optim.AdamW, device: torch.device) -> Update | None:
        """None where the optimiser has yet to make the state of a parameter."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in trained if p.grad is not None]
        if not all(p in optimizer.state for p in trained):
            return None
        states = [(p, optimizer.state[p]) for p in trained]
        graph, groups = torch.cuda.CUDAGraph(), optimizer.param_groups
        rates = [torch.tensor(group["lr"], device=device) for group in groups]
        settings = [{name: group[name] for name in ("lr", "capturable")} for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group |= {"lr": rate, "capturable": True}
        try:
            with torch.cuda.graph(graph, pool=_pool(device)):
                optimizer.step()
        finally:
            for group, before in zip(groups, settings, strict=True):
                group |= before
        _living[device].add(graph)
        return cls(graph, optimizer, states, rates)

    @property
    def is_valid(self) -> bool:
        held = self.optimizer.state
        return all(held.get(parameter) is state for parameter, state in self.states)

    def replay(self) -> None:
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()


class StepGraphs:
    """``run`` on the parts of steps, and AdamW's updates, replayed from the fourth step on."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.run, self.model = run, model
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.steps = 0
        self.obstacle: str | None = None
        """Why nothing is captured, once that is known."""
        self._captured: dict[tuple[Any, ...], Captured] = {}
        self._gradients: dict[tuple[Any, ...], list[tuple[nn.Parameter, Tensor]]] = {}
        self._updates: dict[tuple[Any, ...], Update] = {}
        self._replayed: tuple[Any, ...] | None = None
        """Which gradients the parameters hold; None where they are of no graph."""
        self._hooks = self._num_hooks()

    def __call__(self, parts: Sequence[Batch], count: Tensor) -> Tensor:
        """The summed loss of ``parts``; the parameters hold the gradients and held none before."""
        self.steps += 1
        self._replayed = None
        if self.steps == WARM_UP:
            with _watched() as waits:
                total = self._as_it_is(parts, count)
            self.obstacle = waits[0] if waits else None
            return total
        # a hook is Python, which a graph leaves out
        if self.steps < WARM_UP or self.obstacle or self._num_hooks() != self._hooks:
            return self._as_it_is(parts, count)
        total = torch.zeros_like(count)
        for index, part in enumerate(parts):
            total += self._replay(part, count, is_first=index == 0)
        return total

    @property
    def is_replayed(self) -> bool:
        """Whether the last step was."""
        return self._replayed is not None

    def update(self, optimizer: Any) -> None:
        """``optimizer.step()``, with the gradients of the last call."""
        key = self._replayed
        if key is None or not isinstance(optimizer, torch.optim.AdamW):
            optimizer.step()
            return
        if key not in self._updates or not self._updates[key].is_valid:
            made = Update.captured(optimizer, self.parameters[0].device)
            if made is None:
                optimizer.step()
                return
            self._updates[key] = made
        self._updates[key].replay()

    def _as_it_is(self, parts: Sequence[Batch], count: Tensor) -> Tensor:
        total = torch.zeros_like(count)
        for part in parts:
            total += self.run(part, count)
        return total

    def _replay(self, part: Batch, count: Tensor, *, is_first: bool) -> Tensor:
        trained = [p for p in self.parameters if p.requires_grad]
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
            self._replayed = shapes
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

    def _num_hooks(self) -> int:
        return sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in self.modules
        )


_living: dict[torch.device, WeakSet[torch.cuda.CUDAGraph]] = defaultdict(WeakSet)


def _pool(device: torch.device) -> Any:
    """Memory of all graphs that a process holds: no two are replayed at the same time, and what
    outlives a replay is never given to another. A pool ends with the last of its graphs."""
    pools = [graph.pool() for graph in _living[device]]
    return pools[0] if pools else torch.cuda.graph_pool_handle()


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
