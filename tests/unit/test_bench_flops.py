"""Model FLOPs: the formula against a count of what a step computes."""

import pytest
import torch
from tests.families import family_config
from tests.support import llama_config, qwen3_config, tokens
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import depthroute as dr
from depthroute.bench import flops

STANDARD = dr.RoutingConfig("standard")
MODELS = {
    "qwen3, whose heads are wider than the model": (qwen3_config, STANDARD),
    "a tied head": (lambda: llama_config(tie_word_embeddings=True), STANDARD),
    "experts": (lambda: family_config("qwen3_moe"), STANDARD),
    "latent attention": (lambda: family_config("deepseek_v3"), STANDARD),
    "a looped stack": (llama_config, dr.RoutingConfig("standard", loops=2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_a_step_computes(name):
    """Eager attention computes the upper triangle too, so it is counted twice."""
    config, routing = MODELS[name]
    model, ids = dr.from_config(config(), routing), tokens(batch=2, length=64)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    each = flops.per_token(model, 64)
    assert each["total"] == each["matmul"] + each["attention"]
    computed = (each["matmul"] + 2 * each["attention"]) * ids.numel()
    # besides, rotary tables and the choice of experts are small products
    assert computed <= counter.get_total_flops() <= 1.02 * computed


def test_layers_without_softmax_have_no_attention_to_count():
    """Half of them here; of a convolution every weight is used once a token."""
    config = family_config("lfm2")
    model = dr.from_config(config, STANDARD)
    each = flops.per_token(model, 64)
    softmax = config.layer_types.count("full_attention")
    assert 2 * softmax == config.num_hidden_layers
    assert each["attention"] == 6 * softmax * 64 * config.hidden_size
    used = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d))
    assert each["matmul"] == 6 * sum(m.weight.numel() for m in used)


def test_routing_is_no_work_of_the_model():
    plain, routed = (
        dr.from_config(qwen3_config(), dr.RoutingConfig(method)) for method in ("standard", "delta")
    )
    assert flops.per_token(plain, 32) == flops.per_token(routed, 32)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name_or_not_at_all(name, peak):
    assert flops.peak_tflops(name) == peak


def test_a_peak_is_of_bf16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda")
    assert flops.peak_of(cuda, "bfloat16") == 989.4
    assert flops.peak_of(cuda, "float32") is None
    assert flops.peak_of(torch.device("cpu"), "bfloat16") is None
