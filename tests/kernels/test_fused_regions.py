"""Regions between boundaries that are one kernel each: every sublayer's is the same. And a model of
static weights, whose kernels are others.

In Triton's interpreter; started by test_kernels_interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import depthroute as dr
from depthroute import ops
from tests.support import disturb_routing, llama_config, tokens, trained_like

pytestmark = pytest.mark.interpreter


def step(model, op="depth_mix", backend="triton"):
    ids = tokens(batch=1, length=2)
    with ops.backend(backend), ops.record_backends() as ran:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert ran[op, backend]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


@pytest.mark.parametrize("method", ["attnres", "delta"])
def test_a_norm_that_no_kernel_applies_shares_the_last_ones_graph(method):
    """Attention, MLP and norm: the first place has nothing to mix and its norm stands apart."""
    config = llama_config(layers=3, hidden_size=16, intermediate_size=16)
    model = dr.from_config(config, dr.RoutingConfig(method, num_blocks=3))
    model = disturb_routing(trained_like(model)).train()
    expected = step(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    dr.compile_regions(model, counter, dynamic=False)
    loss, gradients = step(model)
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 3


@pytest.mark.parametrize(
    "setting",
    [{}, {"num_blocks": 3}, {"routing": "replacement"}, {"sources": "cumulative"}],
    ids=str,
)
def test_static_weights_train_alike_with_kernels_and_without(setting):
    """With kernels the gradient of a source travels from site to site."""
    config = llama_config(layers=3, hidden_size=16, intermediate_size=16)
    model = dr.from_config(config, dr.RoutingConfig("static", **setting))
    model = disturb_routing(trained_like(model)).train()
    expected = step(model, "static_mix", "torch")
    loss, gradients = step(model, "static_mix", "triton")
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
