"""Muon on many matrices at a time.

``torch.optim.Muon``, the definition, takes matrices one after another, in some thirty operations
each. Those of a small model wait for their launches: there it takes as long as the rest of a step.
Here matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

AS_ADAMW = 0.2
"""Root mean square of an update over its rate: what AdamW's are measured to be in training, and
torch's ``match_rms_adamw``."""
TOGETHER = 2**24
"""Numbers, at most, in matrices that are taken together. Products of larger ones take longer than
their launches, and what is taken together is copied."""
TOGETHER_ON_CPU = 2**21
"""Where nothing waits for launches, and what is copied is better in the caches."""

_lists: Any = torch
"""Of its operations on lists of tensors, which are documented and not in its stubs."""


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with updates as large as AdamW's, up to the rounding of its bf16."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrices in _alike([p for p in group["params"] if p.grad is not None]):
                self._update(matrices, group)
        return loss

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in matrices if p.grad is not None]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(gradient)
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        _lists._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        ahead = _lists._foreach_lerp(gradients, averages, group["momentum"])
        together = ahead[0].new_empty((len(ahead), *ahead[0].shape), dtype=torch.bfloat16)
        _lists._foreach_copy_(list(together.unbind()), ahead)
        del ahead
        updates = orthogonalised(
            together, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        # laid out as the matrices, or torch adds them one by one
        updates = updates.to(matrices[0].dtype, memory_format=torch.contiguous_format)
        rate = group["lr"] * AS_ADAMW * math.sqrt(max(matrices[0].shape))
        _lists._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        _lists._foreach_add_(matrices, list(updates.unbind()), alpha=-rate)


def orthogonalised(
    matrices: Tensor, coefficients: Sequence[float], num_rounds: int, eps: float
) -> Tensor:
    """``[N, rows, columns]``, each with its singular values near 1: rounds of
    ``X <- a X + (b G + c G G) X`` with ``G = X X^T`` on the wide side, in bf16 as torch's."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(eps)
    for _ in range(num_rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _alike(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """By shape and place, and no more of one than are taken together."""
    kinds: dict[Any, list[Tensor]] = {}
    for matrix in matrices:
        kinds.setdefault((matrix.shape, matrix.device), []).append(matrix)
    for kind in kinds.values():
        numbers = TOGETHER_ON_CPU if kind[0].device.type == "cpu" else TOGETHER
        most = max(1, numbers // max(1, kind[0].numel()))
        for start in range(0, len(kind), most):
            yield kind[start : start + most]
