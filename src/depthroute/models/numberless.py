"""Attention and experts for models on ``meta``, whose tensors have shapes and no numbers.

There torch's attention writes the weights of all pairs of tokens, transformers' linear attention
those of all pairs of a chunk for every channel, and experts ask which tokens are theirs. These have
the shapes of kernels, and keep for backward what those keep.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthroute.models import attention

IMPLEMENTATION = "depthroute_numberless_sdpa"
LINEAR_ATTENTIONS = ("chunk_kimi_delta_attention",)
CHUNK = 64
"""Tokens of which kernels of linear attention keep the weights of pairs."""


def use_attention(model: Any) -> None:
    """In place of torch's; a family's own is left as it is."""
    if model.config._attn_implementation in ("sdpa", attention.IMPLEMENTATION):
        model.set_attn_implementation(IMPLEMENTATION)


def use_experts(model: Any) -> None:
    model.config._experts_implementation = IMPLEMENTATION


@contextmanager
def linear_attention(model: Any) -> Iterator[None]:
    """In place of the family's, which its module calls by a global name."""
    family = sys.modules[getattr(transformers, model.architecture.causal_lm).__module__]
    own = {name: vars(family)[name] for name in LINEAR_ATTENTIONS if name in vars(family)}
    vars(family).update(dict.fromkeys(own, _linear_attention))
    try:
        yield
    finally:
        vars(family).update(own)


class _Attention(torch.autograd.Function):
    """What a fused kernel returns, and what it keeps for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        # as torch's are laid out: what the projection after it reads is no copy
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> Any:
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        pairs = [value.new_empty(*value.shape[:3], CHUNK) for _ in range(2)]
        ctx.save_for_backward(value, *others, *pairs)
        return torch.empty_like(value)


def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> Any:
    return _LinearAttention.apply(value, query, key, g, beta), None


def _experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Every token through as many experts as it is given, of which one stands for all."""
    count = indices.shape[-1]
    rows = hidden.repeat_interleave(count, 0)
    inner = module._apply_gate(_through_one(module, "gate_up_proj", rows))
    outputs = _through_one(module, "down_proj", inner) * weights.reshape(-1, 1)
    return outputs.view(-1, count, hidden.shape[-1]).sum(1).to(hidden.dtype)


def _through_one(module: Any, name: str, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[0]
    bias = getattr(module, f"{name}_bias")[0] if module.has_bias else None
    return functional.linear(rows, weight.T if module.is_transposed else weight, bias)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
