"""Inputs that are made again in backward: the same numbers in less memory, captured and not."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import depthroute as dr
from depthroute.nn.remade import Remade, Watch
from tests.support import disturb_routing, llama_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, LAYERS, ROWS, LENGTH = 1024, 8, 4, 512
ROUTING = dr.RoutingConfig("attnres", num_blocks=8)
PLACES = [*range(1, LAYERS)]
"""In the first half of the blocks of two."""


def routed(dtype, attention="eager"):
    """Eager attention, since flash attention adds in an order of its own every time."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 512}
    config = llama_config(layers=LAYERS, num_attention_heads=8, **shape)
    config._attn_implementation = attention
    model = disturb_routing(dr.from_config(config, ROUTING), amount=0.05)
    return model.to("cuda", dtype).train()


def tokens():
    return torch.randint(3, 97, (ROWS, LENGTH), device="cuda")


def step(model, ids):
    """Loss and gradients, the memory that is held before backward and the most there was."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    most = torch.cuda.max_memory_allocated() - before
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, held, most


def keep(monkeypatch):
    monkeypatch.setattr("depthroute.models.routed.remaking", lambda call, *_: call)


@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loss_and_gradients_are_the_same_to_the_bit_in_less_memory(dtype, compiler, monkeypatch):
    torch._dynamo.reset()
    model, ids = routed(dtype), tokens()
    if compiler is not None:
        dr.compile_regions(model, compiler, dynamic=False)
    step(model, ids)  # compiles
    loss, gradients, held, most = step(model, ids)
    keep(monkeypatch)
    expected, kept, more, most_kept = step(model, ids)
    assert torch.equal(loss, expected)
    for name, gradient in kept.items():
        if "embed_tokens" in name:  # as it does
            torch.testing.assert_close(gradients[name], gradient, rtol=2e-2, atol=1e-4)
        else:
            assert torch.equal(gradients[name], gradient), name
    size = ROWS * LENGTH * WIDTH * dtype.itemsize
    assert more - held >= 0.95 * len(PLACES) * size
    assert most < most_kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_what_is_made_again_is_what_was_read_to_the_bit(dtype, monkeypatch):
    read, made, start, make = {}, {}, Watch.__init__, Remade._remade

    def begin(self, x, remade):
        read[remade._stream.index] = x.detach().clone()
        start(self, x, remade)

    def spy(self):
        made[self._stream.index] = make(self)
        return made[self._stream.index]

    monkeypatch.setattr(Watch, "__init__", begin)
    monkeypatch.setattr(Remade, "_remade", spy)
    step(routed(dtype), tokens())
    assert [*read] == sorted(made) == PLACES
    for index, x in read.items():
        assert torch.equal(made[index], x), index


def test_a_captured_step_makes_it_again_at_every_replay(monkeypatch):
    """Gradients of other tokens than those it was captured with. Eager attention makes its mask on
    the host, which cannot be captured, and another may add in another order when it is: in bf16
    that is as much as small gradients are, so that they are fp32."""
    model, ids = routed(torch.float32, "sdpa"), tokens()
    plain = copy.deepcopy(model)  # the captured one's gradients belong to the stream of its capture
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, ids)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    captured = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _ in range(2):
        ids.copy_(tokens())
        graph.replay()
        found = loss.detach().clone(), {n: g.clone() for n, g in captured.items()}
        with monkeypatch.context() as patched:
            keep(patched)
            expected, gradients, *_ = step(plain, ids)
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients.items():
            assert (found[1][name] - gradient).norm() <= 1e-3 * gradient.norm(), name
