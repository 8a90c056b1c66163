"""A step as CUDA graphs, so that the device does not wait for Python.

A graph is a fixed list of kernels on fixed memory: it is captured for one shape of batch, is given
its tokens by copying them into place, and leaves loss and gradients where it always leaves them.
The first part of a step writes the gradients and the others add to them, so there is a graph for
each. With AdamW two more end the step: one clips and judges, one updates, which are given the rates
and the most that a loss may be as the others are given tokens. The update itself leaves a bad step
out, so it is queued before anybody has read the verdict, and while it runs the next step can be
queued behind it. Muon and validation stay outside.

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
from torch.nn.modules import module as everyones
from torch.utils.hooks import RemovableHandle

from depthroute.data.batches import Batch
from depthroute.errors import ConfigError
from depthroute.models.recording import is_recorder
from depthroute.train.settings import TrainSettings
from depthroute.train.verdict import Verdict

WARM_UP = 3
"""Steps before the one that is captured."""
WAITS = "called a synchronizing CUDA operation"
"""How torch says that something waited."""
PROTOTYPE = "Synchronization debug mode is a prototype"

Run = Callable[[Batch, Tensor], Tensor]
"""The loss of a part of a step of so many tokens, whose gradients are added to the parameters'."""
Judge = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a step's loss, its tokens and the most that a loss may be: the verdict, as one tensor. The
parameters' gradients are clipped."""


def obstacle(settings: TrainSettings, device: torch.device, ranks: int) -> str | None:
    """Why steps of such a training cannot be replayed, as far as that is known before it begins."""
    if device.type != "cuda":
        return f"the model is on {device}, not on a CUDA device"
    if ranks > 1:
        return f"{ranks} processes exchange gradients in every step"
    if settings.gradient_checkpointing:
        return "gradient_checkpointing keeps the state of the random numbers"
    if settings.document_masking:
        return "document_masking makes a mask of every batch"
    return None


def refuse_uncaptured(settings: TrainSettings, reason: str | None) -> None:
    """Where graphs were asked for."""
    if reason is not None and settings.cuda_graph:
        raise ConfigError(
            f"train.cuda_graph=true cannot be: {reason}. Leave it out, or set it to false"
        )


@dataclass(frozen=True)
class Captured:
    """A part of a step."""

    graph: torch.cuda.CUDAGraph
    batch: Batch

    def replay(self, batch: Batch) -> None:
        for place, given in zip(self.batch, batch, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        self.graph.replay()


@dataclass(frozen=True)
class Ending:
    """Clipping, verdict and AdamW's update, on the gradients that the parameters held when it was
    captured."""

    judging: torch.cuda.CUDAGraph
    updating: torch.cuda.CUDAGraph
    given: Tensor
    """The most that a loss may be, and the rate of every group."""
    judged: Tensor
    read: Tensor
    """A copy of it where the CPU reads."""
    optimizer: torch.optim.AdamW
    states: list[tuple[nn.Parameter, dict[str, Any]]]
    """What it was captured with: a state that was loaded or cleared since is another."""
    constants: list[dict[str, Any]]

    @classmethod
    def captured(
        cls, judge: Judge, total: Tensor, tokens: Tensor, optimizer: torch.optim.AdamW
    ) -> Ending | None:
        """None where the optimiser has yet to make the state of a parameter."""
        groups, held, device = optimizer.param_groups, optimizer.state, total.device
        trained = [p for group in groups for p in group["params"] if p.grad is not None]
        if not all(p in held for p in trained):
            return None
        given = torch.zeros(1 + len(groups), dtype=torch.float64, device=device)
        with _capturing(device) as judging:
            judged = judge(total, tokens, given[0])
        with _capturing(device) as updating:
            update_unless(judged[-1], optimizer, given[1:])
        read = _pinned(torch.zeros(judged.shape, dtype=judged.dtype))
        states = [(p, held[p]) for p in trained]
        return cls(judging, updating, given, judged, read, optimizer, states, _constants(optimizer))

    @property
    def is_valid(self) -> bool:
        held = self.optimizer.state
        return self.constants == _constants(self.optimizer) and all(
            held.get(parameter) is state for parameter, state in self.states
        )

    def replay(self, most: float) -> Verdict:
        """The verdict, as soon as it is there; the update, which a bad step leaves out, goes on."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        given = _pinned(torch.tensor([most, *rates], dtype=torch.float64))
        self.given.copy_(given, non_blocking=True)
        self.judging.replay()
        self.read.copy_(self.judged, non_blocking=True)
        is_read = torch.cuda.Event()
        is_read.record(torch.cuda.current_stream(self.given.device))
        self.updating.replay()
        is_read.synchronize()
        return Verdict.read(self.read)


def update_unless(is_bad: Tensor, optimizer: torch.optim.AdamW, rates: Tensor) -> None:
    """``optimizer.step()`` with these ``rates`` where ``is_bad`` is 0; where it is 1, parameters,
    moments and counts of steps stay as they are. Fused AdamW does so itself, for gradient scaling:
    nothing is read."""
    groups, rates = optimizer.param_groups, rates.float()
    settings = [{name: group[name] for name in ("lr", "capturable")} for group in groups]
    for group, rate in zip(groups, rates.unbind(), strict=True):
        group |= {"lr": rate, "capturable": True}
    optimizer.found_inf = is_bad.float()  # pyright: ignore
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # pyright: ignore
        for group, before in zip(groups, settings, strict=True):
            group |= before


def _constants(optimizer: torch.optim.AdamW) -> list[dict[str, Any]]:
    """What a captured update has for good."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


class Hooks:
    """All that may be called in a step of ``model``: those of its modules, of its parameters and of
    every module there is. A hook is Python, which a graph leaves out."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        self._tables: list[dict[int, Any]] = []
        self._next = -1
        self.at_first = self.ids()

    def have_changed(self) -> bool:
        """Whether others are there than at first."""
        return self.ids() != self.at_first

    def ids(self) -> list[tuple[int, ...]]:
        """No two hooks of a process have the same."""
        if self._next != RemovableHandle.next_id:  # a tensor's first hook makes its table
            self._next, self._tables = RemovableHandle.next_id, list(self._found_tables())
        numbers = (
            tuple(number for number, hook in table.items() if not is_recorder(hook))
            for table in filter(None, self._tables)
        )
        return [*filter(None, numbers)]

    def _found_tables(self) -> Iterator[dict[int, Any]]:
        yield from (everyones._global_forward_hooks, everyones._global_forward_pre_hooks)
        yield from (everyones._global_backward_hooks, everyones._global_backward_pre_hooks)
        for module in self.modules:
            yield from (module._forward_hooks, module._forward_pre_hooks)
            yield from (module._backward_hooks, module._backward_pre_hooks)
        for parameter in self.parameters:
            found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
            yield from (table for table in found if table is not None)


class StepGraphs:
    """``run`` on the parts of steps, and with AdamW their ends, replayed from the fourth on."""

    def __init__(self, run: Run, judge: Judge, model: nn.Module) -> None:
        self.run, self.judge, self.model = run, judge, model
        self.parameters = list(model.parameters())
        self.hooks = Hooks(model)
        device = self.parameters[0].device
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        """Targets of the whole step, by which the loss is divided."""
        self.total = torch.zeros((), device=device)
        """The loss of a replayed step, which the next overwrites."""
        self.steps = 0
        self.obstacle: str | None = None
        """Why nothing is captured, once that is known."""
        self._captured: dict[tuple[Any, ...], Captured] = {}
        self._gradients: dict[tuple[Any, ...], list[tuple[nn.Parameter, Tensor]]] = {}
        self._endings: dict[tuple[Any, ...], Ending] = {}
        self._replayed: tuple[Any, ...] | None = None
        """Which gradients the parameters hold; None where they are of no graph."""

    def __call__(self, parts: Sequence[Batch], tokens: Tensor) -> Tensor:
        """The summed loss of ``parts``; the parameters hold the gradients and held none before."""
        self.steps += 1
        self._replayed = None
        if self.steps == WARM_UP:
            with _watched() as waits:
                total = self._as_it_is(parts, tokens)
            self.obstacle = waits[0] if waits else None
            return total
        if self.steps < WARM_UP or self.obstacle or self.hooks.have_changed():
            return self._as_it_is(parts, tokens)
        self.tokens.copy_(tokens)
        for part in parts:
            self._replay(part)
        return self.total

    @property
    def is_replayed(self) -> bool:
        """Whether the last step was."""
        return self._replayed is not None

    def ending(self, optimizer: Any) -> Ending | None:
        """Of the last call, where it was replayed and the update can be."""
        key = self._replayed
        if key is None or not isinstance(optimizer, torch.optim.AdamW):
            return None
        found = self._endings.get(key)
        if found is None or not found.is_valid:
            found = Ending.captured(self.judge, self.total, self.tokens, optimizer)
            if found is not None:
                self._endings[key] = found
        return found

    def _as_it_is(self, parts: Sequence[Batch], tokens: Tensor) -> Tensor:
        total = torch.zeros_like(self.total)
        for part in parts:
            total += self.run(part, tokens)
        return total

    def _replay(self, part: Batch) -> None:
        trained = [p for p in self.parameters if p.requires_grad]
        of_part = (x is not None and tuple(x.shape) for x in part)
        shapes = (*of_part, *(p.requires_grad for p in self.parameters))
        is_first, key = self._replayed is None, (self._replayed, shapes)
        if key not in self._captured:
            self._captured[key] = self._capture(part, is_first=is_first)
            if is_first:
                held = [(p, p.grad) for p in trained]
                self._gradients[shapes] = [(p, grad) for p, grad in held if grad is not None]
        self._captured[key].replay(part)
        if is_first:
            for parameter, gradient in self._gradients[shapes]:
                parameter.grad = gradient
            self._replayed = shapes

    def _capture(self, part: Batch, *, is_first: bool) -> Captured:
        batch = Batch(*(None if x is None else x.clone() for x in part))  # pyright: ignore
        try:
            with _capturing(self.total.device) as graph:
                loss = self.run(batch, self.tokens)
                (self.total.copy_ if is_first else self.total.add_)(loss)
        except RuntimeError as error:
            raise ConfigError(
                f"the step cannot be captured as a CUDA graph ({error}); set cuda_graph=false"
            ) from error
        return Captured(graph, batch)


_living: dict[torch.device, WeakSet[torch.cuda.CUDAGraph]] = defaultdict(WeakSet)


def _pool(device: torch.device) -> Any:
    """Memory of all graphs that a process holds: no two are replayed at the same time, and what
    outlives a replay is never given to another. A pool ends with the last of its graphs."""
    pools = [graph.pool() for graph in _living[device]]
    return pools[0] if pools else torch.cuda.graph_pool_handle()


@contextmanager
def _capturing(device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """What is launched inside is captured, and not run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(device)):
        yield graph
    _living[device].add(graph)


def _pinned(tensor: Tensor) -> Tensor:
    """In memory that the device reads and writes without the CPU, so in its own time."""
    return tensor.pin_memory()


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
