"""A routed model trained by a pipeline of ranks, on ``torch.distributed.pipelining``.

    layout = PipelineLayout.of(model.plan, ranks=4, schedule="interleaved", chunks=2)
    pipeline = Pipeline(model, layout)           # this rank's stages; the rest may be forgotten
    optimizer = torch.optim.AdamW(pipeline.parameters())
    loss = pipeline.step(input_ids, targets)     # forward and backward of all micro-batches
    pipeline.clip_gradients(1.0)
    optimizer.step()

torch's schedules run the stages; here is what they hand over and what a rank keeps
(:mod:`depthroute.parallel.layout`, :mod:`depthroute.parallel.cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

from depthroute.errors import ConfigError, DepthrouteError
from depthroute.models.model import RoutedCausalLM
from depthroute.parallel.cache import BlockCache
from depthroute.parallel.gradients import clip, local
from depthroute.parallel.layout import PipelineLayout
from depthroute.parallel.stages import Loss, StageModule, is_tied, num_parameters
from depthroute.schedule import cut

IGNORED = -100
SPLITS_BACKWARD = (2, 13)
"""The torch whose zero-bubble schedules may leave the gradients of weights for later. 2.11 adds up
those of a node's several outputs, and a mix has several."""


class Traffic(NamedTuple):
    """Bytes that were sent to other ranks."""

    forward: int = 0
    backward: int = 0


class _PipelineStage(PipelineStage):
    """torch's, which tells the cache the micro-batch and counts what it sends."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        group: Any,
        traffic: dict[int, Traffic],
        is_split: bool,
    ) -> None:
        index, num_stages = module.stage.index, len(module.layout.stages)
        rest = None if is_split else _nothing_left
        super().__init__(module, index, num_stages, device, group=group, dw_builder=rest)
        self.cache, self.traffic = module.cache, traffic

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.cache.running(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self._count(forward=_bytes_of(operations))
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self._count(backward=_bytes_of(operations))
        return operations

    # where a V turns, torch hands gradients over in evaluation too, and then has none

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _get_init_p2p_neighbors_ops(self) -> list[distributed.P2POp]:
        """Without those to the rank itself, where a V turns: gloo has no connection to itself.

        Private; torch 2.11 asks for them whatever the backend, later ones only with NCCL.
        """
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def _count(self, forward: int = 0, backward: int = 0) -> None:
        before = self.traffic[self.stage_index]
        after = Traffic(before.forward + forward, before.backward + backward)
        self.traffic[self.stage_index] = after


def _nothing_left() -> Callable[[], None]:
    """What a stage that runs all of backward at once has to do later."""
    return lambda: None


def _bytes_of(operations: list[distributed.P2POp]) -> int:
    return sum(operation.tensor.nbytes for operation in operations)


class Pipeline:
    """This rank's stages of a routed causal ``model``, and how all ranks step together.

    Every rank of ``group`` (all, if left out) makes one from the same ``layout`` and a model with
    the same weights. The stages hold the model's own parameters, those of their layers alone, on
    ``device``. ``loss`` is given the model with the head, the arguments of its forward and the
    targets of a micro-batch, and returns the sum of their losses; left out, it is cross-entropy
    over the targets that are not -100. The batch's loss is what all of them come to, divided by the
    number of its targets.
    """

    def __init__(
        self,
        model: Any,
        layout: PipelineLayout,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        loss: Loss | None = None,
    ) -> None:
        self.layout, self.group, self.device = layout, group, torch.device(device)
        _refuse_misfits(model, layout, group)
        self.rank = distributed.get_rank(group)
        self.cache = BlockCache()
        self._loss, self._num_targets = loss or summed_cross_entropy, 1.0
        self.is_tied = is_tied(model)
        self._num_parameters = num_parameters(model, layout)
        self.splits_backward = splits_backward(model)
        """Whether zero-bubble schedules leave gradients of weights for later; may be set to False
        before the first step, where something hooks on to the backward of whole stages."""
        self.stages = [
            StageModule(model, layout, stage, self.cache, self._share).to(self.device)
            for stage in layout.on(self.rank)
        ]
        if len(twins := self.twins()) == 2:  # or one optimiser would step the same numbers twice
            twins[1].data = twins[1].data.clone()
        self.traffic = {stage.index: Traffic() for stage in layout.on(self.rank)}
        """What each stage of this rank has sent to other ranks so far."""
        self._schedules: dict[bool, tuple[torch.Size, Any]] = {}

    def step(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        num_targets: int | None = None,
        **arguments: Tensor,
    ) -> Tensor:
        """Forward and backward of a batch [B, T], which every rank is given; the loss, on each.

        ``targets[b, t]`` is the token after ``input_ids[b, t]``, or -100. ``num_targets`` is what
        the sum is divided by where the batch is a part of a larger one. ``arguments`` (an
        attention mask, positions) are those of the family's forward, with the batch first.
        Gradients are added to what there is.
        """
        return self._summed(self.share(True, input_ids, targets, num_targets, arguments))

    @torch.no_grad()
    def evaluate(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        num_targets: int | None = None,
        **arguments: Tensor,
    ) -> Tensor:
        """The loss of a batch, without gradients; :meth:`train` says whether in training mode."""
        return self._summed(self.share(False, input_ids, targets, num_targets, arguments))

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.train(mode)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank, by their names in the whole model. A head that is tied to the embedding is
        listed on its own rank as well: both copies are given the same gradient."""
        for stage in self.stages:
            yield from stage.model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, by the names of the whole model, so that what ``torch.distributed
        .checkpoint`` saves of it is loaded into any other layout, or into the whole model."""
        parts = [stage.model.state_dict() for stage in self.stages]
        return {name: value for part in parts for name, value in part.items()}

    def __str__(self) -> str:
        return self.layout.table(self._num_parameters)

    def clip_gradients(self, most: float) -> float:
        """Scale the gradients of all ranks so that their norm is at most ``most``; what it was."""
        twin = self.twin

        def copies(parameter: nn.Parameter) -> int:
            return int(parameter is not twin)

        norm = clip(self.parameters(), most, copies=copies, group=self.group, device=self.device)
        return norm.item()

    @property
    def _is_last(self) -> bool:
        return self.stages[-1].stage.after is None

    @property
    def twin(self) -> nn.Parameter | None:
        """The head's weight, where it is here as a copy of the embedding's."""
        is_twin = self._is_last and self.is_tied and len(self.layout.stages) > 1
        return self.stages[-1].model.get_output_embeddings().weight if is_twin else None

    def share(
        self,
        trains: bool,
        input_ids: Tensor,
        targets: Tensor,
        num_targets: float | None,
        arguments: dict[str, Tensor],
    ) -> Tensor:
        """As :meth:`step` or :meth:`evaluate`, of the loss what this rank has computed of it."""
        self._check_batch(input_ids, targets)
        self.cache.clear()
        self._num_targets = num_targets or (targets != IGNORED).sum().item()
        # dense, since torch 2.11 compares strides with those of another micro-batch
        given = [x.to(self.device).contiguous() for x in (input_ids, targets)]
        arguments = {name: x.to(self.device).contiguous() for name, x in arguments.items()}
        schedule = self._schedule(trains, input_ids.shape)
        twins = [w for w in self.twins() if w.requires_grad] if trains else []
        earlier = [weight.grad for weight in twins]
        for weight in twins:
            weight.grad = None
        ids = given[:1] if self.stages[0].stage.before is None else []
        if self._is_last:
            arguments["targets"] = given[1]
        run = schedule.step if trains else schedule.eval
        losses = run(*ids, target=given[1] if self._is_last else None, **arguments)
        self.cache.check_settled()
        self._add_up(twins, earlier)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if self._is_last:
            loss += losses.detach().sum()
        return loss

    def _summed(self, loss: Tensor) -> Tensor:
        distributed.all_reduce(loss, group=self.group)
        return loss

    def _check_batch(self, input_ids: Tensor, targets: Tensor) -> None:
        parts, rows = self.layout.micro_batches, len(input_ids)
        if input_ids.shape != targets.shape or input_ids.ndim != 2:
            raise DepthrouteError(
                f"input_ids of shape {tuple(input_ids.shape)} and targets of "
                f"{tuple(targets.shape)}; both are [batch, tokens]"
            )
        if rows % parts:
            raise DepthrouteError(
                f"a batch of {rows} sequences does not divide into the layout's {parts} "
                f"micro-batches; use a multiple of {parts}"
            )

    def _schedule(self, trains: bool, shape: torch.Size) -> Any:
        """One for each of training and evaluation: their receive buffers have shapes."""
        if trains not in self._schedules or self._schedules[trains][0] != shape:
            common = self.device, self.group, self.traffic, self.splits_backward
            stages: list[Any] = [_PipelineStage(stage, *common) for stage in self.stages]
            order = self.layout.order
            schedule = get_schedule_class(order.torch_name)(
                stages[0] if order.most_chunks == 1 else stages,
                n_microbatches=self.layout.micro_batches,
                loss_fn=lambda losses, targets: losses.sum(),
                scale_grads=False,
            )
            self._schedules[trains] = (shape, schedule)
        return self._schedules[trains][1]

    def _share(self, model: Any, arguments: dict[str, Any], targets: Tensor) -> Tensor:
        return self._loss(model, arguments, targets) / self._num_targets

    def twins(self) -> list[nn.Parameter]:
        """The copies on this rank, embedding first, of a weight that the head shares with it."""
        if not self.is_tied or len(self.layout.stages) == 1:
            return []
        first, last = self.stages[0], self.stages[-1]
        twins = [first.model.get_input_embeddings().weight] if first.stage.before is None else []
        twins += [last.model.get_output_embeddings().weight] if last.stage.after is None else []
        return twins

    def _add_up(self, twins: list[nn.Parameter], earlier: list[Tensor | None]) -> None:
        """Each copy gets the sum of both gradients, beside what ``earlier`` steps gave it."""
        if not twins:
            return
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in twins]
        shares = [local(gradient) for gradient in gradients]
        if len(twins) == 1:
            ends = {self.layout.stages[0].rank, self.layout.stages[-1].rank}
            (other,) = ends - {self.rank}
            shares.append(self._exchanged(shares[0], other))
        total = shares[0] + shares[1]
        for weight, gradient, before in zip(twins, gradients, earlier, strict=True):
            local(gradient).copy_(total)
            weight.grad = gradient if before is None else before + gradient

    def _exchanged(self, tensor: Tensor, other: int) -> Tensor:
        """The tensor that rank ``other`` gives for this one."""
        peer = other if self.group is None else distributed.get_global_rank(self.group, other)
        incoming = torch.empty_like(tensor)
        pair = ((distributed.isend, tensor.contiguous()), (distributed.irecv, incoming))
        operations = [distributed.P2POp(op, part, peer, self.group) for op, part in pair]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        return incoming


def summed_cross_entropy(model: Any, arguments: dict[str, Any], targets: Tensor) -> Tensor:
    """In nats, of whole logits."""
    logits = model(**arguments).logits
    precise = torch.promote_types(logits.dtype, torch.float32)
    flat, wanted = logits.flatten(0, 1).to(precise), targets.flatten()
    return functional.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")


def splits_backward(model: Any) -> bool:
    """Whether zero-bubble schedules may leave the gradients of weights for later; if not, they
    compute them at once and fill their bubbles less.

    torch looks for the weights between a stage's inputs and its outputs, and finds none of them
    where the inputs have no gradient, as after an embedding that is frozen. And it runs backward
    through what weights share once for each of them, the first of which frees what the others
    need: through phase 1 of a group, and wherever one weight is used twice, as the gain of both
    reads of an attention and the expansion of a latent that is scored before it is mixed.
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    is_trained, plan = model.get_input_embeddings().weight.requires_grad, model.plan
    scores_latents = plan.values == "keys" and model.architecture.values is None
    is_apart = not (plan.groups or plan.value_reads or scores_latents)
    return version >= SPLITS_BACKWARD and is_trained and is_apart


def _refuse_misfits(model: Any, layout: PipelineLayout, group: Any) -> None:
    if not isinstance(model, RoutedCausalLM):
        raise ConfigError(
            f"a pipeline is made of a routed causal model, not of {type(model).__name__}; "
            "depthroute.convert(model, RoutingConfig('standard')) makes one of a plain model"
        )
    size = distributed.get_world_size(group)
    if size != layout.ranks:
        raise ConfigError(
            f"the layout is for {layout.ranks} ranks and there are {size}; start "
            f"{layout.ranks} processes, or make the layout with ranks={size}"
        )
    per_layer = len(layout.plan.sublayers)
    cuts = tuple(per_layer * stage.layers.start for stage in layout.stages[1:])
    if cut(model.plan, cuts) != layout.plan:
        raise ConfigError(
            f"the layout is of {layout.plan.num_layers} layers of method {layout.plan.method!r} "
            f"and the model has {model.plan.num_layers} of {model.plan.method!r}, or other "
            "settings; make it with PipelineLayout.of(model.plan, ...)"
        )
