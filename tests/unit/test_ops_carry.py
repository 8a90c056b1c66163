"""Sources handed from site to site: the same numbers, one gradient for all sites."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from depthroute import ops
from depthroute.ops.backends import INTERPRETS

BACKEND = "triton" if INTERPRETS else "torch"


def three_sites(sources: list[Tensor], queries: Tensor, carried: bool, normed: bool) -> Tensor:
    """A stream of sites, each of whose outputs becomes a source of the next ones."""
    sources, weight = list(sources), queries[0] + 1.0
    options = {"norm_weight": weight} if normed else {}
    for query in queries[:3]:
        if carried:
            x, sources = ops.depth_mix_carried(sources, query, backend=BACKEND, **options)
        else:
            x = ops.depth_mix(sources, query, backend=BACKEND, **options)
        x = x[1] if normed else x
        sources.append(torch.tanh(x))
    if carried:
        outputs, lse, sources = ops.depth_mix_group_carried(sources, queries, backend=BACKEND)
    else:
        outputs, lse = ops.depth_mix_group(sources, queries, backend=BACKEND)
    first = ops.depth_mix_carried(
        sources[-1:], queries[0], prior=outputs[0], prior_lse=lse[0], backend=BACKEND
    )[0]
    return first + outputs[1:].sum(0) * lse[1:].sum(0) + sources[0]


def gradients(run, sources: list[Tensor], queries: Tensor) -> list[Tensor]:
    out = run(sources, queries)
    return [out, *torch.autograd.grad(out.square().sum(), [*sources, queries])]


def draw() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(2)]
    return sources, torch.randn(4, 16).mul_(0.3).requires_grad_()


@pytest.mark.parametrize("normed", [False, True])
def test_carried_sources_give_the_same_gradients(normed):
    sources, queries = draw()
    plain = gradients(lambda s, q: three_sites(s, q, False, normed), sources, queries)
    carried = gradients(lambda s, q: three_sites(s, q, True, normed), sources, queries)
    for a, b in zip(plain, carried, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_checkpointing_a_site_repeats_it_safely():
    sources, queries = draw()

    def checkpointed(s, q):
        return checkpoint(three_sites, s, q, True, True, use_reentrant=False)

    plain = gradients(lambda s, q: three_sites(s, q, True, True), sources, queries)
    for a, b in zip(plain, gradients(checkpointed, sources, queries), strict=True):
        assert torch.equal(a, b)


# dynamo makes an instance of every autograd function it traces and is warned of it
def test_carrying_compiles_into_one_graph():
    sources, queries = draw()
    compiled = torch.compile(three_sites, fullgraph=True, backend="aot_eager")
    plain = gradients(lambda s, q: three_sites(s, q, True, False), sources, queries)
    found = gradients(lambda s, q: compiled(s, q, True, False), sources, queries)
    for a, b in zip(plain, found, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
