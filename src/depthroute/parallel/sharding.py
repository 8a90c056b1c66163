"""FSDP2 over a routed model or a stage of one.

One group is made of every decoder layer and one of the rest. The routing parameters live at the
decoder's root (``decoder.routing``) and are read inside the layers, through the stream; being in
the root group they are gathered before the first layer runs and stay so until the backward pass
has ended, which is what both ways of evaluating a mix (one pass, two phases) need.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from depthroute.models.architecture import decoder_layers


def shard(root: nn.Module, model: Any, mesh: DeviceMesh, precision: str) -> None:
    """``root``, which is ``model`` or runs it, over the ranks of ``mesh``, in place."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        # inputs stay as they are: the embedding is bf16 already, and with the stream a layer is
        # given log-sum-exps, which are fp32 for a reason
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # a layer hands on the stream's earlier sources as they are; nothing ever writes into them
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for layer in decoder_layers(model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
