"""What the torch and Triton backends have no rule for, said before torch says it obscurely.

Both differentiate once, in reverse. ``torch.func`` transforms, forward mode and second derivatives
need the reference backend. Private names of torch 2.11 to 2.13 are here alone; without them torch's
own messages are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from depthroute.errors import DerivativeError

_under_transform: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)


def _under_forward_mode() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0


def refuse_transforms(op: str, backend: str) -> None:
    """Raises where ``op`` would fail, or lose a tangent, under what is being done to it."""
    if _under_transform():
        _refuse(f"{op} runs under a torch.func transform", backend)
    if _under_forward_mode():
        _refuse(f"{op} runs under forward-mode differentiation", backend)


def no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    """The backward of a backward."""
    raise DerivativeError(
        "the torch and Triton backends have no second derivative; run the forward inside "
        'with depthroute.ops.backend("reference"), or differentiate once'
    )


def _refuse(what: str, backend: str) -> NoReturn:
    raise DerivativeError(
        f"{what}, for which the {backend} backend has no rule; run the forward and the transform "
        'inside with depthroute.ops.backend("reference")'
    )
