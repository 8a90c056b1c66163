"""Which pre-norms the boundary kernel may apply in place of the module."""

import pytest
import torch
from tests.families import FAMILIES, family_model
from tests.support import plain_model, tokens
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import depthroute as dr
from depthroute.models.architecture import rms_norm_offset
from depthroute.models.routed import RoutedLayer


@pytest.mark.parametrize(
    ("norm", "offset"),
    [
        (LlamaRMSNorm, 0.0),
        (Qwen3RMSNorm, 0.0),
        (Gemma3RMSNorm, 1.0),
        (OlmoLayerNorm, None),
        (CohereLayerNorm, None),
        (torch.nn.LayerNorm, None),
        (Gemma3nRMSNorm, None),  # an RMSNorm, and without a weight if its other argument says so
    ],
)
def test_an_rms_norm_is_recognised_by_what_it_computes(norm, offset):
    assert rms_norm_offset(norm) == offset


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_is_recognised_while_a_model_is_loaded_in_another_dtype(dtype):
    """transformers sets the default dtype meanwhile, and what is found is kept."""
    rms_norm_offset.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert rms_norm_offset(LlamaRMSNorm) == 0.0
    finally:
        torch.set_default_dtype(before)
    assert rms_norm_offset(Gemma3RMSNorm) == 1.0


def test_an_eps_of_zero_is_an_eps():
    routed = dr.convert(plain_model("llama", layers=2, rms_norm_eps=0.0), DELTA)
    assert routed.model.layers[1]._kernel_norm(routed.model.layers[1].architecture.mlp).eps == 0.0


DELTA = dr.RoutingConfig("delta", num_blocks=2)


def hook(norm):
    norm.register_forward_hook(lambda *_: None)


def backward_hook(norm):
    norm.register_full_backward_hook(lambda *_: None)


def backward_pre_hook(norm):
    norm.register_full_backward_pre_hook(lambda *_: None)


def own_forward(norm):
    """As accelerate does, to fetch weights that were offloaded."""
    norm.forward = lambda x, old=norm.forward: old(x)


@pytest.mark.parametrize("change", [hook, backward_hook, backward_pre_hook, own_forward])
def test_a_norm_that_is_more_than_its_class_is_called(change):
    routed = dr.convert(plain_model("llama", layers=2), DELTA)
    layer = routed.model.layers[1]
    sublayer = layer.architecture.attention
    assert layer._kernel_norm(sublayer).weight is layer.input_layernorm.weight
    change(layer.input_layernorm)
    assert layer._kernel_norm(sublayer) is None


def test_a_norm_before_a_sublayer_that_writes_into_its_input_is_called():
    for noise in (0.0, 0.1):
        plain = family_model("mixtral", num_hidden_layers=2, router_jitter_noise=noise)
        layer = dr.convert(plain, DELTA).model.layers[1]
        assert layer._kernel_norm(layer.architecture.attention) is not None
        assert (layer._kernel_norm(layer.architecture.mlp) is None) == (noise > 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sublayer_writes_into_what_a_kernel_may_need_again(family):
    routed = dr.convert(family_model(family), DELTA).train()
    seen = []

    def before(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        seen.append((x, x._version))

    for layer in (m for m in routed.modules() if isinstance(m, RoutedLayer)):
        for sublayer in (layer.architecture.attention, layer.architecture.mlp):
            sublayer.of(layer).register_forward_pre_hook(before, with_kwargs=True)
    routed(tokens(1, 9))
    assert len(seen) >= 4
    assert all(x._version == version for x, version in seen)
