"""Which layers of a routed model run on which rank of a pipeline, and what crosses each hop.

Worked out from the routing plan alone, before any process or weight exists. A *stage* is a run of
whole layers, a rank has ``chunks`` of them, and a *hop* leads from a stage to the next one. What a
hop hands over is what the plan says a layer is given: sources, keys and values that are finished
and never change again, and the partial sum and the state, which every sublayer adds to. A rank
keeps the finished ones it has had, so that they need not be sent to it twice. ``print(layout)``
shows all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from depthroute import schedule as schedules
from depthroute.checks import check_switch, check_whole
from depthroute.errors import ConfigError, unknown
from depthroute.plan import GROWING, Plan


class Order(NamedTuple):
    """How a pipeline goes through its micro-batches."""

    torch_name: str
    """Of the schedule in ``torch.distributed.pipelining``."""
    least_chunks: int
    most_chunks: int | None
    turns_back: bool = False
    """Whether the second chunks are dealt out from the last rank to the first: a V."""
    in_rounds: bool = False
    """Whether micro-batches go round in groups of equal size, at least one a rank if they can."""


ORDERS = {
    "gpipe": Order("GPipe", 1, 1),
    "1f1b": Order("1F1B", 1, 1),
    "interleaved": Order("Interleaved1F1B", 2, None, in_rounds=True),
    "zero-bubble": Order("InterleavedZeroBubble", 1, None, in_rounds=True),
    "zbv": Order("ZBVZeroBubble", 2, 2, turns_back=True),
}


@dataclass(frozen=True)
class Hop:
    """From one stage to the next."""

    held: tuple[str, ...]
    """What the next stage starts with, in the order of ``LayerState.tensors()``."""
    sent: tuple[str, ...]
    """What of it is handed over; the rest the receiver has."""
    is_local: bool
    """Whether both stages are on one rank, where handing over costs nothing."""

    @property
    def lent(self) -> tuple[str, ...]:
        """What the next stage takes from its rank's cache."""
        return tuple(name for name in self.held if name not in self.sent)


@dataclass(frozen=True)
class Stage:
    index: int
    rank: int
    layers: range
    before: Hop | None
    """None for the first stage, which is given tokens."""
    after: Hop | None
    """None for the last one, which gives logits."""
    keeps: frozenset[str]
    """What of the tensors that it received or made a later stage of this rank will take."""
    is_last_of_rank: bool


@dataclass(frozen=True)
class PipelineLayout:
    """Made with :meth:`of`, which says what would fit where something does not."""

    plan: Plan
    """Of the model, its two-phase groups ended at the cuts."""
    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    layers: tuple[int, ...]
    """How many each stage has."""
    cache: bool = True
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        ranks: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
        micro_batches: int | None = None,
        layers: Sequence[int] | None = None,
        cache: bool = True,
    ) -> PipelineLayout:
        """The layout of a model with this ``plan`` (``model.plan``), or the reason against it.

        ``chunks`` is how many stages a rank has (the fewest the schedule can do with),
        ``micro_batches`` how many parts a batch is cut into (two a rank), ``layers`` how many
        layers each stage has, in the order they run (even numbers). ``cache=False`` sends every
        tensor at every hop.
        """
        if schedule not in ORDERS:
            raise unknown("pipeline schedule", schedule, ORDERS)
        order = ORDERS[schedule]
        chunks = order.least_chunks if chunks is None else chunks
        for name, value in (("ranks", ranks), ("chunks", chunks)):
            check_whole(name, value)
        micro_batches = 2 * ranks if micro_batches is None else micro_batches
        check_whole("micro_batches", micro_batches)
        check_switch("cache", cache)
        _refuse_misfits(plan, schedule, ranks, chunks)
        _refuse_micro_batches(schedule, ranks, micro_batches)
        counts = _layers_of_stages(plan.num_layers, ranks, chunks, layers)
        cuts = tuple(len(plan.sublayers) * end for end in accumulate(counts[:-1]))
        plan = schedules.cut(plan, cuts)
        return cls(plan, schedule, ranks, chunks, micro_batches, counts, cache)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self._stages()))

    @property
    def order(self) -> Order:
        return ORDERS[self.schedule]

    def on(self, rank: int) -> list[Stage]:
        """The stages of ``rank``, in the order they run."""
        return [stage for stage in self.stages if stage.rank == rank]

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Hop ``i`` leads from stage ``i`` to stage ``i + 1``."""
        has: list[set[str]] = [set() for _ in range(self.ranks)]
        hops, ends = [], list(accumulate(self.layers))
        for index, end in enumerate(ends[:-1]):
            sender, receiver = self._rank(index), self._rank(index + 1)
            held = self.plan.held(end)
            has[sender] |= {name for name in held if name not in GROWING}
            is_local = sender == receiver
            lacks = set(held) - has[receiver] if self.cache and not is_local else set(held)
            hops.append(Hop(held, tuple(name for name in held if name in lacks), is_local))
        return tuple(hops)

    def _stages(self) -> list[Stage]:
        stages, ends = [], [0, *accumulate(self.layers)]
        kept: list[set[str]] = [set() for _ in range(self.ranks)]
        ranks = [self._rank(index) for index in range(len(self.layers))]
        hops = [None, *self.hops, None]
        for index, rank in enumerate(ranks):
            before, after = hops[index : index + 2]
            later = [i for i in range(index + 1, len(ranks)) if ranks[i] == rank]
            wanted = {name for i in later for name in self.hops[i - 1].lent}
            seen = {name for hop in (before, after) if hop is not None for name in hop.held}
            keeps = (wanted & seen) - kept[rank]
            kept[rank] |= keeps
            layers = range(ends[index], ends[index + 1])
            stages.append(Stage(index, rank, layers, before, after, frozenset(keeps), not later))
        return stages

    def _rank(self, stage: int) -> int:
        chunk, position = divmod(stage, self.ranks)
        if self.order.turns_back and chunk % 2:
            return self.ranks - 1 - position
        return position

    def __str__(self) -> str:
        return self.table()

    def table(
        self,
        num_parameters: Sequence[int] | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> str:
        """A line a stage; what it is handed, how much of it is sent, and if given what it holds
        and what else there is to say of it."""
        shown: dict[str, Sequence[str]] = {
            "stage": [str(stage.index) for stage in self.stages],
            "rank": [str(stage.rank) for stage in self.stages],
            "layers": [f"{s.layers.start}-{s.layers.stop - 1}" for s in self.stages],
        }
        if num_parameters is not None:
            shown["parameters"] = [f"{count:,}" for count in num_parameters]
        held, sent, names = zip(*(_cells(stage.before) for stage in self.stages), strict=True)
        shown |= {"held": held, "sent": sent, **(columns or {}), "what is sent": names}
        lines = aligned(shown)
        sent = sum(len(hop.sent) for hop in self.hops if not hop.is_local)
        whole = sum(len(hop.held) for hop in self.hops if not hop.is_local)
        title = (
            f"{self.plan.method}, {self.plan.num_layers} layers; {self.order.torch_name} over "
            f"{self.ranks} ranks x {self.chunks} chunks, {self.micro_batches} micro-batches"
        )
        saved = f"{sent} tensors cross ranks a micro-batch and direction"
        saved += f", {whole} without the cache" if sent < whole else ""
        return "\n".join([title, *lines, saved])


def aligned(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a table, the headings first."""
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cells(hop: Hop | None) -> tuple[str, str, str]:
    if hop is None:
        return "-", "-", "(tokens)"
    if hop.is_local:
        return str(len(hop.held)), "0", "(stays on the rank)"
    names = hop.sent if len(hop.sent) < 9 else (*hop.sent[:4], "...", *hop.sent[-4:])
    return str(len(hop.held)), str(len(hop.sent)), ", ".join(names)


def _refuse_misfits(plan: Plan, schedule: str, ranks: int, chunks: int) -> None:
    order, stages = ORDERS[schedule], ranks * chunks
    if plan.loops > 1:
        raise ConfigError(
            f"a looped stack runs the same layers {plan.loops} times, and a pipeline keeps each "
            "layer on one rank; use routing.loops=1, or train it with DDP or FSDP"
        )
    least, most = order.least_chunks, order.most_chunks
    if chunks < least or (most is not None and chunks > most):
        fits = str(least) if most == least else f"{least} or more"
        others = [name for name, other in ORDERS.items() if _has_chunks(other, chunks)]
        raise ConfigError(
            f"schedule {schedule!r} runs {fits} chunks a rank, not {chunks}; use chunks={least}, "
            f"or for {chunks} one of {', '.join(others)}"
        )
    if stages > plan.num_layers:
        fits = plan.num_layers // ranks
        hint = f"at most {fits} chunks a rank"
        if fits < least:
            hint = f"at most {plan.num_layers // least} ranks of {least} chunks"
        raise ConfigError(
            f"{ranks} ranks x {chunks} chunks are {stages} stages, and the model has "
            f"{plan.num_layers} layers, of which each stage needs one; use {hint}"
        )


def _has_chunks(order: Order, chunks: int) -> bool:
    return order.least_chunks <= chunks <= (order.most_chunks or chunks)


def _refuse_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    if schedule == "1f1b" and micro_batches < ranks:
        raise ConfigError(
            f"micro_batches={micro_batches} leave some of the {ranks} ranks of schedule '1f1b' "
            f"without work; use {ranks} or more, or schedule 'gpipe'"
        )
    if ORDERS[schedule].in_rounds and not _goes_in_rounds(micro_batches, ranks):
        near = [m for m in range(1, micro_batches + ranks + 1) if _goes_in_rounds(m, ranks)]
        below, above = max(m for m in near if m < micro_batches), near[-1]
        above = min(m for m in near if m > micro_batches)
        raise ConfigError(
            f"micro_batches={micro_batches} cannot go round {ranks} ranks in groups of one size, "
            f"as schedule {schedule!r} does; use {below} or {above} (any multiple of {ranks})"
        )


def _goes_in_rounds(micro_batches: int, ranks: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


def _layers_of_stages(
    num_layers: int, ranks: int, chunks: int, given: Sequence[int] | None
) -> tuple[int, ...]:
    stages = ranks * chunks
    if given is None:
        # the first ones take what is over: the last has the head as well
        return tuple(num_layers // stages + (i < num_layers % stages) for i in range(stages))
    for count in given:
        check_whole("each of layers", count)
    if len(given) != stages or sum(given) != num_layers:
        even = _layers_of_stages(num_layers, ranks, chunks, None)
        raise ConfigError(
            f"layers={list(given)} are {len(given)} stages of {sum(given)} layers together; "
            f"{ranks} ranks x {chunks} chunks need {stages} numbers that sum to the model's "
            f"{num_layers} layers, such as {','.join(map(str, even))}"
        )
    return tuple(given)
