"""Sharded checkpoints: every rank writes its part, and any number of ranks reads them back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with _known_warnings():
        weights, moments = states.get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Into a model and an optimiser that are already sharded, over these ranks or others."""
    with _known_warnings():
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
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = states.get_model_state_dict(model, options=options)
    doubles = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    doubles -= {n for n, _ in model.named_parameters()}
    return {name: value for name, value in whole.items() if name not in doubles}


@contextmanager
def _known_warnings() -> Iterator[None]:
    """torch warns about its own internals here; nothing in them is for the caller."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", message=".*ShardedTensor.*")
        yield
