"""What is timed on a GPU is the work that was asked for, as often as it was asked for."""

from __future__ import annotations

import pytest
import torch

from depthroute.bench import timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


def test_a_graph_holds_so_many_calls():
    total = torch.zeros(4, device=DEVICE)
    graph = timing.capture(lambda: total.add_(1.0), DEVICE, 5)
    total.zero_()
    graph.replay()
    assert total.tolist() == [5.0] * 4


def test_the_time_is_that_of_one_call():
    source = torch.zeros(2**25, device=DEVICE, dtype=torch.bfloat16)  # 64 MB, some 0.03 ms
    target, many = (
        torch.empty_like(source),
        torch.empty(40, 2**25, device=DEVICE, dtype=source.dtype),
    )
    one = timing.median_ms(lambda: target.copy_(source), DEVICE)
    forty = timing.median_ms(lambda: many.copy_(source.expand(40, -1)), DEVICE)
    assert 0.3 < 40 * one / forty < 4.0
