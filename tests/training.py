"""A model of a few thousand parameters and a few thousand bytes to train it on."""

from dataclasses import replace

import numpy as np
import torch

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.data.batches import TokenData
from depthroute.train.settings import TrainSettings

SMALL = replace(
    presets.get("tiny"),
    model=presets.get("tiny").model
    | {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32},
)
SETTINGS = TrainSettings(steps=12, batch_size=4, sequence_length=16, lr=1e-2, warmup_steps=2)


def words():
    text = (b"def route(depth): return depth * 2\n" * 400)[:8000]
    tokens = np.frombuffer(text, dtype=np.uint8)
    return TokenData("words", tokens[:6000], tokens[6000:], 4, 16)


def build(method="delta", seed=0):
    torch.manual_seed(seed)
    return presets.build(SMALL, RoutingConfig(method=method))


def take_steps(trainer, data, seed=0):
    """The steps that remain, each as it is taken."""
    while not trainer.is_done:
        world = trainer.world
        yield trainer.take_step(data.batch(trainer.completed, seed, world.rank, world.size))
