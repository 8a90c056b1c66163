"""Tensors on disk in any layout: every rank writes the parts that it holds, any ranks read them.

A folder of safetensors, one file a rank, with the names of the whole model. What several ranks
hold alike is written by one of them. ``torch.distributed.checkpoint`` says who writes and who reads
what; the files are those of its ``HuggingFaceStorageReader``, so nothing is ever unpickled, and a
file that holds whole tensors is read in the same way.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future as TorchFuture

from depthroute import files

Tensors = dict[str, Tensor]
_ALL = "tensors"
"""One entry with all of them: torch logs every entry twice, in the time of a step."""
_FLAT: dict[str, bool] = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Copies(AsyncStager):
    """What is written in the background: training goes on in the tensors themselves.

    One for all checkpoints of a run, which are written one after the other: memory that is there
    already, pinned for a GPU, is filled several times as fast as new memory.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.parts: Tensors = {}
        """What this rank has of each tensor."""

    def stage(self, state_dict: dict[str, Tensors]) -> dict[str, Tensors]:
        tensors = state_dict[_ALL]
        self.parts = {name: self._copied(name, _own(t)) for name, t in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return state_dict

    def _copied(self, name: str, part: Tensor) -> Tensor:
        copy = self.parts.get(name)
        if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
            copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return copy.copy_(part, non_blocking=True)


class _Planner(DefaultSavePlanner):
    """Who writes what follows from the tensors; what is written is taken from their copies."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(**_FLAT)
        self.copies = copies

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[_ALL], storage_meta, is_coordinator)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.copies.parts[write_item.index.fqn]


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
            parts[name] = cast(Tensor, planner.resolve_data(item))
            offsets[name] = {"saved_offsets": list(about.chunk.offsets)}
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        if not parts:
            written.set_result([])
            return written
        file = self.folder / f"rank_{self.rank:05d}.safetensors"
        save_file(parts, file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True)})
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
    tensors: Tensors,
    folder: Path,
    seal: Callable[[dict[str, str]], None],
    group: Any,
    copies: Copies,
) -> Future[Any]:
    """Copies ``tensors`` and returns; what comes of writing them is in the future, on each rank.

    ``group`` is all ranks, for this alone, and not a GPU's; None in a single process. ``copies``
    are those of the write before, which has ended.
    """
    _silence()
    tensors = {name: t.full_tensor() if _is_scattered(t) else t for name, t in tensors.items()}
    future = async_save(
        {_ALL: tensors},
        storage_writer=Parts(folder, seal),
        planner=_Planner(copies),
        process_group=group,
        async_stager=copies,
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
    scattered = {name: t for name, t in tensors.items() if _is_scattered(t)}
    whole = {n: torch.empty(t.shape, dtype=t.dtype, device=t.device) for n, t in scattered.items()}
    load(
        tensors | whole,
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=DefaultLoadPlanner(**_FLAT),
        process_group=group,
        no_dist=group is None,
    )
    for name, tensor in scattered.items():
        mesh, places = tensor.device_mesh, tensor.placements
        part = distribute_tensor(whole[name], mesh, places, src_data_rank=None)
        _own(tensor).copy_(part.to_local())


def _is_scattered(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether what a rank has of it lies in several places of the whole, as the gate's and the up
    projection's parts of packed experts do: torch writes and reads one piece a rank.

    A strided shard is one piece where it is cut once more along the same dimension, as often as
    its stride says: FSDP2 over tensor parallel.
    """
    if not isinstance(tensor, DTensor):
        return False
    places = list(enumerate(tensor.placements))
    for axis, place in places:
        if isinstance(place, _StridedShard):
            later = [i for i, p in places[axis + 1 :] if p.is_shard(place.dim)]
            if math.prod(tensor.device_mesh.size(i) for i in later) != place.split_factor:
                return True
    return False


def read_whole(folder: Path, names: Mapping[str, TensorStorageMetadata]) -> Tensors:
    tensors = {n: torch.empty(a.size, dtype=a.properties.dtype) for n, a in names.items()}
    read_into(tensors, folder)
    return tensors


def _silence() -> None:
    """torch warns that a single process is one. It does so in its thread, where filters of the
    caller's block would not hold."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
