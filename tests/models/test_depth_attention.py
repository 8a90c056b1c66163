"""Depth attention in a model: gradients go from layer to layer and are added in its kernels."""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import depthroute as dr
from depthroute.diagnostics.trace import observe
from tests.families import family_model
from tests.support import METHODS, disturb_routing, loss_and_gradients, routed_model, tokens

ROUTINGS = {
    "two anchors": dr.RoutingConfig("depth_attention", stride=2, init="paper"),
    "every layer": METHODS["depth attention stride 1"],
    "recent layers, gated": METHODS["depth attention gate"],
    "looped": dr.RoutingConfig("depth_attention", stride=2, loops=2, init="paper"),
}
HOW = ("eager", "checkpointed", "reentrant", "regions")


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "how"),
    [*((n, h) for n in ROUTINGS for h in HOW), *((n, "whole") for n in list(ROUTINGS)[1:3])],
)
def test_its_gradients_are_those_of_the_definition(name, how):
    torch._dynamo.reset()
    model = routed_model(ROUTINGS[name], "qwen3", layers=4).double().train()
    with dr.ops.backend("reference"):
        expected = loss_and_gradients(model)
    run = model
    if how in ("checkpointed", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    elif how == "regions":
        dr.compile_regions(model, "aot_eager", dynamic=False)
    elif how == "whole":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with dr.ops.record_backends() as ran:
        found = loss_and_gradients(model, forward=run)
    assert ran["depth_attention_mix_backward", "torch"] > 0
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_neox"])
def test_so_are_those_of_other_families(family):
    routing = dr.RoutingConfig("depth_attention", stride=1, init="gate")
    model = disturb_routing(dr.convert(family_model(family), routing)).double().train()
    if family == "deepseek_v3":
        model.set_experts_implementation("batched_mm")
    with dr.ops.backend("reference"):
        expected = loss_and_gradients(model)
    assert_same(loss_and_gradients(model), expected)


def test_an_observer_changes_no_gradient():
    model = routed_model(ROUTINGS["two anchors"], layers=4).double()
    expected, seen = loss_and_gradients(model), []

    class Observer:
        def on_depth_mix(self, layer, layers, weights, values, mixed):
            seen.append(layer)
            return mixed

        def __getattr__(self, name):
            return lambda *args: args[-1]

    with observe(model, Observer()):
        found = loss_and_gradients(model)
    assert seen == [1, 2, 3]
    assert_same(found, expected)


class Additions(TorchDispatchMode):
    """Of tensors with heads, by autograd and by what is not depth attention's own backward."""

    def __init__(self):
        super().__init__()
        self.found, self.copies = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 4:
            name = function.overloadpacket.__name__
            is_ours = any("ops/_torch" in f.filename for f in traceback.extract_stack())
            if name in ("add", "add_") and not is_ours:
                self.found[tuple(result.shape)] += 1
            self.copies += name in ("clone", "copy_") and not is_ours
        return result


def additions(routing, how):
    torch._dynamo.reset()
    model = routed_model(routing, "qwen3", layers=4).train()
    run, ids = model, tokens()
    if how == "regions":
        dr.compile_regions(model, "aot_eager", dynamic=False)
    elif how == "whole":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = run(input_ids=ids, labels=ids, use_cache=False).loss
    with Additions() as seen:
        loss.backward()
    return seen


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((n, h) for n in ("two anchors", "every layer") for h in ("eager", "regions")),
        ("two anchors", "whole"),
    ],
)
def test_backward_adds_no_heads_outside_its_kernel(name, how):
    """But for key and value of the first layer, which mixes nothing: attention reads them and the
    second layer does."""
    plain, routed = additions("standard", how), additions(ROUTINGS[name], how)
    beyond = routed.found - plain.found
    assert beyond == {(2, 2, 17, 16): 2}, beyond
    if how == "regions":  # gradients lie as the regions take them
        assert routed.copies <= plain.copies
