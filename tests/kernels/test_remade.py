"""What a sublayer read is made again by the kernels, to the bit.

In Triton's interpreter; started by test_kernels_interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import depthroute as dr
from depthroute import ops
from depthroute.nn.remade import Remade, Watch
from tests.support import disturb_routing, llama_config, tokens, trained_like

pytestmark = pytest.mark.interpreter
PLACES = [1, 2, 3]


def routed(dtype, **settings):
    config = llama_config(layers=3, hidden_size=16, intermediate_size=16)
    model = dr.from_config(config, dr.RoutingConfig("attnres", num_blocks=3, **settings))
    return disturb_routing(trained_like(model)).to(dtype).train()


def step(model):
    ids = tokens(batch=1, length=2)
    with ops.backend("triton"), ops.record_backends() as ran:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients, ran["depth_mix", "triton"]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"heads": 4, "head_norm": "slice"}),
        (torch.bfloat16, {"init": "complete"}),
    ],
    ids=str,
)
def test_an_input_is_gone_made_again_to_the_bit_and_so_are_the_gradients(
    dtype, settings, monkeypatch
):
    monkeypatch.setattr("depthroute.nn.remade.LEAST_WIDTH", 1)
    model, read, gone, made = routed(dtype, **settings), {}, {}, {}
    start, make = Watch.__init__, Remade._remade

    def begin(self, x, remade):
        index = remade._stream.index
        read[index], gone[index] = x.detach().clone(), StorageWeakRef(x.untyped_storage())
        start(self, x, remade)

    def spy(self):
        assert all(storage.expired() for storage in gone.values())
        made[self._stream.index] = make(self)
        return made[self._stream.index]

    monkeypatch.setattr(Watch, "__init__", begin)
    monkeypatch.setattr(Remade, "_remade", spy)
    loss, gradients, calls = step(model)
    assert [*read] == sorted(made) == PLACES
    for index, x in read.items():
        assert torch.equal(made[index], x)
    monkeypatch.setattr("depthroute.models.routed.remaking", lambda call, *_: call)
    expected, kept, fewer = step(model)
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in kept.items())
    assert calls == fewer + len(PLACES)
