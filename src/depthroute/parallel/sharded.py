"""Sharded checkpoints: every rank writes its part, and any number of ranks reads them back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from depthroute.parallel import whole
from depthroute.parallel.spread import Spread


def save_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with _known_warnings():
        if isinstance(model, Spread):
            save(_spread_state(model, optimizer), checkpoint_id=folder)
            return
        weights, moments = states.get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Into a model and an optimiser that are already sharded, over these ranks or others."""
    with _known_warnings():
        if isinstance(model, Spread):
            whole.prepare_moments(optimizer)
            load(_spread_state(model, optimizer), checkpoint_id=folder)
            whole.after_loading(model, optimizer)
            return
        weights, moments = states.get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": moments}
        load(held, checkpoint_id=folder)
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )


def whole_state(model: Any) -> dict[str, Any]:
    """All weights on the CPU of the first rank, for ``save_pretrained``; empty on the others.

    A tensor with two names (a tied head) comes once, as it is stored.
    """
    if isinstance(model, Spread):
        return _collected(whole.named_tensors(model))
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = states.get_model_state_dict(model, options=options)
    doubles = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    doubles -= {n for n, _ in model.named_parameters()}
    return {name: value for name, value in state.items() if name not in doubles}


def _spread_state(model: Spread, optimizer: Any) -> dict[str, Any]:
    """By the names of the whole model; the tensors themselves, to be written or loaded into."""
    moments = whole.named_moments(model, optimizer)
    return {"model": whole.named_tensors(model), "optimizer": moments}


def _collected(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the first rank, one at a time, of what any rank has; empty on the others."""
    rank, state = distributed.get_rank(), {}
    names: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(names, {n: (tuple(t.shape), t.dtype) for n, t in own.items()})
    for name in sorted({name for theirs in names for name in theirs}):
        owner = next(r for r, theirs in enumerate(names) if name in theirs)
        tensor = None
        if name in own:  # all ranks that share it take part
            held = own[name]
            tensor = held.full_tensor() if isinstance(held, DTensor) else held
        if owner != 0 and rank == 0:
            shape, dtype = names[owner][name]
            device = next(iter(own.values())).device
            tensor = torch.empty(shape, dtype=dtype, device=device)
            distributed.recv(tensor, owner)
        elif owner != 0 and rank == owner:
            assert tensor is not None
            distributed.send(tensor.contiguous(), 0)
        if rank == 0:
            assert tensor is not None
            state[name] = tensor.to("cpu", copy=True)
    return state


@contextmanager
def _known_warnings() -> Iterator[None]:
    """torch warns about its own internals here; nothing in them is for the caller."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", message=".*ShardedTensor.*")
        yield
