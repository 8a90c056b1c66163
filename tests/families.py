"""A tiny configuration of every family in the architecture table."""

from __future__ import annotations

import pytest
import torch
import transformers

from depthroute.models.architecture import ARCHITECTURES
from tests.support import SHAPE, trained_like

MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
LAYERS = 4

SETTINGS: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"use_bias": True},
    "granite": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "olmo2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {},
    "gpt2": {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": LAYERS,
        "n_positions": 128,
        "n_inner": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.5},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **MOE},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        **MOE,
        **MLA,
    },
    "ernie4_5": {"head_dim": 8},
    "olmo3": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "glm4": {"head_dim": 8},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "no_rope_layer_interval": 4,
        "floor_scale": 8,
    },
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **MOE,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "kimi_linear": {
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4},
        **MOE,
        **MLA,
    },
}

HYBRID = ("kimi_linear", "qwen3_next", "lfm2")
"""Some of whose layers have no keys and values."""
LIKE_OTHERS = {
    "ernie4_5": "llama",
    "olmo3": "olmo2",
    "exaone4": "olmo2",
    "glm4": "gemma2",
    "gpt_oss": "mixtral",
    "llama4_text": "mixtral",
    "lfm2": "qwen3_next",
}
"""Families whose layers are put together as another's."""


def families_but(*others: str) -> list:
    """For what takes long and depends on how a layer is put together alone."""
    return [
        pytest.param(family, marks=pytest.mark.slow if family in LIKE_OTHERS else ())
        for family in SETTINGS
        if family not in others
    ]


FAMILIES = families_but()


SHALLOW: dict[str, dict] = {
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_layer": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""What two layers need to be one of each kind: a graph of them takes half the time to trace."""


def shallow_model(family: str):
    layers = {} if family == "gpt2" else {"num_hidden_layers": 2}
    return family_model(family, **layers, **SHALLOW.get(family, {}))


def family_config(family: str, **overrides):
    config_class = transformers.CONFIG_MAPPING[family]
    shape = {
        k: v
        for k, v in SHAPE.items()
        if family != "gpt2" or k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    layers = {} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    settings = shape | layers | SETTINGS[family] | overrides
    return config_class(**{k: v for k, v in settings.items() if v is not None})


def family_model(family: str, seed: int = 0, **overrides):
    config = family_config(family, **overrides)
    torch.manual_seed(seed)
    model = getattr(transformers, ARCHITECTURES[family].causal_lm)(config)
    model = trained_like(model, seed)
    if family.startswith(("gemma", "qwen3_next")):  # whose norms store the gain minus one
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name and "linear_attn" not in name:
                    parameter.sub_(1.0)
    return model


def decoder_of(model):
    """``base_model``, which llama4's causal model does not know."""
    return next(m for m in model.children() if isinstance(m, transformers.PreTrainedModel))
