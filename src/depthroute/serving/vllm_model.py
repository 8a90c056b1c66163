"""Routed models in vLLM: its Transformers backend around the routed decoder that ``AutoModel``
makes. Routing is per token and needs nothing of the engine; depth attention mixes values before
vLLM's attention writes them, so that its paged cache holds mixed values at the plain size."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.transformers import (  # pyright: ignore[reportMissingImports]
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
)
from vllm.model_executor.models.transformers.fusers.qkv import (  # pyright: ignore[reportMissingImports]
    QKVFuser,
)

from depthroute.models import depth_attention
from depthroute.models.architecture import architecture_for, decoder_layers
from depthroute.models.model import RoutedDecoder
from depthroute.serving.limits import check_servable

depth_attention.mix_in("vllm")


def _forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    inputs_embeds: Any = None,
    **kwargs: Any,
) -> Any:
    """The family's. vLLM keeps what it has compiled for the next start if it can pickle what it
    compiled, and of a decorated function, as transformers' are, it cannot."""
    return super(RoutedDecoder, self).forward(  # pyright: ignore
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        **kwargs,
    )


RoutedDecoder.forward = _forward


class _Routed:
    """Mixed into a model class of vLLM's Transformers backend."""

    model: Any
    text_config: Any
    logits_processor: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_servable(
            vllm_config.model_config.hf_config,
            pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore
        config = self.text_config
        options = architecture_for(config).logit_options(config)
        self.logits_processor.scale = options["scale"]
        for layer in decoder_layers(self.model):
            _find_values(layer)

    def _create_hf_to_vllm_mapper(self) -> None:
        """vLLM drops every weight that a decoder would pass over, such as the head; here it is
        wanted, as is all that the decoder has itself."""
        wanted = ["lm_head.weight", *(name for name, _ in self.model.named_parameters())]
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        self.model._keys_to_ignore_on_load_unexpected = [
            pattern for pattern in patterns if not any(re.search(pattern, name) for name in wanted)
        ]
        super()._create_hf_to_vllm_mapper()  # pyright: ignore


def _find_values(layer: Any) -> None:
    """vLLM projects queries, keys and values at once where the family has a projection each."""
    spec = layer.architecture
    attention = getattr(layer, spec.attention.module)
    if spec.values is not None and not hasattr(attention, spec.values):
        layer.architecture = replace(spec, values=QKVFuser.merged_name)


class RoutedForCausalLM(_Routed, TransformersForCausalLM):
    """A routed decoder behind vLLM's attention, linear layers and head."""


class RoutedMoEForCausalLM(_Routed, TransformersMoEForCausalLM):
    """The same for families with experts."""
