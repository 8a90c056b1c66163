"""Model FLOPs of a training step, and of what a GPU could do they are.

    FLOPs of a token = 6 M + 6 L T A

M counts the weights of matrix products that a token passes: every linear layer and the head, tied
or not, of experts those that are active, once for each visit of a looped stack. L T A is attention:
L layers, T tokens of a sequence and A, the width of all query heads (of latent attention the mean
of that and the width of all values); it would be 12 if it were not causal. Backward counts twice
the forward.
Recomputation, embeddings, norms, the softmax, the state of linear attention and the routing over
depth are not counted: a method
that adds work has the FLOPs of the model that it changes, so utilisation falls with its speed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from depthroute.models.architecture import decoder_layers

PEAK_TFLOPS: dict[tuple[str, ...], float] = {
    ("GB200",): 2500.0,
    ("B200",): 2250.0,
    ("GH200",): 989.4,
    ("H200", "NVL"): 835.5,
    ("H200",): 989.4,
    ("H100", "NVL"): 835.5,
    ("H100", "PCIe"): 756.5,
    ("H100",): 989.4,
    ("H800",): 989.4,
    ("H20",): 148.0,
    ("A100",): 312.0,
    ("A800",): 312.0,
    ("A40",): 149.7,
    ("A10G",): 70.0,
    ("A10",): 125.0,
    ("L40S",): 362.0,
    ("L4",): 121.0,
}
"""Dense bf16 by the vendor's datasheet, by words of the device's name; the first that fits."""


def peak_tflops(name: str) -> float | None:
    """Of the GPU called ``name``; None where it is not known."""
    words = set(re.split(r"[\s-]+", name))
    return next((peak for known, peak in PEAK_TFLOPS.items() if words.issuperset(known)), None)


def peak_of(device: torch.device, dtype: str) -> float | None:
    """TFLOP/s that matrix products of ``dtype`` could reach on ``device``, where that is known."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    return peak_tflops(torch.cuda.get_device_name(device))


def per_token(model: Any, sequence_length: int) -> dict[str, float]:
    """Forward and backward of one token: ``matmul`` and ``attention`` FLOPs, and their sum."""
    spec, config, loops = model.architecture, model.config, model.plan.loops
    layers = decoder_layers(model)
    looped = {module for layer in layers for module in layer.modules()}
    weights = loops * sum(_weights(m, config) for m in looped)
    weights += sum(_weights(m, config) for m in model.modules() if m not in looped)
    softmax = sum(not spec.is_linear(spec.attention.of(layer)) for layer in layers)
    attention = 6 * loops * softmax * sequence_length * _attention_width(config)
    return {"matmul": 6 * weights, "attention": attention, "total": 6 * weights + attention}


def _attention_width(config: Any) -> float:
    """Of what is multiplied to scores, and of what they weigh: the mean of both."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        scored = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads * (scored + config.v_head_dim) / 2
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _weights(module: nn.Module, config: Any) -> float:
    """Of this very module, those that one token is multiplied with."""
    if isinstance(module, nn.Linear | nn.Conv1d):
        return module.weight.numel()
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]  # an expert a row
    active = getattr(config, "num_experts_per_tok", None)
    return sum(p.numel() / len(p) * active for p in stacked) if active else 0
