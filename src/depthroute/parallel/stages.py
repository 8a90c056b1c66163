"""A routed causal model taken apart: each stage is the family's own model with the rest left out.

The family's forward runs as it is, preamble, masks, rotary tables and head, so every family works
alike. Where layers, embeddings or the final norm are elsewhere, something without parameters stands
in for them: layers keep their indices, and parameters the names of the whole model. The stand-in
just before a stage's layers gives out what was received, the one just after them takes what is
handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.models.adoption import adopted
from depthroute.models.state import LayerState
from depthroute.parallel.cache import BlockCache
from depthroute.parallel.layout import PipelineLayout, Stage

Loss = Callable[[Any, dict[str, Any], Tensor], Tensor]
"""Of a model, the arguments of its forward and the targets: what they add to the batch's loss."""


class Elsewhere(nn.Module):
    """In place of a layer that another stage runs."""

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        return hidden_states


class Arrival(Elsewhere):
    """Gives the first layer of a stage what was handed to the stage."""

    state: LayerState | None = None

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        return self.state


class Departure(Elsewhere):
    """Takes what the last layer of a stage hands on; the decoder goes on with some tensor."""

    state: LayerState | None = None

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        self.state = hidden_states
        return hidden_states.stream.example


class NoEmbedding(nn.Module):
    """Zeros of an embedding's shape and dtype."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = embedding.embedding_dim, embedding.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


class StageModule(nn.Module):
    """One stage of ``model``: tensors in, tensors out, as the layout says.

    ``stage.model`` has the parameters of these layers under the names they have in the whole model,
    and shares them with it.
    """

    def __init__(
        self,
        model: Any,
        layout: PipelineLayout,
        stage: Stage,
        cache: BlockCache,
        loss: Loss | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.layout, self.stage, self.cache = layout, stage, cache
        self.model = _part(model, layout, stage)
        spec = self.model.architecture
        layers, own = getattr(self.model.base_model, spec.layers), stage.layers
        self._arrival = (None if stage.before is None else layers[own.start - 1],)
        self._departure = (None if stage.after is None else layers[own.stop],)

    def forward(self, *given: Tensor, targets: Tensor | None = None, **arguments: Any) -> Any:
        """Tokens, or what the stage before handed over; what the next one is handed, or logits,
        of which a ``loss`` makes the micro-batch's share of the batch's.

        ``arguments`` (an attention mask, positions) are those of the family's forward.
        """
        (arrival,), (departure,) = self._arrival, self._departure
        arguments["use_cache"] = False
        if arrival is None:
            arguments["input_ids"] = given[0]
        else:
            arrival.state = self._received(given)
            # of the right shape, dtype and device, which is what preambles look at
            arguments["inputs_embeds"] = arrival.state.stream.example.detach()
        if departure is None:
            if self.loss is None:
                handed = self.model(**arguments).logits
            else:
                assert targets is not None
                handed = self.loss(self.model, arguments, targets).view(1)
        else:
            self.model.base_model(**arguments)
            handed = self.cache.left(self.stage, departure.state.tensors())
            departure.state = None
        if arrival is not None:
            arrival.state = None
        return handed

    def _received(self, given: tuple[Tensor, ...]) -> LayerState:
        tensors = self.cache.entered(self.stage, given)
        routing = self.model.base_model.routing(tensors[0])
        state = LayerState.start(tensors[0], routing).emptied()
        state = state.with_tensors(tensors, self.stage.layers.start)
        return state._replace(stream=state.stream.opened())


def num_parameters(model: Any, layout: PipelineLayout, *, frozen: bool = True) -> list[int]:
    """Of each stage, with those that are ``frozen`` or without; a weight that embedding and head
    share is counted in both."""
    parts = (_part(model, layout, stage).parameters() for stage in layout.stages)
    return [sum(p.numel() for p in part if frozen or p.requires_grad) for part in parts]


def is_tied(model: Any) -> bool:
    """Whether embedding and head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _part(model: Any, layout: PipelineLayout, stage: Stage) -> Any:
    """A model of the same class that has the stage's share of what ``model`` has."""
    part = adopted(type(model), model)
    decoder = _decoder_part(model.base_model, layout, stage)
    setattr(part, model.base_model_prefix, decoder)
    for name, child in model.named_children():
        if name == model.base_model_prefix or not any(True for _ in child.parameters()):
            continue
        if stage.after is not None:
            setattr(part, name, nn.Identity())
        elif stage.before is not None and is_tied(model) and child is model.get_output_embeddings():
            head = adopted(type(child), child)
            head.weight = nn.Parameter(child.weight.detach(), child.weight.requires_grad)
            setattr(part, name, head)
    return part


def _decoder_part(decoder: Any, layout: PipelineLayout, stage: Stage) -> Any:
    spec, own = decoder.architecture, stage.layers
    part = adopted(type(decoder), decoder)
    for name, child in decoder.named_children():
        has_parameters = any(True for _ in child.parameters())
        if name in (spec.layers, "routing") or not has_parameters:
            continue
        if isinstance(child, nn.Embedding):
            if stage.before is not None:
                setattr(part, name, NoEmbedding(child))
        elif stage.after is not None:
            setattr(part, name, nn.Identity())
    kinds = {own.start - 1: Arrival, own.stop: Departure}
    layers: list[nn.Module] = list(getattr(decoder, spec.layers))
    for index, layer in enumerate(layers):
        if index not in own:
            layers[index] = kinds.get(index, Elsewhere)()
        elif index == 0:  # it starts the stream with the routing of its decoder
            layers[index] = first = adopted(type(layer), layer)
            first.decoder = (part,)
    setattr(part, spec.layers, nn.ModuleList(layers))
    per_layer, last = len(layout.plan.sublayers), layout.plan.num_sublayers
    stop = own.stop * per_layer + (own.stop * per_layer == last)  # the end belongs to the last
    part.routing = decoder.routing.active.within(layout.plan, range(own.start * per_layer, stop))
    return part
