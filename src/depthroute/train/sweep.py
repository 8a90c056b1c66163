"""Every method at its own best value of a setting, on seeds that had no say in choosing it.

Each run of a sweep is a comparison of one method, value and seed in a directory of its own, so
whatever is finished stays so, and runs may go side by side.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from depthroute import presets
from depthroute.config import Method, RoutingConfig
from depthroute.data import batches
from depthroute.errors import ConfigError, DepthrouteError, unknown
from depthroute.json_shape import jsonable
from depthroute.methods import BASELINE, parse_assignments
from depthroute.presets import Preset
from depthroute.runs import sweep as layout
from depthroute.runs.directory import RunDirectory, RunError, open_run, refuse_another
from depthroute.runs.summary import summarise
from depthroute.runs.sweep import Value
from depthroute.train import pace
from depthroute.train.compare import Comparison, baselines, build, run_comparison
from depthroute.train.compiler import forgets_tuning, why_it_failed
from depthroute.train.interrupt import Stop, stop_signals
from depthroute.train.loop import Look, Progress, raise_recompile_limit
from depthroute.train.prepare import FIRST_CHOOSING_SEED, open_tokens
from depthroute.train.settings import TrainSettings, from_preset
from depthroute.train.trainer import Trainer

POLL_SECONDS = 0.05
SWEPT = ("lr", "min_lr", "routing_lr", "routing_min_lr", "warmup_steps", "schedule")
SWEPT += ("decay_fraction", "optimizer", "weight_decay", "clip", "output_init")
"""Training settings that leave data, tokens and batches as they are."""


@dataclass(frozen=True)
class Sweep:
    comparison: Comparison
    """As set, with the seeds that are reported."""
    name: str | None
    values: tuple[Value, ...]
    variant: Callable[[Value], tuple[Preset, TrainSettings]]
    """The model and the settings with a value; an error where it is not allowed."""
    seeds: tuple[int, ...] = (1000,)
    """That values are chosen on."""
    extend: int = 3
    """Values added for a method as long as its best is at an end."""
    idle: frozenset[str] = frozenset()
    """Methods that have nothing to sweep: a routing rate without routing parameters."""

    def __post_init__(self) -> None:
        if shared := set(self.seeds) & set(self.comparison.seeds):
            raise ConfigError(
                f"seeds {sorted(shared)} would both choose the value and be reported; use others"
            )

    def config(self) -> dict[str, Any]:
        swept = {"name": self.name, "values": list(self.values), "seeds": list(self.seeds)}
        return self.comparison.config() | {"kind": layout.KIND, "sweep": swept}


def prepare(
    comparison: Comparison,
    text: str,
    changes: dict[str, Any],
    *,
    num_seeds: int = 1,
    extend: int = 3,
) -> Sweep:
    """``text`` is ``name=value,value,...``; ``changes`` are the settings that all values share."""
    name, values = _parsed(text)
    if name in changes:
        raise ConfigError(f"--sweep {name} and --set {name} contradict each other; give one")
    is_training = name in comparison.settings.to_dict()
    if is_training and name not in SWEPT:
        raise unknown("setting to sweep", name, (*SWEPT, "or a model setting"))
    if is_training and name != "warmup_steps" and layout.is_ordered(values):
        values = [float(value) for value in values]  # or what is tried beyond would be whole, too

    def variant(value: Value) -> tuple[Preset, TrainSettings]:
        if value is None:
            return comparison.preset, comparison.settings
        if is_training:
            return comparison.preset, from_preset(comparison.preset, changes | {name: value})
        return presets.with_model(comparison.preset, {name: value}), comparison.settings

    sizes = {value: _num_parameters(variant(value)[0]) for value in values}
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{value}: {size:,}" for value, size in sizes.items())
        raise ConfigError(
            f"--sweep {name} changes the number of parameters ({words}); use --ladder"
        )
    seeds = tuple(FIRST_CHOOSING_SEED + n for n in range(num_seeds))
    idle = _idle(comparison, name)
    return Sweep(comparison, name, tuple(values), variant, seeds, extend, idle)


def _parsed(text: str) -> tuple[str, list[Any]]:
    name, separator, listed = text.partition("=")
    values = [
        v for part in listed.split(",") for v in parse_assignments([f"v={part}"], "").values()
    ]
    is_plain = all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values)
    if not (separator and is_plain) or len(values) < 2 or len(set(values)) < len(values):
        raise ConfigError(
            f"--sweep {text}: give a setting and at least two values, each once, such as "
            "lr=1e-3,2e-3,4e-3"
        )
    return name.strip(), values


def _idle(comparison: Comparison, name: str) -> frozenset[str]:
    """Methods that have no use for the setting."""
    if name not in ("routing_lr", "routing_min_lr"):
        return frozenset()
    built = {
        label: presets.build(comparison.preset, routing, device="meta")
        for label, routing in comparison.methods
    }
    idle = frozenset(label for label, model in built.items() if not model.plan.site_names())
    if len(idle) == len(built):
        raise ConfigError(f"--sweep {name}: none of the methods has routing parameters")
    return idle


def unswept(comparison: Comparison) -> Sweep:
    """Every method as set, its seeds as runs of their own."""
    labels = frozenset(comparison.labels)
    return Sweep(
        comparison, None, (), lambda value: (comparison.preset, comparison.settings), idle=labels
    )


def _num_parameters(preset: Preset) -> int:
    model = presets.build(preset, RoutingConfig("standard"), device="meta")
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Part:
    """One run of a sweep."""

    comparison: Comparison
    path: Path
    words: str
    is_reported: bool

    def job(self) -> dict[str, Any]:
        """For another process: JSON-ready."""
        tokens = self.comparison.tokens
        return {
            "config": self.comparison.config(),
            "tokens": None if tokens is None else str(tokens),
            "path": str(self.path),
            "is_reported": self.is_reported,
            "parent": os.getpid(),
        }


@dataclass(frozen=True)
class Watch:
    """What a sweep tells its caller while it goes on."""

    note: Callable[[str], None] = lambda text: None
    on_part: Callable[[Part, int, int], None] = lambda part, ended, parts: None
    """A run ended: it, how many have, and of how many as far as is known."""
    on_step: Callable[[Progress], None] = lambda progress: None


@dataclass
class Runner:
    """Runs the parts of one sweep, here or in ``jobs`` processes."""

    look: Look | None = None
    jobs: int = 1
    command: Sequence[str] = ()
    """What runs :meth:`Part.job` from a file, whose name is put behind it."""
    watch: Watch = Watch()

    def __post_init__(self) -> None:
        self.signal, self.ended, self.expected = 0, 0, 0

    def __call__(self, parts: list[Part]) -> None:
        """All of them; what fails is noted, others go on, and in the end it is an error."""
        if self.signal:
            return
        waiting = [part for part in parts if not _is_finished(part.path)]
        self.ended += len(parts) - len(waiting)
        failed = list(self._side_by_side(waiting) if self.jobs > 1 else self._in_turn(waiting))
        if failed:
            raise RunError(
                f"{len(failed)} of {len(parts)} runs failed, the first with {failed[0]}. The "
                "others are kept; go on with --resume auto"
            )

    def _in_turn(self, parts: list[Part]) -> Iterator[str]:
        for part in parts:
            try:
                summary = run_part(part, self.look, self.watch.on_step, self.watch.note)
            except (DepthrouteError, torch.OutOfMemoryError) as error:
                yield self._failed(part, str(error))
                continue
            if not summary["is_complete"]:
                self.signal = summary["signal"] or signal.SIGINT
                return
            self._end(part)

    def _side_by_side(self, parts: list[Part]) -> Iterator[str]:
        waiting, running = list(parts), {}
        compiles = any(part.comparison.settings.compile for part in parts)
        with (
            forgets_tuning() if compiles else nullcontext(),
            tempfile.TemporaryDirectory() as folder,
            stop_signals() as stop,
            _ended(running),
        ):
            while waiting or running:
                while waiting and len(running) < self.jobs and not stop.signal:
                    part = waiting.pop(0)
                    running[self._start(part, Path(folder))] = part
                for process in [p for p in running if p.poll() is not None]:
                    part = running.pop(process)
                    if process.returncode == 0 and _is_finished(part.path):
                        self._end(part)
                    elif not stop.signal:
                        yield self._failed(part, _why(process))
                if stop.signal and not self.signal:
                    self._stop(stop, waiting, list(running))
                time.sleep(POLL_SECONDS)

    def _start(self, part: Part, folder: Path) -> subprocess.Popen[bytes]:
        job, errors = (
            folder / f"{part.path.parent.name}-{id(part)}{end}" for end in (".json", ".err")
        )
        job.write_text(json.dumps(part.job()))
        with errors.open("wb") as handle:
            command = [*self.command, str(job)]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=handle)

    def _stop(self, stop: Stop, waiting: list[Part], running: list[Any]) -> None:
        """Each saves after the step in hand."""
        self.signal = stop.signal
        waiting.clear()
        for process in running:
            process.send_signal(signal.SIGTERM)

    def _end(self, part: Part) -> None:
        self.ended += 1
        self.watch.on_part(part, self.ended, max(self.expected, self.ended))

    def _failed(self, part: Part, reason: str) -> str:
        self.watch.note(f"{part.words} failed: {reason}")
        return f"{part.words}: {reason}"


@contextmanager
def _ended(running: dict[Any, Part]) -> Iterator[None]:
    """Whatever happens here, no process is left behind."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _why(process: subprocess.Popen[bytes]) -> str:
    job = Path(str(process.args[-1]))  # pyright: ignore
    text = job.with_suffix(".err").read_text(errors="replace")
    return why_it_failed(subprocess.CompletedProcess(process.args, process.returncode, "", text))


def _is_finished(path: Path) -> bool:
    """By its records too, which are what is read of it: a summary may have outlived them."""
    try:
        is_summarised = RunDirectory(path).read_json("summary.json").get("is_complete") is True
        return is_summarised and layout.final_loss(path) is not None
    except RunError:
        return False


def run_part(
    part: Part,
    look: Look | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    run, is_resumed = open_run(part.path, resume=True)
    if part.comparison.settings.compile is not None:
        torch.compiler.reset()  # or those of earlier parts would count against its limit
    with closing(run):
        return run_comparison(
            part.comparison,
            run,
            is_resumed=is_resumed,
            look=look if part.is_reported else None,
            on_step=on_step,
            note=note,
        )


def run_job(job: dict[str, Any], look: Look) -> None:
    """What a process of its own does. One whose parent is gone saves and stops."""
    config = job["config"]
    settings = TrainSettings.from_dict(config["train"])
    if job["tokens"] is None:
        sizes = {"batch_size": settings.batch_size, "sequence_length": settings.sequence_length}
        data = batches.standard_library(**sizes)
    else:
        data = open_tokens(Path(job["tokens"]), settings, verify=False)
    comparison = Comparison(
        Preset.from_dict(config["preset"]),
        tuple(Method(n, RoutingConfig.from_dict(r)) for n, r in config["methods"].items()),
        tuple(config["seeds"]),
        settings,
        data,
        torch.device(config["device"]),
        about_data=config["data"],
        is_part=True,
    )

    def watch(progress: Progress) -> None:
        if os.getppid() != job["parent"]:
            os.kill(os.getpid(), signal.SIGTERM)

    part = Part(comparison, Path(job["path"]), "", job["is_reported"])
    if not run_part(part, look, watch)["is_complete"]:
        raise SystemExit(1)


def run_sweep(
    sweep: Sweep, run: RunDirectory, runner: Runner, *, is_resumed: bool = False
) -> dict[str, Any]:
    """Tune, choose, train the reported seeds; the summary, which is also written to the run."""
    config = begin(sweep, run, runner, is_resumed=is_resumed)
    return finish(sweep, run, runner, config)


def begin(sweep: Sweep, run: RunDirectory, runner: Runner, *, is_resumed: bool) -> dict[str, Any]:
    """Everything before the first run: what it is, how fast, and how long it will take."""
    config = _configure(sweep, run, is_resumed)
    run.append({"event": "started"})
    _announce(sweep, run, runner)
    return config


def finish(
    sweep: Sweep, run: RunDirectory, runner: Runner, config: dict[str, Any]
) -> dict[str, Any]:
    _tune(sweep, run, config, runner)
    chosen = layout.choices(run.path, config)
    reported = [
        _part(sweep, run.path, method, chosen[method.label].value, seed, config, is_reported=True)
        for seed in sweep.comparison.seeds
        for method in sweep.comparison.methods
        if not (runner.signal or chosen[method.label].edge)
    ]
    runner.expected = runner.ended + len(reported)
    runner(reported)
    if runner.signal:
        run.append({"event": "interrupted", "signal": runner.signal})
    else:
        _measure(_beside_standard(sweep.comparison), run, runner.watch.note)
    summary = summarise_sweep(run.path)
    run.write_json("summary.json", summary)
    return summary


def summarise_sweep(root: Path) -> dict[str, Any]:
    config, records, _ = layout.read_sweep(root)
    return jsonable(summarise(config, records) | {"sweep": config["sweep"]})


def _configure(sweep: Sweep, run: RunDirectory, is_resumed: bool) -> dict[str, Any]:
    """Further values, methods and seeds may come with every start: each is runs of its own."""
    config = sweep.config()
    if is_resumed:
        saved = run.read_json("config.json")
        same = {name: saved.get(name) for name in ("methods", "seeds")}
        refuse_another(run, config | same)
        _refuse_another_setting(run, sweep.name)
        config["data"] = saved["data"] | config["data"]
    else:
        config["data"] |= {"baselines": baselines(sweep.comparison)}
    run.write_json("config.json", config)
    return config


def _refuse_another_setting(run: RunDirectory, name: str | None) -> None:
    """What was tried so far is values of the setting that the sweep was started with."""
    before = layout.read_config(run.path)["sweep"]["name"]
    if before != name:
        was, now = ("no --sweep" if n is None else f"--sweep {n}" for n in (before, name))
        raise ConfigError(
            f"{run.path} was started with {was} and now has {now}; resume with the same, or start "
            "a new sweep with another --out"
        )


def _measure(comparison: Comparison, run: RunDirectory, note: Callable[[str], None]) -> None:
    """Speeds side by side: runs that share a device, or follow each other, cannot tell them."""
    labels = set(comparison.labels)
    known = [r for r in run.records() if r["event"] == "speed"]
    if known and labels <= set(known[-1]["tokens_per_second"]):
        return
    words = next(iter(labels)) if len(labels) == 1 else f"{len(labels)} methods"
    note(f"measuring the speed of {words}")
    run.append({"event": "speed", "tokens_per_second": _speeds(comparison)})
    gc.collect()
    if comparison.device.type == "cuda":
        torch.cuda.empty_cache()  # the runs may be other processes, which need the room


def _beside_standard(comparison: Comparison) -> Comparison:
    """A speed says something beside standard's, whether or not that is trained here too."""
    if BASELINE in comparison.labels:
        return comparison
    return replace(
        comparison, methods=(Method(BASELINE, RoutingConfig(BASELINE)), *comparison.methods)
    )


def _speeds(comparison: Comparison) -> dict[str, float]:
    settings = comparison.settings
    if settings.compile is not None:
        raise_recompile_limit(len(comparison.methods))
    torch.manual_seed(0)
    trainers = {
        method.label: Trainer(build(comparison, method.routing), settings, is_timed=True)
        for method in comparison.methods
    }
    seconds = pace.measure(trainers, comparison.data.batch(0, 0).to(comparison.device))
    return {label: settings.tokens_per_step / taken for label, taken in seconds.items()}


def _announce(sweep: Sweep, run: RunDirectory, runner: Runner) -> None:
    """How much it will be, before it begins, by the speed of one method: compiling all of them
    only to know theirs would take longer than many a run."""
    comparison = sweep.comparison
    first = min(comparison.methods, key=lambda method: method.label != BASELINE)
    _measure(replace(comparison, methods=(first,)), run, runner.watch.note)
    (*_, record) = (r for r in run.records() if r["event"] == "speed")
    tokens = comparison.settings.steps * comparison.settings.tokens_per_step
    number = sum(
        len(comparison.seeds) + (0 if label in sweep.idle else len(sweep.values) * len(sweep.seeds))
        for label in comparison.labels
    )
    runner.expected = number
    minutes = number * tokens / record["tokens_per_second"][first.label] / 60
    more = len(comparison.methods) * sweep.extend * len(sweep.seeds)
    epochs = tokens / (comparison.data.num_sequences * comparison.data.sequence_length)
    runner.watch.note(
        f"{number} runs of {tokens:,} tokens ({epochs:.2g} epochs), {number * tokens:,} in all: "
        f"about {minutes:.1f} minutes of steps at the speed of {first.label}, one run after the "
        "other"
        + (f" ({runner.jobs} go side by side)" if runner.jobs > 1 else "")
        + (f"; up to {more} runs more where a best value is at an end" if sweep.values else "")
    )


def _tune(sweep: Sweep, run: RunDirectory, config: dict[str, Any], runner: Runner) -> None:
    """Until the best value of every method has neighbours on both sides."""
    values: dict[str, list[Value]] = {
        label: [None] if label in sweep.idle else list(sweep.values)
        for label in sweep.comparison.labels
    }
    while values:
        for label, mine in values.items():
            for value in mine:
                if value not in layout.tried_values(run.path).get(label, []):
                    run.append({"event": "value", "method": label, "value": value})
        tried = layout.tried_values(run.path)
        parts = [
            _part(sweep, run.path, method, value, seed, config)
            # methods first: side by side they are then compiled once each
            for seed in sweep.seeds
            for place in range(max(map(len, tried.values())))
            for method in sweep.comparison.methods
            for value in tried[method.label][place : place + 1]
            if value is not None
        ]
        runner.ended = 0
        runner.expected = len(parts) + len(sweep.comparison.seeds) * len(sweep.comparison.methods)
        runner(parts)
        values = {} if runner.signal else _further(sweep, run, config, runner.watch.note)


def _further(
    sweep: Sweep, run: RunDirectory, config: dict[str, Any], note: Callable[[str], None]
) -> dict[str, list[Value]]:
    """A value more for every method that is best at an end, by the ratio of those before it."""
    values: dict[str, list[Value]] = {}
    for label, choice in layout.choices(run.path, config).items():
        if choice.edge is None:
            continue
        value = _allowed(sweep, choice)
        if value is None:
            run.append({"event": "end", "method": label, "value": choice.value})
        elif len(set(choice.losses) - set(sweep.values)) < sweep.extend:
            values[label] = [value]
            words = f"{label} is best at the {choice.edge} {sweep.name}"
            note(f"{words}, {choice.value}: {value} is tried too")
    return values


def _allowed(sweep: Sweep, choice: layout.Choice) -> Value:
    """The next value beyond the edge, or nearer to it if that is not allowed: a setting has ends of
    its own. None where the edge is such an end, to a hundredth."""
    end: Any = choice.value
    value: Any = layout.further(choice)
    while value is not None and value not in choice.losses:
        try:
            sweep.variant(value)
        except ConfigError:
            if abs(value - end) <= max(abs(end) / 100, isinstance(end, int)):
                return None
            value = layout.between(end, math.sqrt(end * value) if end * value > 0 else end / 2)
        else:
            return value
    return None


def _part(
    sweep: Sweep,
    root: Path,
    method: Method,
    value: Value,
    seed: int,
    config: dict[str, Any],
    *,
    is_reported: bool = False,
) -> Part:
    preset, settings = sweep.variant(value)
    comparison = replace(
        sweep.comparison,
        preset=preset,
        settings=settings,
        methods=(method,),
        seeds=(seed,),
        about_data=config["data"],
        is_part=True,
    )
    words = f"{method.label}{'' if value is None else f' {sweep.name}={value}'} seed {seed}"
    path = layout.folder(root, method.label, sweep.name, value, seed)
    return Part(comparison, path, words, is_reported)
