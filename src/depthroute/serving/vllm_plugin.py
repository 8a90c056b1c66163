"""What vLLM imports in every process it starts, by the entry point ``vllm.general_plugins``.

Light, because the process that only reads configurations loads it too; the model's module is
imported where a model is made.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from depthroute.errors import DepthrouteError
from depthroute.models.architecture import ARCHITECTURES
from depthroute.models.configuration import MODEL_TYPE

_MODELS = "depthroute.serving.vllm_model"


def register() -> None:
    """Make routed checkpoints known to vLLM; may be called again."""
    import vllm  # pyright: ignore[reportMissingImports]

    import depthroute  # noqa: F401  transformers' Auto classes learn of routed checkpoints

    for architecture in ARCHITECTURES.values():
        kind = "RoutedMoEForCausalLM" if architecture.has_experts else "RoutedForCausalLM"
        vllm.ModelRegistry.register_model(f"Routed{architecture.causal_lm}", f"{_MODELS}:{kind}")
    is_command = "vllm" in Path(sys.argv[0]).parts
    if is_command and multiprocessing.parent_process() is None:
        judge(sys.argv[1:])


def judge(words: Sequence[str]) -> None:
    """End a vLLM command whose routed folder cannot be served with one line; what is found later
    is a traceback of every process."""
    from depthroute.models.loading import model_config
    from depthroute.serving.limits import check_servable, pipeline_size

    for word in words:
        folder = Path(word.partition("=")[2] or word)
        text = ""
        with suppress(OSError, ValueError):  # most words are no folders, nor can be names of any
            text = (folder / "config.json").read_text(errors="replace")
        if f'"{MODEL_TYPE}"' in text:
            try:
                check_servable(model_config(folder), pipeline_parallel_size=pipeline_size(words))
            except DepthrouteError as error:
                sys.exit(f"error: {error}")
