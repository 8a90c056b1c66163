"""What the torch and Triton backends have no rule for, said before torch says it obscurely.

Both differentiate once, in reverse. ``torch.func`` transforms, forward mode and second derivatives
need the reference backend. Private names of torch 2.11 to 2.15 are here alone; without them torch's
own messages are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthroute.errors import DerivativeError

_HINT = 'run the model inside `with depthroute.ops.backend("reference"):`'
_under_transform: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)

_is_batched: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda tensor: False
)
"""By ``torch.autograd.grad(is_grads_batched=True)``, which has a vmap of its own."""


def _under_forward_mode() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0


def refuse_transforms(op: str, backend: str) -> None:
    """Raises where ``op`` would fail, or lose a tangent, under what is being done to it."""
    if _under_transform():
        _refuse(f"{op} runs under a torch.func transform", backend)
    if _under_forward_mode():
        _refuse(f"{op} runs under forward-mode differentiation", backend)


def refuse_batched(op: str, backend: str, *grads: Tensor | None) -> None:
    """The same for the backward of an ``op`` whose forward nothing was done to."""
    if torch.compiler.is_compiling():
        return
    if _under_transform() or any(g is not None and _is_batched(g) for g in grads):
        _refuse(f"the backward of {op} runs for a batch of gradients", backend)


def no_derivative(ctx: Any, *grads: Any) -> NoReturn:
    """The backward of a registered op: of a backward, since forwards are only called by functions
    that have one."""
    raise DerivativeError(
        f"the torch and Triton backends have no second derivative; {_HINT}, or differentiate once"
    )


def _refuse(what: str, backend: str) -> NoReturn:
    raise DerivativeError(f"{what}, for which the {backend} backend has no rule; {_HINT}")
