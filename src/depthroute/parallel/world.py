"""The processes of a run, as ``torchrun`` starts them; one process is a world of size 1."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from depthroute.errors import ConfigError, DepthrouteError

T = TypeVar("T")
GONE = ("Connection closed", "Connection re", "Timed out", "timed out", "Broken pipe")
"""What gloo's plain RuntimeErrors say of another rank (torch 2.11 to 2.13)."""
CPU = torch.device("cpu")


class LostRankError(DepthrouteError):
    """Another process of the run has ended or does not answer."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    replica: tuple[int, int] | None = None
    """Which part of a batch this rank is given, and of how many; left out, each has its own."""
    alike: int = 1
    """So many neighbours compute the same residual stream, and so draw the same random numbers."""

    @property
    def seat(self) -> int:
        """Whose random numbers this rank draws: the first of those that are alike."""
        return self.rank - self.rank % self.alike

    @property
    def part(self) -> tuple[int, int]:
        return self.replica or (self.rank, self.size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Over ranks, in fp64; the same on all of them."""
        return self._reduced(value, distributed.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduced(value, distributed.ReduceOp.MAX)

    def _reduced(self, value: float, op: Any) -> float:
        if self.size == 1:
            return value
        # the tensor lives where the backend can reach it; gloo and NCCL both reduce fp64
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total, op)
        return total.item()

    def summed(self, value: Tensor) -> Tensor:
        """As :meth:`sum`, of a tensor and without waiting for it."""
        if self.size == 1:
            return value
        total = value.to(self.device, torch.float64, copy=True)
        distributed.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def first(self, text: str) -> str:
        """The first rank's text that is not empty."""
        return next((found for found in self.gather(text) if found), "")

    def barrier(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def on_main(self, action: Callable[[], T]) -> T | None:
        """``action`` on the first rank while the others wait; its failure is everybody's."""
        result = failure = None
        if self.is_main:
            try:
                result = action()
            except DepthrouteError as error:
                failure = error
        self.raise_together(failure)
        return result

    def raise_together(self, error: BaseException | None) -> None:
        """If some rank failed, every rank fails: its own error, or word of the other's."""
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise ConfigError(f"rank {rank} failed: {failure}")


SINGLE = World()


@contextmanager
def joined(
    device: torch.device, part: Callable[[int], tuple[int, int]] | None = None, alike: int = 1
) -> Iterator[World]:
    """The world of this process: read from torchrun's variables, left at the end.

    ``device`` is what was asked for; under torchrun each rank of a CUDA run gets its own. ``part``
    says which part of a batch a rank is given, and of how many; left out, each has its own.
    ``alike`` neighbours, those of tensor parallel, compute the same residual stream.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=device)
        return
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started more processes than this machine has CUDA devices "
                f"({torch.cuda.device_count()}); use --nproc-per-node {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    rank = int(os.environ["RANK"])
    try:
        _join("nccl" if device.type == "cuda" else "gloo", rank, size)
        yield World(rank, size, device, None if part is None else part(rank), alike)
        distributed.barrier()  # leave together, or the first to go can abort the others' threads
    except RuntimeError as error:
        if not _tells_of_a_loss(error):
            raise
        raise LostRankError(
            f"rank {rank} of {size} ends because another one has ended or does not answer "
            f"({_first_words(error)}); what that one said is above, if it was not killed. Go on "
            "from the last checkpoint with --resume auto"
        ) from error
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join(backend: str, rank: int, size: int) -> None:
    """torchrun's store outlives the processes that it starts again, and with it the addresses of
    those that are gone (torch 2.13); so what these processes write there has a name of its own."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        distributed.init_process_group(backend)
        return
    store, _, _ = next(iter(rendezvous("env://")))
    store = PrefixStore(agreed_name(store, rank, size), store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def agreed_name(store: Any, rank: int, size: int) -> str:
    """One that these processes have agreed on, whatever earlier ones have left in ``store``.

    Who asks is answered under a name that it has just made up, so never by what was left. The first
    rank answers everybody that it finds, those that are gone too, until the others are there.
    """
    name, end = secrets.token_hex(8), time.monotonic() + store.timeout.total_seconds()
    if rank:
        store.set(f"asks/{rank}", name)
        agreed = store.get(f"answer/{name}").decode()
        store.set(f"knows/{agreed}/{rank}", "")
        return agreed
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"knows/{name}/{other}"]):
                missing.remove(other)
            elif store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
        if time.monotonic() > end:
            raise distributed.DistStoreError(f"Timed out waiting for rank {min(missing)}")
        time.sleep(0.01)
    return name


def _tells_of_a_loss(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or any(word in str(error) for word in GONE)


def _first_words(error: RuntimeError) -> str:
    """Without the place in torch's source, and the advice and the stack that may follow."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(". ")[0].rpartition("] ")[2][:100] or line[:100]
