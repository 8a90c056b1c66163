"""Gains are folded into queries once for all places, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthroute import RoutingConfig, nn

LAYERS, WIDTH = 4, 16
CHOOSING = [
    "delta",
    "delta-block:num_blocks=2",
    "attnres-full",
    "attnres-block:num_blocks=2",
    "attnres-block-roles:num_blocks=2",
    "delta:heads=4",
    "attnres-full:evaluation=two_phase:group_size=3",
]


def sites_of(method, dtype=torch.float64):
    plan = RoutingConfig.named(method).resolve(num_layers=LAYERS, width=WIDTH)
    sites = nn.Sites(plan, WIDTH)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in sites.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return sites.to(dtype)


def outputs(routing, embedding):
    """Of a stack whose sublayers are functions without parameters."""
    stream = nn.ResidualStream.start(embedding, routing.plan, sites=routing)
    total = 0.0
    for index in range(routing.plan.num_sublayers):
        site = routing.at(index)
        for read in (None,) if site is None else site.reads:
            x, stream = stream.read(read)
            total = total + torch.tanh(x)
        stream = stream.push(total)
    return stream.finish(routing.at(routing.plan.num_sublayers))


@pytest.mark.parametrize("method", CHOOSING)
def test_results_and_gradients_are_those_of_single_products(method):
    embedding = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    found = []
    for is_folded in (False, True):
        sites = sites_of(method)
        routing = sites()
        if is_folded:
            routing = routing.folded(embedding.dtype)
            assert not any(site.has_gain for site in routing.sites if site is not None)
        out = outputs(routing, embedding)
        out.square().sum().backward()
        found.append((out, {name: p.grad for name, p in sites.named_parameters()}))
    (out, gradients), (expected, single) = found
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, single[name], rtol=1e-10, atol=1e-12, msg=name)


def test_statistics_keep_their_precision():
    folded = sites_of("delta", torch.bfloat16)().folded(torch.bfloat16)
    queries = [site.query for site in folded.sites if site is not None]
    assert {query.dtype for query in queries} == {torch.float32}


def test_places_without_gains_stay_as_they_are():
    for method in ("static", "mhc", "x0-skip-learned", "value-residual"):
        routing = sites_of(method)()
        assert routing.folded(torch.float32) is routing


def test_parameters_of_several_kinds_stay_as_they_are():
    sites = sites_of("delta")
    next(sites.children()).to(torch.float32)
    routing = sites()
    assert routing.folded(torch.float32) is routing


def test_the_number_of_products_does_not_grow_with_the_places():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.mul.Tensor
            return func(*args, **(kwargs or {}))

    with Products() as products:
        routing = sites_of("delta")().folded(torch.float64)
        sum(site.query.sum() for site in routing.sites if site is not None).backward()
    assert products.count == 3
