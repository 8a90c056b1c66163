"""Routing over a base of int8 or int4 weights: converted, trained alone, saved and loaded."""

from __future__ import annotations

import pytest
import torch

import depthroute as dr
from tests.support import plain_model, tokens

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

METHODS = {
    "delta": dr.RoutingConfig("delta", num_blocks=3),
    "attnres": dr.RoutingConfig("attnres", num_blocks=3),
    "depth attention": dr.RoutingConfig("depth_attention"),
}


def quantised(folder, bits):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import AutoModelForCausalLM, TorchAoConfig

    kind = Int8WeightOnlyConfig()
    if bits == 4:
        kind = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=TorchAoConfig(kind), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    plain_model(layers=3).save_pretrained(path)
    return path


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("method", METHODS)
def test_routing_is_an_identity_over_quantised_weights_and_learns_alone(
    folder, tmp_path, method, bits
):
    base, ids = quantised(folder, bits), tokens(length=17)
    routed = dr.convert(base, METHODS[method])
    assert dr.identity_report(base, routed, ids).max_difference < 1e-5
    routed.freeze_base()
    optimiser = torch.optim.Adam(routed.routing_parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = routed(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = routed(ids).logits
    routed.save_pretrained(tmp_path / "whole")
    torch.testing.assert_close(dr.from_pretrained(tmp_path / "whole")(ids).logits, expected)
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    again = dr.load_adapter(quantised(folder, bits), tmp_path / "adapter")
    torch.testing.assert_close(again(ids).logits, expected)
