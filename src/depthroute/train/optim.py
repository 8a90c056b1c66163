"""The optimiser and its rate. Schedules are pure functions of the step, so resuming is exact."""

from __future__ import annotations

import math
from typing import Any

import torch

from depthroute.models.convert import parameter_groups
from depthroute.train.settings import TrainSettings


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


def build_optimizer(model: Any, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with its own group and rate for the routing; fused where torch has the kernel."""
    groups = parameter_groups(
        model, settings.lr, settings.routing_lr, weight_decay=settings.weight_decay
    )
    for group in groups:
        group["peak_lr"] = group["lr"]
        group["floor"] = settings.min_lr / settings.lr
        if group["name"] == "routing" and settings.routing_min_lr is not None:
            group["floor"] = settings.routing_min_lr / settings.routing_peak
    is_fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=is_fused)


def set_rates(optimizer: torch.optim.Optimizer, step: int, settings: TrainSettings) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate_factor(step, settings, group["floor"])
