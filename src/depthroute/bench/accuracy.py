"""Whether an operator is right, asked before it is timed and at the size at which it is timed.

The mix is independent from token to token, so a few rows spread over all tokens are compared, the
first and the last among them, and the gradient that comes in is zero in all others: then the query
gradient, a sum over tokens, is theirs alone. The truth is the definition in fp64. An error counts
relative to that of the definition in the same dtypes; the budget is twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthroute.ops import reference

BUDGET = 2.0
SAME_FORMULA = 0.05
"""Relative error above which an operator computes something else, whatever its rounding."""
NUM_ROWS = 257

Mix = Callable[[Sequence[Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    ratio: float
    """The largest error of an output or gradient over what the definition itself is off."""
    error: float
    """The largest error relative to the truth."""
    worst: str
    """What the ratio was largest for."""

    @property
    def holds(self) -> bool:
        return self.ratio <= BUDGET

    @property
    def is_same_formula(self) -> bool:
        return self.error <= SAME_FORMULA

    def __str__(self) -> str:
        return (
            f"{self.worst} is {self.ratio:.2f} times as far from fp64 as the definition "
            f"(at most {BUDGET:g}); largest relative error {self.error:.1e}"
        )


@dataclass
class Draw:
    """Inputs of one shape. The query holds bf16 numbers, so that every contender gets the same."""

    sources: list[Tensor]
    query: Tensor
    grad: Tensor


def draw(
    num_sources: int,
    tokens: int,
    width: int,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_dtype: torch.dtype = torch.float32,
) -> Draw:
    generator = torch.Generator(device).manual_seed(num_sources * 100_003 + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    sources = [normal(tokens, width).to(dtype).requires_grad_() for _ in range(num_sources)]
    query = (normal(width) / width**0.5).bfloat16().to(query_dtype).requires_grad_()
    return Draw(sources, query, normal(tokens, width).to(dtype))


def run_both(
    mix: Mix, sources: Sequence[Tensor], query: Tensor, grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Forward and backward; nothing is accumulated."""
    x = mix(sources, query)
    return x, torch.autograd.grad(x, [*sources, query], grad.to(x.dtype))


def check(mix: Mix, inputs: Draw, definition: Mix = reference.depth_mix) -> Verdict:
    """Run ``mix`` on all of ``inputs`` and compare a few rows with the definition."""
    tokens = inputs.grad.shape[0]
    rows = torch.linspace(0, tokens - 1, min(tokens, NUM_ROWS), device=inputs.grad.device).long()
    grad = torch.zeros_like(inputs.grad)
    grad[rows] = inputs.grad[rows]
    x, (*dsources, dquery) = run_both(mix, inputs.sources, inputs.query, grad)
    got = [x[rows], *(d[rows] for d in dsources), dquery]
    few = [s.detach()[rows].requires_grad_() for s in inputs.sources]
    query, grad = inputs.query.detach().requires_grad_(), grad[rows]
    exact = [t.detach().double().requires_grad_() for t in (*few, query)]
    truth = _flat(run_both(definition, exact[:-1], exact[-1], grad))
    native = _flat(run_both(definition, few, query, grad))
    names = ["x", *(f"gradient of source {i}" for i in range(len(few))), "gradient of the query"]
    return judge(names, got, native, truth)


def judge(
    names: Sequence[str], got: Sequence[Tensor], native: Sequence[Tensor], truth: Sequence[Tensor]
) -> Verdict:
    """The worst of several tensors; one that is not finite is infinitely wrong. Zeros, such as the
    query's gradient with one source, have an absolute error for want of a relative one."""
    worst, error, name = 0.0, 0.0, names[0]
    for label, g, n, t in zip(names, got, native, truth, strict=True):
        size = t.norm().item() or t.numel() ** 0.5
        off = (g.double() - t).norm().item()
        allowed = (n.double() - t).norm().item() + 16 * 2.0**-24 * size
        ratio = off / allowed if math.isfinite(off) else math.inf
        error = max(error, off / size if math.isfinite(off) else math.inf)
        if ratio > worst:
            worst, name = ratio, label
    return Verdict(worst, error, name)


def _flat(result: tuple[Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [result[0], *result[1]]
