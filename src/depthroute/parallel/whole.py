"""The tensors of a trained model by their names in the whole, unsplit model, whoever holds them.

A rank has some of them, each whole or as a DTensor that knows its place in the whole; where several
ranks have the same one they have the same numbers. What writes or reads checkpoints works from
these names alone, and need not know the layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthroute.parallel.spread import Spread
from depthroute.parallel.wrap import unwrapped


def named_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Of this rank. A head that is tied to an embedding elsewhere has the embedding's name; where
    both are here the embedding alone is listed, see :func:`after_loading`."""
    inner = unwrapped(model)
    named = dict(inner.named_parameters())
    return inner.by_whole_name(named) if isinstance(inner, Spread) else named


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and the buffers that are kept, detached: to be written, or loaded into."""
    inner = unwrapped(model)
    parts = inner.parts if isinstance(inner, Spread) else [inner]
    tensors: dict[str, Tensor] = {n: p.detach() for n, p in named_parameters(model).items()}
    for part in parts:
        kept = part.state_dict(keep_vars=True).keys()
        tensors |= {name: b for name, b in part.named_buffers() if name in kept}
    return tensors


def named_moments(model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state of each parameter that has some: ``{name: {"exp_avg": ..., ...}}``.

    These are the tensors themselves, so loading into them is loading the optimiser.
    """
    return {
        name: optimizer.state[parameter]
        for name, parameter in named_parameters(model).items()
        if parameter in optimizer.state
    }


@torch.no_grad()
def after_loading(model: Any, optimizer: Any) -> None:
    """To be called when the tensors above were filled: a second copy on a rank follows the first.

    The optimiser must have the state that it will have, for which :func:`prepare_moments` is.
    """
    inner = unwrapped(model)
    for first, second in inner.twins() if isinstance(inner, Spread) else ():
        second.copy_(first)
        for key, value in optimizer.state.get(first, {}).items():
            optimizer.state[second][key].copy_(value)


@torch.no_grad()
def prepare_moments(optimizer: Any) -> None:
    """Give every parameter its state, as the first step would, for something to be loaded into:
    a step of rate zero on gradients of zero."""
    if optimizer.state:
        return
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (lr, decay) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["weight_decay"] = lr, decay
