"""One side of `python -m bench commits`: does what lines of JSON on its input say, with whichever
depthroute is first on its path.

What is used here has to be there in both trees, so it is little: operators by their public name,
and a step as `depthroute.bench.step` of that tree takes it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from depthroute import config, ops
from depthroute.bench import step, timing

REPLAYS = 12
DEVICE = torch.device("cuda")


class Side:
    """Holds what was made ready last; every public method is a task."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        self.runner: Any = None

    def operator(self, sources: int, tokens: int, width: int) -> None:
        """One site in bf16, forward, and forward with backward, as graphs."""
        self.forget()
        forward, both = _mix(sources, tokens, width)
        for name, call in (("forward", forward), ("both", both)):
            graph = timing.capture(call, DEVICE)
            graph.replay()
            (alone,) = timing.each_ms(graph.replay, DEVICE, 1)
            calls = timing.calls_per_graph(alone)
            self.graphs[name] = timing.capture(call, DEVICE, calls), calls

    def compiled(self, shapes: list[list[int]]) -> None:
        """Kernels of these shapes, into Triton's cache."""
        for sources, tokens, width in shapes:
            for call in _mix(sources, min(tokens, 256), width):
                call()
        self.forget()

    def times(self) -> dict[str, float]:
        """Of one call of each operator, in milliseconds."""
        return {
            name: statistics.median(timing.each_ms(graph.replay, DEVICE, REPLAYS)[2:]) / calls
            for name, (graph, calls) in self.graphs.items()
        }

    def step(self, settings: dict[str, Any], method: str) -> None:
        self.forget()
        labels = dict.fromkeys(["standard", method])
        parse: Any = getattr(config, "parse_methods", None)
        if parse is None:
            from depthroute.train.methods import (  # pyright: ignore[reportMissingImports]
                parse_methods as parse,
            )
        routing = next(m.routing for m in parse(",".join(labels)) if m.label == method)
        make: Any = getattr(step, "StepRunner", None) or step.Trainer  # pyright: ignore
        self.runner = make(step.Settings(**settings), method, routing)
        self.runner.warm_up(8)  # replays begin at a fourth step

    def steps(self, count: int) -> list[float]:
        """Milliseconds of each."""
        return [self.runner.timed_step() for _ in range(count)]

    def forget(self) -> None:
        self.graphs, self.runner = {}, None
        timing.forget()


def _mix(sources: int, tokens: int, width: int) -> list[Callable[[], object]]:
    torch.manual_seed(0)
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    given = [torch.randn(tokens, width, **like).requires_grad_() for _ in range(sources)]
    query = torch.randn(width, device=DEVICE).mul_(0.1).requires_grad_()
    grad = torch.randn(tokens, width, **like)

    def forward() -> object:
        with torch.no_grad():
            return ops.depth_mix(given, query, backend="triton")

    def both() -> object:
        mixed = ops.depth_mix(given, query, backend="triton")
        return torch.autograd.grad(mixed, [*given, query], grad)

    return [forward, both]


def main() -> None:
    side, replies = Side(), sys.stdout
    for line in sys.stdin:
        task = json.loads(line)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = {"result": getattr(side, task.pop("do"))(**task)}
        except Exception as error:  # the other side goes on, and the row says why
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
