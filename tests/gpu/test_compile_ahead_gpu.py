"""On a GPU: what threads have compiled ahead is all that steps launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from depthroute.config import RoutingConfig
from depthroute.data.batches import Batch
from depthroute.models.convert import from_config
from depthroute.ops.private import ahead, launcher
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer
from tests.families import family_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not launcher.IS_KNOWN, reason="with this Triton nothing is compiled ahead"),
]
WIDTH = 320
"""Of no other test: kernels that were launched before are not compiled again."""


@pytest.mark.parametrize("method", ["delta-block", "delta", "attnres-full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_steps_compile_nothing_more(monkeypatch, tmp_path, method, precision):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(ahead.VARIABLE, "4")
    pools, make, missed = [], ahead.Pool, []
    monkeypatch.setattr(ahead, "Pool", lambda *args: pools.append(make(*args)) or pools[-1])

    def listen(*, src, cache_hit, **_):
        if not cache_hit:
            missed.append(src.name)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    config = family_config("llama", hidden_size=WIDTH, num_attention_heads=4)
    model = from_config(config, RoutingConfig.named(method)).cuda()
    trainer = Trainer(model, TrainSettings(5, 4, 16, lr=1e-4, precision=precision))
    ids = torch.randint(0, config.vocab_size, (4, 16), device="cuda")
    batch = Batch(ids, ids.roll(-1, 1))
    trainer._rehearse(batch)
    (pool,) = pools
    for future in pool.futures.values():
        future.result()
    assert len(missed) > 4
    missed.clear()
    for _ in range(5):  # the last ones are replayed from a graph
        trainer.take_step(batch)
    trainer.validate([batch])
    assert missed == []
