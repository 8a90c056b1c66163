"""Tensors on disk in any layout: every rank writes the parts that it holds, any ranks read them.

A folder of safetensors, one file a rank, with the names of the whole model. What several ranks
hold alike is written by one of them. ``torch.distributed.checkpoint`` says who writes and who reads
what; the files are those of its ``HuggingFaceStorageReader``, so nothing is ever unpickled, and a
file that holds whole tensors is read in the same way.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from depthroute import files

Tensors = dict[str, Tensor]
_FLAT: dict[str, bool] = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Copies(AsyncStager):
    """What is written in the background: training goes on in the tensors themselves."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Tensors) -> Tensors:
        return {name: t.detach().to("cpu", copy=True) for name, t in state_dict.items()}


class Parts(StorageWriter):
    """``seal`` is called on the first rank once every file is on the disk, with their SHA-256."""

    def __init__(self, folder: Path, seal: Callable[[dict[str, str]], None]) -> None:
        self.folder, self.seal, self.rank = folder, seal, 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        parts: Tensors = {}
        offsets: dict[str, Any] = {}
        for item in plan.items:
            name, about = item.index.fqn, item.tensor_data
            assert about is not None and name not in parts, name
            parts[name] = cast(Tensor, planner.resolve_data(item)).contiguous()
            offsets[name] = {"saved_offsets": list(about.chunk.offsets)}
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        if not parts:
            written.set_result([])
            return written
        file = self.folder / f"rank_{self.rank:05d}.safetensors"
        save_file(parts, file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
        files.sync_file(file)
        checksum = (file.name, files.sha256(file))
        written.set_result(
            [WriteResult(i.index, parts[i.index.fqn].nbytes, checksum) for i in plan.items]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        checksums = dict(result.storage_data for part in results for result in part)
        for name in checksums:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(
                    f"{name} was written on another node and is not here; the run must be in a "
                    "folder that all nodes share"
                )
        self.seal(checksums)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def start_writing(
    tensors: Tensors, folder: Path, seal: Callable[[dict[str, str]], None], group: Any
) -> Future[Any]:
    """Copies ``tensors`` and returns; what comes of writing them is in the future, on each rank.

    ``group`` is all ranks, for this alone, and not a GPU's; None in a single process.
    """
    _silence()
    future = async_save(
        tensors,
        storage_writer=Parts(folder, seal),
        planner=DefaultSavePlanner(**_FLAT),
        process_group=group,
        async_stager=Copies(),
        no_dist=group is None,
    )
    return cast("Future[Any]", future)


def about(folder: Path) -> Mapping[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in ``folder``, whole."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return cast("Mapping[str, TensorStorageMetadata]", metadata.state_dict_metadata)


def read_into(tensors: Tensors, folder: Path, group: Any = None) -> None:
    """The parts that ``tensors`` are, in place; ``group`` reads together, None alone."""
    _silence()
    load(
        tensors,
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=DefaultLoadPlanner(**_FLAT),
        process_group=group,
        no_dist=group is None,
    )


def read_whole(folder: Path, names: Mapping[str, TensorStorageMetadata]) -> Tensors:
    tensors = {n: torch.empty(a.size, dtype=a.properties.dtype) for n, a in names.items()}
    read_into(tensors, folder)
    return tensors


def _silence() -> None:
    """torch warns that a single process is one. It does so in its thread, where filters of the
    caller's block would not hold."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
