"""DDP and FSDP2 around a routed model, and what a trainer has to know of them and of a mesh."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from depthroute.errors import unknown
from depthroute.parallel.mesh import MODES
from depthroute.parallel.sharding import shard
from depthroute.parallel.spread import Spread
from depthroute.parallel.world import World


def wrap(model: Any, world: World, mode: str, *, precision: str = "fp32") -> Any:
    """``model`` as the ranks of ``world`` train it; itself where there is one rank."""
    if mode not in MODES:
        raise unknown("parallel mode", mode, MODES)
    if world.size == 1:
        return model
    if mode == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    shard(model, model, init_device_mesh(world.device.type, (world.size,)), precision)
    return model


def unwrapped(model: Any) -> Any:
    """The model inside DDP; FSDP2 shards a model in place."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def parts_of(model: Any) -> list[Any]:
    """The routed models that this rank has: the whole of one, or its stages."""
    inner = unwrapped(model)
    return list(inner.parts) if isinstance(inner, Spread) else [inner]


def named_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters and the buffers that are kept, of this rank, by their names in the whole model.

    Each is whole or a DTensor, which knows its place in the whole; where several ranks have the
    same one they have the same numbers. An embedding and the head that is a copy of it have one
    name, and may both be here.
    """
    inner, tensors = unwrapped(model), []
    twin = inner.twin if isinstance(inner, Spread) else None
    for part in parts_of(model):
        kept = part.state_dict(keep_vars=True)
        buffers = [(name, b) for name, b in part.named_buffers() if name in kept]
        for name, tensor in [*part.named_parameters(), *buffers]:
            tensors.append((inner.embedding if tensor is twin else name, tensor))
    return tensors


def is_sharded(model: Any) -> bool:
    """Whether ranks hold different parts of it."""
    return isinstance(model, FSDPModule | Spread)


def casts_itself(model: Any) -> bool:
    """Whether precision is a matter of FSDP2's, not of autocast."""
    if isinstance(model, Spread):
        return model.layout.mode == "fsdp"
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def syncing(model: Any, is_last: bool):
    """Gradients cross ranks with the last part of an accumulated step, not with each."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
        return
    if isinstance(model, Spread):
        model.syncs(is_last)
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    yield


def global_norm_clipped(model: nn.Module, most: float) -> Tensor:
    """Clip the gradient of all ranks together; its norm before that, which is not waited for."""
    if isinstance(model, Spread):
        model.finish_gradients()
        return model.clipped_norm(most)
    norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
