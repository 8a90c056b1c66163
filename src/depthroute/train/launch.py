"""From what a user asks for to a finished run directory: ``train`` and ``finetune``.

RUN/run.toml, config.json, metrics.jsonl, checkpoints/, model/, traces.json, summary.json
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from depthroute import files, presets
from depthroute.config import RoutingConfig
from depthroute.data import sources, tokenise
from depthroute.data.batches import TokenData
from depthroute.data.shards import read_index
from depthroute.data.sources import TextSource
from depthroute.data.vocabulary import Vocabulary
from depthroute.errors import ConfigError
from depthroute.json_shape import ANYTHING, NUMBER, WHOLE, check
from depthroute.models import attention, saving
from depthroute.models.convert import convert, converted_config, from_config
from depthroute.models.loading import load_model, load_plain, plain_config
from depthroute.models.model import plan_for
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.spread import Spread
from depthroute.parallel.world import World, joined
from depthroute.parallel.wrap import is_sharded, wrap
from depthroute.presets import Recipe
from depthroute.runs import environment
from depthroute.runs.checkpoint import whole_weights
from depthroute.runs.directory import RunDirectory, open_run, refuse_another
from depthroute.runs.sinks import TensorBoard, WeightsAndBiases
from depthroute.runs.summary import unit_of
from depthroute.train import graphs, story
from depthroute.train.loop import Experiment, Look, Sink
from depthroute.train.prepare import (
    check_length,
    choose_device,
    open_tokens,
    refuse_idle_rates,
    refuse_too_large,
    refuse_unknown_tokens,
    refuse_unparted,
)
from depthroute.train.settings import TrainSettings, from_recipe
from depthroute.train.trainer import StepResult, Trainer

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
_OUTCOME = {"steps": WHOLE, "validation_loss": NUMBER, "best": ANYTHING}
LOOKS = 10
"""Validations and checkpoints of a run whose settings name no other number."""


@dataclass(frozen=True)
class Watch:
    """What a run tells its caller while it goes on; the first rank alone calls it."""

    on_progress: Callable[[tokenise.Progress], None] = lambda progress: None
    on_start: Callable[[int, int], None] = lambda first, steps: None
    on_step: Callable[[StepResult, int], None] = lambda result, memory: None
    on_validation: Callable[[int, int], None] = lambda done, parts: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Request(TextSource):
    """What both commands share."""

    out: Path
    resume: bool = False
    seed: int = 0
    device: str = "auto"
    layout: MeshLayout = field(default_factory=MeshLayout)
    changes: dict[str, Any] = field(default_factory=dict)
    """Training settings."""
    tensorboard: bool = False
    wandb: str | None = None
    watch: Watch = Watch()
    look: Look | None = None
    """At the trained model, as in a comparison."""
    options: str = ""
    """As a run file, which the run directory keeps."""


@dataclass(frozen=True)
class _Job:
    """A request made definite: how to build the model, and what config.json says of it."""

    kind: str
    about: dict[str, Any]
    routing: RoutingConfig
    settings: TrainSettings
    build: Callable[[TokenData, torch.device, bool], Any]
    has_story: bool = False
    """There was a model before, which the result is told against."""


def train(
    request: Request,
    preset: str,
    routing: RoutingConfig | None = None,
    shape: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A preset's model from scratch, with another routing or shape if given."""
    chosen = presets.with_model(presets.get(preset), shape or {})
    chosen = replace(chosen, routing=routing or chosen.routing)
    # a bad routing is refused before text is tokenised
    model = presets.build(chosen, device="meta")
    refuse_too_large(model, choose_device(request.device))
    refuse_idle_rates(request.changes, [model.plan])
    settings = _ten_looks(from_recipe(chosen.recipe, request.changes, f"preset {preset!r}"))
    layout = _fitting_layout(request, settings, model)
    tokenizer = sources.default_tokenizer(chosen, request)

    def job(vocabulary: dict[str, Any], data: TokenData) -> _Job:
        fitted = sources.fit_vocabulary(chosen, vocabulary, shape)
        check_length(settings, fitted.model.get("max_position_embeddings"))

        def build(data: TokenData, device: torch.device, is_new: bool) -> Any:
            return presets.build(fitted, device=device, output_init=settings.output_init)

        return _Job("train", {"preset": fitted.to_dict()}, fitted.routing, settings, build)

    return _launch(replace(request, layout=layout), job, tokenizer, settings)


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
    if settings.output_init != TrainSettings.output_init:
        raise ConfigError(
            f"--set output_init={settings.output_init} is how a model from scratch starts, and "
            "fine-tuning starts from a checkpoint; leave it out"
        )
    # what cannot be converted is refused before a corpus is tokenised for it
    config = converted_config(plain_config(base), routing)
    plan = plan_for(config, config.routing_config())
    refuse_idle_rates(request.changes, [plan])
    check_length(settings, getattr(config, "max_position_embeddings", None))
    with torch.device("meta"):
        model = from_config(config, routing)
    if freeze_base:
        model.freeze_base()
    layout = _fitting_layout(request, settings, model)

    def job(vocabulary: dict[str, Any], data: TokenData) -> _Job:
        refuse_unknown_tokens(data, vocabulary, config.vocab_size)

        def build(data: TokenData, device: torch.device, is_new: bool) -> Any:
            plain = attention.use(load_plain(base, dtype=torch.float32)).to(device)
            verify = data.validation_batches(1)[0].inputs.to(device) if is_new else None
            most = math.inf if tolerance is None else tolerance
            model = convert(plain, routing, verify=verify, tolerance=most)
            if freeze_base:
                model.freeze_base()
            return model

        about = {"base": base, "freeze_base": freeze_base}
        return _Job("finetune", about, routing, settings, build, has_story=True)

    return _launch(replace(request, layout=layout), job, base, settings)


def _fitting_layout(request: Request, settings: TrainSettings, model: Any) -> MeshLayout:
    """For the processes that there are, before anything is tokenised or loaded."""
    refuse_unparted(settings, model.architecture.model_type)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    obstacle = graphs.obstacle(settings, choose_device(request.device), ranks)
    graphs.refuse_uncaptured(settings, obstacle)
    layout = request.layout.over(ranks)
    layout.check(model, settings.batch_size, settings.accumulation, settings.sequence_length)
    if (layout.mode == "fsdp" or layout.tp > 1) and settings.optimizer == "muon":
        why = "--parallel fsdp shards" if layout.mode == "fsdp" else f"--tp {layout.tp} shares"
        raise ConfigError(
            f"--set optimizer=muon orthogonalises whole matrices, and {why} them; use --parallel "
            "ddp and --pp, or optimizer=adamw"
        )
    if settings.compile and not layout.is_plain:
        raise ConfigError(
            f"--set compile={settings.compile} is not for a model over --tp or --pp; leave it out, "
            "or use --parallel ddp or fsdp alone"
        )
    return layout


def _launch(
    request: Request,
    make_job: Callable[[dict[str, Any], TokenData], _Job],
    tokenizer: str,
    settings: TrainSettings,
) -> dict[str, Any]:
    layout = request.layout
    with joined(choose_device(request.device), layout.part, layout.tp) as world:
        prepared = world.on_main(
            lambda: sources.prepare(request, tokenizer, request.watch.on_progress)
        )
        folder = Path(world.gather(str(prepared and prepared.folder))[0])
        data = open_tokens(folder, settings, verify=world.is_main)
        index = read_index(folder, verify=False)
        vocabulary = None if prepared is None else prepared.vocabulary
        job = make_job(index["tokenizer"], data)
        return _run(request, job, data, index, vocabulary, world)


def _run(
    request: Request,
    job: _Job,
    data: TokenData,
    index: dict[str, Any],
    vocabulary: Vocabulary | None,
    world: World,
) -> dict[str, Any]:
    config = _config(request, job, index, world)
    unit = unit_of(config["data"])
    opened = world.on_main(lambda: _open_run(request, config))
    run, goes_on = opened or (RunDirectory(files.at_home(request.out)), False)
    name = next(iter(run.read_json("config.json")["methods"])) if world.is_main else ""
    is_resumed, name = world.gather((goes_on, name))[0]
    watch = request.watch if world.is_main else Watch()
    # each rank takes its part of a model that no device has to hold
    device = world.device if request.layout.is_plain else torch.device("cpu")
    with closing(run):
        outcome = world.gather(_finished(run) if goes_on else None)[0]
        if outcome is not None:
            watch.note(f"{run.path} is finished: nothing is left to do")
            return outcome

        def tell(experiment: Experiment) -> None:
            story.begin(experiment, request.look, watch.note)

        experiment = Experiment(
            {name: lambda: job.build(data, device, experiment.is_new)},
            job.settings,
            data,
            run,
            (request.seed,),
            world,
            wrap=lambda model: _placed(model, request.layout, world, job.settings),
            sinks=_sinks(request, run, config) if world.is_main else (),
            on_built=tell if job.has_story else lambda experiment: None,
            on_step=lambda progress: watch.on_step(progress.result, progress.memory),
            on_validation=watch.on_validation,
            on_trained=lambda experiment: _finish(experiment, request, vocabulary, watch, unit),
        )
        if is_resumed:
            step = experiment.resume(watch.note)
            watch.note("no checkpoint yet: from the start" if step is None else f"from step {step}")
        watch.on_start(experiment.taken, job.settings.steps)
        experiment()
        return run.read_json("summary.json") | _places(run)


def _placed(model: Any, layout: MeshLayout, world: World, settings: TrainSettings) -> Any:
    if layout.is_plain:
        return wrap(model, world, layout.mode, precision=settings.precision)
    return Spread(model, layout, world, precision=settings.precision)


def _finished(run: RunDirectory) -> dict[str, Any] | None:
    """What a run came to that has written its last file, whether or not checkpoints are left."""
    if not (run.path / "model" / "config.json").is_file():
        return None
    with suppress(ValueError):  # damaged, it is written again from the last checkpoint
        outcome = run.read_json("summary.json")
        check(outcome, _OUTCOME, "summary.json")
        return outcome | _places(run)
    return None


def _places(run: RunDirectory) -> dict[str, str]:
    return {"run": str(run.path), "model": str(run.path / "model")}


def _finish(
    experiment: Experiment,
    request: Request,
    vocabulary: Vocabulary | None,
    watch: Watch,
    unit: str,
) -> None:
    """The trained model for everybody's use, a look at it, and last what it all came to."""
    run, trainer = experiment.directory, experiment.trainer
    outcome = {
        "steps": trainer.completed,
        "validation_loss": experiment.last_validation,
        "unit": unit,
        "best": experiment.checkpoints.best,
    } | _places(run)
    trainer.parts[0].identity = story.identity(run)
    saved = experiment.checkpoints.path(experiment.taken)
    loss = "" if experiment.last_validation is None else f"{experiment.last_validation:.4f}"
    before = story.loss_before(run)
    since = "" if before is None else f", {before:.4f} before the first step"
    figures = {
        "training steps": trainer.completed,
        "validation loss": f"{loss} nats per {unit}{since}" if loss else None,
    }
    export(trainer, run.path / "model", vocabulary, figures, checkpoint=saved)

    def whole(trainer: Trainer) -> Any:
        if not is_sharded(trainer.model):
            return trainer.inner
        loaded = load_model(str(run.path / "model"), dtype=torch.float32)
        return attention.use(loaded).to(trainer.device)

    def write() -> None:
        traces: list[dict[str, Any]] = []
        if request.look is not None:
            traces = experiment.traces(request.look, watch.note, whole)
            if traces:
                run.write_json("traces.json", {"traces": traces})
                outcome["mean_normalised_max"] = traces[0]["mean_normalised_max"]
        run.write_json("summary.json", outcome | story.end(run, traces))

    experiment.world.on_main(write)


def export(
    trainer: Trainer,
    folder: Path,
    tokenizer: Any = None,
    figures: Mapping[str, Any] | None = None,
    *,
    checkpoint: Path | None = None,
) -> None:
    """The trained model: ``save_pretrained``, whole, with its tokenizer; ``figures`` of training
    are for its card.

    Where no rank has all of it, it is what ``checkpoint`` holds.
    """
    model = trainer.parts[0]  # any part has the class and the configuration of the whole

    def write() -> None:
        weights = None
        if is_sharded(trainer.model):
            assert checkpoint is not None
            weights = whole_weights(checkpoint)
        with saving.replacing(folder) as new:
            options = {} if weights is None else {"state_dict": weights}
            model.write_into(new, training=figures, **options)
            if tokenizer is not None:
                tokenizer.save_pretrained(new)

    trainer.world.on_main(write)


def _config(request: Request, job: _Job, index: dict[str, Any], world: World) -> dict[str, Any]:
    """Everything needed to run this again, JSON-ready."""
    return {
        "kind": job.kind,
        **job.about,
        "methods": {job.routing.name: job.routing.to_dict()},
        "seeds": [request.seed],
        "train": job.settings.to_dict(),
        "device": str(world.device),
        "ranks": world.size,
        "parallel": request.layout.mode if world.size > 1 else None,
        "mesh": None if request.layout.is_plain else request.layout.to_dict(),
        "data": sources.describe(index),
        "environment": environment.describe(),
    }


def _open_run(request: Request, config: dict[str, Any]) -> tuple[RunDirectory, bool]:
    """The run, and whether it was there already and goes on."""
    run, is_resumed = open_run(request.out, resume=request.resume, options=request.options)
    if is_resumed:
        refuse_another(run, config)
    else:
        run.write_json("config.json", config)
    return run, is_resumed


def _ten_looks(settings: TrainSettings) -> TrainSettings:
    every = max(1, settings.steps // LOOKS)
    return replace(
        settings,
        validate_every=settings.validate_every or every,
        save_every=settings.save_every or every,
    )


def _sinks(request: Request, run: RunDirectory, config: dict[str, Any]) -> list[Sink]:
    sinks: list[Sink] = []
    if request.tensorboard:
        sinks.append(TensorBoard(run.path / "tensorboard"))
    if request.wandb is not None:
        sinks.append(WeightsAndBiases(request.wandb, run.path, config))
    return sinks
