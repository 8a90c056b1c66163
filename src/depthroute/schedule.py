"""How a plan is worked out: which sources exist at each place, who reads them, what is kept.

Pure arithmetic on indices, done once for a model. Legend: ``i`` is the sublayer index
``0..num_sublayers-1``, ``num_sublayers`` the end; ``k`` the block size in sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from depthroute.checks import check_number, check_whole
from depthroute.errors import ConfigError, NothingToShare, shown
from depthroute.methods import METHODS
from depthroute.plan import FINAL, DepthRow, Place, Plan, Resolved

if TYPE_CHECKING:
    from depthroute.config import RoutingConfig

STORED = {"delta": "deltas", "cumulative": "states", "reference": "reference"}
FEW_SOURCES = 9
"""Up to which additive routing adds its sources up instead of keeping their sum."""
FEW_REMADE = 7
"""Sources up to which a read may be made again in backward: so many are mixed by as many threads
with a push as without, and so to the same bits."""


@dataclass(frozen=True)
class Schedule(Resolved):
    """The rules; a :class:`Plan` is what they give."""

    @property
    def is_complete(self) -> bool:
        """Whether the sources sum to the residual state at every place."""
        return all(self.is_complete_at(i) for i in range(self.num_sublayers + self.has_final_site))

    def is_complete_at(self, index: int) -> bool:
        """Whether the sources sum to the state at this place; at a block's start they do."""
        summed = self.chooses and self.sources == "delta" and self.embedding_source
        is_whole = self.starts_block(index) or self.reads_unfinished(index)
        if self.chooses and self.sources == "cumulative":
            return is_whole and self.num_sources(index) == 1  # the state itself
        return summed and is_whole

    def starts_block(self, index: int) -> bool:
        """Whether sublayer ``index`` starts a block (``num_sublayers`` closes the last)."""
        return index % self.block_size == 0

    def num_finished(self, index: int) -> int:
        """Sources that exist before sublayer ``index``, the current partial not counted."""
        if self.method == "x0_skip":
            return 1
        if not self.chooses:
            return 0
        if self.sources == "reference":
            # stored while a block's first sublayer is pushed, so visible one sublayer later
            return 0 if index == 0 else (index - 1) // self.block_size + 1
        return int(self.embedding_source) + index // self.block_size

    def has_partial(self, index: int) -> bool:
        """Whether a block is being summed here: one of a single sublayer is never in parts."""
        return self.chooses and self.sources == "delta" and not self.starts_block(index)

    def reads_unfinished(self, index: int) -> bool:
        """Whether the block in progress is a source too: its sum so far, or the running state.

        At the end it is in any case, or a final site would never see the last block.
        """
        at_end = index == self.num_sublayers
        if self.sources == "cumulative":
            return at_end and not self.starts_block(index)
        return self.has_partial(index) and (self.include_partial or at_end)

    def num_sources(self, index: int) -> int:
        """Sources that the place before sublayer ``index`` reads; ``num_sublayers`` is the end."""
        if self.has_streams:
            return self.streams
        return self.num_finished(index) + self.reads_unfinished(index)

    def reads_mix(self, index: int) -> bool:
        """Whether the place before sublayer ``index`` reads more than the plain state."""
        if self.has_streams:
            return index < self.num_sublayers
        if not self.routes or index == 0:
            return False
        if index == self.num_sublayers and not self.has_final_site:
            return False
        if self.is_centered and self.num_sources(index) == 1:
            return False
        if self.init == "gate" and self.is_complete_at(index):
            return False  # the gate would be dead: see _refuse_dead_combinations
        return self.num_sources(index) > 0

    def chooses_at(self, index: int) -> bool:
        """Whether there is something to choose: a single source has weight 1 and no gradient."""
        weighs = self.chooses or self.has_streams
        return weighs and self.reads_mix(index) and self.num_sources(index) > 1

    def reads(self, index: int) -> tuple[str, ...]:
        """Names of what is read here: by attention its values too, where there is a choice."""
        name, has_attention = self.name(index), index % len(self.sublayers) == 0
        is_twice = self.value_reads and has_attention and index < self.num_sublayers
        return (name, f"{name}.values") if is_twice and self.chooses_at(index) else (name,)

    def has_gate(self, index: int) -> bool:
        if self.values == "numbers" or (self.values == "keys" and self.init == "gate"):
            # one per layer, at its attention: how much of the others' values there is in its own
            layer, place = divmod(index, len(self.sublayers))
            return place == 0 and index < self.num_sublayers and bool(self.depth_sources(layer))
        return self.is_gated and self.reads_mix(index)

    def scale(self, index: int) -> float:
        """What the mix is multiplied by, so that the sources' mean is their sum at the start."""
        if self.init != "complete" or not self.routes:
            return 1.0
        count = self.num_sources(index)
        return count / (count + 1) if self.is_additive else float(count)

    def name(self, index: int) -> str:
        if index == self.num_sublayers:
            return FINAL
        layer, kind = divmod(index, len(self.sublayers))
        return f"layers.{layer}.{self.sublayers[kind]}"

    def depth_sources(self, layer: int) -> tuple[int, ...]:
        """Earlier layers whose mixed values layer ``layer`` draws on (D_l without itself).

        Anchors are absolute within a visit of the stack: ``j < l`` with ``j % stride == 0``, plus
        the ``recent_window`` layers just below. A looped stack adds the same layer's earlier
        visits. A value residual draws on layer 0 alone, of the first visit.
        """
        if self.values is None:
            return ()
        if self.values == "numbers":
            return (0,) if layer else ()
        depth = self.num_layers // self.loops
        visit, position = divmod(layer, depth)
        anchors = {j for j in range(position) if j % self.stride == 0}
        anchors |= set(range(max(0, position - self.recent_window), position))
        earlier = [v * depth + position for v in range(visit)]
        return tuple(earlier + [visit * depth + j for j in sorted(anchors)])

    def depth_kept(self, layer: int) -> tuple[int, ...]:
        """Layers whose keys and values must outlive layer ``layer``."""
        later = range(layer + 1, self.num_layers)
        return tuple(sorted({j for x in later for j in self.depth_sources(x) if j <= layer}))

    def source_names(self, index: int) -> tuple[str, ...]:
        if self.has_streams:
            return tuple(f"stream.{n}" for n in range(self.streams))
        count = self.num_finished(index)
        if self.sources == "reference" and self.chooses:
            names = ["embedding", *(f"stored.{n}" for n in range(1, count))][:count]
        else:
            names = ["embedding"] if self.embedding_source and count else []
            names += [self._block_name(block) for block in range(count - len(names))]
        if self.reads_unfinished(index):
            names.append(f"state.{index}" if self.sources == "cumulative" else "partial")
        return tuple(names)

    def _block_name(self, block: int) -> str:
        """A cumulative state is known by the sublayers before it."""
        if self.sources == "cumulative":
            return f"state.{(block + 1) * self.block_size}"
        return self.name(block) if self.block_size == 1 else f"block.{block}"

    # the table

    def plan(self, groups: tuple[int, ...], reason: str, cuts: tuple[int, ...] = ()) -> Plan:
        """``groups``: where some may start, beside the ``cuts``."""
        rows = self._grouped({*groups, *cuts})
        groups = tuple(dict.fromkeys(row.start for row in rows if row is not None))
        sums_sources = not groups and self._sums_sources()
        keeps_state = not sums_sources and self._needs_state()
        adds_state = (self.is_additive or self.is_centered) and not sums_sources
        is_simple = self.softmax == "query" and self.sources == "delta"
        is_simple = is_simple and keeps_state == adds_state
        last_read = self._last_read(keeps_state)
        return Plan(
            **{f.name: getattr(self, f.name) for f in fields(Resolved)},
            groups=groups,
            reason=reason,
            is_complete=self.is_complete,
            sums_sources=sums_sources,
            keeps_state=keeps_state,
            adds_state=adds_state,
            stores=STORED[self.sources] if self.chooses else "nothing",
            weight_offset=-1 if self.is_centered else int(sums_sources),
            places=tuple(self._place(i, g, is_simple, last_read) for i, g in enumerate(rows)),
            depth=tuple(
                DepthRow(self.depth_sources(layer), self.depth_kept(layer))
                for layer in range(self.num_layers)
            ),
        )

    def _place(self, index: int, group: range | None, is_simple: bool, last_read: int) -> Place:
        opens = group if group is not None and group.start == index else None
        chooses, has_gate = self.chooses_at(index), self.has_gate(index)
        is_added = self.is_additive and self.reads_mix(index)  # be it a single source, of weight 1
        is_simple = is_simple and (chooses or is_added) and not has_gate and opens is None
        fuses = is_simple and index < self.num_sublayers
        return Place(
            index=index,
            name=self.name(index),
            reads=self.reads(index),
            num_finished=self.num_finished(index),
            reads_unfinished=self.reads_unfinished(index),
            num_sources=self.num_sources(index),
            source_names=self.source_names(index),
            reads_mix=self.reads_mix(index),
            chooses=chooses,
            has_gate=has_gate,
            has_site=chooses or has_gate,
            scale=self.scale(index),
            starts_block=self.starts_block(index),
            has_partial=self.has_partial(index),
            hands_on=index < last_read,
            opens_group=opens,
            num_grouped=0 if group is None else self.num_finished(group.start),
            fuses=fuses,
            remakes=fuses and group is None and self._remakes(index),
        )

    def _remakes(self, index: int) -> bool:
        """Whether a read that one kernel does is made again in backward instead of being kept.

        In blocks a sublayer would have two activations kept, what it read and the block's sum so
        far, where a plain residual has one. Of its own accord backward needs the sources, which
        are few in the first half of the blocks: half of the memory for a third of the traffic.
        Where the state is added, backward needs the read itself, and where no sum so far is read,
        none is kept.
        """
        if self.is_additive or self.is_centered or not self.include_partial:
            return False
        if len(self.reads(index)) > 1:
            return False
        count, block = math.ceil(self.num_sublayers / self.block_size), index // self.block_size
        is_early = self.block_size > 1 and count > 1 and 2 * block < count
        return is_early and self.num_sources(index) <= FEW_REMADE

    def shares(self, group: range) -> bool:
        """Whether its places have sources to read ahead for all of them."""
        return self.num_finished(group.start) > 1 and any(map(self.chooses_at, group))

    def _grouped(self, starts: set[int]) -> list[range | None]:
        """For each place those that share phase 1 with it; none where there is nothing to share."""
        count = self.num_sublayers
        groups: list[range | None] = [None] * (count + 1)
        for start, stop in pairwise([*sorted(starts), count]):
            group = range(start, stop)
            if self.shares(group):
                groups[start:stop] = [group] * len(group)
        return groups

    def _sums_sources(self) -> bool:
        """Whether the state is taken from the sources that are read anyway.

        A few block sums and the current partial are cheaper to add up than a running sum is to
        read and write. Elsewhere the state is kept: many sources, an ``init`` that has to repeat a
        pretrained model's own roundings, or two phases, which do not read them all.
        """
        whole = self.chooses and self.sources == "delta" and self.embedding_source
        whole = whole and self.is_additive and self.init == "paper" and not self.is_gated
        few = self.block_size > 1 and self.num_sources(self.num_sublayers) <= FEW_SOURCES
        return whole and few and self.chooses_at(self.num_sublayers - 1)  # or nothing reads them

    def _needs_state(self) -> bool:
        return (
            not self.routes
            or self.is_additive
            or self.is_centered
            or self.sources == "cumulative"
            or not self.embedding_source
        )

    def _last_read(self, keeps_state: bool) -> int:
        """The last place where sources are read, be it only to add them up at the end."""
        if not self.routes or not keeps_state:
            return self.num_sublayers if self.routes else 0
        return max((i for i in range(self.num_sublayers + 1) if self.reads_mix(i)), default=0)


def build(
    config: RoutingConfig,
    num_layers: int,
    *,
    width: int | None,
    eps: float,
    converting: bool,
    sublayers: tuple[str, ...],
) -> Plan:
    """The plan of ``config`` for a model of ``num_layers`` layers, or the reason against it."""
    check_whole("num_layers", num_layers)
    check_whole("width", width, optional=True)
    check_number("eps", eps, least=0.0)
    _check_sublayers(sublayers)
    _refuse_misfits(config, num_layers, width)
    method, depth = config.method, num_layers // config.loops
    kind = METHODS[method]
    block_size = _block_size(config, num_layers * len(sublayers), len(sublayers))
    init = config.init or _default_init(config, converting)
    routing = config.routing or kind.routing
    sources = _sources(config, init, routing, block_size)
    partial = config.include_partial
    if partial is None:
        partial = sources == "delta" and (kind.reads_partial or init == "complete")
    schedule = Schedule(
        method=method,
        init=init,
        num_layers=num_layers,
        sublayers=tuple(sublayers),
        block_size=block_size,
        sources=sources,
        routing=routing,
        include_partial=bool(partial) and kind.softmax is not None,
        embedding_source=config.embedding_source,
        heads=config.heads,
        head_norm=config.head_norm,
        eps=config.eps if config.eps is not None else eps,
        learned=config.learned or (method == "x0_skip" and init == "gate"),
        value_reads=config.value_reads,
        stride=config.stride or max(1, depth // 2),
        recent_window=config.recent_window,
        key_norm=config.key_norm,
        streams=config.streams if "streams" in kind.settings else 1,
        loops=config.loops,
    )
    if schedule.chooses:
        _refuse_dead_combinations(schedule)
        _refuse_idle(schedule)
    return schedule.plan(*_evaluation(config, schedule))


def cut(plan: Plan, cuts: tuple[int, ...]) -> Plan:
    """``plan`` for a stack that is cut before the sublayers ``cuts``: groups end there, since what
    comes after is computed elsewhere."""
    rules = Schedule(**{f.name: getattr(plan, f.name) for f in fields(Resolved)})
    return rules.plan(plan.groups, plan.reason, cuts if plan.groups else ())


def _check_sublayers(names: Any) -> None:
    """A place is known by its layer and such a name: two of one name would share a site."""
    is_several = isinstance(names, tuple | list) and len(names) > 0
    if not is_several or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise ConfigError(
            f"sublayers={shown(names)} must be the names of a layer's sublayers in their order, "
            "such as ('attention', 'mlp')"
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"sublayers={shown(names)} has a name twice; give each sublayer one of its own"
        )


def _refuse_misfits(config: RoutingConfig, num_layers: int, width: int | None) -> None:
    """What this model's depth and width cannot have."""
    if num_layers % config.loops:
        raise ConfigError(
            f"routing.loops={config.loops} does not divide the {num_layers} layers of the "
            "model as run; num_hidden_layers counts every visit, so use a multiple of loops"
        )
    if width is not None and width % config.heads:
        divisors = [str(h) for h in range(1, min(width, 64) + 1) if width % h == 0]
        raise ConfigError(
            f"routing.heads={config.heads} does not divide the hidden width {width}; "
            f"use one of {', '.join(divisors)}"
        )
    depth = num_layers // config.loops
    if config.stride is not None and config.stride > depth:
        raise ConfigError(
            f"routing.stride={config.stride} is larger than the {depth} layers of the model, so "
            f"only layer 0 would be an anchor; use 1 to {depth}"
        )


def _sources(config: RoutingConfig, init: str, routing: str, block_size: int) -> str:
    sources = config.sources or ("reference" if init == "reference" else "delta")
    if sources == "reference" and (routing == "replacement" or block_size == 1):
        # the released code departs from the paper only in its additive block sources
        sources = "delta"
    if config.include_partial and sources != "delta":
        raise ConfigError(
            f"routing.include_partial=true needs sources='delta'; {sources!r} sources have no "
            "partial block. Leave it out"
        )
    if config.include_partial and block_size == 1:
        raise ConfigError(
            "routing.include_partial=true needs blocks of more than one sublayer, which are in "
            "parts while they are filled; leave it out, or give a larger block_size"
        )
    if sources == "reference" and not config.embedding_source:
        raise ConfigError(
            "routing.embedding_source=false has no meaning for sources='reference': the "
            "released code stores the embedding first. Leave it out"
        )
    return sources


def _block_size(config: RoutingConfig, total: int, per_layer: int) -> int:
    if config.num_blocks is not None:
        if config.num_blocks > total:
            raise ConfigError(
                f"routing.num_blocks={config.num_blocks} is more than the {total} sublayers of "
                f"the model; use 1 to {total}"
            )
        if "reference" in (config.sources, config.init):
            # the released code counts whole layers: ceil(L / num_blocks) of them
            return per_layer * math.ceil(total // per_layer / config.num_blocks)
        size = math.ceil(total / config.num_blocks)
        if math.ceil(total / size) != config.num_blocks:
            possible = sorted({math.ceil(total / s) for s in range(1, total + 1)})
            raise ConfigError(
                f"routing.num_blocks={config.num_blocks} cannot be made from {total} sublayers "
                f"with equal blocks and a shorter last one; possible: "
                f"{', '.join(map(str, possible))}"
            )
        return size
    size = config.block_size or 1
    if size > total:
        raise ConfigError(
            f"routing.block_size={size} is larger than the model's {total} sublayers "
            f"({total // per_layer} layers of {per_layer}); use 1 to {total}. block_size counts "
            "sublayers; a size given in layers, as in Kimi K3 and Megatron configurations, must "
            f"be multiplied by {per_layer}"
        )
    return size


def _default_init(config: RoutingConfig, converting: bool) -> str:
    """Left out, ``init`` is the paper's from scratch and an identity when converting."""
    if not converting:
        return "paper"
    identity = METHODS[config.method].identity
    if identity is not None:
        return identity
    incomplete = config.sources in ("cumulative", "reference") or not config.embedding_source
    return "centered" if incomplete or config.include_partial is False else "complete"


def _refuse_dead_combinations(schedule: Schedule) -> None:
    if schedule.init == "complete" and not schedule.is_complete:
        raise ConfigError(
            f"routing.init='complete' needs sources that sum to the residual state, and "
            f"sources={schedule.sources!r} with include_partial={schedule.include_partial}, "
            f"embedding_source={schedule.embedding_source} do not; use init='centered', which is "
            "an identity for any sources"
        )
    if schedule.init == "gate" and not schedule.is_additive:
        raise ConfigError(
            "routing.init='gate' scales what routing adds, and routing='replacement' adds "
            "nothing; use routing='additive', or init='complete' or 'centered'"
        )
    if schedule.init == "gate" and schedule.is_complete:
        raise ConfigError(
            f"routing.init='gate' is dead with complete sources: at uniform weights the mix is "
            f"parallel to the state, the norm removes it, and neither the gate nor the weights "
            f"of method={schedule.method!r}, block_size={schedule.block_size} get a gradient; use "
            "init='complete' or 'centered'"
        )


def _refuse_idle(schedule: Schedule) -> None:
    """How sources are chosen, where there are none to choose among."""
    places = range(schedule.num_sublayers + schedule.has_final_site)
    reads = [len(schedule.reads(i)) for i in places if schedule.chooses_at(i)]
    if schedule.heads > 1 and not reads:
        setting, where = f"heads={schedule.heads}", "no place"
    elif schedule.value_reads and 2 not in reads:
        setting, where = "value_reads=true", "no attention"
    else:
        return
    raise ConfigError(
        f"routing.{setting} does nothing: {where} of {schedule.num_sublayers} sublayers, in "
        f"blocks of {schedule.block_size}, reads several sources; leave it out, or have more"
    )


def _evaluation(config: RoutingConfig, schedule: Schedule) -> tuple[tuple[int, ...], str]:
    """Two phases or one pass: the same numbers to rounding, so only speed and memory decide."""
    if not schedule.chooses:
        return (), f"method={schedule.method!r} has no softmax over depth"
    if schedule.softmax != "query":
        return (), "one pass: there are no keys to read ahead of time"
    if schedule.is_centered:
        if config.evaluation == "two_phase":
            raise ConfigError(
                "routing.evaluation='two_phase' would lose the bit-level identity of "
                "init='centered'; use evaluation='one_pass' or 'auto'"
            )
        return (), "one pass: centred weights are exactly zero at step 0 only in one pass"
    if config.evaluation == "one_pass":
        return (), "one pass: asked for"
    is_asked = config.evaluation == "two_phase"
    starts, grouped, single = _cheapest_groups(config.group_size, schedule, is_asked)
    lengths = [len(g) for g in _groups(starts, schedule) if schedule.shares(g)]
    if not lengths and is_asked:
        raise NothingToShare(_nothing_to_share(config.group_size, schedule))
    if not lengths:
        return (), "one pass: two phases would take longer"
    sizes = f"{len(lengths)} group{'s' if len(lengths) > 1 else ''} of {min(lengths)}"
    sizes += f" to {max(lengths)}" if min(lengths) < max(lengths) else ""
    costs = f"as long as about {grouped:.0f} passes a sublayer, and one pass {single:.0f}"
    if is_asked:
        return starts, f"two phases in {sizes}: asked for; {costs}"
    if schedule.heads > 1:
        # more have no tensor cores, for which alone phase 1 was tuned (docs/kernels.md)
        return (), f"one pass: phase 1 is fast with one head only, and there are {schedule.heads}"
    if grouped < TWO_PHASE_PAYS * single:
        return starts, f"two phases in {sizes}: {costs}"
    return (), f"one pass: two phases in {sizes} would take {costs}"


def _groups(starts: Iterable[int], schedule: Schedule) -> Iterator[range]:
    return (range(*bounds) for bounds in pairwise((*starts, schedule.num_sublayers)))


def _nothing_to_share(group_size: int | None, schedule: Schedule) -> str:
    if group_size is not None and _can_share(schedule):
        return (
            f"routing.group_size={group_size} leaves nothing to read ahead: no group of that size "
            "begins where two sources are finished; leave group_size out"
        )
    both = "evaluation" if group_size is None else "evaluation and group_size"
    return (
        "routing.evaluation='two_phase' has nothing to read ahead: no sublayer that chooses has "
        f"two finished sources before it; leave out {both}, or use more layers or blocks"
    )


def _can_share(schedule: Schedule) -> bool:
    """Whether some group of places would have a first phase."""
    count = schedule.num_sublayers
    return any(schedule.shares(range(start, count)) for start in range(count))


TWO_PHASE_PAYS = 0.6
"""Two phases keep one more activation per sublayer for backward and launch more kernels. With 8
blocks (attnres, 0.6B shape) they measured 8.6% more memory than standard, so they must save much.
"""
LONGEST_GROUP = 10
"""So that what is newer than a group, nine sources at most, is held by one program up to a width of
4096."""
FIRST_PASSES = 12
"""More at a group's first place than at the others: push, mix and norm are kernels apart."""


def phase_1_passes(num_sources: int) -> int:
    """As the kernels take them, the group's outputs and their gradients left out: S for the logits,
    S for the outputs, S for the products and 3S for the gradients of the sources, which come by 16,
    32 or 64 to tensor cores and take about as long as 4 for each of those, there or not."""
    launches = math.ceil(num_sources / 64)
    padded = max(16, 1 << (math.ceil(num_sources / launches) - 1).bit_length())
    return 3 * num_sources + max(3 * num_sources, 4 * padded * launches)


def _cheapest_groups(
    asked: int | None, schedule: Schedule, is_wanted: bool
) -> tuple[tuple[int, ...], float, float]:
    """Where groups start so that reading takes least, how long it takes, and one pass. If
    ``is_wanted``, some places share a first phase wherever any can.

    Times are in passes (reads or writes of one activation) per sublayer, forward and backward, with
    source gradients accumulated in the kernels; docs/kernels.md has the account. One pass over S
    sources: S + 3 forward, 3S + 1 backward. Two phases with E newer sources: phase 1 for the whole
    group (:func:`phase_1_passes`, G for its outputs and 2G for their gradients), E + 2 and 3E + 3
    at every place. One that reads twice pays all but phase 1's reading of the sources twice.
    """
    count = schedule.num_sublayers
    reads = [len(schedule.reads(i)) for i in range(count)]
    single = [reads[i] * (4 * schedule.num_sources(i) + 4) for i in range(count)]
    must_share = is_wanted and _can_share(schedule)

    def cost(start: int, stop: int) -> float:
        grouped = schedule.num_finished(start)
        if not schedule.shares(range(start, stop)):
            return math.inf if must_share and stop == count else sum(single[start:stop])
        newer = (reads[i] * (schedule.num_sources(i) - grouped + 2) for i in range(start, stop))
        return phase_1_passes(grouped) + FIRST_PASSES + 4 * sum(newer)

    size = asked or (schedule.block_size if schedule.block_size > 1 else None)
    starts = tuple(range(0, count, size)) if size else ()
    shares = any(map(schedule.shares, _groups(starts, schedule)))
    if size and (asked or shares or not must_share):
        must_share = False
        total = sum(cost(*group) for group in pairwise((*starts, count)))
    else:
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # up to each place
        for stop in range(1, count + 1):
            first = max(0, stop - LONGEST_GROUP)
            best.append(
                min(
                    (best[start][0] + cost(start, stop), (*best[start][1], start))
                    for start in range(first, stop)
                )
            )
        total, starts = best[count]
    return starts, total / count, sum(single) / count
