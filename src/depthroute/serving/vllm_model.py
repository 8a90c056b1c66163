"""Routed models in vLLM: its Transformers backend around the routed decoder that ``AutoModel``
makes. Routing is per token and needs nothing of the engine; depth attention mixes values before
vLLM's attention writes them, so that its paged cache holds mixed values at the plain size."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.transformers import (  # pyright: ignore[reportMissingImports]
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
)

from depthroute.models import depth_attention
from depthroute.models.architecture import architecture_for
from depthroute.serving.limits import check_servable

depth_attention.mix_in("vllm")


class _Routed:
    """Mixed into a model class of vLLM's Transformers backend."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_servable(
            vllm_config.model_config.hf_config,
            pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore
        config = self.text_config
        options = architecture_for(config).logit_options(config)
        self.logits_processor.scale = options["scale"]

    def _create_hf_to_vllm_mapper(self) -> None:
        # a routed decoder passes over the head of a causal model's checkpoint; here it is wanted
        ignored = self.model._keys_to_ignore_on_load_unexpected
        self.model._keys_to_ignore_on_load_unexpected = [k for k in ignored if "lm_head" not in k]
        super()._create_hf_to_vllm_mapper()  # pyright: ignore


class RoutedForCausalLM(_Routed, TransformersForCausalLM):
    """A routed decoder behind vLLM's attention, linear layers and head."""


class RoutedMoEForCausalLM(_Routed, TransformersMoEForCausalLM):
    """The same for families with experts."""
