"""What a training run is: frozen, validated, and equal to itself after a trip through JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from depthroute.checks import (
    check_betas,
    check_choice,
    check_number,
    check_object,
    check_switch,
    check_whole,
    is_finite,
)
from depthroute.errors import ConfigError
from depthroute.presets import OUTPUT_INITS, Preset, Recipe

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
PRECISIONS = ("fp32", "bf16")
POLICIES = ("stop", "skip")
SCOPES = ("regions", "whole")

_WHOLE = {"steps": 1, "batch_size": 1, "sequence_length": 1, "warmup_steps": 0}
_WHOLE |= {"validate_every": 1, "validation_sequences": 1, "accumulation": 1}
_WHOLE |= {"save_every": 1, "keep_last": 1, "loss_chunk": 0}
_NUMBERS: dict[str, dict[str, Any]] = {
    "lr": {"above": 0.0},
    "min_lr": {"least": 0.0},
    "routing_lr": {"above": 0.0, "optional": True},
    "routing_min_lr": {"least": 0.0, "optional": True},
    "weight_decay": {"least": 0.0},
    "clip": {"above": 0.0},
    "spike": {"above": 0.0, "optional": True},
    "decay_fraction": {"above": 0.0, "most": 1.0},
}
_OPTIONAL = ("validate_every", "save_every", "loss_chunk")
_SWITCHES = ("gradient_checkpointing", "importance", "document_masking")


@dataclass(frozen=True)
class TrainSettings:
    """Everything the loop needs to know besides the model, the data and the seed."""

    steps: int
    batch_size: int
    """Sequences a step."""
    sequence_length: int
    lr: float
    min_lr: float = 0.0
    routing_lr: float | None = None
    """Peak rate of the routing parameters; left out, ``lr``."""
    routing_min_lr: float | None = None
    """Where the routing rate ends; left out, in proportion to ``min_lr``."""
    warmup_steps: int = 0
    schedule: str = "cosine"
    decay_fraction: float = 0.2
    """wsd only: the last part of the run that decays."""
    optimizer: str = "adamw"
    """muon: Muon for the matrices of the layers, with updates as large as AdamW's, so that one
    rate serves both; AdamW for embeddings, head, norms, biases and routing."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm."""
    output_init: str = "default"
    """From scratch: how the projections that write into the stream start, see OUTPUT_INITS."""
    validate_every: int | None = None
    """Steps between validations; the end of the run is always validated."""
    validation_sequences: int = 256
    accumulation: int = 1
    """Parts that a step's sequences are run in, one after the other."""
    precision: str = "fp32"
    """bf16: the stream and the matrix products; parameters, gradients and optimiser stay fp32."""
    gradient_checkpointing: bool = False
    compile: str | None = None
    """A torch.compile backend, such as inductor."""
    loss_chunk: int | None = None
    """Tokens whose logits the loss holds at a time; left out, as many as make half a billion
    numbers. 0 makes the logits of all tokens first, as the model's own forward does."""
    compile_scope: str = "regions"
    """What is compiled: what layers have in common, once for all of them, or the whole model."""
    cuda_graph: bool | None = None
    """Replay steps as CUDA graphs; left out, wherever that can be."""
    importance: bool = False
    """After training, also how much the loss rises where a site may not read a source."""
    document_masking: bool = False
    """Attention and positions start anew at every document of a packed sequence."""
    on_bad_step: str = "stop"
    """What a loss or gradient that is no number, or a spike, does: stop the run or skip it."""
    spike: float | None = None
    """Nats above the median of recent losses from which a loss is a spike; left out, none is."""
    save_every: int | None = None
    """Steps between checkpoints; the end and an interruption are always saved."""
    keep_last: int = 2
    """Newest checkpoints to keep, besides the one with the best validation loss."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", check_betas("train.betas", self.betas))
        for name, least in _WHOLE.items():
            is_optional = name in _OPTIONAL
            check_whole(f"train.{name}", getattr(self, name), least, optional=is_optional)
        for name, bounds in _NUMBERS.items():
            check_number(f"train.{name}", getattr(self, name), **bounds)
        if self.routing_min_lr is not None and self.routing_min_lr > self.routing_peak:
            raise ConfigError(
                f"train.routing_min_lr={self.routing_min_lr} is above the routing rate "
                f"{self.routing_peak}; give at most that"
            )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"train.min_lr={self.min_lr} is above train.lr={self.lr}; the schedule ends at "
                "min_lr, so give at most lr"
            )
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"train.warmup_steps={self.warmup_steps} leaves nothing of train.steps="
                f"{self.steps} to train at the full rate; use fewer than {self.steps}"
            )
        choices = {"schedule": SCHEDULES, "precision": PRECISIONS, "on_bad_step": POLICIES}
        choices |= {"optimizer": OPTIMIZERS, "output_init": OUTPUT_INITS}
        choices |= {"compile_scope": SCOPES}
        for name, allowed in choices.items():
            check_choice(f"train.{name}", getattr(self, name), allowed)
        for name in (*_SWITCHES, *(["cuda_graph"] if self.cuda_graph is not None else [])):
            check_switch(f"train.{name}", getattr(self, name))
        if self.compile is not None:
            check_choice("train.compile", self.compile, _compilers())
        elif self.compile_scope != TrainSettings.compile_scope:
            raise ConfigError(
                f"train.compile_scope={self.compile_scope!r} has no meaning without a compiler; "
                "set compile=inductor, or leave it out"
            )
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"train.accumulation={self.accumulation} does not divide train.batch_size="
                f"{self.batch_size} into equal parts; choose a divisor"
            )
        if self.schedule != "wsd" and self.decay_fraction != TrainSettings.decay_fraction:
            raise ConfigError(
                f"train.decay_fraction={self.decay_fraction} has no meaning for schedule="
                f"{self.schedule!r}; it belongs to wsd. Leave it out, or set schedule=wsd"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def routing_peak(self) -> float:
        return self.lr if self.routing_lr is None else self.routing_lr

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainSettings:
        check_object("training setting", values, _names())
        missing = [
            name for name in ("steps", "batch_size", "sequence_length", "lr") if name not in values
        ]
        if missing:
            raise ConfigError(f"training settings without {', '.join(missing)}; give them")
        return cls(**values)


def from_preset(preset: Preset, changes: dict[str, Any] | None = None) -> TrainSettings:
    """The preset's published settings with ``changes`` on top."""
    return from_recipe(preset.recipe, changes, f"preset {preset.name!r}")


def from_recipe(recipe: Recipe, changes: dict[str, Any] | None, name: str) -> TrainSettings:
    """Warm-up keeps its proportion of the steps and ``min_lr`` of ``lr`` unless told otherwise.

    ``name`` is whose recipe it is, for errors.
    """
    changes = {} if changes is None else changes
    check_object("training setting", changes, _names())
    values: dict[str, Any] = {
        "steps": recipe.steps,
        "sequence_length": recipe.sequence_length,
        "lr": recipe.lr,
        "betas": recipe.betas,
        "weight_decay": recipe.weight_decay,
        "clip": recipe.clip,
    }
    if recipe.tokens_per_step and recipe.sequence_length:
        values["batch_size"] = recipe.tokens_per_step // recipe.sequence_length
    warmup = _in_proportion(recipe.warmup_steps, recipe.steps, changes.get("steps"))
    values["warmup_steps"] = None if warmup is None else round(warmup)
    values["min_lr"] = _in_proportion(recipe.min_lr, recipe.lr, changes.get("lr"))
    values = {key: value for key, value in values.items() if value is not None} | changes
    missing = [n for n in ("steps", "batch_size", "sequence_length", "lr") if n not in values]
    if missing:
        raise ConfigError(
            f"{name} has no published {', '.join(missing)}; give "
            + " ".join(f"--set {key}=..." for key in missing)
        )
    return TrainSettings(**values)


def _in_proportion(value: float | None, whole: float | None, changed: Any) -> float | None:
    """``value`` as ``whole`` becomes ``changed``; what is no number is refused by validation."""
    if value is None or not whole or not is_finite(changed):
        return value
    return value * changed / whole


def _names() -> list[str]:
    return [f.name for f in fields(TrainSettings)]


def _compilers() -> list[str]:
    """Every backend of torch.compile here, those for debugging too: asked only if one is named."""
    import torch

    return torch.compiler.list_backends(exclude_tags=())
