"""Depth attention inside any Hugging Face attention module.

The attention modules of transformers write keys and values to the cache and then call an attention
function with queries, keys and values. Depth attention needs the moment in between: the value is
mixed first, the mixed value goes into the cache. So the module is handed a cache that passes this
step's keys and values through (:class:`DeferredCache`), and the attention function registered here
mixes, updates the real cache and then calls the implementation the model is configured for. The
cache keeps exactly its vanilla shapes, dtype and bytes.

The keys and queries seen here carry RoPE; both sit at the same token, so it cancels in the scores.

**Latent attention (MLA)** caches one compressed latent per token, from which every head's key (its
part without position) and value are expanded. There the *latent* is mixed: one softmax per token,
scored by the mean over heads of q . k / sqrt(d), over the latents of the layers read. The cache
keeps its latent shape; the mixed latent feeds both the values and the position-free part of the
keys, because the cache has room for one latent only.

Other values are put in at the same moment: where attention reads its values apart
(``value_reads``), they are projected of that read here, and those that the module made of what its
queries read are dropped. A compiler does not even make them; run eagerly, they cost a product.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import modeling_utils

from depthroute.errors import ConfigError
from depthroute.models.adoption import adopted, plain_class, routed_class
from depthroute.models.architecture import Architecture
from depthroute.nn import DepthMemory, SiteParameters

IMPLEMENTATION = "depthroute_depth_attention"
_mixing = {IMPLEMENTATION}
"""Names under which the attention function mixes by itself."""


class VisitCache:
    """A cache as one visit of a looped stack sees it: its layers start at ``offset``."""

    def __init__(self, cache: Any, offset: int) -> None:
        self.cache, self.offset = cache, offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        return self.cache.update(key, value, layer_idx + self.offset, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.get_seq_length(layer_idx + self.offset)


class DeferredCache:
    """Hands this step's keys and values straight back; the attention function stores them.

    One is made per attention call, so what it remembers never outlives the call.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.pending: tuple[Tensor, Tensor] | None = None
        self.memory: DepthMemory | None = None
        """After this layer, for the layers to come."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.pending = key, value
        return key, value

    def store(self, key: Tensor, value: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Into the real cache, if there is one; everything attended to comes back."""
        if self.cache is None:  # a graph that all layers share may not ask for their number
            return key, value
        return self.cache.update(key, value, cast(int, module.layer_idx))


class DepthContext(NamedTuple):
    """What one attention call needs to know about depth."""

    memory: DepthMemory | None
    """Of earlier layers' values, where they are mixed in."""
    site: SiteParameters | None
    cache: DeferredCache
    implementation: str
    architecture: Architecture
    is_latent: bool
    value_input: Tensor | None = None
    """What the values are projected of, where that is not what the queries and keys are."""

    def own(self, attention: nn.Module, value: Tensor) -> Tensor:
        """The layer's own value, where ``value`` is of what its queries read."""
        if self.value_input is None:
            return value
        return self.architecture.project_values(attention, self.value_input, value)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        """Mix over depth, store, attend over time."""
        if self.is_latent:
            assert self.cache.pending is not None
            latent, rotary = self.cache.pending
            # one latent serves all heads: concatenated heads make their mean score a single dot
            one_query = _one_head(query)
            scaling = query.shape[-1] ** 0.5 / one_query.shape[-1]
            *_, mixed = self._mixed(one_query, _one_head(key), latent, scaling, attends=False)
            expand = cast(Any, module).expand_kv
            keys, values = expand(*self.cache.store(mixed, rotary, module))
        else:
            query, key, mixed = self._mixed(query, key, self.own(module, value))
            keys, values = self.cache.store(key, mixed, module)
        interfaces = modeling_utils.ALL_ATTENTION_FUNCTIONS
        attend: Any = interfaces.get_interface(self.implementation, None)  # pyright: ignore
        attend = attend or _eager_attention(module)
        return attend(module, query, keys, values, mask, **kwargs)

    def _mixed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        *,
        attends: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and mixed value for attention over time, which reads the first two as they are
        if it ``attends``; the memory after this layer is left in the cache."""
        site, memory = self.site, self.memory
        if memory is None:
            return query, key, value
        if site is not None and site.value_weight is not None and site.gate is not None:
            mixed = memory.add(value, site.value_weight, site.gate)
            self.cache.memory = memory.push(key, mixed)
            return query, key, mixed
        gate = None if site is None else site.gate
        handed, memory = memory.mix_carried(
            query, key, value, scaling, attends=attends, keeps_mixed=gate is None
        )
        mixed, kept = handed.mixed, handed.values[-1]
        if gate is not None:
            mixed = kept = value + gate.to(value.dtype) * (mixed - value)
        self.cache.memory = memory.push(handed.keys[-1], kept)
        return handed.query, handed.key, mixed

    def memory_after(self) -> DepthMemory | None:
        """The memory after this layer, which may not have attended."""
        if self.memory is None or self.cache.memory is not None:
            return self.cache.memory
        return self.memory.push(None, None)

    def resumed(self, module: nn.Module, arguments: tuple[Any, ...]) -> Attended:
        """Attends with what :class:`Paused` was given."""
        *heads, mask, kwargs, self.cache.pending = arguments
        query, key, value = (x.transpose(1, 2) for x in heads)
        return Attended(self.attend(module, query, key, value, mask, **kwargs))


class Paused:
    """In place of a context: takes what the attention function is called with and leaves it at
    that. What the module makes of the answer is nothing, which a compiler then leaves out."""

    def __init__(self, cache: DeferredCache) -> None:
        self.cache = cache
        self.arguments: tuple[Any, ...] = ()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        # as they lie in memory: a graph has gradients of its results copied to be contiguous
        heads = (x.transpose(1, 2) for x in (query, key, value))
        self.arguments = *heads, mask, kwargs, self.cache.pending
        batch, heads, length, _ = query.shape
        return value.new_zeros(batch, length, heads, value.shape[-1]), None


class Attended(NamedTuple):
    """In place of a context, where queries have met keys already: a compiler leaves out what leads
    up to it."""

    answer: Any

    def attend(self, *_: Any, **__: Any) -> Any:
        return self.answer


def depth_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    depth: DepthContext | Paused | Attended,
    **kwargs: Any,
):
    """The attention function that these modules find in their configuration."""
    late = module._modules.get("k_norm")
    if isinstance(late, LateNorm):
        key = late.late(key)
    return depth.attend(module, query, key, value, attention_mask, **kwargs)


class LateNorm(nn.Module):
    """Mixed into a key norm that is to act after RoPE: where the model calls it, it passes."""

    prefix = "Late"

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def late(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


def is_latent(attention: nn.Module) -> bool:
    """Whether this attention caches a latent from which keys and values are expanded."""
    return hasattr(type(attention), "expand_kv")


def _one_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2).unsqueeze(1)


def _eager_attention(module: nn.Module) -> Any:
    """Of the family's modelling file, be the module's class made from one of it or not."""
    for cls in type(module).__mro__:
        if hasattr(home := sys.modules[cls.__module__], "eager_attention_forward"):
            return home.eager_attention_forward
    raise AssertionError(f"no eager attention beside {type(module).__name__}")


def enable(attentions: list[nn.Module], config: Any) -> None:
    """Make these attention modules call :func:`depth_attention_forward`.

    They get a copy of the configuration that names it; the model's own configuration, and so its
    masks, still name the implementation the user chose, which is read at every call.
    """
    if config._attn_implementation in _mixing:
        return
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, depth_attention_forward)
    own = copy.copy(config)
    own._attn_implementation = IMPLEMENTATION
    for attention in attentions:
        attention.config = own


def mix_in(implementation: str) -> None:
    """Let the attention function of that name mix where it is asked to, for an engine that must
    find its own name in every module's configuration."""
    plain = modeling_utils.ALL_ATTENTION_FUNCTIONS[implementation]

    def attend(*args: Any, depth: Any = None, **kwargs: Any) -> Any:
        if depth is None:
            return plain(*args, **kwargs)
        return depth_attention_forward(*args, depth=depth, **kwargs)

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(implementation, attend)
    _mixing.add(implementation)


def delay_key_norms(attentions: list[Any], model_type: str) -> None:
    for attention in attentions:
        if not hasattr(attention, "k_norm"):
            raise ConfigError(
                f"routing.key_norm='after_rope' moves a key norm, and {model_type} has none; "
                "leave it out, or use a family with QK-norm such as qwen3"
            )
        norm = attention.k_norm
        attention.k_norm = adopted(routed_class(type(norm), LateNorm), norm)


def restore_key_norms(attentions: list[Any]) -> None:
    for attention in attentions:
        norm = getattr(attention, "k_norm", None)
        if isinstance(norm, LateNorm):
            attention.k_norm = adopted(plain_class(type(norm), LateNorm), norm)
