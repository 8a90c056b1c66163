"""What vLLM cannot serve, said before it starts: one line instead of a traceback of workers."""

from __future__ import annotations

from typing import Any

from depthroute.errors import ConfigError
from depthroute.models.architecture import architecture_for


def check_servable(config: Any, *, pipeline_parallel_size: int = 1) -> None:
    """Whether vLLM can run a routed model of this configuration as ``generate`` does."""
    spec, routing = architecture_for(config), config.routing_config()
    start = f"vLLM cannot serve this {spec.model_type} model with method {routing.method!r}: "
    plan_values = routing.method in ("depth_attention", "value_residual")
    if spec.linear_attentions:
        raise ConfigError(
            f"{start}its linear attention keeps a state for which vLLM's Transformers backend has "
            "no cache; use generate, or transformers' own server"
        )
    if routing.loops > 1:
        raise ConfigError(
            f"{start}its layers are run {routing.loops} times, and vLLM keeps one cache a layer; "
            "use generate, or transformers' own server"
        )
    if plan_values and spec.values is None:
        raise ConfigError(
            f"{start}it mixes a latent of which keys are made too, before vLLM's attention sees "
            "either; use generate, or transformers' own server"
        )
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"{start}pipeline_parallel_size={pipeline_parallel_size} sends one tensor from stage to "
            "stage, and a routed layer reads several; use tensor_parallel_size"
        )
