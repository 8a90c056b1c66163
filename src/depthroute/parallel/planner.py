"""What a layout of ranks costs a model before there are ranks or weights: what crosses every hop,
what a rank holds, how long it waits.

Who sends what is the layout's (:mod:`depthroute.parallel.layout`), sizes are those of the model's
own forward on ``meta`` (:mod:`depthroute.parallel.tracing`), and the order is torch's
(:mod:`depthroute.parallel.timeline`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from depthroute.checks import check_number
from depthroute.errors import ConfigError
from depthroute.models.model import recompute_layers
from depthroute.parallel import timeline, tracing
from depthroute.parallel.layout import Hop, PipelineLayout, aligned
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.pipeline import splits_backward
from depthroute.parallel.stages import num_parameters

WEIGHT, GRADIENT, MOMENTS, COPY = 4, 4, 8, 2
"""Bytes a parameter: fp32, its gradient, the two moments of Adam; and a copy in bf16."""


NOTES = (
    "activations: what the model's own forward keeps, uncompiled, attention and experts as "
    "kernels, the loss in chunks; not what an operation needs while it runs, nor what is computed "
    "again, nor gradients on their way",
    "bubble: how long ranks wait if a layer takes 1 forward and 2 backward, and embedding, head "
    "and sending nothing",
)
"""What the numbers are, where that is not plain."""


class Crossing(NamedTuple):
    """A hop of one micro-batch in one direction, from a rank to its peer; nothing if that is the
    rank itself."""

    tensors: int
    num_bytes: int
    tensors_without_cache: int
    bytes_without_cache: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the worst moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    """Weights in bf16 while they are used, where autocast makes them."""
    buffers: int
    """To receive into, for every micro-batch; torch keeps them from the first step on."""
    activations: int
    """What stages keep from forward to backward of the micro-batches under way, without what they
    received."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Forecast:
    layout: PipelineLayout
    mesh: MeshLayout
    rows: int
    length: int
    """Sequences of a micro-batch, and tokens of each."""
    num_parameters: tuple[int, ...]
    """A rank's, of each stage."""
    hops: tuple[Crossing, ...]
    memory: tuple[Memory, ...]
    """Of each rank of a pipeline."""
    cached_blocks: tuple[int, ...]
    cached_bytes: tuple[int, ...]
    """The most that each rank's cache holds at once: among the buffers if they were received, and
    among the activations if they were made here."""
    bubble: float

    @property
    def total(self) -> Crossing:
        """Of all hops."""
        return (
            Crossing(*map(sum, zip(*self.hops, strict=True))) if self.hops else Crossing(0, 0, 0, 0)
        )

    @property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    def to_dict(self) -> dict[str, Any]:
        layout = self.layout
        stages = [
            {
                "stage": stage.index,
                "rank": stage.rank,
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "parameters": count,
            }
            for stage, count in zip(layout.stages, self.num_parameters, strict=True)
        ]
        hops = [
            hop._asdict()
            | {"from": index, "to": index + 1, "sent": which.sent, "local": which.is_local}
            for index, (hop, which) in enumerate(zip(self.hops, layout.hops, strict=True))
        ]
        memory = [
            asdict(m) | {"total": m.total, "cached_blocks": blocks, "cached_bytes": size}
            for m, blocks, size in zip(
                self.memory, self.cached_blocks, self.cached_bytes, strict=True
            )
        ]
        chosen = {"schedule": layout.schedule, "chunks": layout.chunks}
        chosen |= {"micro_batches": layout.micro_batches, "layers": list(layout.layers)}
        return {
            "mesh": self.mesh.to_dict() | chosen,
            "processes": self.mesh.size,
            "micro_batch": [self.rows, self.length],
            "stages": stages,
            "hops": hops,
            "all_hops": self.total._asdict(),
            "ranks": memory,
            "bubble": self.bubble,
            "notes": list(NOTES),
        }

    def __str__(self) -> str:
        mesh = self.mesh
        mode = f" ({mesh.mode})" if mesh.dp != 1 else ""
        start = f"{mesh.size} process{'es' * (mesh.size > 1)}: pp {mesh.pp} x dp {mesh.dp}{mode} x "
        start += f"tp {mesh.tp}; micro-batches of {self.rows} x {self.length:,} tokens"
        waits = f"bubble {100 * self.bubble:.1f}%"
        lines = [start, *self._stage_lines(), "", *aligned(self._memory_columns()), "", waits]
        return "\n".join([*lines, *(f"- {note}" for note in NOTES)])

    def _stage_lines(self) -> list[str]:
        layout, total = self.layout, self.total
        if not layout.hops:
            return [f"{self.num_parameters[0]:,} parameters on every rank"]
        columns = {"bytes": ["-", *(_size(hop.num_bytes) for hop in self.hops)]}
        step, saved = 2 * layout.micro_batches * total.num_bytes, ""
        if total.num_bytes < total.bytes_without_cache:
            columns["uncached"] = ["-", *(_size(hop.bytes_without_cache) for hop in self.hops)]
            saved = f", {_size(total.bytes_without_cache)} without the cache"
        sums = f"{_size(total.num_bytes)} cross ranks a micro-batch and direction{saved}; "
        sums += f"{_size(step)} in a step"
        return [layout.table(self.num_parameters, columns), sums]

    def _memory_columns(self) -> dict[str, list[str]]:
        columns = {"rank": [str(rank) for rank in range(len(self.memory))]}
        for name in [*asdict(self.memory[0]), "total"]:
            counts = [getattr(memory, name) for memory in self.memory]
            if any(counts):
                columns[name] = [_size(count) for count in counts]
        if any(self.cached_blocks):
            pairs = zip(self.cached_blocks, self.cached_bytes, strict=True)
            columns["of it cached"] = [f"{count} blocks, {_size(size)}" for count, size in pairs]
        return columns


def forecast(
    model: Any,
    mesh: MeshLayout,
    *,
    batch_size: int,
    length: int,
    accumulation: int = 1,
    precision: str = "fp32",
    recomputes: bool = False,
) -> Forecast:
    """Of training ``model``, which is on ``meta``, with AdamW, except weights without gradients; or
    the reason against it.

    ``model`` is used up: it becomes what one rank of tensor parallel has of it.
    """
    mesh = replace(mesh, dp=mesh.dp or 1)
    mesh.check(model, batch_size, accumulation, length)
    layout = mesh.pipeline(model.plan) or PipelineLayout.of(
        model.plan, ranks=1, schedule="gpipe", micro_batches=1
    )
    rows = batch_size // (mesh.size // mesh.tp // mesh.pp * accumulation * layout.micro_batches)
    is_split = splits_backward(model) and mesh.mode != "fsdp"  # which reduces with the inputs
    if mesh.tp > 1:
        tracing.take_a_part(model, mesh.tp)
    counts = num_parameters(model, layout)
    trained = num_parameters(model, layout, frozen=False)
    if precision == "bf16":
        model.to(torch.bfloat16)
    if recomputes:
        recompute_layers(model)
    traces = tracing.traced(model.train(), layout, rows, length, mesh.tp)
    sizes = {name: size for trace in traces for name, size in trace.sizes.items()}
    orders = timeline.orders(layout)
    kept, has_copies = [t.kept for t in traces], precision == "bf16" and mesh.mode != "fsdp"
    if has_copies and not recomputes:  # autocast copies what is frozen for each micro-batch anew
        kept = [k + COPY * (c - t) for k, c, t in zip(kept, counts, trained, strict=True)]
    memory = [
        _weights(_of(layout, rank, counts), _of(layout, rank, trained), mesh, has_copies)
        | _streams(layout, rank, sizes)
        | {"activations": timeline.most_alive(order, kept, splits_backward=is_split)}
        for rank, order in enumerate(orders)
    ]
    return Forecast(
        layout,
        mesh,
        rows,
        length,
        tuple(counts),
        tuple(_crossing(hop, sizes) for hop in layout.hops),
        tuple(Memory(**parts) for parts in memory),
        tuple(timeline.most_cached(layout, o, dict.fromkeys(sizes, 1)) for o in orders),
        tuple(timeline.most_cached(layout, o, sizes) for o in orders),
        timeline.bubble(timeline.timeline(layout, splits_backward=is_split)),
    )


def _of(layout: PipelineLayout, rank: int, numbers: list[int]) -> int:
    return sum(numbers[stage.index] for stage in layout.on(rank))


def _weights(count: int, trained: int, mesh: MeshLayout, has_copies: bool) -> dict[str, int]:
    """Of a rank whose stages have ``count`` parameters, so many of them ``trained``."""
    shards = mesh.dp or 1 if mesh.mode == "fsdp" else 1
    held, updated = -(-count // shards), -(-trained // shards)
    return {
        "parameters": WEIGHT * held,
        "gradients": GRADIENT * updated,
        "optimizer": MOMENTS * updated,
        "copies": COPY * trained * has_copies,
    }


def _streams(layout: PipelineLayout, rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """What ``rank`` receives: outputs of the stages before its own, gradients of those after."""
    hops = [hop for stage in layout.on(rank) for hop in (stage.before, stage.after)]
    received = sum(_crossing(hop, sizes).num_bytes for hop in hops if hop is not None)
    return {"buffers": layout.micro_batches * received}


def _crossing(hop: Hop, sizes: dict[str, int]) -> Crossing:
    if hop.is_local:
        return Crossing(0, 0, 0, 0)
    sent, held = (sum(sizes[name] for name in names) for names in (hop.sent, hop.held))
    return Crossing(len(hop.sent), sent, len(hop.held), held)


def _size(count: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5:
        count, unit = count / 1000, next(units)
    return f"{count:.3g} {unit}"


def refuse_too_large(
    result: Forecast, gigabytes: float, make: Callable[[MeshLayout, bool], Forecast]
) -> None:
    """If a rank needs more than a device has, say what and which layout would do; ``make`` gives
    the forecast of another one, with or without recomputation."""
    check_number("--memory", gigabytes, above=0.0)
    room, rank = gigabytes * 1e9, result.fullest
    needed = result.memory[rank]
    if needed.total <= room:
        return
    parts = sorted(asdict(needed).items(), key=lambda part: -part[1])[:2]
    largest = " and ".join(f"{_size(size)} of {name}" for name, size in parts)
    raise ConfigError(
        f"rank {rank} needs {_size(needed.total)}, with {largest}, and --memory {gigabytes:g} is "
        f"less; {_what_fits(result.mesh, room, make)}"
    )


def _what_fits(mesh: MeshLayout, room: float, make: Callable[[MeshLayout, bool], Forecast]) -> str:
    """The first of a few changes that is enough, those that need no more ranks before others."""
    sharded = [{"mode": "fsdp"}] if mesh.dp != 1 and mesh.mode == "ddp" else []
    more = [{axis: factor * getattr(mesh, axis)} for factor in (2, 4, 8) for axis in ("tp", "pp")]
    best = float("inf")
    for change in [{}, *sharded, *more]:
        with suppress(ConfigError):  # heads or layers that do not divide
            result = make(replace(mesh, **change), True)
            most = result.memory[result.fullest].total
            best = min(best, most)
            if most <= room:
                options = [
                    f"--{name.replace('mode', 'parallel')} {v} " for name, v in change.items()
                ]
                fits = f"{''.join(options)}--set gradient_checkpointing=true"
                return f"it fits with {fits} ({_size(most)} a rank)"
    return f"of the layouts tried the best needs {_size(best)}; use more ranks, or a smaller batch"
