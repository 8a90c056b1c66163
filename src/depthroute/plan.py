"""The schedule of a routed model: which sources each place reads, worked out once and frozen.

A plan is pure arithmetic on indices. Streams, sites, checkpoints and diagnostics all ask it, so
the question "what is a source here?" has one answer. Legend: ``i`` is the sublayer index
``0..num_sublayers-1``; ``k`` the block size in sublayers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthroute.errors import ConfigError

if TYPE_CHECKING:
    from depthroute.config import RoutingConfig

FINAL = "final"
FEW_SOURCES = 9
"""Up to which additive routing adds its sources up instead of keeping their sum."""


@dataclass(frozen=True)
class Plan:
    method: str
    init: str
    num_layers: int
    sublayers: tuple[str, ...]
    block_size: int
    sources: str
    routing: str
    include_partial: bool
    embedding_source: bool
    heads: int
    head_norm: str
    eps: float
    learned: bool
    stride: int
    recent_window: int
    key_norm: str
    loops: int
    group_size: int | None
    """Sublayers per two-phase group; None reads in one pass."""
    reason: str
    """Why one pass or two phases."""

    @property
    def num_sublayers(self) -> int:
        return self.num_layers * len(self.sublayers)

    @property
    def routes(self) -> bool:
        """Whether any place reads something other than the plain residual state."""
        return self.method in ("attnres", "delta", "x0_skip")

    @property
    def is_additive(self) -> bool:
        return self.routing == "additive"

    @property
    def is_centered(self) -> bool:
        return self.init == "centered"

    @property
    def is_gated(self) -> bool:
        return self.init == "gate" or self.learned

    @property
    def is_scale_preserving(self) -> bool:
        return self.init == "complete" and self.routes

    @property
    def is_complete(self) -> bool:
        """Whether the sources sum to the residual state at every place."""
        return all(self.is_complete_at(i) for i in range(self.num_sublayers + self.has_final_site))

    def is_complete_at(self, index: int) -> bool:
        """Whether the sources sum to the state at this place; at a block's start they do."""
        routed = self.method in ("attnres", "delta")
        summed = routed and self.sources == "delta" and self.embedding_source
        is_whole = self.boundary(index) or self.reads_unfinished(index)
        if routed and self.sources == "cumulative":
            return is_whole and self.num_sources(index) == 1  # the state itself
        return summed and is_whole

    @property
    def sums_sources(self) -> bool:
        """Whether additive routing takes the residual state from the sources that it reads.

        A few block sums and the current partial are cheaper to add up than a running sum is to
        read and write. Elsewhere the state is kept: many sources, an ``init`` that has to repeat a
        pretrained model's own roundings, or two phases, which do not read them all.
        """
        whole = self.method in ("attnres", "delta") and self.sources == "delta"
        whole = whole and self.embedding_source and self.is_additive and self.init == "paper"
        few = self.block_size > 1 and self.num_sources(self.num_sublayers) <= FEW_SOURCES
        few = few and self.has_query(self.num_sublayers - 1)  # or nothing would read them
        return whole and few and not self.is_gated and self.group_size is None

    @property
    def keeps_state(self) -> bool:
        """Whether the running sum itself is needed beside the sources."""
        if self.sums_sources:
            return False
        return (
            not self.routes
            or self.is_additive
            or self.is_centered
            or self.sources == "cumulative"
            or not self.embedding_source
        )

    @property
    def adds_state(self) -> bool:
        """Whether a site adds a kept state to its mix."""
        return (self.is_additive or self.is_centered) and not self.sums_sources

    @property
    def keeps_partial(self) -> bool:
        """Whether the sum of the current block is needed."""
        blocks = self.method in ("attnres", "delta") and self.sources == "delta"
        return blocks and self.block_size > 1

    @property
    def has_final_site(self) -> bool:
        return self.method in ("attnres", "delta") and not self.is_additive

    def boundary(self, index: int) -> bool:
        """Whether sublayer ``index`` starts a block (``num_sublayers`` closes the last)."""
        return index % self.block_size == 0

    def num_finished(self, index: int) -> int:
        """Sources that exist before sublayer ``index``, the current partial not counted."""
        if self.method == "x0_skip":
            return 1
        if self.method not in ("attnres", "delta"):
            return 0
        if self.sources == "reference":
            # stored while a block's first sublayer is pushed, so visible one sublayer later
            return 0 if index == 0 else (index - 1) // self.block_size + 1
        return int(self.embedding_source) + index // self.block_size

    def has_partial(self, index: int) -> bool:
        return self.keeps_partial and not self.boundary(index)

    def reads_unfinished(self, index: int) -> bool:
        """Whether the block in progress is a source too: its sum so far, or the running state.

        At the end it is in any case, or a final site would never see the last block.
        """
        at_end = index == self.num_sublayers
        if self.sources == "cumulative":
            return at_end and not self.boundary(index)
        return self.has_partial(index) and (self.include_partial or at_end)

    def num_sources(self, index: int) -> int:
        """Sources that the place before sublayer ``index`` reads; ``num_sublayers`` is the end."""
        return self.num_finished(index) + self.reads_unfinished(index)

    def reads_mix(self, index: int) -> bool:
        """Whether the place before sublayer ``index`` reads more than the plain state."""
        if not self.routes or index == 0:
            return False
        if index == self.num_sublayers and not self.has_final_site:
            return False
        if self.is_centered and self.num_sources(index) == 1:
            return False
        if self.init == "gate" and self.is_complete_at(index):
            return False  # the gate would be dead: see _refuse_dead_combinations
        return self.num_sources(index) > 0

    @property
    def last_read(self) -> int:
        """The last place where sources are read, be it only to add them up at the end."""
        place = self.num_sublayers if self.routes else 0
        if place == 0 or not self.keeps_state:
            return place
        while place > 0 and not self.reads_mix(place):
            place -= 1
        return place

    def has_query(self, index: int) -> bool:
        """Whether there is something to choose: a single source has weight 1 and no gradient."""
        chooses = self.method in ("attnres", "delta")
        return chooses and self.reads_mix(index) and self.num_sources(index) > 1

    def has_gate(self, index: int) -> bool:
        if self.method == "depth_attention" and self.init == "gate":
            # one per layer, at its attention: how far the mixed value replaces the layer's own
            layer, place = divmod(index, len(self.sublayers))
            return place == 0 and index < self.num_sublayers and bool(self.depth_sources(layer))
        return self.is_gated and self.reads_mix(index)

    def scale(self, index: int) -> float:
        """What the mix is multiplied by, so that the sources' mean is their sum at the start."""
        if not self.is_scale_preserving:
            return 1.0
        count = self.num_sources(index)
        return count / (count + 1) if self.is_additive else float(count)

    def fuses(self, index: int) -> bool:
        """Whether this place is a softmax over deltas and nothing else, which one kernel can do
        together with the push before it. Phase 1 of a group needs that push done."""
        simple = self.sources == "delta" and self.has_query(index) and not self.has_gate(index)
        simple = simple and self.keeps_state == self.adds_state
        return simple and index < self.num_sublayers and not self.opens_group(index)

    def has_site(self, index: int) -> bool:
        return self.has_query(index) or self.has_gate(index)

    def site_name(self, index: int) -> str:
        if index == self.num_sublayers:
            return FINAL
        layer, kind = divmod(index, len(self.sublayers))
        return f"layers.{layer}.{self.sublayers[kind]}"

    def site_names(self) -> dict[int, str]:
        """Index to name of every place that owns parameters, in the order they are read."""
        return {i: self.site_name(i) for i in range(self.num_sublayers + 1) if self.has_site(i)}

    def num_parameters(self, width: int) -> int:
        """Routing parameters at hidden width ``width``."""
        places = range(self.num_sublayers + 1)
        queries = sum(self.has_query(i) for i in places)
        gates = sum(self.has_gate(i) for i in places)
        return 2 * width * queries + gates

    @property
    def init_reason(self) -> str:
        """What this ``init`` means for a pretrained model, in a sentence."""
        return {
            "complete": "the sources sum to the residual state and the mix is rescaled to it, so "
            "zero queries reproduce the model to rounding under any norm",
            "centered": "weights are softmax minus 1/S, exactly zero at zero queries for any "
            "sources",
            "gate": "what routing adds is multiplied by a learned scalar that starts at zero",
            "paper": "zero queries as published: an identity only where the sources are complete, "
            "and then up to the norm's eps",
            "reference": "random queries and the sources of the released code: not an identity",
        }[self.init]

    # two-phase groups

    def opens_group(self, index: int) -> bool:
        """Whether phase 1 of a two-phase group is computed just before sublayer ``index``."""
        return (
            self.group_size is not None
            and index % self.group_size == 0
            and index < self.num_sublayers
            and self.num_finished(index) > 1
            and any(self.has_query(i) for i in self.group(index))
        )

    def group(self, index: int) -> range:
        """The sublayers that share phase 1 with ``index``."""
        assert self.group_size is not None
        start = index - index % self.group_size
        return range(start, min(start + self.group_size, self.num_sublayers))

    def in_open_group(self, index: int) -> bool:
        return self.group_size is not None and (
            index < self.num_sublayers and self.opens_group(self.group(index).start)
        )

    # depth attention

    def depth_sources(self, layer: int) -> tuple[int, ...]:
        """Earlier layers whose mixed values layer ``layer`` draws on (D_l without itself).

        Anchors are absolute within a visit of the stack: ``j < l`` with ``j % stride == 0``, plus
        the ``recent_window`` layers just below. A looped stack adds the same layer's earlier
        visits.
        """
        if self.method != "depth_attention":
            return ()
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

    @classmethod
    def build(
        cls,
        config: RoutingConfig,
        num_layers: int,
        *,
        width: int | None,
        eps: float,
        converting: bool,
        sublayers: tuple[str, ...],
    ) -> Plan:
        if num_layers < 1:
            raise ConfigError(f"num_layers={num_layers} must be at least 1")
        if num_layers % config.loops:
            raise ConfigError(
                f"routing.loops={config.loops} does not divide the {num_layers} layers of the "
                "model as run; num_hidden_layers counts every visit, so use a multiple of loops"
            )
        total = num_layers * len(sublayers)
        method = config.method
        routed = method in ("attnres", "delta")
        block_size = _block_size(config, total, len(sublayers))
        init = config.init or _default_init(config, converting)
        sources = config.sources or ("reference" if init == "reference" else "delta")
        routing = config.routing or ("replacement" if method == "attnres" else "additive")
        if sources == "reference" and (routing == "replacement" or block_size == 1):
            # the released code departs from the paper only in its additive block sources
            sources = "delta"
        partial = config.include_partial
        if partial is None:
            partial = sources == "delta" and (method == "attnres" or init == "complete")
        if partial and sources != "delta":
            raise ConfigError(
                f"routing.include_partial=true needs sources='delta'; {sources!r} sources have no "
                "partial block. Leave it out"
            )
        if sources == "reference" and not config.embedding_source:
            raise ConfigError(
                "routing.embedding_source=false has no meaning for sources='reference': the "
                "released code stores the embedding first. Leave it out"
            )
        if width is not None and width % config.heads:
            divisors = [str(h) for h in range(1, min(width, 64) + 1) if width % h == 0]
            raise ConfigError(
                f"routing.heads={config.heads} does not divide the hidden width {width}; "
                f"use one of {', '.join(divisors)}"
            )
        stride = config.stride or max(1, num_layers // config.loops // 2)
        if method == "depth_attention" and stride > num_layers // config.loops:
            raise ConfigError(
                f"routing.stride={stride} is larger than the {num_layers // config.loops} layers "
                f"of the model, so only layer 0 would be an anchor; use 1 to "
                f"{num_layers // config.loops}"
            )
        plan = cls(
            method=method,
            init=init,
            num_layers=num_layers,
            sublayers=tuple(sublayers),
            block_size=block_size,
            sources=sources,
            routing=routing,
            include_partial=bool(partial) and routed,
            embedding_source=config.embedding_source,
            heads=config.heads,
            head_norm=config.head_norm,
            eps=config.eps if config.eps is not None else eps,
            learned=config.learned or (method == "x0_skip" and init == "gate"),
            stride=stride,
            recent_window=config.recent_window,
            key_norm=config.key_norm,
            loops=config.loops,
            group_size=None,
            reason="",
        )
        if routed:
            _refuse_dead_combinations(plan)
        group_size, reason = _evaluation(config, plan)
        object.__setattr__(plan, "group_size", group_size)
        object.__setattr__(plan, "reason", reason)
        return plan


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
    if not converting or config.method == "standard":
        return "paper"
    if config.method in ("x0_skip", "depth_attention"):
        return "gate"
    incomplete = config.sources in ("cumulative", "reference") or not config.embedding_source
    return "centered" if incomplete or config.include_partial is False else "complete"


def _refuse_dead_combinations(plan: Plan) -> None:
    if plan.init == "complete" and not plan.is_complete:
        raise ConfigError(
            f"routing.init='complete' needs sources that sum to the residual state, and "
            f"sources={plan.sources!r} with include_partial={plan.include_partial}, "
            f"embedding_source={plan.embedding_source} do not; use init='centered', which is an "
            "identity for any sources"
        )
    if plan.init == "gate" and not plan.is_additive:
        raise ConfigError(
            "routing.init='gate' scales what routing adds, and routing='replacement' adds "
            "nothing; use routing='additive', or init='complete' or 'centered'"
        )
    if plan.init == "gate" and plan.is_complete:
        raise ConfigError(
            f"routing.init='gate' is dead with complete sources: at zero queries the mix is "
            f"parallel to the state, the norm removes it, and neither the gate nor the queries "
            f"of method={plan.method!r}, block_size={plan.block_size} get a gradient; use "
            "init='complete' or 'centered'"
        )


def _evaluation(config: RoutingConfig, plan: Plan) -> tuple[int | None, str]:
    """Two phases or one pass: the same numbers to rounding, so only speed and memory decide."""
    if plan.method not in ("attnres", "delta"):
        return None, f"method={plan.method!r} has no softmax over depth"
    if plan.is_centered:
        if config.evaluation == "two_phase":
            raise ConfigError(
                "routing.evaluation='two_phase' would lose the bit-level identity of "
                "init='centered'; use evaluation='one_pass' or 'auto'"
            )
        return None, "one pass: centred weights are exactly zero at step 0 only in one pass"
    if config.evaluation == "one_pass":
        return None, "one pass: asked for"
    group, grouped, single = _cheapest_group(config.group_size, plan)
    costs = f"about {grouped:.0f} passes a sublayer against {single:.0f} in one pass"
    if config.evaluation == "two_phase":
        return group, f"two phases in groups of {group}: asked for; {costs}"
    if plan.heads > 1:
        # its kernels without tensor cores are far from the memory's limit (docs/kernels.md)
        return None, f"one pass: phase 1 is fast with one head only, and there are {plan.heads}"
    if grouped < TWO_PHASE_PAYS * single:
        return group, f"two phases in groups of {group}: {costs}"
    return None, f"one pass: two phases in groups of {group} would take {costs}"


TWO_PHASE_PAYS = 1 / 2
"""Two phases keep one more activation per sublayer for backward and launch more kernels. Where they
would save a third (attnres with 8 blocks, 0.6B shape) they measured 8.6% more memory than standard,
so they must save half."""


def _cheapest_group(asked: int | None, plan: Plan) -> tuple[int, float, float]:
    """The group size with the least memory traffic, its cost, and that of one pass.

    Costs are passes (reads or writes of one activation) per sublayer, forward and backward, with
    source gradients accumulated in the kernels; docs/kernels.md has the account. One pass over S
    sources: S + 3 forward, 3S + 1 backward. Two phases with E newer sources: (2S + G)/G forward and
    (4S + 2G)/G backward in phase 1, E + 2 and 3E + 3 in phase 2.
    """
    count = plan.num_sublayers
    average = sum(plan.num_sources(i) for i in range(count)) / count
    candidates = [asked] if asked else [plan.block_size] if plan.block_size > 1 else []
    costs = {}
    for size in candidates or range(min(2, count), count + 1):
        newer = finished = 0
        for i in range(count):
            start = i - i % size
            finished += plan.num_finished(start)
            newer += plan.num_sources(i) - plan.num_finished(start)
        costs[size] = 6 * finished / count / size + 3 + 4 * newer / count + 5
    best = min(costs, key=lambda size: costs[size])
    return best, costs[best], 4 * average + 4
