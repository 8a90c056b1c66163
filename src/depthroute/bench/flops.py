"""Model FLOPs of a training step, and of what a GPU could do they are.

    FLOPs of a token = 6 M + 6 L T A

M counts the weights of matrix products that a token passes: every linear layer and the head, tied
or not, of experts those that are active, once for each visit of a looped stack. L T A is attention:
L layers, T tokens of a sequence and A, the width of all query heads; it would be 12 if it were not
causal. Backward counts twice the forward.
Recomputation, embeddings, norms, the softmax and the routing over depth are not counted: a method
that adds work has the FLOPs of the model that it changes, so utilisation falls with its speed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

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
    decoder, config = model.base_model, model.config
    layers = getattr(decoder, model.architecture.layers)
    looped = set(layers.modules())
    weights = model.plan.loops * sum(_weights(m, config) for m in looped)
    weights += sum(_weights(m, config) for m in model.modules() if m not in looped)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 6 * config.num_hidden_layers * sequence_length * width
    return {"matmul": 6 * weights, "attention": attention, "total": 6 * weights + attention}


def _weights(module: nn.Module, config: Any) -> float:
    """Of this very module, those that one token is multiplied with."""
    if isinstance(module, nn.Linear):
        return module.weight.numel()
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]  # an expert a row
    active = getattr(config, "num_experts_per_tok", None)
    return sum(p.numel() / len(p) * active for p in stacked) if active else 0
