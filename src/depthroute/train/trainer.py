"""One model and its steps: whatever trains or times a model calls :meth:`Trainer.take_step`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthroute.data.batches import Batch
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.models.model import RoutedCausalLM, compile_regions, recompute_layers
from depthroute.models.stand_ins import without_sublayers
from depthroute.ops import compile_ahead, compile_options
from depthroute.ops.private.regions import compile_whole
from depthroute.parallel.spread import Spread
from depthroute.parallel.world import SINGLE, World
from depthroute.parallel.wrap import (
    casts_itself,
    global_norm_clipped,
    named_tensors,
    parts_of,
    syncing,
    unwrapped,
)
from depthroute.runs import environment
from depthroute.train import graphs
from depthroute.train.compiler import use_own_caches, use_triton_cache
from depthroute.train.divergence import locate
from depthroute.train.graphs import StepGraphs
from depthroute.train.loss import called_loss, head_obstacle, loss_sum, obstacle
from depthroute.train.optim import build_optimizer, set_rates
from depthroute.train.settings import TrainSettings
from depthroute.train.verdict import Verdict, judged

logger = logging.getLogger("depthroute")

RECENT = 32
"""Losses whose median a spike is measured against."""
LEAST_RECENT = 8
"""Before so many are known nothing is called a spike."""


class DivergenceError(DepthrouteError):
    """The loss or the gradient stopped being a number, or the loss jumped."""

    def __init__(self, step: int, what: str, value: float, lr: float, site: str = "") -> None:
        self.step, self.site = step, site
        super().__init__(
            f"{what} is {value} at step {step} (lr {lr:.3g}){site and ', ' + site}; the parameters "
            "are those of the step before. Lower lr or clip, or lengthen warmup_steps"
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
    """Of all ranks."""
    skipped: str | None = None
    """Why the update was left out; None where it was made."""


class Trainer:
    """A model, its optimiser and how many steps they have taken.

    A step is given its batch, so that several trainers can share one. With a ``world`` of several
    ranks ``model`` is what :func:`depthroute.parallel.wrap.wrap` made, and each rank is given its
    own part of the batch.

    Where steps ``is_timed`` against another trainer's, each waits for its own update, which would
    otherwise run in the other's time.
    """

    def __init__(
        self,
        model: Any,
        settings: TrainSettings,
        world: World = SINGLE,
        *,
        is_timed: bool = False,
    ) -> None:
        self.model = model
        self.settings = settings
        self.is_timed = is_timed
        self.world = world
        self.inner = unwrapped(model)
        self.parts = parts_of(model)
        for part in self.parts:
            if settings.gradient_checkpointing:
                recompute_layers(part)
            if settings.precision == "bf16":
                # autocast leaves embeddings fp32, and with them every source of the stream
                part.get_input_embeddings().register_forward_hook(_in_bf16)
        self.optimizer = build_optimizer(self.inner, settings)
        if settings.compile is not None:
            self._compile(settings.compile)
        self.needs_logits = settings.loss_chunk == 0 or self._must_have_logits()
        self.completed = 0
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.device = world.device if isinstance(model, Spread) else next(model.parameters()).device
        if isinstance(model, Spread):
            model.loss = self._spread_loss
        self.graphs = self._graphs()
        self._is_rehearsed = not self._launches_many()
        model.train()

    def _compile(self, backend: str) -> None:
        use_own_caches()
        # every batch has one shape, and a graph that keeps others open is a slower one
        if self.settings.compile_scope == "regions":
            compile_regions(self.inner, backend, dynamic=False)
            return
        options = compile_options() if backend == "inductor" else None
        compile_whole(self.model, backend=backend, dynamic=False, options=options)

    def _graphs(self) -> StepGraphs | None:
        reason = graphs.obstacle(self.settings, self.device, self.world.size)
        graphs.refuse_uncaptured(self.settings, reason)
        if reason is not None or self.settings.cuda_graph is False:
            return None
        return StepGraphs(self._part_gradients, self._judged, self.inner)

    def _launches_many(self) -> bool:
        """Whether this rank has kernels of ours to compile, enough to begin before they are
        launched. Ranks of a machine share them on disk."""
        is_plain = isinstance(self.inner, RoutedCausalLM) and not casts_itself(self.model)
        is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
        return self.device.type == "cuda" and is_plain and is_first and self.inner.plan.chooses

    def _rehearse(self, part: Batch) -> None:
        """Before anything else is compiled; the threads go on while it is."""
        if self._is_rehearsed:
            return
        self._is_rehearsed, chunk = True, self._chunk(self.inner)
        if self.settings.compile == "inductor":
            use_triton_cache(self.device)

        plain = Batch(*part[:2])  # what attention masks changes none of these kernels

        def run(model: Any) -> None:
            """A step and a validation."""
            without_sublayers(model)
            with torch.enable_grad(), self._autocast():
                loss = loss_sum(model.train(), plain, chunk)
            if self.settings.compile_scope == "regions":  # of a whole graph gradients are changed
                loss.backward()
            with torch.no_grad(), self._autocast():
                loss_sum(model.eval(), plain, chunk)

        compile_ahead(self.inner, run)

    @property
    def is_done(self) -> bool:
        return self.completed >= self.settings.steps

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What is saved of the model on this rank."""
        return named_tensors(self.model)

    @property
    def is_replayed(self) -> bool:
        """Whether the last step was replayed, and so took the memory of the one it was captured
        from."""
        return self.graphs is not None and self.graphs.is_replayed

    def resident_tensors(self) -> Iterator[Tensor]:
        return environment.resident_tensors(self.model, self.optimizer)

    def take_step(self, batch: Batch) -> StepResult:
        """Forward, backward, clip, update. A bad step never touches the parameters.

        Up to the verdict nothing waits for an accelerator, so that its queue does not run dry;
        waiting for it makes the time the step's.
        """
        started = time.perf_counter()
        step = self.completed
        batch = batch.to(self.device)
        tokens = self._num_targets(batch)
        parts = batch.split(self.settings.accumulation)
        self._rehearse(parts[0])
        total = self._gradients(parts, tokens)
        set_rates(self.optimizer, step, self.settings)
        verdict = self._finish(total, tokens)
        lr = self.optimizer.param_groups[0]["lr"]
        skipped = self._judgement(verdict, parts, lr) if verdict.is_bad else None
        if skipped is None:
            self.recent.append(verdict.loss)
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_timed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.completed += 1
        return StepResult(
            step=step,
            loss=verdict.loss,
            lr=lr,
            gradient_norm=verdict.norm,
            seconds=time.perf_counter() - started,
            tokens=verdict.tokens,
            skipped=skipped,
        )

    def _num_targets(self, batch: Batch) -> Tensor:
        """Of all ranks, on this one's device."""
        if self.world.size == 1:
            return batch.counted()
        # ranks that are given the same part of the batch count it once
        tokens = round(self.world.sum(batch.num_targets) * self.world.part[1] / self.world.size)
        return torch.full((), tokens, device=self.device)

    def _gradients(self, parts: list[Batch], tokens: Tensor) -> Tensor:
        """What this rank adds to the mean loss of a step of so many ``tokens``; its parameters
        hold their gradients."""
        if self.graphs is not None:
            total = self.graphs(parts, tokens)
            graphs.refuse_uncaptured(self.settings, self.graphs.obstacle)
            return total
        total = torch.zeros((), device=self.device)
        if isinstance(self.model, Spread):
            tokens = tokens.cpu()  # pipelines want a number, of which one wait is enough
        for index, part in enumerate(parts):
            with syncing(self.model, index == len(parts) - 1):
                if isinstance(self.model, Spread):
                    total += self._spread_gradients(part, tokens)
                else:
                    total += self._part_gradients(part, tokens)
        return total

    def _finish(self, total: Tensor, tokens: Tensor) -> Verdict:
        """Judges the step and, if it is good, makes the update."""
        ending = None if self.graphs is None else self.graphs.ending(self.optimizer)
        if ending is not None:
            return ending.replay(self._most)
        verdict = Verdict.read(self._judged(total, tokens, self._most))
        if not verdict.is_bad:
            self.optimizer.step()
        return verdict

    def _judged(self, total: Tensor, tokens: Tensor, most: Tensor | float) -> Tensor:
        """A verdict on the gradients that the parameters hold, which are clipped."""
        norm = global_norm_clipped(self.inner, self.settings.clip)
        return judged(self.world.summed(total), norm, tokens, most)

    @property
    def _most(self) -> float:
        """A loss above it is a spike."""
        if self.settings.spike is None or len(self.recent) < LEAST_RECENT:
            return math.inf
        return statistics.median(self.recent) + self.settings.spike

    def _spread_gradients(self, part: Batch, tokens: Tensor) -> Tensor:
        assert isinstance(self.model, Spread)
        with self._autocast():
            return self.model.backward(*part[:2], num_targets=tokens.item(), **part.arguments)

    def _part_gradients(self, part: Batch, tokens: Tensor) -> Tensor:
        loss = self._loss_sum(part) / tokens.float()
        # each rank's gradient is averaged with the others', so its share of the mean is its sum
        # times the number of ranks
        (loss * self.world.size if self.world.size > 1 else loss).backward()
        return loss.detach()

    def _judgement(self, verdict: Verdict, parts: list[Batch], lr: float) -> str:
        """Of a bad step: an error, or by policy the reason to skip it."""
        values = {"loss": verdict.loss, "the gradient norm": verdict.norm}
        bad = next((w for w, value in values.items() if not math.isfinite(value)), None)
        if bad is not None:
            site = locate(self.inner, lambda: self._losses(parts), self.world.first)
        else:
            bad = "loss"
            site = f"{verdict.loss - statistics.median(self.recent):.2f} above the recent median"
        if self.settings.on_bad_step == "stop":
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergenceError(self.completed, bad, values[bad], lr, site)
        return f"{bad} is {values[bad]}{site and ', ' + site}"

    def _losses(self, parts: list[Batch]) -> None:
        for part in parts:
            self._loss_sum(part)

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Without gradients, of a model over a mesh this rank's share of it."""
        with self._autocast():
            if isinstance(self.model, Spread):
                return self.model.evaluate(*batch[:2], **batch.arguments)
            return loss_sum(self.model, batch, self._chunk(self.inner))

    def _spread_loss(self, model: Any, arguments: dict[str, Any], targets: Tensor) -> Tensor:
        tokens = self.model.tokens(targets.shape[1])
        return called_loss(model, arguments, targets, self._chunk(model), tokens)

    def _chunk(self, model: Any) -> int | None:
        needs_logits = self.needs_logits or head_obstacle(model, self._has_shards) is not None
        return 0 if needs_logits else self.settings.loss_chunk

    @property
    def _has_shards(self) -> bool:
        """Whether weights are FSDP2's shards, which it makes whole for the loss."""
        return casts_itself(self.model)

    def _must_have_logits(self) -> bool:
        chunk, error = self.settings.loss_chunk, None
        model = self.model.headed if isinstance(self.model, Spread) else self.inner
        reason = None if model is None else obstacle(model, self._has_shards)
        if reason is not None and chunk is not None:
            error = ConfigError(
                f"train.loss_chunk={chunk} cannot be: {reason}, so the loss needs whole logits. "
                "Leave it out, or set loss_chunk=0"
            )
        if chunk is not None:  # the head is on some ranks only
            self.world.raise_together(error)
        if reason is not None:
            logger.warning("the loss is that of whole logits: %s", reason)
        return reason is not None

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Parameters stay fp32 and are the master weights: nothing to keep in step or to save
        twice, and the same code under DDP. FSDP2 casts by its own policy."""
        if self.settings.precision == "fp32" or casts_itself(self.model):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def validate(
        self,
        batches: list[Batch],
        on_part: Callable[[int, int], None] = lambda done, parts: None,
    ) -> float:
        """Mean nats per token over held-out batches, which every rank computes in full.

        ``on_part`` hears how many parts are done, and of how many.
        """
        self.model.eval()
        count = sum(batch.num_targets for batch in batches)
        if self.settings.compile is not None:
            batches = [batch.padded(len(batches[0].inputs)) for batch in batches]
        parts = [p for batch in batches for p in batch.split(self.settings.accumulation)]
        if isinstance(self.model, Spread):
            rows = self.model.rows(len(parts[0].inputs))
            parts = [part.padded(rows) for part in parts if len(part.inputs)]
        parts, sums = [part for part in parts if len(part.inputs)], []
        self._rehearse(parts[0].to(self.device))
        for done, part in enumerate(parts):
            on_part(done, len(parts))
            sums.append(self._loss_sum(part.to(self.device)))
        on_part(len(parts), len(parts))
        self.model.train()
        total = sum(value.item() for value in sums)
        if isinstance(self.model, Spread):
            total = self.world.sum(total) / self.world.part[1]
        return total / count

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """In the precision of training but never compiled: a look at a model runs once."""
        with torch.compiler.set_stance("force_eager"), self._autocast():
            yield


def _in_bf16(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)
