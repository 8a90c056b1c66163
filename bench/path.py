"""The whole residual path of a model whose sublayers cost nothing.

attnres in blocks over 32 sublayers, each one elementwise product: here it shows what accumulating
gradients in the kernel and grouping queries save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute import ops
from depthroute.bench import accuracy, timing
from depthroute.bench.record import Record, one_line
from depthroute.ops import reference

SUBLAYERS, BLOCK, TOKENS, WIDTH = 32, 8, 16384, 2048
WAYS = ("standard", "site by site", "carried", "two phases")
PATH_BUDGET = 4.0
"""A path rounds its activations at every site; orders of rounding differ between the ways."""


def residual_path(embedding: Tensor, queries: Tensor, gains: Tensor, how: str) -> Tensor:
    """``how`` is one of :data:`WAYS`, or ``"definition"``."""
    if how == "standard":
        for gain in gains:
            embedding = embedding + embedding * gain
        return embedding
    mix = reference.depth_mix if how == "definition" else ops.depth_mix
    sources: Sequence[Tensor] = [embedding]
    partial: Tensor | None = None
    for start in range(0, len(queries), BLOCK):
        block = queries[start : start + BLOCK]
        outputs, lses = (), ()
        if how == "two phases":
            dtype = embedding.dtype
            outputs, lse, sources = ops.depth_mix_group_carried(sources, block, dtype=dtype)
            lses = lse.unbind()
        for i, query in enumerate(block.unbind()):
            newer: Sequence[Tensor] = [] if partial is None else [partial]
            if how == "two phases":
                x, newer = ops.depth_mix_carried(
                    newer, query, prior=outputs[i], prior_lse=lses[i], dtype=embedding.dtype
                )
                partial = newer[0] if newer else None
            elif how == "carried":
                x, carried = ops.depth_mix_carried([*sources, *newer], query)
                sources, newer = carried[: len(sources)], carried[len(sources) :]
                partial = newer[0] if newer else None
            else:
                x = mix([*sources, *newer], query)
            output = x * gains[start + i]
            partial = output if partial is None else partial + output
        assert partial is not None
        sources, partial = [*sources, partial], None
    return mix(sources, queries[-1])


def draw(
    tokens: int, width: int, sublayers: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embedding, queries, gains and the gradient that comes in."""
    torch.manual_seed(0)
    embedding = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    queries = (torch.randn(sublayers, width, device=device) / width**0.5).requires_grad_()
    gains = torch.rand(sublayers, width, device=device).to(dtype) * 0.1
    return embedding, queries, gains, torch.randn_like(embedding)


def check(
    how: str, device: torch.device, *, width: int, sublayers: int, tokens: int = 65
) -> accuracy.Verdict:
    """One way against the definition in fp64, on few tokens."""
    inputs = draw(tokens, width, sublayers, device, torch.bfloat16)

    def results(how: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        embedding, queries, gains, grad = (
            t.detach() if dtype is None else t.detach().to(dtype) for t in inputs
        )
        embedding.requires_grad_()
        queries.requires_grad_()
        x = residual_path(embedding, queries, gains, how)
        return [x, *torch.autograd.grad(x, [embedding, queries], grad)]

    names = ["x", "gradient of the embedding", "gradient of the queries"]
    truth = results("definition", torch.float64)
    return accuracy.judge(names, results(how), results("definition"), truth)


def run(
    record: Record,
    device: torch.device,
    *,
    tokens: int = TOKENS,
    width: int = WIDTH,
    sublayers: int = SUBLAYERS,
) -> None:
    for how in WAYS:
        timing.forget()
        row: dict[str, Any] = {"how": how}
        try:
            row |= measure(how, device, tokens, width, sublayers)
        except Exception as error:
            row["error"] = one_line(error)
            record.fail(f"{how}: {row['error']}")
        record.add(row)
        if "forward_ms" in row:
            memory = "" if row["peak_gb"] is None else f", {row['peak_gb']:.2f} GB"
            record.say(
                f"{how}: forward {row['forward_ms']:.2f} ms, with backward "
                f"{row['both_ms']:.2f} ms{memory}"
            )


def measure(
    how: str, device: torch.device, tokens: int, width: int, sublayers: int
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if how != "standard":
        verdict = check(how, device, width=width, sublayers=sublayers)
        row |= {"budget": verdict.ratio, "error_relative": verdict.error}
        if verdict.ratio > PATH_BUDGET or not verdict.is_same_formula:
            raise ArithmeticError(f"not timed: {verdict}")
    embedding, queries, gains, grad = draw(tokens, width, sublayers, device, torch.bfloat16)

    def both() -> object:
        x = residual_path(embedding, queries, gains, how)
        return torch.autograd.grad(x, [embedding, queries], grad, allow_unused=True)

    with torch.no_grad():
        row["forward_ms"] = timing.median_ms(
            lambda: residual_path(embedding, queries, gains, how), device
        )
    timing.forget()
    row["peak_gb"] = timing.peak_gb(device, both)
    row["both_ms"] = timing.median_ms(both, device)
    return row
