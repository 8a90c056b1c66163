"""Whether torch would round on the way. ``meta`` has no autocast and says so with an error, and a
graph of torch 2.11 cannot ask which devices have one: that is asked once, here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
_HAVE_IT = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))


def is_autocast(device: str) -> bool:
    return device in _HAVE_IT and torch.is_autocast_enabled(device)


def unrounded(device: str) -> AbstractContextManager[Any]:
    """Without autocast, which would round what goes into products to 16 bits."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()
