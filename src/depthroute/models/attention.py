"""Causal attention that builds no mask where none is needed: ``depthroute_sdpa``.

Torch's attention has kernels for plain causal attention that need no mask and no repeated keys and
values. While a graph is traced or captured, transformers cannot read whether positions restart
(packed documents), so its ``sdpa`` then builds a dense mask for the whole batch. A routed decoder
knows that much: positions that nobody gave never restart.

What is not plainly causal is as exact as in transformers. Padding, caches with room left and chunks
behind a cache get the mask of ``sdpa``. Packed documents, and windows shorter than the sequence,
get a block mask of FlexAttention on the devices of :data:`BLOCK_MASKS`, which skips what nobody
sees, and the dense mask elsewhere: on a CPU FlexAttention has no backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers.cache_utils import StaticLayer
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthroute.models.architecture import ARCHITECTURES

IMPLEMENTATION = "depthroute_sdpa"
"""With "sdpa" in its name, transformers refuses it for families that sdpa cannot compute."""
BLOCK_MASKS = {"cuda"}
"""Devices on which FlexAttention takes what is neither plainly causal nor padded."""
LEAST_FLEX_WIDTH = 16
"""Of a head; FlexAttention has no kernels for less."""

_call = threading.local()


def use(model: Any) -> Any:
    """``model``, running this where it would run ``sdpa``; any other choice is left alone."""
    config = model.config
    if config._attn_implementation == "sdpa" and config.model_type in ARCHITECTURES:
        model.set_attn_implementation(IMPLEMENTATION)
    return model


@contextmanager
def as_in_transformers(model: Any) -> Iterator[None]:
    """With transformers' own ``sdpa``, of which alone it has a paged form."""
    is_ours = model.config._attn_implementation == IMPLEMENTATION
    if is_ours:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if is_ours:
            model.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def whole_sequences(are_whole: bool) -> Iterator[None]:
    """What the caller knows of this call: whether each row is one sequence from its start."""
    _call.are_whole = are_whole
    try:
        yield
    finally:
        _call.are_whole = False


def causal_mask(**given: Any) -> Tensor | BlockMask | None:
    """The mask function of transformers' interface: None where attention is plainly causal.

    ``allow_is_causal_skip`` is False for packed documents, for positions that may be packed, for
    one token before a static cache, and for the patterns of families that are not known here.
    """
    queries, keys, offset = given["q_length"], given["kv_length"], given["kv_offset"]
    is_padded = given["attention_mask"] is not None
    is_special = given["use_vmap"] or "allow_is_bidirectional_skip" in given
    if is_padded or is_special or torch.is_tensor(offset):
        return sdpa_mask(**given)
    is_whole = queries == keys
    is_plain = given["allow_is_causal_skip"] or (is_whole and getattr(_call, "are_whole", False))
    window = given.get("local_size")
    is_in_window = window is None or keys + offset <= window
    if is_plain and is_in_window and (is_whole or queries == 1):
        return None
    is_known = given["config"].model_type in ARCHITECTURES
    if is_whole and is_known and torch.device(given["device"]).type in BLOCK_MASKS:
        return _block_mask(given)
    return sdpa_mask(**given)


def is_left_to(model: Any, cache: Any) -> bool:
    """Whether ``forward`` may make the mask of a token: every layer of a static cache keeps every
    token, and attention reads a mask as any other tensor, so that a graph can hold its making."""
    is_dense = model.config._attn_implementation in ("eager", "sdpa", IMPLEMENTATION)
    return is_dense and all(type(layer) is StaticLayer for layer in cache.layers)


def whole_padding(mask: Tensor | None, cache: Any) -> Tensor | None:
    """Padding [B, tokens so far] as far as the cache has room, so that it never changes its shape:
    ``forward`` makes of it what attention needs, in its graph where it is compiled. In advance, as
    transformers does, that is a dozen small operations for every token. What is to come is
    hidden by its position."""
    if mask is None:
        return None
    return nn.functional.pad(mask, (0, cache.layers[0].max_cache_len - mask.shape[1]))


def causal_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: FlexAttention for a block mask, torch's own for any other."""
    if isinstance(attention_mask, BlockMask):
        narrowest = min(query.shape[-1], value.shape[-1])
        if dropout == 0.0 and narrowest >= LEAST_FLEX_WIDTH:
            query, key, value = _in_one_dtype(query, key, value)
            return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)
        attention_mask = _dense(attention_mask)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, **kwargs
    )


def _block_mask(given: dict[str, Any]) -> BlockMask:
    """Compiled, be the model so or not: the blocks are counted and no [T, T] mask is written."""
    is_compiling = torch.compiler.is_compiling()
    make = create_block_mask if is_compiling else torch.compile(create_block_mask)
    lengths = given["q_length"], given["kv_length"]
    return make(given["mask_function"], given["batch_size"], None, *lengths, given["device"])


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast would hand them to torch's own attention; a QK-norm leaves fp32 behind."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _dense(mask: BlockMask) -> Tensor:
    batch, heads, *lengths = mask.shape
    return create_mask(mask.mask_mod, batch, heads, *lengths, device=mask.kv_num_blocks.device)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, causal_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, causal_mask)
