"""Tokens a second of transformers' ``generate``, greedy, with a static cache and a compiled graph.

Standard is the family's own model, without this library. Methods take turns with it, a call of
``generate`` each. On a GPU the graph of a token is a CUDA graph (``reduce-overhead``); the prompt
is read eagerly, as transformers does, and only ``ms_per_token`` leaves its time out.

What was generated is checked before it is timed: its logits against those that the model computes
in one piece, eagerly and without a cache, both relative to fp64 (the error budget).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch._dynamo.utils import counters

from depthroute.bench import accuracy, step, timing, turns
from depthroute.bench.record import Record
from depthroute.config import Method, RoutingConfig
from depthroute.methods import BASELINE

COMPILER: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
WARM_CALLS = 2
"""After the one that compiles: CUDA graphs are recorded in the second call of a token."""


@dataclass(frozen=True)
class Length:
    prompt: int
    new: int


class Generation:
    """One method, ready to continue prompts."""

    def __init__(
        self, settings: step.Settings, length: Length, label: str, routing: RoutingConfig
    ) -> None:
        from transformers import CompileConfig

        self.label, self.device, self.length = label, torch.device(settings.device), length
        model = step.build(settings, routing).eval()
        step.move_queries(model)
        self.model = step.plain(model) if label == BASELINE else model
        shape = settings.batch_size, length.prompt
        self.prompt = torch.randint(0, self.model.config.vocab_size, shape, device=self.device)
        self.options: dict[str, Any] = {"disable_compile": settings.eager}
        if not settings.eager:
            compiler = CompileConfig(**COMPILER)
            compiler._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue]
            self.options = {"compile_config": compiler}

    def generate(self, new_tokens: int, **options: Any) -> Any:
        """Exactly so many tokens, whatever they are."""
        return self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            do_sample=False,
            cache_implementation="static",
            **self.options,
            **options,
        )

    def start(self) -> dict[str, Any]:
        """Compiled, checked and warm."""
        exact = copy.deepcopy(self.model).double()  # before it holds compiled code
        started, graphs = time.perf_counter(), num_graphs()
        output = self.generate(self.length.new, return_dict_in_generate=True, output_logits=True)
        timing.synchronise(self.device)
        seconds = time.perf_counter() - started
        verdict = self.check(output.sequences[:, :-1], torch.stack(output.logits, 1), exact)
        if not verdict.holds:
            raise ArithmeticError(f"what it generates is wrong, so it is not timed: {verdict}")
        for _ in range(WARM_CALLS):
            self.step()
        prefill = timing.each_ms(lambda: self.generate(1), self.device, 3)
        return {
            "budget": verdict.ratio,
            "warmup_s": seconds,
            "prefill_ms": statistics.median(prefill),
            "graphs": num_graphs() - graphs,
        }

    @torch.no_grad()
    def check(self, sequences: Tensor, logits: Tensor, exact: Any) -> accuracy.Verdict:
        whole: dict[str, Any] = {"use_cache": False, "logits_to_keep": self.length.new}
        native, truth = (model(sequences, **whole).logits for model in (self.model, exact))
        return accuracy.judge(["logits"], [logits], [native], [truth])

    def step(self) -> None:
        self.generate(self.length.new)

    def timed_step(self) -> float:
        graphs = num_graphs()
        (milliseconds,) = timing.each_ms(self.step, self.device, 1)
        if num_graphs() > graphs:
            raise RuntimeError("another graph was compiled while it was timed")
        return milliseconds

    def figures(self, times: Sequence[float]) -> dict[str, Any]:
        milliseconds = statistics.median(times)
        return {
            "ms": milliseconds,
            "tokens_per_second": len(self.prompt) * self.length.new / milliseconds * 1e3,
            "steps": len(times),
        }


def num_graphs() -> int:
    """Compiled by this process so far."""
    return counters["stats"]["unique_graphs"]


def run(
    record: Record,
    settings: Sequence[step.Settings],
    methods: Sequence[Method],
    length: Length,
    *,
    steps: int,
) -> None:
    """Every batch size by itself: another shape is another graph."""
    for each in settings:
        timing.forget()
        measured = turns.Turns(
            lambda label, routing, each=each: Generation(each, length, label, routing),
            steps,
            progress=record.progress,
        )
        with dynamo_config.patch(recompile_limit=step.RECOMPILE_LIMIT):  # a token's of each method
            for group in turns.groups(methods, torch.device(each.device)):
                for row in measured.rows(group):
                    finish({"batch_size": each.batch_size} | row, record, length)


def finish(row: dict[str, Any], record: Record, length: Length) -> None:
    if "error" in row:
        record.add(row)
        record.fail(f"{row['method']}, batch {row['batch_size']}: {row['error']}")
        return
    row["ms_per_token"] = (row["ms"] - row["prefill_ms"]) / max(1, length.new - 1)
    record.add(row)
    record.say(
        f"batch {row['batch_size']:<3} {row['method']:<28} {row['tokens_per_second']:10,.1f} "
        f"tokens/s  x{row.get('relative_speed', float('nan')):.3f}  {row['ms_per_token']:.3f} ms a "
        f"token  {row['graphs']} graphs, warm-up {row['warmup_s']:.1f} s"
    )
