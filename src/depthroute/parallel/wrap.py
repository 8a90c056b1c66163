"""DDP and FSDP2 around a routed model.

FSDP2 makes one group of every decoder layer and one of the rest. The routing parameters live at
the decoder's root (``decoder.routing``) and are read inside the layers, through the stream; being
in the root group they are gathered before the first layer runs and stay so until the backward
pass has ended, which is what both ways of evaluating a mix (one pass, two phases) need.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from depthroute.errors import unknown
from depthroute.models.architecture import decoder_layers
from depthroute.parallel.world import World

MODES = ("ddp", "fsdp")


def wrap(model: Any, world: World, mode: str, *, precision: str = "fp32") -> Any:
    """``model`` as the ranks of ``world`` train it; itself where there is one rank."""
    if mode not in MODES:
        raise unknown("parallel mode", mode, MODES)
    if world.size == 1:
        return model
    if mode == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        # inputs stay as they are: the embedding is bf16 already, and with the stream a layer is
        # given log-sum-exps, which are fp32 for a reason
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    mesh = init_device_mesh(world.device.type, (world.size,))
    # a layer hands on the stream's earlier sources as they are; nothing ever writes into them
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def unwrapped(model: Any) -> Any:
    """The model inside DDP; FSDP2 shards a model in place."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def syncing(model: Any, is_last: bool):
    """Gradients cross ranks with the last part of an accumulated step, not with each."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    yield


def global_norm_clipped(model: nn.Module, clip: float) -> float:
    """Clip the gradient of all ranks together; its norm before that."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
