"""How the processes of a run share a model: a description, checked before anything is loaded.

Ranks are numbered through ``pp x dp x tp``, tensor parallel innermost, so that the ranks that talk
most are neighbours. The ranks of one replica (``tp x pp`` of them) are given the same part of the
batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from depthroute.checks import check_choice, check_switch, check_whole
from depthroute.errors import ConfigError
from depthroute.parallel.layout import PipelineLayout
from depthroute.parallel.tensor import refuse_tensor_misfits
from depthroute.plan import Plan

MODES = ("ddp", "fsdp")
AXES = ("pp", "dp", "tp")
PIPELINE_ONLY = ("schedule", "chunks", "micro_batches", "layers")


@dataclass(frozen=True)
class MeshLayout:
    dp: int | None = None
    """Replicas that take a part of the batch each; left out, as many as the ranks make."""
    tp: int = 1
    """Ranks that share every layer."""
    pp: int = 1
    """Ranks that have some of the layers each."""
    mode: str = "ddp"
    """Of data parallel: whether replicas hold whole weights (``ddp``) or shards (``fsdp``)."""
    schedule: str | None = None
    """Of a pipeline, as all that follow: see :class:`PipelineLayout`."""
    chunks: int | None = None
    micro_batches: int | None = None
    layers: tuple[int, ...] | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        check_whole("--dp", self.dp, optional=True)
        for name in ("tp", "pp"):
            check_whole(f"--{name}", getattr(self, name))
        check_choice("--parallel", self.mode, MODES)
        check_switch("--pipeline-cache", self.cache)
        given = [name for name in PIPELINE_ONLY if getattr(self, name) is not None]
        given += [] if self.cache else ["no_pipeline_cache"]
        if self.pp == 1 and given:
            option = given[0].replace("_", "-").replace("layers", "stage-layers")
            raise ConfigError(f"--{option} is for a pipeline; add --pp 2 or more, or leave it out")

    @property
    def is_plain(self) -> bool:
        """Whether every rank has every layer whole, as DDP and FSDP alone want it."""
        return self.tp == self.pp == 1

    @property
    def size(self) -> int:
        return (self.dp or 1) * self.tp * self.pp

    def over(self, ranks: int) -> MeshLayout:
        """For so many ranks, the replicas counted; or what would fit them."""
        each = self.tp * self.pp
        if self.dp is None and ranks % each == 0:
            return replace(self, dp=ranks // each)
        if self.dp is not None and self.size == ranks:
            return self
        dp = "" if self.dp is None else f"--dp {self.dp} "
        wanted = f"{dp}--tp {self.tp} --pp {self.pp}"
        there = f"there {'is' if ranks == 1 else 'are'} {ranks}"
        if self.dp is None:
            most = max(1, ranks // each) * each
            others = f", or choose --tp and --pp whose product divides {ranks}" * (ranks > 1)
            raise ConfigError(
                f"{wanted} takes processes in multiples of {each} and {there}; start {most} with "
                f"torchrun --nproc-per-node {most}{others}"
            )
        fits = f", or use --dp {ranks // each}" if ranks % each == 0 else ""
        raise ConfigError(
            f"{wanted} takes {self.size} processes and {there}; start it with torchrun "
            f"--nproc-per-node {self.size}{fits}"
        )

    def part(self, rank: int) -> tuple[int, int]:
        """Which part of a batch ``rank`` is given, of how many."""
        assert self.dp is not None
        return rank // self.tp % self.dp, self.dp

    def pipeline(self, plan: Plan) -> PipelineLayout | None:
        """Of a model with this ``plan``; None where each rank has all layers."""
        if self.pp == 1:
            return None
        schedule = self.schedule or ("1f1b" if self.chunks in (None, 1) else "interleaved")
        return PipelineLayout.of(
            plan,
            ranks=self.pp,
            schedule=schedule,
            chunks=self.chunks,
            micro_batches=self.micro_batches,
            layers=self.layers,
            cache=self.cache,
        )

    def check(self, model: Any, batch_size: int, accumulation: int, length: int) -> None:
        """Refuse what does not fit ``model``, which may be on the meta device, or the batch."""
        assert self.dp is not None
        if self.mode == "fsdp" and self.dp == 1:
            what = "processes" if self.is_plain else f"replicas of --tp {self.tp} --pp {self.pp}"
            raise ConfigError(
                f"--parallel fsdp is for several {what}, and this is one; use --dp 2, which takes "
                f"{2 * self.size} processes (torchrun --nproc-per-node), or leave it out"
            )
        pipeline = self.pipeline(model.plan)
        if self.tp > 1:
            refuse_tensor_misfits(model, self.tp)
        parts = self.dp * accumulation * (1 if pipeline is None else pipeline.micro_batches)
        if batch_size % parts:
            over = f"{self.dp} replicas" if not self.is_plain else f"{self.dp} ranks"
            micro = others = ""
            if pipeline is not None:
                micro = f" times {pipeline.micro_batches} micro-batches"
                others = ", or another number of --micro-batches"
            raise ConfigError(
                f"train.batch_size={batch_size} does not split over {over} times "
                f"accumulation={accumulation}{micro}; use a multiple of {parts}{others}"
            )
        if length % self.tp:
            raise ConfigError(
                f"train.sequence_length={length} does not split over --tp {self.tp}, whose ranks "
                f"take a part of the tokens each in the loss; use a multiple of {self.tp}"
            )

    def mesh(self, device: str) -> DeviceMesh:
        """Every rank calls this."""
        assert self.dp is not None
        return init_device_mesh(device, (self.pp, self.dp, self.tp), mesh_dim_names=AXES)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layers": None if self.layers is None else list(self.layers)}
