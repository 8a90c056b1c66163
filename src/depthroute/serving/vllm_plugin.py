"""What vLLM imports in every process it starts, by the entry point ``vllm.general_plugins``.

Light, because the process that only reads configurations loads it too; the model's module is
imported where a model is made.
"""

from __future__ import annotations

from depthroute.models.architecture import ARCHITECTURES

_MODELS = "depthroute.serving.vllm_model"


def register() -> None:
    """Make routed checkpoints known to vLLM; may be called again."""
    import vllm  # pyright: ignore[reportMissingImports]

    import depthroute  # noqa: F401  transformers' Auto classes learn of routed checkpoints

    for architecture in ARCHITECTURES.values():
        kind = "RoutedMoEForCausalLM" if architecture.has_experts else "RoutedForCausalLM"
        vllm.ModelRegistry.register_model(f"Routed{architecture.causal_lm}", f"{_MODELS}:{kind}")
