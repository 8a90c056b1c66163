"""Whether a step may change the parameters: decided on its device, and read from there once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Of one step, the same on every rank."""

    loss: float
    """Mean nats per token, before the update."""
    norm: float
    """Of the gradient, before clipping."""
    tokens: int
    is_bad: bool

    @classmethod
    def read(cls, judged: Tensor) -> Verdict:
        """What :func:`judged` has made, for which it waits."""
        loss, norm, tokens, is_bad = judged.tolist()
        return cls(loss, norm, round(tokens), bool(is_bad))


def judged(loss: Tensor, norm: Tensor, tokens: Tensor, most: Tensor | float) -> Tensor:
    """A :class:`Verdict` as one tensor: bad is a step whose loss or gradient norm is not finite,
    or whose loss is above ``most``. Nothing is read, so it can be part of a CUDA graph."""
    loss, norm = loss.double(), norm.double()
    is_good = loss.isfinite() & norm.isfinite() & (loss <= most)
    return torch.stack([loss, norm, tokens.double(), (~is_good).double()])
