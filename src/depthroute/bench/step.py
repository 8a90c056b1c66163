"""Whole training steps, every method against standard in the same run.

Standard is measured first and again last; the difference between the two is the noise of the run,
and ratios are what to read. On a CPU the methods take turns, step by step, so that what else the
machine does hits all of them alike; on a GPU there is memory for one at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

from depthroute import ops, presets
from depthroute.bench import breakdown, gate, precompile, timing
from depthroute.bench.record import Record, one_line
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.train.compiler import use_own_caches
from depthroute.train.methods import BASELINE, parse_method, parse_methods

AGAIN = "standard, again"
GATE_SOURCES = (2, 5, 9)
WARMUP_STEPS = 3
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Settings:
    preset: str = "delta-0.6b"
    batch_size: int = 8
    sequence_length: int = 2048
    layers: int | None = None
    vocab_size: int | None = None
    eager: bool = False
    device: str = "cuda"
    dtype: str = "bfloat16"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build(settings: Settings, routing: RoutingConfig) -> Any:
    """The preset's model, or a slice of it with fewer layers or a smaller vocabulary."""
    preset = presets.get(settings.preset)
    changes: dict[str, Any] = {}
    if settings.layers:
        changes["num_hidden_layers"] = settings.layers
    if settings.vocab_size:
        changes["vocab_size"] = settings.vocab_size
    preset = replace(preset, model=preset.model | changes)
    torch.manual_seed(0)
    dtype = getattr(torch, settings.dtype)
    return presets.build(preset, routing, device=settings.device, dtype=dtype)


class Trainer:
    """One method, ready to take steps on one batch."""

    def __init__(self, settings: Settings, label: str, routing: RoutingConfig) -> None:
        self.label, self.device = label, torch.device(settings.device)
        self.model = build(settings, routing).train()
        with torch.no_grad():  # queries off zero: nothing may be special about the start
            for parameter in self.model.routing_parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.forward = self.model
        if not settings.eager:
            self.forward = torch.compile(self.model, fullgraph=True, dynamic=False)
        shape = settings.batch_size, settings.sequence_length
        self.ids = torch.randint(0, self.model.config.vocab_size, shape, device=self.device)
        self.times: list[float] = []

    def step(self) -> None:
        loss = self.forward(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def warm_up(self, steps: int = WARMUP_STEPS) -> float:
        """Seconds of the first steps, most of which is compilation."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        timing.synchronise(self.device)
        return time.perf_counter() - started

    def measure(self, repeats: int) -> None:
        for _ in range(repeats):
            self.times += timing.each_ms(self.step, self.device, 1)

    def figures(self) -> dict[str, Any]:
        milliseconds = statistics.median(self.times)
        return {
            "ms": milliseconds,
            "tokens_per_second": self.ids.numel() / milliseconds * 1e3,
            "evaluation": self.model.plan.reason,
            "steps": len(self.times),
        }


def jobs(text: str, *, again: bool) -> list[tuple[str, RoutingConfig]]:
    """Methods in order, with standard first, since everything is relative to it."""
    methods = parse_methods(text)
    if methods[0].label != BASELINE:
        raise ConfigError(f"--methods must begin with {BASELINE}: the others are relative to it")
    listed = [(method.label, method.routing) for method in methods]
    return listed + ([(AGAIN, parse_method(BASELINE).routing)] if again else [])


def gate_operators(record: Record, settings: Settings, width: int) -> bool:
    """The operators these steps use, at their width, dtype and device; False if one is wrong."""
    tokens = min(1024, settings.batch_size * settings.sequence_length)
    worst = 0.0
    for sources in GATE_SOURCES:
        given = gate.draw(
            sources, tokens, width, settings.device, dtype=getattr(torch, settings.dtype)
        )
        verdict = gate.check(ops.depth_mix, given)
        worst = max(worst, verdict.ratio)
        if not verdict.holds:
            record.fail(f"depth_mix of {sources} sources, width {width}: not timed: {verdict}")
    record.values["gate"] = {"op": "depth_mix", "worst_ratio": worst, "sources": GATE_SOURCES}
    return worst <= gate.BUDGET


def run(
    record: Record,
    settings: Settings,
    methods: Sequence[tuple[str, RoutingConfig]],
    *,
    steps: int,
    num_processes: int = 0,
    profile: bool = False,
) -> None:
    device = torch.device(settings.device)
    width = presets.get(settings.preset).model["hidden_size"]
    if not gate_operators(record, settings, width):
        return
    if not settings.eager:
        record.values["caches"] = use_own_caches()
        if num_processes > 0:
            names = [label for label, _ in methods if label != AGAIN]
            record.values["precompiled"] = precompile.steps(
                settings.to_dict(), names, num_processes, record.say
            )
    groups = [list(methods)] if device.type == "cpu" else [[job] for job in methods]
    for group in groups:
        timing.forget()
        with dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT):  # a compilation a method
            for row in measured(group, settings, steps, profile):
                finish(row, record)


def measured(
    group: Sequence[tuple[str, RoutingConfig]], settings: Settings, steps: int, profile: bool
) -> Iterator[dict[str, Any]]:
    """A row for every method of a group; they take turns if there are several."""
    rows: dict[str, dict[str, Any]] = {label: {"method": label} for label, _ in group}
    trainers: list[Trainer] = []
    for label, routing in group:
        try:
            trainer = Trainer(settings, label, routing)
            before = precompile.counts()
            with ops.record_backends() as ran:
                rows[label]["warmup_s"] = trainer.warm_up()
            rows[label]["ran"] = {f"{op}, {backend}": n for (op, backend), n in ran.items()}
            rows[label]["compiler_caches"] = precompile.counts(since=before)
            rows[label]["peak_gb"] = timing.peak_gb(trainer.device, trainer.step)
            trainers.append(trainer)
        except Exception as error:
            rows[label]["error"] = one_line(error, 600)
    for _ in range(steps):
        for trainer in trainers:
            trainer.measure(1)
    for trainer in trainers:
        rows[trainer.label] |= trainer.figures()
        if profile:
            rows[trainer.label]["breakdown"] = breakdown.of(trainer.step, trainer.device)
    yield from rows.values()


def finish(row: dict[str, Any], record: Record) -> None:
    """Relative to standard, said and saved."""
    if "error" in row:
        record.fail(f"{row['method']}: {row['error']}")
        record.add(row)
        return
    base = next((r for r in record.rows if r["method"] == BASELINE and "ms" in r), None)
    base = row if row["method"] == BASELINE else base
    if base is not None:
        row["relative_speed"] = base["ms"] / row["ms"]
        if row["peak_gb"] is not None:
            row["relative_memory"] = row["peak_gb"] / base["peak_gb"] - 1
    record.add(row)
    record.say(line(row))
    if "breakdown" in row:
        record.say(breakdown.line(row["breakdown"]))


def line(row: dict[str, Any]) -> str:
    text = f"{row['method']:<28} {row['ms']:9.3f} ms"
    if "relative_speed" in row:
        text += f"  x{row['relative_speed']:.3f}"
    text += f"  {row['tokens_per_second'] / 1e3:.1f} ktok/s"
    if row.get("peak_gb") is not None:
        text += f"  {row['peak_gb']:.2f} GB"
        if "relative_memory" in row:
            text += f" ({100 * row['relative_memory']:+.1f}%)"
    hits, misses = row["compiler_caches"]["hits"], row["compiler_caches"]["misses"]
    return f"{text}  warm-up {row['warmup_s']:.1f} s (caches: {hits} hit, {misses} missed)"
