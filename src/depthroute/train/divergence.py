"""Where a number stopped being one. Looked for only after a step has gone bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


@torch.no_grad()
def locate(
    model: nn.Module,
    forward: Callable[[], Any],
    agree: Callable[[str], str] = lambda name: name,
) -> str:
    """The origin of a non-finite loss or gradient in words, or ``""`` where none is found.

    In the order of cause and effect: a parameter, the first module of ``forward`` whose output is
    not finite, a parameter's gradient (the last of the model, so the first of the backward pass).
    ``agree`` takes what this rank found and returns what any rank found, so that all of them run
    ``forward`` together or not at all.
    """
    parameters = list(model.named_parameters())
    bad = (name for name, p in parameters if not _is_finite(p))
    if name := agree(next(bad, "")):
        return f"first in parameter {name}"
    if name := agree(_first_output(model, forward)):
        return f"first in the output of {name}"
    bad = (
        name for name, p in reversed(parameters) if p.grad is not None and not _is_finite(p.grad)
    )
    if name := agree(next(bad, "")):
        return f"first in the gradient of {name}"
    return ""


def _first_output(model: nn.Module, forward: Callable[[], Any]) -> str:
    names: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            if not names and not all(_is_finite(x) for x in leaves):
                names.append(name)

        return look

    hooks = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())
