"""Graphs compiled for a GPU hand a boundary's backward every part of a gradient."""

from __future__ import annotations

import pytest
import torch

from depthroute.ops.private import inductor
from tests.kernels.test_inductor import parts, sublayer, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("projections", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_sublayer_has_the_gradients_of_an_eager_one(dtype, projections, monkeypatch):
    graphs, pass_terms = [], inductor.pass_terms

    def noted(graph):
        pass_terms(graph)
        graphs.append(graph)

    monkeypatch.setattr(inductor, "pass_terms", noted)
    torch._dynamo.reset()
    compiled = torch.compile(sublayer, fullgraph=True, options=inductor.compile_options())
    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    with caches, torch._inductor.config.patch(fx_graph_cache=False):
        found = with_gradients(compiled, dtype, projections, "cuda")
    assert parts(graphs) == [projections]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    expected = with_gradients(sublayer, dtype, projections, "cuda")
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.double().norm()
