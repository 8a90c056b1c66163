"""Perplexity and bits per byte of a text under a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from depthroute.checks import check_whole
from depthroute.errors import DepthrouteError
from depthroute.models.loading import tokens_of
from depthroute.models.modes import evaluating

_LARGEST_EXPONENT = 709.0
"""Of what a double holds."""


@dataclass(frozen=True)
class PerplexityReport:
    perplexity: float
    """exp of the mean nats per predicted token."""
    nats_per_token: float
    bits_per_byte: float | None
    """All nats over all bytes of the text; None when only tokens were given."""
    num_tokens: int
    """Predicted tokens."""
    window: int
    stride: int

    def __str__(self) -> str:
        byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"perplexity {self.perplexity:.4f} ({self.nats_per_token:.5f} nats per token{byte}) "
            f"over {self.num_tokens} tokens, window {self.window}, stride {self.stride}"
        )


@torch.no_grad()
def perplexity(
    model: Any,
    input_ids: Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    num_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityReport:
    """Score ``input_ids`` [T] once: every token but the first is predicted exactly once.

    The text is cut into windows of ``window`` tokens that advance by ``stride`` (default: the
    whole window, less one token so that each window's first token is predicted by the one before).
    A smaller stride gives every token more context, at proportional cost.
    """
    ids = input_ids.flatten()
    if ids.numel() < 2:
        raise DepthrouteError(f"perplexity needs at least 2 tokens, not {ids.numel()}")
    check_whole("batch_size", batch_size)
    if window < 2:
        raise DepthrouteError(f"window={window} must be at least 2 tokens")
    stride = window - 1 if stride is None else stride
    if not 1 <= stride <= window - 1:
        raise DepthrouteError(f"stride={stride} must be between 1 and window - 1 = {window - 1}")
    device = next(model.parameters()).device
    total, count, seen = 0.0, 0, 1
    with evaluating(model):
        for spans in _batches(_spans(ids.numel(), window, stride), batch_size):
            batch = torch.stack([ids[begin:end] for begin, end in spans]).to(device)
            for row, (begin, end) in zip(token_losses(model, batch), spans, strict=True):
                fresh = row[max(seen, begin + 1) - begin - 1 :]
                total += fresh.double().sum().item()
                count += fresh.numel()
                seen = end
            if progress is not None:
                progress(seen, ids.numel())
    mean = total / count
    return PerplexityReport(
        perplexity=math.inf if mean > _LARGEST_EXPONENT else math.exp(mean),
        nats_per_token=mean,
        bits_per_byte=None if num_bytes is None else total / math.log(2) / num_bytes,
        num_tokens=count,
        window=window,
        stride=stride,
    )


def token_losses(model: Any, batch: Tensor) -> Tensor:
    """Nats of every token of each row but the first.

    By logsumexp: over a large vocabulary the CPU's fp32 cross entropy is biased (8e-6 nats low for
    49,152 tokens, where this is within 1e-8), and a bias does not average out.
    """
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
    chosen = logits.gather(-1, batch[:, 1:, None]).squeeze(-1)
    return logits.logsumexp(-1) - chosen


Span = tuple[int, int]
"""Begin and end of a window."""


def _spans(total: int, window: int, stride: int) -> Iterator[Span]:
    for begin in range(0, max(1, total - window + stride), stride):
        yield begin, min(begin + window, total)


def _batches(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """In order, so many of one length at a time."""
    for _, alike in groupby(spans, lambda span: span[1] - span[0]):
        while batch := list(islice(alike, size)):
            yield batch


def text_perplexity(
    model: Any, tokenizer: Any, text: str, *, add_bos: bool = False, **options: Any
) -> PerplexityReport:
    """:func:`perplexity` of a text, with bits per byte of its UTF-8 form.

    ``add_bos`` puts the tokenizer's beginning-of-text token in front of the whole text, for models
    that expect one.
    """
    ids = tokens_of(text, tokenizer, model, add_special_tokens=False)
    if add_bos:
        if tokenizer.bos_token_id is None:
            raise DepthrouteError("add_bos was asked for and the tokenizer has no such token")
        ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1)
    return perplexity(model, ids, num_bytes=len(text.encode()), **options)
