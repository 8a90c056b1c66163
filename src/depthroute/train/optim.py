"""The optimiser and its rate. Schedules are pure functions of the step, so resuming is exact."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from depthroute.errors import ConfigError
from depthroute.models.architecture import decoder_layers
from depthroute.models.convert import parameter_groups
from depthroute.parallel.wrap import parts_of
from depthroute.train.muon import Muon
from depthroute.train.settings import TrainSettings

Group = dict[str, Any]
"""Parameters and how they are trained, as optimisers take it."""


def cosine(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """Fraction of the peak rate: linear warm-up, then half a cosine that ends at ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def wsd(step: int, *, steps: int, warmup: int, decay: int, floor: float) -> float:
    """Warm-up, a stable stretch at the peak, and a linear decay that ends at ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    remaining = (steps - 1 - step) / max(1, decay)
    return floor + (1 - floor) * min(1.0, max(0.0, remaining))


def rate_factor(step: int, settings: TrainSettings, floor: float | None = None) -> float:
    """What a peak rate is multiplied by at ``step``; left out, the floor is the base's."""
    floor = settings.min_lr / settings.lr if floor is None else floor
    steps, warmup = settings.steps, settings.warmup_steps
    if settings.schedule == "cosine":
        return cosine(step, steps=steps, warmup=warmup, floor=floor)
    decay = min(steps - warmup, round(settings.decay_fraction * steps))
    return wsd(step, steps=steps, warmup=warmup, decay=decay, floor=floor)


class MuonAndAdamW:
    """Muon for the matrices of the layers and AdamW for everything else, as one optimiser.

    Each parameter is in a group of exactly one of the two, and its state under its own key, so
    whoever saves, clears or counts the state need not know of two. Muon's step makes a Python
    number of the rate: it is never part of a compiled or captured graph.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: Muon) -> None:
        self.parts = (adamw, muon)
        self.state = muon.state = adamw.state
        self.param_groups = [*adamw.param_groups, *muon.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def build_optimizer(model: Any, settings: TrainSettings) -> torch.optim.AdamW | MuonAndAdamW:
    """With its own group and rate for the routing; AdamW is fused where torch has the kernel."""
    groups = parameter_groups(
        model, settings.lr, settings.routing_lr, weight_decay=settings.weight_decay
    )
    # a stage of a pipeline may have nothing to train, and optimisers want some group
    groups = groups or [{"name": "no_decay", "params": [], "lr": settings.lr, "weight_decay": 0.0}]
    for group in groups:
        group["peak_lr"] = group["lr"]
        group["floor"] = settings.min_lr / settings.lr
        if group["name"] == "routing" and settings.routing_min_lr is not None:
            group["floor"] = settings.routing_min_lr / settings.routing_peak
    is_fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    rest, matrices = groups, None
    if settings.optimizer == "muon":
        rest, matrices = _apart(groups, model)
    rest = [part for group in rest for part in _by_mesh(group)]
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=settings.betas, fused=is_fused)
    if matrices is None:
        return adamw
    return MuonAndAdamW(adamw, Muon([matrices], settings.lr))


def _by_mesh(group: Group) -> list[Group]:
    """One group for each mesh that its parameters are distributed over: fused updates take tensors
    of one kind."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return [group | {"params": mine} for mine in by_mesh.values()] or [group]


def _apart(groups: list[Group], model: Any) -> tuple[list[Group], Group]:
    """All groups without the matrices of the layers, and those as a group."""
    layers = (layer for part in parts_of(model) for layer in decoder_layers(part))
    inside = {id(p) for layer in layers for p in layer.parameters() if p.ndim == 2}
    rest, matrices = [], None
    for group in groups:
        parameters = group["params"]
        others = [p for p in parameters if group["name"] != "decay" or id(p) not in inside]
        if len(others) < len(parameters):
            kept = {id(p) for p in others}
            mine = [p for p in parameters if id(p) not in kept]
            matrices = group | {"name": "matrices", "params": mine}
            if any(isinstance(p, DTensor) for p in mine):
                raise ConfigError(
                    "train.optimizer='muon' orthogonalises whole matrices, and those of this model "
                    "are sharded; use adamw, or a model that every rank has whole"
                )
        if others:
            rest.append(group | {"params": others})
    if matrices is None:
        raise ConfigError(
            "train.optimizer='muon' is for the matrices of the layers, and none of them is "
            "trained; use adamw"
        )
    return rest, matrices


def set_rates(
    optimizer: torch.optim.Optimizer | MuonAndAdamW, step: int, settings: TrainSettings
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate_factor(step, settings, group["floor"])
