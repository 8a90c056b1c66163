"""The one training loop. Everything that trains a model takes its steps here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthroute.errors import DepthrouteError
from depthroute.train.data import Batch, TokenData
from depthroute.train.optim import build_optimizer, rate_factor, set_rate
from depthroute.train.settings import TrainSettings


class DivergenceError(DepthrouteError):
    """The loss or the gradient stopped being a number."""

    def __init__(self, step: int, what: str, value: float, lr: float) -> None:
        self.step = step
        super().__init__(
            f"{what} is {value} at step {step} (lr {lr:.3g}); the parameters are those of the "
            "step before. Lower lr or clip, or lengthen warmup_steps"
        )


@dataclass(frozen=True)
class StepResult:
    step: int
    loss: float
    """Mean nats per token of this step's batch, before the update."""
    lr: float
    gradient_norm: float
    """Before clipping."""
    seconds: float
    tokens: int


class Trainer:
    """A model, its optimiser and how many steps they have taken.

    :meth:`take_step` is given its batch, so that several trainers can share one; :meth:`run` draws
    the batches itself.
    """

    def __init__(self, model: Any, settings: TrainSettings) -> None:
        self.model = model
        self.settings = settings
        self.optimizer = build_optimizer(model, settings)
        self.completed = 0
        self.device = next(model.parameters()).device
        model.train()

    @property
    def is_done(self) -> bool:
        return self.completed >= self.settings.steps

    def resident_tensors(self) -> Iterator[Tensor]:
        """What stays in memory between steps: parameters, buffers and the optimiser's state."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def run(self, data: TokenData, seed: int) -> Iterator[StepResult]:
        """The remaining steps, each result handed over as it is made."""
        while not self.is_done:
            yield self.take_step(data.batch(self.completed, seed))

    def take_step(self, batch: Batch) -> StepResult:
        """Forward, backward, clip, update. A bad step raises before it touches the parameters."""
        started = time.perf_counter()
        step = self.completed
        set_rate(self.optimizer, rate_factor(step, self.settings))
        lr = self.optimizer.param_groups[0]["lr"]
        loss = next_token_loss(self.model, batch.to(self.device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        # reading both numbers also waits for an accelerator, so the time is the step's
        values = {"loss": loss.item(), "the gradient norm": norm.item()}
        for what, value in values.items():
            if not math.isfinite(value):
                raise DivergenceError(step, what, value, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.completed += 1
        return StepResult(
            step=step,
            loss=values["loss"],
            lr=lr,
            gradient_norm=values["the gradient norm"],
            seconds=time.perf_counter() - started,
            tokens=batch.targets.numel(),
        )

    @torch.no_grad()
    def validate(self, batches: list[Batch]) -> float:
        """Mean nats per token over held-out batches."""
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches:
            tokens = batch.targets.numel()
            total += next_token_loss(self.model, batch.to(self.device)).item() * tokens
            count += tokens
        self.model.train()
        return total / count


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats; targets are the inputs one token on."""
    logits = model(input_ids=batch.inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
