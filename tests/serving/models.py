"""Small routed models of widths that vLLM's attention has kernels for, and what generate says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import depthroute as dr
from depthroute.methods import settings_of
from tests.families import family_model
from tests.serving.engine import TOKENS
from tests.support import disturb_routing, word_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10], [90, 81, 3, 4], [*range(3, 40)], [*range(11, 23)]]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
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


@torch.no_grad()
def generated(model: Any, prompts: list[list[int]], tokens: int = TOKENS) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, a prompt at a time."""
    found: dict[str, Any] = {"tokens": [], "log_probabilities": []}
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[0, len(prompt) :].tolist()
        steps = zip(new, output.logits, strict=True)
        found["tokens"].append(new)
        found["log_probabilities"].append(
            [float(logits[0].log_softmax(-1)[token]) for token, logits in steps]
        )
    return found


def assert_equal(answer: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-3) -> None:
    assert "error" not in answer, answer["error"]
    assert answer["tokens"] == expected["tokens"]
    rows = zip(answer["log_probabilities"], expected["log_probabilities"], strict=True)
    for row, wanted in rows:
        torch.testing.assert_close(torch.tensor(row), torch.tensor(wanted), rtol=0, atol=tolerance)
