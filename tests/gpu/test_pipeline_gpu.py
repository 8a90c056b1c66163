"""One process on a GPU that holds several chunks of a pipeline computes what the plain model does:
losses, norms and every gradient, with the kernels, and nothing is left in the cache."""

from __future__ import annotations

import pytest
import torch

from depthroute import ops
from tests.distributed.pipeline_worker import SEVERAL_CHUNKS, TIED, Case, run
from tests.distributed.ranks import one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def seen(method, layout, dtype, **settings):
    case = Case(method, layers=4, model=TIED, layout=layout, dtype=dtype, device="cuda", **settings)
    with one_rank("cuda"), ops.record_backends() as ran:
        found = run(case, ranks=1)
    return found, {backend for _, backend in ran}


@pytest.mark.parametrize(("method", "layout"), SEVERAL_CHUNKS)
def test_several_chunks_of_one_process_equal_the_plain_model_with_the_kernels(method, layout):
    """fp32 over three steps, clipped. Gradients are within 1e-4 of a parameter's largest entry, as
    sums over micro-batches and those of a GPU are taken in another order; those that are missing or
    counted twice are a hundred times as far."""
    found, backends = seen(method, layout, torch.float32, steps=3, clipped=0.1)
    assert found["losses"] == pytest.approx(found["expected"], abs=1e-5)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=1e-5)
    assert found["worst"][0] < 1e-4, found["worst"]
    assert set(found["names"]) >= set(found["expected_names"])
    assert found["left"] == 0
    assert set(map(tuple, found["bytes"].values())) == {(0, 0)}
    assert "triton" in backends or method in ("standard", "x0-skip learned")


@pytest.mark.parametrize(("method", "layout"), SEVERAL_CHUNKS[:2])
def test_a_gradient_that_is_missing_or_counted_twice_cannot_hide_in_rounding(method, layout):
    """fp64, which the kernels leave to torch."""
    found, _ = seen(method, layout, torch.float64, evaluates=True)
    assert found["losses"] == pytest.approx(found["expected"], abs=1e-9)
    assert found["worst"][0] < 1e-9, found["worst"]
    assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], abs=1e-12)
    assert found["left"] == 0
