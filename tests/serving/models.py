"""Small routed models of widths that vLLM's attention has kernels for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.serve_real import Answer, compared

import depthroute as dr
from depthroute.methods import settings_of
from tests.families import family_model
from tests.support import disturb_routing, word_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10], [90, 81, 3, 4], [*range(3, 40)], [*range(11, 23)]]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
OWN: dict[str, dict[str, Any]] = {
    **{
        family: {"head_dim": 32}
        for family in ("qwen3", "qwen3_moe", "ernie4_5", "glm4", "gpt_oss", "llama4_text")
    },
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}


def save_routed(folder: Path, family: str, method: str | None) -> Any:
    """A model whose routing is no identity, in ``folder`` with a tokenizer; as it was saved."""
    model = family_model(family, **WIDE | OWN.get(family, {}))
    if method is not None:
        model = dr.convert(model, dr.RoutingConfig(**settings_of(method)))
        disturb_routing(model)
    model.save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return model.eval()


def assert_equal(answer: dict[str, Any], expected: list[Answer], tolerance: float = 1e-3) -> None:
    assert "error" not in answer, answer["error"]
    comparison = compared(answer["answers"], expected)
    assert comparison["first differences"] == []
    assert comparison["log-probability difference"] <= tolerance
