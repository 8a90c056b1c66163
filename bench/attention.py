"""Attention over time, the ways there are to call it: what ``models/attention.py`` chooses from.

Causal over whole sequences, and over packed documents of mixed lengths. Every way is checked
against the definition in fp64 before it is timed; what it needs to know of the documents is made
once a step for all layers, and timed on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from depthroute.bench import accuracy, timing
from depthroute.bench.record import Record, one_line

PATTERNS: dict[str, tuple[str, ...]] = {
    "causal": ("is_causal", "dense mask", "flex", "varlen"),
    "documents": ("dense mask", "flex", "varlen"),
}
MEAN_LENGTH = 400
"""Of a document in tokens; most are shorter, a few much longer."""


class Shape(NamedTuple):
    batch: int = 8
    heads: int = 16
    kv_heads: int = 8
    tokens: int = 2048
    width: int = 128


CHECKED = Shape(batch=2, heads=4, kv_heads=2, tokens=512)


@dataclass(frozen=True)
class Case:
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    documents: Tensor
    """Which document a token belongs to, [batch, tokens]; one a row where they are whole."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def to(self, dtype: torch.dtype) -> Case:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in self.inputs)
        return replace(self, query=q, key=k, value=v, grad=self.grad.to(dtype))


def draw(pattern: str, shape: Shape, device: torch.device) -> Case:
    torch.manual_seed(0)
    many = shape.batch, shape.heads, shape.tokens, shape.width
    few = shape.batch, shape.kv_heads, shape.tokens, shape.width
    q, k, v, grad = (torch.randn(size, device=device).bfloat16() for size in (many, few, few, many))
    documents = torch.zeros(shape.batch, shape.tokens, dtype=torch.int64)
    if pattern == "documents":
        lengths = torch.empty(documents.shape).exponential_(1 / MEAN_LENGTH).ceil()
        places = torch.arange(shape.tokens).expand_as(documents).contiguous()
        documents = torch.searchsorted(lengths.cumsum(1), places, right=True)
    for x in (q, k, v):
        x.requires_grad_()
    return Case(q, k, v, grad, documents.to(device))


def definition(case: Case) -> Tensor:
    q, k, v = case.inputs
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~dense(case), -torch.inf).softmax(-1) @ v


def dense(case: Case) -> Tensor:
    """Who sees whom, [batch, 1, tokens, tokens]."""
    place = torch.arange(case.documents.shape[1], device=case.documents.device)
    same = case.documents[:, :, None] == case.documents[:, None, :]
    return (same & (place[:, None] >= place))[:, None]


def blocks(case: Case) -> Any:
    documents = case.documents

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    batch, tokens = documents.shape
    make = torch.compile(create_block_mask)
    return make(sees, batch, None, tokens, tokens, device=documents.device)


def bounds(case: Case) -> tuple[Tensor, int]:
    """Where documents begin in all rows laid end to end, the end too; and the longest."""
    begins = case.documents.diff(dim=1, prepend=case.documents[:, :1] - 1) != 0
    starts = begins.flatten().nonzero().flatten()
    ends = torch.tensor([begins.numel()], device=starts.device)
    starts = torch.cat([starts, ends]).int()
    return starts, int(starts.diff().max())


def with_mask(case: Case, mask: Tensor) -> Tensor:
    """As transformers calls it: a mask allows no grouped heads."""
    q, k, v = case.inputs
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_name(case: Case, _: None) -> Tensor:
    return functional.scaled_dot_product_attention(*case.inputs, is_causal=True, enable_gqa=True)


def with_blocks(case: Case, mask: Any) -> Any:
    return torch.compile(flex_attention)(*case.inputs, block_mask=mask, enable_gqa=True)


def varlen(case: Case, known: tuple[Tensor, int]) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters  # which differ from torch to torch
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in takes else {}
    if "window_size" in takes:
        options["window_size"] = -1, 0
    q, k, v = case.inputs
    if "enable_gqa" in takes:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    batch, tokens = case.documents.shape
    starts, longest = known
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


Way = tuple[Callable[[Case], Any], Callable[[Case, Any], Tensor]]
WAYS: dict[str, Way] = {
    "is_causal": (lambda case: None, by_name),
    "dense mask": (dense, with_mask),
    "flex": (blocks, with_blocks),
    "varlen": (bounds, varlen),
}
"""What a way has to know of the documents, and the call that is given it."""


def check(way: str, pattern: str, device: torch.device) -> accuracy.Verdict:
    case = draw(pattern, CHECKED, device)
    prepare, attend = WAYS[way]

    def results(case: Case, attend: Callable[[Case], Tensor]) -> list[Tensor]:
        out = attend(case)
        return [out, *torch.autograd.grad(out, case.inputs, case.grad)]

    names = ["the output", *(f"the gradient of the {x}" for x in ("query", "key", "value"))]
    got = results(case, lambda case: attend(case, prepare(case)))
    truth = results(case.to(torch.float64), definition)
    return accuracy.judge(names, got, results(case, definition), truth)


def measure(way: str, pattern: str, shape: Shape, device: torch.device) -> dict[str, Any]:
    verdict = check(way, pattern, device)
    row: dict[str, Any] = {"budget": verdict.ratio, "error_relative": verdict.error}
    if not verdict.holds:
        raise ArithmeticError(f"not timed: {verdict}")
    timing.forget()
    case = draw(pattern, shape, device)
    prepare, attend = WAYS[way]
    known = prepare(case)

    def both() -> object:
        return torch.autograd.grad(attend(case, known), case.inputs, case.grad)

    with torch.no_grad():
        if way in ("dense mask", "flex"):  # the others need nothing, or have it from the data
            row["mask_ms"] = timing.median_ms(lambda: prepare(case), device)
        row["forward_ms"] = timing.median_ms(lambda: attend(case, known), device)
    row["peak_gb"] = timing.peak_gb(device, both)
    row["both_ms"] = timing.median_ms(both, device)
    return row


def run(record: Record, device: torch.device, shape: Shape, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for way in PATTERNS[pattern]:
            timing.forget()
            row: dict[str, Any] = {"pattern": pattern, "how": way}
            try:
                row |= measure(way, pattern, shape, device)
                record.say(
                    f"{pattern}, {way}: forward {row['forward_ms']:.3f} ms, with backward "
                    f"{row['both_ms']:.3f} ms, mask {row.get('mask_ms', 0.0):.3f} ms a step"
                )
            except Exception as error:
                row["error"] = one_line(error)
                record.fail(f"{pattern}, {way}: {row['error']}")
            record.add(row)
