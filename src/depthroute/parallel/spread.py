"""A routed model spread over a mesh of ranks: this rank's part of it, and how all of them step.

    spread = Spread(model, layout, world)     # every rank, from the same weights
    share = spread.backward(inputs, targets, num_targets=tokens_of_all_replicas)
    spread.finish_gradients()
    norm = spread.clip_gradients(1.0)

Pipelines are those of :mod:`depthroute.parallel.pipeline`, matrices are shared as
:mod:`depthroute.parallel.tensor` says, and replicas sum their gradients when the last part of a
step is through, or shard their weights with FSDP2, group by group as without a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from depthroute.parallel import tensor
from depthroute.parallel.gradients import clip, sum_over
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.pipeline import Pipeline, summed_cross_entropy
from depthroute.parallel.sharding import shard
from depthroute.parallel.stages import Loss
from depthroute.parallel.world import World


class Spread(nn.Module):
    """Made from a model with the same weights on every rank, of which each keeps its part."""

    loss: Loss
    """Of a model with a head, the arguments of its forward and targets: the sum over this rank's
    ``tokens`` of their losses."""

    def __init__(
        self, model: Any, layout: MeshLayout, world: World, *, precision: str = "fp32"
    ) -> None:
        super().__init__()
        self.layout, self.device = layout, world.device
        self.loss = summed_cross_entropy
        table = model.get_input_embeddings().weight
        self.embedding = next(name for name, p in model.named_parameters() if p is table)
        self.mesh = layout.mesh(world.device.type)
        self.partial = tensor.share(model, self.mesh["tp"]) if layout.tp > 1 else frozenset()
        """Names of parameters whose gradients the ranks of ``tp`` have to sum."""
        self.pipeline: Pipeline | None = None
        stages = layout.pipeline(model.plan)
        if stages is None:
            parts = roots = [model.to(self.device)]
        else:
            group = self.mesh.get_group("pp")
            self.pipeline = Pipeline(
                model, stages, device=self.device, group=group, loss=self._summed
            )
            roots = self.pipeline.stages
            parts = [stage.model for stage in roots]
        if layout.mode == "fsdp":
            if self.pipeline is not None:  # FSDP2 reduces gradients with the backward of its inputs
                self.pipeline.splits_backward = False
            for root, part in zip(roots, parts, strict=True):
                shard(root, part, self.mesh["dp"], precision)
        self.parts = nn.ModuleList(parts)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a spread model is run with backward() and evaluate(), by all its ranks")

    def backward(
        self, inputs: Tensor, targets: Tensor, *, num_targets: float, **arguments: Tensor
    ) -> Tensor:
        """Forward and backward of this replica's part of a batch; of the batch's loss, what this
        rank has computed of it. Gradients are added to what there is."""
        # FSDP2 takes the mean over replicas, and wanted is the sum
        scale = self.layout.dp if self.layout.mode == "fsdp" else 1
        assert scale is not None
        if self.pipeline is not None:
            share = self.pipeline.share(True, inputs, targets, num_targets / scale, arguments)
        else:
            share = self._summed(self._only, self._called_with(inputs, arguments), targets)
            share = share * (scale / num_targets)
            share.backward()
        return share.detach() / scale

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        """The summed loss without gradients, what this rank has computed of it."""
        if self.pipeline is not None:
            return self.pipeline.share(False, inputs, targets, 1.0, arguments)
        return self._summed(self._only, self._called_with(inputs, arguments), targets)

    @property
    def _only(self) -> Any:
        (model,) = self.parts
        return model

    def _called_with(self, inputs: Tensor, arguments: dict[str, Tensor]) -> dict[str, Any]:
        return {"input_ids": inputs, "use_cache": False, **arguments}

    def _summed(self, model: Any, arguments: dict[str, Any], targets: Tensor) -> Tensor:
        return self.loss(model, arguments, targets)

    def tokens(self, length: int) -> slice:
        """Whose losses are this rank's, of sequences of ``length``."""
        ranks, rank = self.layout.tp, self.mesh.get_local_rank("tp")
        return slice(rank * length // ranks, (rank + 1) * length // ranks)

    def rows(self, sequences: int) -> int:
        """So many at least, and as a pipeline cuts them into micro-batches."""
        parts = 1 if self.pipeline is None else self.pipeline.layout.micro_batches
        return -(-sequences // parts) * parts

    @property
    def headed(self) -> Any:
        """The part that has the model's head; None where that is on another rank."""
        if self.pipeline is None:
            return self._only
        last = self.pipeline.stages[-1]
        return last.model if last.stage.after is None else None

    def syncs(self, is_last: bool) -> None:
        """Whether the next backward is the last part of a step."""
        if self.pipeline is None and isinstance(self._only, FSDPModule):
            self._only.set_requires_gradient_sync(is_last)

    def finish_gradients(self) -> None:
        """After the last part of a step: what ranks have of the same parameter is summed."""
        named = list(self.named_parameters())
        if self.partial:
            sum_over(self.mesh.get_group("tp"), (p for n, p in named if n in self.partial))
        if self.layout.dp != 1 and self.layout.mode == "ddp":
            sum_over(self.mesh.get_group("dp"), (p for _, p in named))

    def clip_gradients(self, most: float) -> float:
        """Scale the gradients of all ranks so that their norm is at most ``most``; what it was."""
        return self.clipped_norm(most).item()

    def clipped_norm(self, most: float) -> Tensor:
        """As :meth:`clip_gradients`, without waiting for the device."""
        return clip(self.parameters(), most, copies=self._copies, device=self.device)

    def _copies(self, parameter: nn.Parameter) -> int:
        """Ranks that have the same numbers of it; 0 for a second copy of an embedding."""
        if parameter is self.twin:
            return 0
        sharded: set[str] = set()
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            places = zip(axes, parameter.placements, strict=True)
            sharded = {axis for axis, place in places if not place.is_replicate()}
        sizes = {"dp": self.layout.dp or 1, "tp": self.layout.tp}
        return math.prod(size for axis, size in sizes.items() if axis not in sharded)

    @property
    def twin(self) -> nn.Parameter | None:
        """The head's weight, where it is here as a copy of the embedding's."""
        return None if self.pipeline is None else self.pipeline.twin

    # By the names of the whole model, as if the parts were one module.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(self, *arguments: Any, **options: Any) -> Any:
        for part in self.parts:
            yield from part.named_modules(*arguments, **options)
