"""The op of the loss: what it holds, what it works out, what it refuses, and how torch sees it."""

from __future__ import annotations

import pytest
import torch
from tests.dispatch import Largest, Products
from torch.library import opcheck
from torch.testing import assert_close

from depthroute import ops
from depthroute.errors import DepthrouteError, DerivativeError
from depthroute.ops.cross_entropy import HeadLoss

ZEROS = torch.zeros(6, dtype=torch.int64)


def head(dtype=torch.float32):
    return [torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (6, 20)]


def test_without_a_setting_a_chunk_is_so_many_numbers(monkeypatch):
    monkeypatch.setattr("depthroute.ops.cross_entropy.CHUNK_LOGITS", 100 * 64)
    hidden, weight = torch.randn(500, 8, requires_grad=True), torch.randn(64, 8)
    with Largest() as largest:
        ops.linear_cross_entropy(hidden, weight, torch.zeros(500, dtype=torch.int64)).backward()
    assert largest.count == 128 * 64  # 100 rows, rounded up


@pytest.mark.parametrize(
    ("frozen", "products"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1)],
)
def test_no_gradient_is_worked_out_that_nobody_wants(frozen, products):
    given = {"hidden": torch.randn(6, 8), "weight": torch.randn(20, 8)}
    for name, tensor in given.items():
        tensor.requires_grad_(name not in frozen)
    with Products() as seen:
        ops.linear_cross_entropy(*given.values(), torch.zeros(6, dtype=torch.int64))
    assert seen.count == products
    with torch.no_grad(), Products() as seen:
        ops.linear_cross_entropy(*given.values(), torch.zeros(6, dtype=torch.int64))
    assert seen.count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wants", [[True, True, True], [False, True, False], [False] * 3])
def test_the_op_passes_opcheck(dtype, wants):
    hidden, weight = (t.detach() for t in head(dtype))
    bias = torch.randn(20, dtype=dtype)
    given = HeadLoss(hidden, weight, bias, ZEROS, 0.5, 3.0, -100, 4, wants)
    opcheck(torch.ops.depthroute.linear_cross_entropy.default, tuple(given))


def test_a_compiled_graph_does_not_grow_with_the_number_of_chunks():
    nodes = []

    def count(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    hidden, weight = head()
    for chunk in (6, 1):
        torch._dynamo.reset()
        compiled = torch.compile(ops.linear_cross_entropy, backend=count, fullgraph=True)
        loss = compiled(hidden, weight, ZEROS, chunk=chunk)
        expected = ops.reference.linear_cross_entropy(hidden, weight, ZEROS)
        assert_close(loss, expected)
        wanted = torch.autograd.grad(expected, [hidden, weight])
        assert_close(torch.autograd.grad(loss, [hidden, weight]), wanted)
    assert len(set(nodes)) == 1


def test_numerical_gradients_agree():
    hidden, weight = head(torch.float64)
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)

    def loss(*given):
        options = {"scale": 0.5, "softcap": 2.0, "chunk": 4}
        return ops.linear_cross_entropy(given[0], given[1], ZEROS, given[2], **options)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_backward_may_be_run_again():
    hidden, weight = head()
    loss = ops.linear_cross_entropy(hidden, weight, ZEROS, chunk=4)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert_close(torch.autograd.grad(loss * 2, [hidden, weight]), tuple(2 * g for g in first))


def test_second_derivatives_are_the_definitions_alone():
    hidden, weight = head()
    loss = ops.linear_cross_entropy(hidden, weight, ZEROS)
    with pytest.raises(DerivativeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with ops.backend("reference"):
        loss = ops.linear_cross_entropy(hidden, weight, ZEROS)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), hidden)[0].any()


BAD = {
    "do not fit": {"weight": torch.zeros(20, 7)},
    "needs int64 of shape": {"targets": ZEROS.int()},
    r"of shape \(6,\)": {"targets": ZEROS[:5]},
    r"needs \[20\]": {"bias": torch.zeros(19)},
    "or use autocast": {"weight": torch.zeros(20, 8, dtype=torch.bfloat16)},
    "on meta": {"targets": ZEROS.to("meta")},
    "softcap=0.0 must be": {"softcap": 0.0},
    "chunk=0 must be": {"chunk": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_said(message):
    given = {"hidden": torch.zeros(6, 8), "weight": torch.zeros(20, 8), "targets": ZEROS}
    with pytest.raises(DepthrouteError, match=message):
        ops.linear_cross_entropy(**(given | BAD[message]))
