"""Which pre-norms the boundary kernel may apply in place of the module."""

import pytest
import torch
from tests.support import plain_model
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import depthroute as dr
from depthroute.models.architecture import rms_norm_offset


@pytest.mark.parametrize(
    ("norm", "offset"),
    [
        (LlamaRMSNorm, 0.0),
        (Qwen3RMSNorm, 0.0),
        (Gemma3RMSNorm, 1.0),
        (OlmoLayerNorm, None),
        (CohereLayerNorm, None),
        (torch.nn.LayerNorm, None),
    ],
)
def test_an_rms_norm_is_recognised_by_what_it_computes(norm, offset):
    assert rms_norm_offset(norm) == offset


def test_a_norm_with_a_hook_is_called():
    routed = dr.convert(plain_model("llama", layers=2), dr.RoutingConfig("delta", num_blocks=2))
    layer = routed.model.layers[1]
    sublayer = layer.architecture.attention
    assert layer._norm(sublayer).weight is layer.input_layernorm.weight
    layer.input_layernorm.register_forward_hook(lambda *_: None)
    assert layer._norm(sublayer).weight is None
