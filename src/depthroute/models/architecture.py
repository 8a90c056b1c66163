"""The table of architectures: where each family keeps its sublayers.

A decoder layer of nearly every family is *norm, sublayer, optional post-norm or dropout, optional
multiplier, add*, twice. An :class:`Architecture` names those parts; the forward loop in
:mod:`depthroute.models.routed` does the rest. Adding a family is adding an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from depthroute.errors import ConfigError


@dataclass(frozen=True)
class Sublayer:
    """``h + after(module(norm(h)))``, each part named as an attribute of the decoder layer."""

    module: str
    norm: str | None = None
    """The pre-norm; None where the family has only a post-norm."""
    after: tuple[str, ...] = ()
    """Post-norms and dropouts between the module and the add, in order."""


@dataclass(frozen=True)
class Architecture:
    model_type: str
    """As in the Hugging Face configuration."""
    causal_lm: str
    """Name of the model class in transformers."""
    attention: Sublayer
    mlp: Sublayer
    decoder: str = "model"
    layers: str = "layers"
    final_norm: str = "norm"
    eps: str = "rms_norm_eps"
    """Configuration attribute that holds the norm eps."""
    multiplier: str | None = None
    """Layer attribute that multiplies a sublayer's output before it is added."""
    parallel: bool | str = False
    """Attention and MLP read the same input; a string names the configuration flag for it."""
    cache_argument: str = "past_key_values"
    ignored_arguments: tuple[str, ...] = ()
    """Arguments of the layer that its attention does not take."""
    adapt_arguments: Callable[[nn.Module, dict[str, Any]], dict[str, Any]] | None = None
    """Last word on the attention's arguments, for layers of mixed kinds."""

    def is_parallel(self, config: Any) -> bool:
        if isinstance(self.parallel, str):
            return bool(getattr(config, self.parallel))
        return self.parallel

    def sublayers(self, config: Any) -> tuple[str, ...]:
        return ("block",) if self.is_parallel(config) else ("attention", "mlp")


PRE_NORM: dict[str, Any] = {
    "attention": Sublayer("self_attn", norm="input_layernorm"),
    "mlp": Sublayer("mlp", norm="post_attention_layernorm"),
}

ARCHITECTURES: dict[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        Architecture("llama", "LlamaForCausalLM", **PRE_NORM),
        Architecture("qwen3", "Qwen3ForCausalLM", **PRE_NORM),
    )
}


def architecture_for(config: Any) -> Architecture:
    model_type = getattr(config, "model_type", None)
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"no architecture spec for model_type {model_type!r}; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. docs/conversion.md shows how to add one"
        )
    return ARCHITECTURES[model_type]
