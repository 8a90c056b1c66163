"""From what a user asks for to a finished run directory: ``train`` and ``finetune``.

RUN/config.json, metrics.jsonl, checkpoints/, summary.json, model/
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.models.command import load_plain
from depthroute.models.convert import convert
from depthroute.parallel.world import World, joined
from depthroute.parallel.wrap import MODES, is_sharded, wrap
from depthroute.presets import Preset, Recipe
from depthroute.train import environment, tokenise
from depthroute.train.compare import SHARPNESS_SEQUENCES, Sharpness
from depthroute.train.data import HELD_OUT_PERCENT, TokenData
from depthroute.train.documents import open_corpus
from depthroute.train.fit import Fit, Sink, export, peak_memory
from depthroute.train.loop import StepResult, Trainer
from depthroute.train.prepare import choose_device
from depthroute.train.run_directory import RunDirectory
from depthroute.train.settings import MAY_CHANGE, TrainSettings, from_recipe
from depthroute.train.shards import read_index
from depthroute.train.sinks import TensorBoard, WeightsAndBiases
from depthroute.train.vocabulary import Vocabulary

FINETUNING = Recipe(
    steps=20_000,
    tokens_per_step=65_536,
    sequence_length=2048,
    lr=5e-5,
    min_lr=3e-5,
    warmup_steps=500,
)
"""As published for converting pretrained models; the routing has a rate of its own."""
FINETUNING_ROUTING = {"routing_lr": 5e-3, "routing_min_lr": 3e-5}
LOOKS = 10
"""Validations and checkpoints of a run whose settings name no other number."""


@dataclass(frozen=True)
class Watch:
    """What a run tells its caller while it goes on; the first rank alone calls it."""

    on_progress: Callable[[tokenise.Progress], None] = lambda progress: None
    on_start: Callable[[int, int], None] = lambda first, steps: None
    on_step: Callable[[StepResult, int], None] = lambda result, memory: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Request:
    """What both commands share."""

    data: str
    out: Path
    tokenizer: str | None = None
    resume: bool = False
    seed: int = 0
    device: str = "auto"
    parallel: str = "ddp"
    changes: dict[str, Any] = field(default_factory=dict)
    """Training settings."""
    text_field: str = "text"
    held_out: float = HELD_OUT_PERCENT
    max_tokens: int | None = None
    workers: int | None = None
    cache: Path | None = None
    tensorboard: bool = False
    wandb: str | None = None
    watch: Watch = Watch()
    sharpness: Sharpness | None = None
    """Looks at the trained model, as in a comparison."""


@dataclass(frozen=True)
class _Job:
    """A request made definite: how to build the model, and what config.json says of it."""

    kind: str
    about: dict[str, Any]
    routing: RoutingConfig
    settings: TrainSettings
    build: Callable[[TokenData, torch.device, bool], Any]


def train(
    request: Request,
    preset: str,
    routing: RoutingConfig | None = None,
    shape: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A preset's model from scratch, with another routing or shape if given."""
    chosen = presets.get(preset)
    chosen = replace(chosen, model=chosen.model | (shape or {}), routing=routing or chosen.routing)
    settings = _ten_looks(from_recipe(chosen.recipe, request.changes, f"preset {preset!r}"))
    default = "bytes" if chosen.model["vocab_size"] == 256 else None
    if request.tokenizer is None and default is None:
        raise ConfigError(
            f"preset {preset!r} needs a tokenizer: give --tokenizer with a folder, a hub id, "
            "train:SIZE or bytes"
        )

    def job(vocabulary: dict[str, Any]) -> _Job:
        fitted = _fit_vocabulary(chosen, vocabulary)
        presets.build(fitted, device="meta")  # a bad shape is refused before anything is written
        _check_length(settings, fitted.model.get("max_position_embeddings"))

        def build(data: TokenData, device: torch.device, is_resumed: bool) -> Any:
            return presets.build(fitted, device=device)

        return _Job("train", {"preset": fitted.to_dict()}, fitted.routing, settings, build)

    return _launch(request, job, request.tokenizer or default or "bytes", settings)


def finetune(
    request: Request,
    base: str,
    routing: RoutingConfig,
    *,
    freeze_base: bool = False,
    tolerance: float | None = 1e-3,
) -> dict[str, Any]:
    """A converted checkpoint; ``tolerance`` bounds how far its logits may be from the base's."""
    changes = FINETUNING_ROUTING | request.changes
    settings = _ten_looks(from_recipe(FINETUNING, changes, "fine-tuning"))

    def job(vocabulary: dict[str, Any]) -> _Job:
        def build(data: TokenData, device: torch.device, is_resumed: bool) -> Any:
            plain = load_plain(base, dtype=torch.float32).to(device)
            _check_length(settings, getattr(plain.config, "max_position_embeddings", None))
            verify = None
            if tolerance is not None and not is_resumed:
                verify = data.validation_batches(1)[0].inputs.to(device)
            model = convert(plain, routing, verify=verify, tolerance=tolerance or 0.0)
            if freeze_base:
                model.freeze_base()
            return model

        about = {"base": base, "freeze_base": freeze_base}
        return _Job("finetune", about, routing, settings, build)

    return _launch(request, job, request.tokenizer or base, settings)


def _launch(
    request: Request,
    make_job: Callable[[dict[str, Any]], _Job],
    tokenizer: str,
    settings: TrainSettings,
) -> dict[str, Any]:
    if request.parallel not in MODES:
        raise ConfigError(f"--parallel {request.parallel!r} is none of {', '.join(MODES)}")
    with joined(choose_device(request.device)) as world:
        _check_ranks(settings, world)
        vocabulary, folder = world.on_main(lambda: _prepare(request, tokenizer)) or (None, None)
        folder = Path(world.gather(str(folder))[0])
        data = tokenise.open_tokens(
            folder,
            batch_size=settings.batch_size,
            sequence_length=settings.sequence_length,
            document_masking=settings.document_masking,
            verify=world.is_main,
        )
        index = read_index(folder, verify=False)
        return _run(request, make_job(index["tokenizer"]), data, index, vocabulary, world)


def _run(
    request: Request,
    job: _Job,
    data: TokenData,
    index: dict[str, Any],
    vocabulary: Vocabulary | None,
    world: World,
) -> dict[str, Any]:
    config = _config(request, job, index, world)
    watch = request.watch if world.is_main else Watch()
    is_resumed = bool(world.gather(world.on_main(lambda: _open_run(request, config)))[0])
    run = RunDirectory(request.out.expanduser())
    torch.manual_seed(request.seed)
    model = job.build(data, world.device, is_resumed)
    torch.manual_seed(request.seed + world.rank)
    model = wrap(model, world, request.parallel, precision=job.settings.precision)
    trainer = Trainer(model, job.settings, world)

    def on_step(result: StepResult) -> None:
        watch.on_step(result, peak_memory(trainer.device))

    sinks = _sinks(request, run, config) if world.is_main else ()
    fit = Fit(trainer, data, run, request.seed, label(job.routing), sinks, on_step)
    if is_resumed:
        step = fit.resume()
        watch.note("no checkpoint yet: from the start" if step is None else f"from step {step}")
    watch.on_start(trainer.completed, job.settings.steps)
    outcome = fit()
    if request.sharpness is not None and world.is_main and not is_sharded(model):
        inputs = data.validation_batches(SHARPNESS_SEQUENCES)[0].inputs[:SHARPNESS_SEQUENCES]
        value = request.sharpness(trainer.inner, inputs.to(trainer.device))
        fit.record("routing", mean_normalised_max=value)
        outcome["mean_normalised_max"] = value
    outcome |= {"run": str(run.path), "model": str(run.path / "model")}
    export(trainer, run.path / "model", vocabulary)
    if world.is_main:
        run.write_json("summary.json", outcome)
    world.barrier()
    return outcome


def _prepare(request: Request, tokenizer: str) -> tuple[Vocabulary, Path]:
    if not 0 < request.held_out < 100:
        raise ConfigError(f"--held-out {request.held_out} must be between 0 and 100 percent")
    corpus = open_corpus(request.data, field=request.text_field)
    cache = request.cache or tokenise.cache_folder()
    vocabulary = tokenise.choose_vocabulary(tokenizer, corpus, cache)
    folder = tokenise.prepare(
        corpus,
        vocabulary,
        cache=cache,
        held_out=request.held_out,
        max_tokens=request.max_tokens,
        workers=request.workers,
        on_progress=request.watch.on_progress,
    )
    return vocabulary, folder


def _config(request: Request, job: _Job, index: dict[str, Any], world: World) -> dict[str, Any]:
    """Everything needed to run this again, JSON-ready."""
    parts = index["parts"]
    return {
        "kind": job.kind,
        **job.about,
        "methods": {label(job.routing): job.routing.to_dict()},
        "seeds": [request.seed],
        "train": job.settings.to_dict(),
        "device": str(world.device),
        "ranks": world.size,
        "parallel": request.parallel if world.size > 1 else None,
        "data": {
            "name": index["corpus"]["name"],
            "sha256": index["corpus"]["sha256"],
            "tokenizer": index["tokenizer"],
            "train_tokens": parts["train"]["tokens"],
            "train_documents": parts["train"]["documents"],
            "validation_tokens": parts["validation"]["tokens"],
            "validation_documents": parts["validation"]["documents"],
        },
        "environment": environment.describe(),
    }


def _open_run(request: Request, config: dict[str, Any]) -> bool:
    """Whether the run was there already and goes on."""
    path = request.out.expanduser()
    if request.resume and (path / "config.json").is_file():
        run = RunDirectory.reopen(path)
        _refuse_another_run(path, run.read_json("config.json"), config)
        return True
    RunDirectory.create(path).write_json("config.json", config)
    return False


def _refuse_another_run(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    saved, now = ({**c, "data": c["data"] | {"name": ""}} for c in (saved, now))  # wherever it lies
    for name in ("kind", "preset", "base", "freeze_base", "methods", "seeds", "data"):
        if saved.get(name) != now.get(name):
            raise _other_run(path, name, saved.get(name), now.get(name))
    old, new = saved["train"], now["train"]
    for setting in sorted({*old, *new} - set(MAY_CHANGE)):
        if old.get(setting) != new.get(setting):
            raise _other_run(path, f"train.{setting}", old.get(setting), new.get(setting))


def _other_run(path: Path, name: str, old: Any, new: Any) -> ConfigError:
    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) < 60 else f"{text[:57]}..."

    return ConfigError(
        f"{path} was started with {name} {short(old)} and now has {short(new)}; resume with the "
        "same, or start a new run with another --out"
    )


def label(routing: RoutingConfig) -> str:
    """``delta:num_blocks=4``: the method and what was set on it."""
    values = routing.to_dict()
    method = values.pop("method")
    return ":".join([method, *(f"{key}={value}" for key, value in values.items())])


def _ten_looks(settings: TrainSettings) -> TrainSettings:
    every = max(1, settings.steps // LOOKS)
    return replace(
        settings,
        validate_every=settings.validate_every or every,
        save_every=settings.save_every or every,
    )


def _fit_vocabulary(preset: Preset, vocabulary: dict[str, Any]) -> Preset:
    """The published vocabulary where the tokenizer fits into it, or else the tokenizer's own."""
    size = max(preset.model["vocab_size"], vocabulary["size"])
    ends = {"eos_token_id": vocabulary["separator"], "bos_token_id": vocabulary["separator"]}
    return replace(preset, model=preset.model | {"vocab_size": size} | ends)


def _check_length(settings: TrainSettings, longest: int | None) -> None:
    if longest is not None and settings.sequence_length > longest:
        raise ConfigError(
            f"train.sequence_length={settings.sequence_length} is longer than the model's "
            f"{longest} positions; use at most {longest}"
        )


def _check_ranks(settings: TrainSettings, world: World) -> None:
    parts = world.size * settings.accumulation
    if settings.batch_size % parts:
        raise ConfigError(
            f"train.batch_size={settings.batch_size} does not split over {world.size} ranks times "
            f"accumulation={settings.accumulation}; use a multiple of {parts}"
        )


def _sinks(request: Request, run: RunDirectory, config: dict[str, Any]) -> list[Sink]:
    sinks: list[Sink] = []
    if request.tensorboard:
        sinks.append(TensorBoard(run.path / "tensorboard"))
    if request.wandb is not None:
        sinks.append(WeightsAndBiases(request.wandb, run.path, config))
    return sinks
