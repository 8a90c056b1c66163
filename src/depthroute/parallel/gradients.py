"""Gradients of a model that several ranks hold: summed over some of them, clipped over all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sum_over(group: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Every rank of ``group`` gets the sum of their gradients."""
    own = [local(p.grad).contiguous() for p in parameters if p.grad is not None]
    works = [distributed.all_reduce(gradient, group=group, async_op=True) for gradient in own]
    for work in works:
        assert work is not None
        work.wait()


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter],
    most: float,
    *,
    copies: Callable[[nn.Parameter], int] = lambda parameter: 1,
    group: Any = None,
    device: torch.device,
) -> Tensor:
    """Scale the gradients of all ranks of ``group`` so that their norm is at most ``most``; what
    it was.

    ``copies`` is how many ranks hold the same numbers of a parameter, 0 for one that counts not.
    """
    trained = [p for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in trained:
        gradient, times = local(parameter.grad), copies(parameter)  # pyright: ignore
        if times:
            precise = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, dtype=precise)
            total += norm.double().square() / times
    distributed.all_reduce(total, group=group)
    norm = total.sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch's own
    for parameter in trained:
        local(parameter.grad).mul_(factor)  # pyright: ignore
    return norm
