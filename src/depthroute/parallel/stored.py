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
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from safetensors.torch import save
from torch import Tensor, distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
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

    One for all checkpoints of a run, which are written one after the other. The copies lie in one
    piece of memory, pinned for a GPU, in the order of the file, and who writes what is agreed on
    once. So Python, which one thread at a time can run, has next to nothing to do beside a step:
    copying, writing and hashing do without it.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.group: Any = None
        self.plan: SavePlan | None = None
        """What this rank writes; None where ranks have yet to agree on it."""
        self.pieces: list[bytes | memoryview] = []
        """Of the file with it."""
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._parts: Tensors = {}
        """What this rank has of each tensor, one after the other in the memory."""

    def stage(self, state_dict: dict[str, Tensors]) -> dict[str, Tensors]:
        tensors = state_dict[_ALL]
        own = {name: _own(tensor) for name, tensor in tensors.items()}
        shapes = {n: (tensors[n].shape, part.shape, part.dtype) for n, part in own.items()}
        if shapes != self._shapes:
            self._lay_out(own)
            self._shapes = shapes
        if not self._are_agreed():
            self.plan = None
        items = None if self.plan is None else self.plan.items
        names = list(own) if items is None else [item.index.fqn for item in items]
        if names:
            copies, parts = [self._parts[n] for n in names], [own[n] for n in names]
            torch._foreach_copy_(copies, parts, non_blocking=True)  # pyright: ignore
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return state_dict

    def _lay_out(self, own: Tensors) -> None:
        """Larger numbers first, so that all are aligned, and without gaps, as safetensors does."""
        self.plan, self.pieces, self._parts = None, [], {}
        is_pinned = any(part.is_cuda for part in own.values())
        size = sum(part.nbytes for part in own.values())
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        start = 0
        for name, part in sorted(own.items(), key=lambda item: (-item[1].itemsize, item[0])):
            place = self._memory[start : start + part.nbytes]
            self._parts[name] = place.view(part.dtype).view(part.shape)
            start += part.nbytes

    def _are_agreed(self) -> bool:
        """Whether no rank has other tensors than when they agreed on who writes what."""
        missing = torch.tensor(self.plan is None, dtype=torch.uint8)
        if self.group is not None:
            distributed.all_reduce(missing, distributed.ReduceOp.MAX, group=self.group)
        return not missing.item()

    def agree(self, plan: SavePlan) -> None:
        """Lay out the file: its table, and the tensors of ``plan`` that lie beside each other."""
        written = {item.index.fqn: item.tensor_data for item in plan.items}
        assert len(written) == len(plan.items), "a tensor twice"
        offsets, table, regions, end = {}, {}, [], 0
        for name, part in self._parts.items():
            if (about := written.get(name)) is None:
                continue
            offsets[name] = {"saved_offsets": list(about.chunk.offsets)}
            place = [end, end := end + part.nbytes]
            kind = {"dtype": _name_of(part.dtype), "shape": list(part.shape)}
            table[name] = kind | {"data_offsets": place}
            start = part.storage_offset() * part.itemsize
            stop = start + part.nbytes
            if regions and regions[-1].stop == start:
                start = regions.pop().start
            regions.append(slice(start, stop))
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True)}
        head = json.dumps({"__metadata__": metadata} | table, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        memory = self._memory.numpy().data
        self.pieces = [len(head).to_bytes(8, "little"), head, *(memory[r] for r in regions)]
        self.plan = plan


@cache
def _name_of(dtype: torch.dtype) -> str:
    """In a safetensors file."""
    return json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]


class _Planner(DefaultSavePlanner):
    """Who writes what follows from the tensors, and is not asked again while they are the same."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(**_FLAT)
        self.copies = copies

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[_ALL], storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan() if self.copies.plan is None else SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.copies.plan is None:
            return super().create_global_plan(all_plans)
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.copies.plan is None:
            self.copies.agree(new_plan)
        assert self.copies.plan is not None
        return self.copies.plan


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Parts(StorageWriter):
    """``seal`` is called on the first rank once every file is on the disk, with their SHA-256."""

    def __init__(
        self, folder: Path, seal: Callable[[dict[str, str]], None], copies: Copies
    ) -> None:
        self.folder, self.seal, self.copies, self.rank = folder, seal, copies, 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """One result for the file: every rank's go through the first one's hands."""
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        results = []
        if plan.items:
            file = self.folder / f"rank_{self.rank:05d}.safetensors"
            checksum = files.create(file, self.copies.pieces)
            size = sum(len(piece) for piece in self.copies.pieces)
            results = [WriteResult(plan.items[0].index, size, (file.name, checksum))]
        written.set_result(results)
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
    copies.group = group
    future = async_save(
        {_ALL: tensors},
        storage_writer=Parts(folder, seal, copies),
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
