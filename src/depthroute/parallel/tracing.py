"""What the stages of a pipeline make and keep, seen by running them on ``meta``.

It is the model's own forward with shapes and no numbers, so what is counted is what runs, and no
memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthroute.models import numberless
from depthroute.parallel.cache import BlockCache
from depthroute.parallel.layout import PipelineLayout
from depthroute.parallel.stages import StageModule
from depthroute.parallel.tensor import PACKED, STYLES, tensor_plan, without_numbers


class Trace(NamedTuple):
    """Of one stage and one micro-batch, in bytes."""

    sizes: dict[str, int]
    """Of each tensor that is handed over, by name."""
    kept: int
    """What is there from forward to backward: all that autograd saves and the outputs, without
    parameters and what the stage received or took from the cache."""


def traced(model: Any, layout: PipelineLayout, rows: int, length: int, tp: int = 1) -> list[Trace]:
    """Each stage of ``model`` (on ``meta``) run on a micro-batch of ``rows`` x ``length`` tokens;
    of ``tp`` ranks each has the loss of its part of them."""
    numberless.use_attention(model)
    numberless.use_experts(model)
    caches = [BlockCache() for _ in range(layout.ranks)]
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    # whole, as to make one transformers reads values; attention's kernels have no use for it
    mask = torch.zeros(rows, 1, length, length, dtype=model.dtype, device="meta")
    tokens = None if tp == 1 else slice(0, length // tp)

    def loss(model: Any, arguments: dict[str, Any], targets: Tensor) -> Tensor:
        return model(**arguments, targets=targets, tokens=tokens)

    seen = _Storages()
    seen.add([ids, mask, *model.parameters(), *model.buffers()])
    given: tuple[Tensor, ...] = (ids,)
    traces = []
    for stage in layout.stages:
        module = StageModule(model, layout, stage, caches[stage.rank], loss)
        arguments = {"attention_mask": mask} | ({} if stage.after else {"targets": ids})
        seen.kept = []
        with numberless.linear_attention(model), seen:
            handed = module(*given, **arguments)
        kept = sum(size for reference, size in seen.kept if not reference.expired())
        names, tensors = ((), ()) if stage.after is None else (stage.after.sent, handed)
        traces.append(Trace({n: t.nbytes for n, t in zip(names, tensors, strict=True)}, kept))
        given = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    return traces


class _Storages(TorchDispatchMode):
    """Notes every piece of memory that an operation makes, once."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference also keeps the number taken
        self.kept: list[tuple[StorageWeakRef, int]] = []

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._known:
                    self._known[reference.cdata] = reference
                    self.kept.append((reference, storage.nbytes()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result


def take_a_part(model: Any, ranks: int) -> None:
    """Make of ``model``, which is on ``meta``, what one of the ``ranks`` of tensor parallel has of
    it, in place."""
    plan, decoder = tensor_plan(model), model.base_model
    for name, parameter in list(decoder.named_parameters()):
        home, _, leaf = name.rpartition(".")
        # experts are named one by one
        planned = plan.get(without_numbers(name)) or plan.get(without_numbers(home), "")
        style = STYLES.get("colwise" if planned == PACKED else planned)
        place: Any = None if style is None else style.bias if leaf == "bias" else style.weight
        if style is None or place is None:
            continue
        module, shape = decoder.get_submodule(home), list(parameter.shape)
        shape[place.dim] //= ranks
        part = parameter.new_empty(shape)
        module._parameters[leaf] = nn.Parameter(part, parameter.requires_grad)
        if leaf == "weight" and style.splits_input:
            module.register_forward_pre_hook(lambda _, given: (given[0].chunk(ranks, -1)[0],))
        if leaf == "weight" and style.gathers_output:
            module.register_forward_hook(lambda _, __, output: torch.cat([output] * ranks, -1))
