"""The loss of a step, from whole logits only where it has to be.

A routed model computes its summed loss a chunk of tokens at a time
(:func:`depthroute.ops.linear_cross_entropy`), for which it must be known what becomes of the head's
output. The architecture says so, :func:`obstacle` tries whether that is true of this model, and
whatever is not as it should be takes the model's own logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import skip_init

from depthroute.data.batches import IGNORED, Batch
from depthroute.models.architecture import is_as_its_class
from depthroute.models.model import RoutedCausalLM
from depthroute.ops import reference


def loss_sum(model: Any, batch: Batch, chunk: int | None = None) -> Tensor:
    """Cross-entropy in nats, summed; targets are the inputs one token on. A ``chunk`` of 0 is that
    of whole logits."""
    inputs = {"input_ids": batch.inputs, "use_cache": False, **batch.arguments}
    return called_loss(model, inputs, batch.targets, chunk)


def called_loss(
    model: Any,
    arguments: dict[str, Any],
    targets: Tensor,
    chunk: int | None,
    tokens: slice | None = None,
) -> Tensor:
    """As :func:`loss_sum`, of whatever ``arguments`` of its forward; of some ``tokens`` of each
    sequence alone, if not all."""
    if chunk != 0:
        return model(**arguments, targets=targets, chunk=chunk, tokens=tokens)
    if tokens is not None:
        targets = targets[:, tokens]
        places = torch.arange(tokens.start, tokens.stop, device=targets.device)
        arguments = arguments | {"logits_to_keep": places}
    logits = model(**arguments).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def obstacle(model: Any, has_shards: bool = False) -> str | None:
    """Why the loss of ``model`` needs whole logits; None where it does not."""
    if not isinstance(model, RoutedCausalLM):
        return f"{type(model).__name__} is no routed model"
    return head_obstacle(model, has_shards) or _mapping_obstacle(model)


def head_obstacle(model: Any, has_shards: bool = False) -> str | None:
    """Such as may come between steps: a hook. ``has_shards`` is whether its weights are those of
    FSDP2, which are whole while the model runs."""
    if len(model._forward_hooks) > isinstance(model, FSDPModule):  # FSDP2 has one of its own
        return "it has forward hooks, which want logits"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain linear layer"
    if not is_as_its_class(head):
        return "its head has hooks or a forward of its own"
    if isinstance(head.weight, DTensor) and not (has_shards or isinstance(model, FSDPModule)):
        return "its head is distributed"
    return None


def _mapping_obstacle(model: Any) -> str | None:
    """Tries whether the model makes of its head's output what its architecture says."""
    if "forward" in vars(model):
        return "its forward has been replaced"
    try:
        logits, expected = _tried(model)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"its forward cannot be tried without its decoder ({type(error).__name__}: {error})"
    if logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
        return None
    return (
        f"its logits are not what the architecture {model.architecture.model_type!r} says of "
        f"the head's output: {model.architecture.logit_options(model.config)}"
    )


@torch.no_grad()
def _tried(model: Any) -> tuple[Tensor, Tensor]:
    """Logits by the model's own forward and by what its architecture says of them.

    Large ones: of those that a model has at the start of training, a softcap could not be seen. On
    a decoder and a head of its own, so that neither devices nor shards nor hooks are touched.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    hidden = 10 * torch.randn(1, 3, 4, **numbers)
    head: Any = skip_init(nn.Linear, 4, 31, bias=False, dtype=torch.float32, device="cpu")
    head.weight.copy_(torch.randn(31, 4, **numbers))
    trial: Any = object.__new__(type(model))
    trial.__dict__ |= vars(model) | {"_modules": {**model._modules}}
    setattr(trial, model.base_model_prefix, _Decoder(hidden))
    trial.set_output_embeddings(head)
    ids = torch.zeros(1, 3, dtype=torch.int64, device="cpu")
    logits = type(model).forward(trial, input_ids=ids, use_cache=False).logits
    options = model.architecture.logit_options(model.config)
    return logits, reference.mapped_logits(head(hidden), **options)


class _Decoder(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self.hidden)


class _Outputs:
    """Of any decoder: the hidden states by name and place, and nothing else of whatever name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor | None:
        return None if place else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
