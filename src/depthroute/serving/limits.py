"""What vLLM cannot serve, said before it starts: one line instead of a traceback of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from depthroute.errors import ConfigError
from depthroute.methods import METHODS
from depthroute.models.architecture import architecture_for

_NO_CACHE = "keeps a state for which vLLM's Transformers backend has no cache"
_FAMILIES = {
    "gpt2": "its attention counts on heads in what vLLM's attention returns without them",
    "kimi_linear": f"its linear attention {_NO_CACHE}",
    "llama4_text": "its experts are stored transposed, which vLLM's Transformers backend does not "
    "load",
    "lfm2": f"its convolution {_NO_CACHE}",
    "qwen3_next": f"its linear attention {_NO_CACHE}",
}
"""Those that vLLM's Transformers backend cannot run, routed or not, and why."""
_INSTEAD = "use generate, or transformers' own server"


def check_servable(config: Any, *, pipeline_parallel_size: int = 1) -> None:
    """Whether vLLM can run a routed model of this configuration as ``generate`` does."""
    spec, routing = architecture_for(config), config.routing_config()
    start = f"vLLM cannot serve this {spec.model_type} model with method {routing.method!r}: "
    if spec.model_type in _FAMILIES:
        raise ConfigError(f"{start}{_FAMILIES[spec.model_type]}; {_INSTEAD}")
    if routing.loops > 1:
        raise ConfigError(
            f"{start}its layers are run {routing.loops} times, and vLLM keeps one cache a layer; "
            f"{_INSTEAD}"
        )
    if METHODS[routing.method].values is not None and spec.values is None:
        raise ConfigError(
            f"{start}it mixes a latent of which keys are made too, before vLLM's attention sees "
            f"either; {_INSTEAD}"
        )
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"{start}pipeline_parallel_size={pipeline_parallel_size} sends one tensor from stage "
            "to stage, and a routed layer reads several; use tensor_parallel_size"
        )


def pipeline_size(words: Sequence[str]) -> int:
    """Of the pipeline that a command line of vLLM's asks for; what cannot be read is vLLM's to
    judge."""
    size = 1
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, _, value = word.replace("_", "-").partition("=")
        if name in ("--pipeline-parallel-size", "-pp") and (value or after).isdigit():
            size = int(value or after)
    return size
