"""Whole training steps, every method against standard in the same window; see :mod:`.turns`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

from depthroute import ops, presets
from depthroute.bench import accuracy, flops, timing, turns
from depthroute.bench.record import Record
from depthroute.checks import check_number
from depthroute.config import Method, RoutingConfig, parse_methods
from depthroute.data.batches import Batch
from depthroute.errors import ConfigError
from depthroute.methods import BASELINE
from depthroute.models.convert import revert, routed_config
from depthroute.models.settings import make_config
from depthroute.ops.private.ahead import tally
from depthroute.presets import Preset
from depthroute.train import trainer
from depthroute.train.compiler import use_own_caches
from depthroute.train.optim import MuonAndAdamW, build_optimizer
from depthroute.train.settings import OPTIMIZERS, TrainSettings

GATE_SOURCES = (2, 5, 9)
WARMUP_STEPS = 3
ROUNDS = 2
RECOMPILE_LIMIT = 64
COMPILER = "inductor"
PLAIN = Method("transformers", RoutingConfig(BASELINE))
"""The family's own model as transformers has it, whole, with its own attention and loss."""


@dataclass(frozen=True)
class Settings:
    preset: str = "delta-0.6b"
    batch_size: int = 8
    sequence_length: int = 2048
    layers: int | None = None
    vocab_size: int | None = None
    eager: bool = False
    whole: bool = False
    """One graph of the model instead of those that its layers share."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = False
    optimizer: str = OPTIMIZERS[0]
    peak_tflops: float | None = None
    """Of the device at this dtype; None where it is not known."""

    def __post_init__(self) -> None:
        check_number("--peak-tflops", self.peak_tflops, above=0.0, optional=True)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shape(settings: Settings) -> Preset:
    """The preset, or a slice of it with fewer layers or a smaller vocabulary."""
    preset = presets.get(settings.preset)
    changes: dict[str, Any] = {}
    if settings.layers:
        changes["num_hidden_layers"] = settings.layers
    if settings.vocab_size:
        changes["vocab_size"] = settings.vocab_size
    return replace(preset, model=preset.model | changes)


def build(settings: Settings, routing: RoutingConfig) -> Any:
    torch.manual_seed(0)
    dtype = getattr(torch, settings.dtype)
    return presets.build(shape(settings), routing, device=settings.device, dtype=dtype)


def check_methods(settings: Settings, methods: Sequence[Method]) -> None:
    """Whether this model can have them all, before the first of them is built and timed."""
    preset = shape(settings)
    config = make_config(preset.model_type, preset.model)
    for method in methods:
        routed_config(config, method.routing)


@torch.no_grad()
def move_queries(model: Any) -> None:
    """Off zero: nothing may be special about the start."""
    for parameter in model.routing_parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))


def plain(model: Any) -> Any:
    """The same weights in the family's own class, with torch's attention as transformers calls
    it."""
    found = revert(model)
    found.set_attn_implementation("sdpa")
    return found


class PlainTrainer(trainer.Trainer):
    """Takes the loss that the model itself computes, so that it is compiled with it."""

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            return self.model(
                input_ids=batch.inputs,
                labels=batch.targets,
                shift_labels=batch.targets,
                num_items_in_batch=1,
                use_cache=False,
            ).loss


class StepRunner:
    """One method, ready to take steps on one batch."""

    def __init__(self, settings: Settings, label: str, routing: RoutingConfig) -> None:
        self.label, self.device = label, torch.device(settings.device)
        self.peak_tflops = settings.peak_tflops
        model = build(settings, routing)
        move_queries(model)
        shape = settings.batch_size, settings.sequence_length
        self.flops = flops.per_token(model, settings.sequence_length)["total"]
        self.evaluation = model.plan.reason
        is_plain = label == PLAIN.label
        is_whole = settings.whole or (is_plain and not settings.eager)
        self.model = plain(model) if is_plain else model
        training = TrainSettings(
            *(1, *shape),
            lr=1e-4,
            min_lr=1e-4,
            compile=None if settings.eager else COMPILER,
            compile_scope="whole" if is_whole else "regions",
            loss_chunk=0 if is_plain else None,
            gradient_checkpointing=settings.gradient_checkpointing,
            optimizer=settings.optimizer,
        )
        self.trainer = (PlainTrainer if is_plain else trainer.Trainer)(self.model, training)
        self.ids = torch.randint(0, self.model.config.vocab_size, shape, device=self.device)
        self.batch = Batch(self.ids, self.ids.roll(-1, 1))
        self.losses: list[float] = []
        """Of every step since the start, on the same batch for every method."""

    def step(self) -> None:
        """The very step that training takes."""
        self.losses.append(self.trainer.take_step(self.batch).loss)

    def warm_up(self, steps: int = WARMUP_STEPS) -> float:
        """Seconds of the first steps, most of which is compilation."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        timing.synchronise(self.device)
        return time.perf_counter() - started

    def start(self) -> dict[str, Any]:
        """Compiled and warm; what that took and what ran."""
        before, kernels = cache_counts(), tally()
        with ops.record_backends() as ran:
            seconds = self.warm_up()
        return {
            "warmup_s": seconds,
            "kernels": tally().since(kernels)._asdict(),
            "ran": {f"{op}, {backend}": n for (op, backend), n in ran.items()},
            "compiler_caches": (counts := cache_counts(since=before)),
            "compiled": cached(counts) if self.trainer.settings.compile else None,
            "peak_gb": self.peak_gb(),
        }

    def peak_gb(self) -> float | None:
        """Of one step: this model, its optimiser and activations, whatever else is resident."""
        return timing.peak_gb(self.device, self.step, self.trainer.resident_tensors)

    def timed_step(self) -> float:
        (milliseconds,) = timing.each_ms(self.step, self.device, 1)
        return milliseconds

    def figures(self, times: Sequence[float]) -> dict[str, Any]:
        milliseconds = statistics.median(times)
        speed = self.ids.numel() / milliseconds * 1e3
        tflops = speed * self.flops / 1e12
        return {
            "ms": milliseconds,
            "tokens_per_second": speed,
            "tflops": tflops,
            "mfu": None if self.peak_tflops is None else tflops / self.peak_tflops,
            "evaluation": self.evaluation,
            "steps": len(times),
            "losses": self.losses.copy(),
        }


def cache_counts(since: dict[str, int] | None = None) -> dict[str, int]:
    """Graphs that this process has traced, and found in and missed from the disk caches."""
    from torch._dynamo.utils import counters

    graphs = {
        "graphs": counters["stats"]["unique_graphs"],
        "hits": counters["inductor"]["fxgraph_cache_hit"]
        + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"]
        + counters["aot_autograd"]["autograd_cache_miss"],
        "bypasses": counters["inductor"]["fxgraph_cache_bypass"]
        + counters["aot_autograd"]["autograd_cache_bypass"],
    }
    return {name: n - (since or {}).get(name, 0) for name, n in graphs.items()}


def cached(counts: dict[str, int]) -> str:
    """How cold a compilation was."""
    hits, misses = counts["hits"], counts["misses"]
    return f"{hits} of {hits + misses} cached" if hits else "cold"


def jobs(text: str) -> list[Method]:
    """Methods in order, with standard first, since everything is relative to it."""
    methods = parse_methods(text)
    if methods[0].label != BASELINE:
        raise ConfigError(f"--methods must begin with {BASELINE}: the others are relative to it")
    return list(methods)


def check_operators(record: Record, settings: Settings, width: int) -> bool:
    """The operators these steps use, at their width, dtype and device; False if one is wrong."""
    tokens = min(1024, settings.batch_size * settings.sequence_length)
    worst = 0.0
    for sources in GATE_SOURCES:
        inputs = accuracy.draw(
            sources, tokens, width, settings.device, dtype=getattr(torch, settings.dtype)
        )
        verdict = accuracy.check(ops.depth_mix, inputs)
        worst = max(worst, verdict.ratio)
        if not verdict.holds:
            record.fail(f"depth_mix of {sources} sources, width {width}: not timed: {verdict}")
    record.values["gate"] = {"op": "depth_mix", "worst_ratio": worst, "sources": GATE_SOURCES}
    return worst <= accuracy.BUDGET


def state_bytes(settings: Settings, routing: RoutingConfig) -> int:
    """What stays on the device whatever the batch: parameters, gradients and the optimiser's states
    in the parameters' dtype, two of AdamW and one of Muon for its matrices."""
    model = build(replace(settings, device="meta"), routing)
    optimizer = build_optimizer(model, TrainSettings(1, 1, 1, 1.0, optimizer=settings.optimizer))
    of_muon = optimizer.parts[1].param_groups if isinstance(optimizer, MuonAndAdamW) else ()
    matrices = [p for group in of_muon for p in group["params"]]
    return 4 * _bytes(model.parameters()) - _bytes(matrices)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def device_bytes(device: torch.device) -> int | None:
    """Of memory; None where nothing says."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def rounds_for(settings: Settings, routing: RoutingConfig) -> int:
    """How methods are measured: 0 in turns, or rounds of one model on the device at a time, where
    two have no room; an error where not even one has."""
    room = device_bytes(torch.device(settings.device))
    if room is None:
        return 0
    needed = state_bytes(settings, routing)
    if needed > room:
        raise ConfigError(
            f"{settings.preset} needs {needed / 1e9:.1f} GB for parameters, gradients and the "
            f"states of {settings.optimizer} in {settings.dtype}, before any activation, and "
            f"{settings.device} has {room / 1e9:.1f} GB; give fewer --layers"
            f"{_or_narrower(settings.dtype)}"
        )
    beside = needed * 3 // 4  # between its steps a model has no gradients
    return ROUNDS if needed + beside > room else 0


def _or_narrower(dtype: str) -> str:
    return "" if dtype == "bfloat16" else " or --dtype bfloat16"


def run(
    record: Record,
    settings: Settings,
    methods: Sequence[Method],
    *,
    steps: int,
    rounds: int | None = None,
    profile: turns.Profile | None = None,
) -> None:
    """``rounds`` as :func:`rounds_for` chooses them, where they are left out."""
    fitting = rounds_for(settings, methods[0].routing)
    rounds = record.values["rounds"] = fitting if rounds is None else rounds
    width = presets.get(settings.preset).model["hidden_size"]
    if not check_operators(record, settings, width):
        return
    if not settings.eager:
        record.values["caches"] = use_own_caches()
    timing.forget()
    measured = turns.Turns(
        lambda label, routing: StepRunner(settings, label, routing),
        steps,
        profile=profile,
        progress=record.progress,
        rounds=rounds,
        on_round=lambda *result: keep_round(record, *result),
    )
    device = torch.device(settings.device)
    with (
        dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT),  # a compilation a method
        timing.steadied(device) as record.values["clock"],
    ):
        for group in turns.groups(methods, device, rounds):
            for row in measured.rows(group):
                finish(row, record, profile)


def keep_round(record: Record, label: str, turn: int, milliseconds: float) -> None:
    """Rows come when all rounds are over; what is cut short before keeps these."""
    found = {"method": label, "round": turn, "ms": milliseconds}
    record.values.setdefault("by_round", []).append(found)
    record.say(f"round {turn}: {label} {milliseconds:.3f} ms")
    record.save()


def finish(row: dict[str, Any], record: Record, profile: turns.Profile | None = None) -> None:
    """Saved, then said, with the seconds of a cold first step where they were taken."""
    if row["method"] in record.values.get("cold", {}):
        row["cold_s"] = record.values["cold"][row["method"]]
    record.add(row)
    if "error" in row:
        record.fail(f"{row['method']}: {row['error']}")
        return
    for text in [line(row), *(profile.lines(row) if profile else ())]:
        record.say(text)


def line(row: dict[str, Any]) -> str:
    text = f"{row['method']:<28} {row['ms']:9.3f} ms"
    if "relative_speed" in row:
        text += f"  x{row['relative_speed']:.3f}"
    if "relative_speed_quartiles" in row:
        text += " ({:.3f} to {:.3f})".format(*row["relative_speed_quartiles"])
    if BASELINE in row:
        text += f" of {row[BASELINE]['ms']:.3f} ms" + ("" if row["paired"] else ", not paired")
    text += f"  {row['tokens_per_second'] / 1e3:.1f} ktok/s  {row['tflops']:.3g} TFLOP/s"
    if row["mfu"] is not None:
        text += f" ({row['mfu']:.1%} of the peak)"
    if row.get("peak_gb") is not None:
        text += f"  {row['peak_gb']:.2f} GB"
        if "relative_memory" in row:
            text += f" ({100 * row['relative_memory']:+.1f}%)"
    if row.get("cold_s") is not None:
        text += f"  cold {row['cold_s']:.1f} s"
    counts = "{graphs} graphs; caches: {hits} hit, {misses} missed".format(**row["compiler_caches"])
    if row.get("kernels"):
        made = row["kernels"]
        counts += f"; {made['kernels']} kernels in {made['seconds']:.1f} s"
        counts += f", waited for {made['waited']:.1f} s"
    return f"{text}  warm-up {row['warmup_s']:.1f} s ({counts})"
