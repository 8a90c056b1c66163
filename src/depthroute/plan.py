"""What a routed model does at every place, as a table that is made once and looked up afterwards.

A *place* is where something is read: before each sublayer, and at the end. A row says which
sources it reads, what is chosen or added there, and what becomes of the block that was being
summed. Streams, sites, checkpoints and traces take it from here, so the question "what is a source
here?" has one answer; :mod:`depthroute.schedule` works it out. ``print(plan)`` shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from depthroute.methods import METHODS, SITE_SIZES

FINAL = "final"
PARTIAL, STATE = GROWING = ("partial", "state")
"""What a stream holds that every sublayer adds to; all else in it is finished."""


@dataclass(frozen=True)
class Place:
    """What is read before sublayer ``index``; the last row is the end of the stack."""

    index: int
    name: str
    """``layers.3.mlp``, or ``final``."""
    reads: tuple[str, ...]
    """Names of the reads made here, each with a query of its own: the place's, and where attention
    reads its values apart that name with ``.values``."""
    num_finished: int
    """Finished sources that exist here."""
    reads_unfinished: bool
    """Whether the block in progress is a source too: its sum so far, or the running state."""
    num_sources: int
    """That are read: the finished ones, and the unfinished if it is one."""
    source_names: tuple[str, ...]
    """``embedding``, a sublayer, ``block.2``, ``state.4``, ``stored.1``, ``partial``; of several
    streams ``stream.0``, ``stream.1``, ..."""
    reads_mix: bool
    """Whether it reads more than the plain state."""
    chooses: bool
    """Whether there is something to choose: a single source has weight 1 and no gradient."""
    has_gate: bool
    has_site: bool
    """Whether there are parameters."""
    scale: float
    """What the mix is multiplied by, so that the sources' mean is their sum at the start."""
    starts_block: bool
    """What was summed until here is a source of its own from here on."""
    has_partial: bool
    """Whether a block is being summed here."""
    hands_on: bool
    """Whether a later place reads sources, be it only to add them up at the end."""
    opens_group: range | None
    """The places whose phase 1 is computed here, where evaluation is in two phases."""
    num_grouped: int
    """Sources that phase 1 of this place's group has read; the others are newer."""
    fuses: bool
    """Whether it is a softmax over deltas (one of a single source is 1) and nothing else, which one
    kernel can do together with the push before it. Phase 1 of a group needs that push done."""
    remakes: bool
    """Whether what the sublayer reads is mixed again in backward, where one kernel did it, instead
    of being kept: all that it is made of is kept anyway, and there is little of it."""


@dataclass(frozen=True)
class DepthRow:
    """Which layers' values (and, in depth attention, keys) a layer's attention draws on."""

    sources: tuple[int, ...]
    """Earlier layers (D_l without itself)."""
    kept: tuple[int, ...]
    """Layers that a later one draws on, when this one is done."""


@dataclass(frozen=True)
class Resolved:
    """A routing configuration for one model, nothing left out."""

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
    value_reads: bool
    stride: int
    recent_window: int
    key_norm: str
    streams: int
    """Residual streams; a single one unless the method has more."""
    loops: int

    @property
    def num_sublayers(self) -> int:
        return self.num_layers * len(self.sublayers)

    @property
    def chooses(self) -> bool:
        """Whether there is a softmax over depth."""
        return self.softmax is not None

    @property
    def softmax(self) -> str | None:
        """What gives the weights over depth: a site's ``"query"``, or nothing."""
        return METHODS[self.method].softmax

    @property
    def has_streams(self) -> bool:
        """Whether there is more than one residual stream, and every place reads and mixes them."""
        return self.streams > 1

    @property
    def values(self) -> str | None:
        """What weights attention's values over layers: ``"keys"``, ``"numbers"``, or nothing."""
        return METHODS[self.method].values

    @property
    def changes_values(self) -> bool:
        """Whether attention is given other values than those of what its queries read."""
        return self.values is not None or self.value_reads

    @property
    def routes(self) -> bool:
        """Whether any place reads something other than the plain residual state."""
        return self.chooses or self.method == "x0_skip"

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
    def has_final_site(self) -> bool:
        return self.chooses and not self.is_additive


@dataclass(frozen=True)
class Plan(Resolved):
    groups: tuple[int, ...]
    """Where groups that share a first phase start; with none, places are read in one pass."""
    reason: str
    """Why one pass or two phases."""
    is_complete: bool
    """Whether the sources sum to the residual state at every place."""
    sums_sources: bool
    """Whether additive routing takes the residual state from the sources that it reads."""
    keeps_state: bool
    """Whether the running sum itself is needed beside the sources."""
    adds_state: bool
    """Whether a site adds a kept state to its mix."""
    stores: str
    """What becomes a source: ``"deltas"`` (what a block added), ``"states"`` (the sum so far),
    ``"reference"`` (as the released code does) or ``"nothing"``."""
    weight_offset: int
    """What is added to every weight of a mix; -1 stands for -1/S."""
    places: tuple[Place, ...] = field(repr=False)
    """One for each sublayer, and the end."""
    depth: tuple[DepthRow, ...] = field(repr=False)
    """One for each layer."""

    def window(self, index: int, count: int) -> Plan:
        """The plan of ``count`` sublayers from ``index`` on and of the place after them, with
        indices and names of its own: equal wherever the same happens."""
        made = self._windows.get((index, count))
        if made is None:
            rows, names = self.places[index : index + count + 1], [*self.sublayers, FINAL]
            places = tuple(
                replace(row, index=i, name=names[i % len(names)], source_names=())
                for i, row in enumerate(rows)
            )
            layers, first, depth = count // len(self.sublayers), index // len(self.sublayers), ()
            if self.values == "numbers":  # as of one layer: it draws on -1, or others draw on it
                depth = tuple(
                    DepthRow((-1,), ()) if row.sources else DepthRow((), (0,))
                    for row in self.depth[first : first + layers]
                )
            made = replace(self, num_layers=layers, loops=1, places=places, depth=depth)
            self._windows[index, count] = made
        return made

    @cached_property
    def _windows(self) -> dict[tuple[int, int], Plan]:
        return {}

    def site_names(self) -> dict[int, str]:
        """Index to name of every place that owns parameters, in the order they are read."""
        return {place.index: place.name for place in self.places if place.has_site}

    def held(self, layer: int) -> tuple[str, ...]:
        """What is handed to ``layer``, by name and in the order of ``LayerState.tensors()``.

        Everything but :data:`GROWING` is finished: it never changes under that name.
        """
        place = self.places[layer * len(self.sublayers)]
        names = [*place.source_names[: place.num_finished]]
        names += [PARTIAL] * place.has_partial + [STATE] * self.keeps_state
        kept = self.depth[layer - 1].kept if layer else ()
        kinds = ("keys", "values") if self.values == "keys" else ("values",)
        return (*names, *(f"{kind}.{j}" for kind in kinds for j in kept))

    def num_parameters(self, width: int) -> int:
        """Routing parameters at hidden width ``width``."""
        gates = sum(place.has_gate for place in self.places)
        gates += gates if self.values == "numbers" else 0  # and the weight of each layer's own
        weighted_by = "streams" if self.has_streams else self.softmax
        if weighted_by is None:
            return gates
        size, chosen = SITE_SIZES[weighted_by], [p for p in self.places if p.chooses]
        queries = width * sum(len(place.reads) - 1 for place in chosen)  # of one gain
        return gates + queries + sum(size(width, place.num_sources) for place in chosen)

    @property
    def init_reason(self) -> str:
        """What this ``init`` means for a pretrained model, in a sentence."""
        if self.has_streams:
            return (
                "the mean of the streams is read and each output is added to it once, so it is the "
                "residual state and the model is reproduced to rounding under any norm"
            )
        return {
            "complete": "the sources sum to the residual state and the mix is rescaled to it, so "
            "uniform weights reproduce the model to rounding under any norm",
            "centered": "weights are softmax minus 1/S, exactly zero at the start for any sources",
            "gate": "what routing adds is multiplied by a learned scalar that starts at zero",
            "paper": "uniform weights, as published: an identity only where the sources are "
            "complete, and then up to the norm's eps",
            "reference": "random queries and the sources of the released code: not an identity",
        }[self.init]

    def __str__(self) -> str:
        rows = [("place", "reads", "sources", "")] + [self._row(place) for place in self.places]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        title = f"{self.method}, init {self.init}, {self.num_layers} layers; {self.reason}"
        return "\n".join([title, *(line.rstrip() for line in lines)])

    def _row(self, place: Place) -> tuple[str, str, str, str]:
        reads = "softmax" if place.chooses else "source" if place.reads_mix else "state"
        reads = f"gate * {reads}" if place.has_gate and place.reads_mix else reads
        if self.has_streams:
            reads = "streams" if place.reads_mix else "mean of streams"
        elif place.reads_mix and (self.adds_state or self.sums_sources):
            reads = f"state + {reads}"
        sources = place.source_names if place.reads_mix else ()
        starts = place.starts_block and self.block_size > 1 and place.name != FINAL
        notes = ["starts a block"] if starts else []
        notes += ["values read apart"] if len(place.reads) > 1 else []
        notes += ["kernels read it again in backward"] if place.remakes else []
        if place.opens_group is not None:
            notes.append(f"phase 1 for {len(place.opens_group)}")
        if place.index < self.num_sublayers:
            layer, sublayer = divmod(place.index, len(self.sublayers))
            earlier = self.depth[layer].sources if sublayer == 0 else ()
            notes += [f"values of layers {', '.join(map(str, earlier))}"] if earlier else []
        return place.name, reads, ", ".join(_shortened(sources)), ", ".join(notes)


def _shortened(names: tuple[str, ...], most: int = 6) -> tuple[str, ...]:
    return names if len(names) <= most else (*names[:2], f"... {len(names) - 4} more", *names[-2:])
