"""Tensor parallel: the matrices of every sublayer are shared by the ranks of a mesh.

Which, and along which dimension, is transformers' plan of the family. What a sublayer reads and
writes, and so all of the residual stream and its routing, is whole on every rank (docs/meshes.md
says why). So the routing's gradients need nothing, except those of gates inside an attention whose
heads are shared. These, norms of single heads and the head are *partial*: the ranks' gradients have
to be summed, once a step (:meth:`Spread.finish_gradients`).

Embedding and head are whole on every rank and stay tied where they are. The loss is shared by
tokens: each rank takes its part of them through the whole head, in chunks as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from depthroute.errors import ConfigError
from depthroute.models.adoption import adopted, routed_class


class Style(NamedTuple):
    """What ranks hold of a module's parameters, and what they do with its input and output."""

    weight: Placement
    bias: Placement | None
    """None where it is whole, and added when the ranks' products are."""
    splits_input: bool = False
    gathers_output: bool = False
    sums_output: bool = False


STYLES = {
    "colwise": Style(Shard(-2), Shard(-1)),
    "colwise_gather_output": Style(Shard(-2), Shard(-1), gathers_output=True),
    "rowwise": Style(Shard(-1), None, sums_output=True),
    "rowwise_split_input": Style(Shard(-1), None, splits_input=True, sums_output=True),
}
_COPY = "_depthroute_entered"
EXPERTS, PARTIAL = "moe_tp_experts", "replicated_with_grad_allreduce"
PACKED = "packed_colwise"
"""Of experts that have gate and up after each other in one matrix."""
SHARES_PACKED = (2, 13)
"""The torch whose DTensors may be every second part of a dimension; 2.11's may not."""


def tensor_plan(model: Any) -> dict[str, str]:
    """transformers' plan of which modules of layers ranks share, by name in the decoder. Some
    versions share embeddings too, which are whole here."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if ".*." in name}


def without_numbers(name: str) -> str:
    """As plans name what is alike in every layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def shares_heads(plan: dict[str, str]) -> bool:
    """Whether with it a rank has some of the heads only."""
    names = {name.rpartition(".")[2]: style for name, style in plan.items()}
    return any(names.get(name) == "colwise" for name in ("k_proj", "query_key_value", "qkv_proj"))


def refuse_tensor_misfits(model: Any, tp: int) -> None:
    config, kind, plan = model.config, model.architecture.model_type, tensor_plan(model)
    if not plan:
        raise ConfigError(
            f"{kind} has no plan of tensor parallel in transformers, so --tp {tp} cannot be; use "
            "--pp or --parallel fsdp"
        )
    joined: dict[str, int] = {}
    """What ranks put together again or cut themselves, in even parts."""
    decoder = model.base_model
    for name, member in (*decoder.named_modules(), *decoder.named_parameters()):
        style = plan.get(without_numbers(name))
        if style in STYLES and STYLES[style].gathers_output:
            joined[f"outputs of {name.rpartition('.')[2]}"] = member.weight.shape[0]
        elif style in STYLES and STYLES[style].splits_input:
            joined[f"inputs of {name.rpartition('.')[2]}"] = member.weight.shape[1]
        elif style not in (None, *STYLES, EXPERTS, PACKED, PARTIAL):
            raise ConfigError(
                f"{kind} shares {without_numbers(name)} as {style!r}, for which there is no --tp; "
                "use --pp or --parallel fsdp"
            )
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if PACKED in plan.values() and version < SHARES_PACKED:
        raise ConfigError(
            f"{kind} packs gate and up of its experts, and torch {torch.__version__} cannot share "
            f"such matrices; use torch {'.'.join(map(str, SHARES_PACKED))}, or --pp or --parallel "
            "fsdp in place of --tp"
        )
    sizes = {
        "intermediate size": getattr(config, "intermediate_size", None),
        "expert intermediate size": getattr(config, "moe_intermediate_size", None),
    }
    if shares_heads(plan):
        heads = config.num_attention_heads
        others = getattr(config, "num_key_value_heads", None) or heads
        sizes = {"attention heads": heads, "key-value heads": others} | sizes
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int)} | joined
    common = reduce(gcd, sizes.values())
    if common % tp:
        wrong = ", ".join(f"{size} ({name})" for name, size in sizes.items() if size % tp)
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(f"--tp {tp} does not divide {wrong} of this {kind} model; use {fits}")


class _Entry(torch.autograd.Function):
    """The tensor itself; in backward, ranks' gradients of it are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.detach()  # no view of x, which has to go when nobody reads it any more

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _changed(gradients[0], ctx.mesh, Partial(), Replicate()), None


def _entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """``x`` for a module that ranks share. All that read it are given one copy, so its gradient is
    summed over ranks once, and not once for each of them."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copy = getattr(x, _COPY, None)
    if copy is None:
        copy = _Entry.apply(x, mesh)
        setattr(x, _COPY, copy)
    return copy


class Shared(nn.Module):
    """Mixed into a module whose parameters ranks share."""

    prefix = "Shared"
    style: Style

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        style, mesh = self.style, _mesh_of(self)
        if style.splits_input:
            x = _changed(x, mesh, Replicate(), Shard(-1))
        elif not style.sums_output:
            x = _entered(x, mesh)
        with _own_parameters(self) as bias:
            output = super().forward(x, *others)
        if style.gathers_output:
            return _changed(output, mesh, Shard(-1), Replicate())
        if style.sums_output:
            output = _changed(output, mesh, Partial(), Replicate())
            return output if bias is None else output + bias
        return output


class SharedExperts(nn.Module):
    """Mixed into a family's experts, each of which all ranks share."""

    prefix = "Shared"

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor, *others: Any) -> Tensor:
        mesh = _mesh_of(self)
        hidden, weights = _entered(hidden, mesh), _entered(weights, mesh)
        with _own_parameters(self):
            output = super().forward(hidden, indices, weights, *others)
        return _changed(output, mesh, Partial(), Replicate())


def _mesh_of(module: nn.Module) -> DeviceMesh:
    """Of the ranks that share its parameters."""
    parameters = module.parameters(recurse=False)
    return next(p.device_mesh for p in parameters if isinstance(p, DTensor))


def _changed(x: Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> Tensor:
    return (
        DTensor.from_local(x, mesh, [before], run_check=False)
        .redistribute(placements=[after])
        .to_local()
    )


@contextmanager
def _own_parameters(module: nn.Module) -> Iterator[Tensor | None]:
    """With what this rank holds of its parameters in their place; a bias that is whole is left out
    and given, to be added to the sum of the ranks."""
    parameters = dict(module._parameters)
    own: Any = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    bias = parameters.get("bias")
    is_whole = bias is not None and not isinstance(bias, DTensor)
    module._parameters.update(own | ({"bias": None} if is_whole else {}))
    try:
        yield bias if is_whole else None
    finally:
        module._parameters.update(parameters)


def share(model: Any, mesh: DeviceMesh) -> frozenset[str]:
    """Share ``model`` over a mesh of one dimension, in place, each rank keeping its part of the
    same weights; the names of the parameters whose gradients are then partial."""
    plan, decoder = tensor_plan(model), model.base_model
    prefix = f"{model.base_model_prefix}."
    partial: set[str] = set()
    for name, module in list(decoder.named_modules()):
        style = plan.get(without_numbers(name))
        if style == PARTIAL:
            partial |= {f"{prefix}{name}.{own}" for own, _ in module.named_parameters()}
        elif style == EXPERTS:
            shared = _shared_experts(module, name, plan, mesh)
            _put(decoder, name, shared)
        elif style is not None:
            _put(decoder, name, _shared_linear(module, name, style, mesh))
    partial |= _partial_gates(model, plan, prefix)
    partial |= _share_ends(model, mesh)
    return frozenset(partial)


def _put(decoder: nn.Module, name: str, module: nn.Module) -> None:
    home, _, leaf = name.rpartition(".")
    decoder.get_submodule(home)._modules[leaf] = module


def _shared_linear(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> nn.Module:
    if type(module) is not nn.Linear:
        raise ConfigError(
            f"tensor parallel cannot share {name}: it is a {type(module).__name__}, and linear "
            "layers can be; use --pp or --parallel fsdp"
        )
    shared = adopted(routed_class(type(module), Shared), module)
    shared.style = STYLES[style]
    _distribute(shared, "weight", shared.style.weight, mesh)
    if module.bias is not None and shared.style.bias is not None:
        _distribute(shared, "bias", shared.style.bias, mesh)
    return shared


def _shared_experts(module: nn.Module, name: str, plan: Any, mesh: DeviceMesh) -> nn.Module:
    shared = adopted(routed_class(type(module), SharedExperts), module)
    for own, parameter in module.named_parameters(recurse=False):
        style = plan[without_numbers(f"{name}.{own}")]
        if style == PACKED:  # gate and up after each other, of each of which a rank has its part
            place = _StridedShard(parameter.ndim - 2, split_factor=2)
        else:
            place = STYLES[style].weight
        _distribute(shared, own, place, mesh)
    return shared


def _distribute(module: Any, name: str, place: Any, mesh: DeviceMesh) -> None:
    whole = module._parameters[name]
    if isinstance(place, Shard) and place.dim < 0:
        place = Shard(place.dim + whole.ndim)
    # every rank has the same weights, so none has to be told its part
    part = distribute_tensor(whole.detach(), mesh, [place], src_data_rank=None)
    module._parameters[name] = nn.Parameter(part, whole.requires_grad)


def _partial_gates(model: Any, plan: dict[str, str], prefix: str) -> set[str]:
    """Numbers that weigh the values of heads."""
    if model.plan.values is None or not shares_heads(plan):
        return set()
    names = (name for name, _ in model.base_model.named_parameters())
    wanted = (
        n for n in names if n.startswith("routing.") and n.endswith((".gate", "value_weight"))
    )
    return {f"{prefix}{name}" for name in wanted}


def _share_ends(model: Any, mesh: DeviceMesh) -> set[str]:
    """The loss is shared by tokens, so what comes before the head needs the sum of its gradients,
    and the head's own are partial. A tied embedding's are whole and made partial too."""
    norm = getattr(model.base_model, model.architecture.final_norm)
    norm.register_forward_hook(lambda module, inputs, output: _entered(output, mesh))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight:
        table.register_forward_hook(lambda module, inputs, output: _divided(output, mesh.size()))
    own = {id(parameter) for parameter in head.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in own}


def _divided(output: Tensor, ranks: int) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / ranks)
    return output
