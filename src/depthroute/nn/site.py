"""Parameters: the few numbers that choose among sources."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from depthroute import ops
from depthroute.checks import check_choice, check_number, check_whole
from depthroute.errors import ConfigError
from depthroute.ops.private.regions import is_constant
from depthroute.plan import Place, Plan

if TYPE_CHECKING:
    from depthroute.nn.stream import Observer

REFERENCE_STD = 0.02
"""Of the queries in the Delta authors' released code; the papers start at exactly zero."""
STREAM_FACTOR = 0.01
"""Of the projections of mHC, as published."""
STREAM_OWN, STREAM_APART = 7 / 4, -8.0
"""How a place of mHC starts: what its own stream is added of an output, more than the others, or
they would be alike and their gradients too; and the logit of mixing one stream into another."""

_HOLDING = threading.Lock()

LONGEST_WINDOW = 4
"""Reads that are mixed together ahead of the first: so many more activations are held."""


@dataclass(frozen=True, eq=False)
class SiteParameters:
    """What calling a :class:`Site` returns: its parameters themselves, and how they are used.

    A site is called like any module, so that whoever replaces, wraps or offloads it (PEFT,
    accelerate) decides which tensors these are.
    """

    query: Tensor | None
    key_weight: Tensor | None
    gate: Tensor | None
    eps: float
    heads: int
    head_norm: str
    logits: Tensor | None = None
    """In place of query and gain."""
    projection: Tensor | None = None
    """With ``bias`` and ``factors``, of several streams: see :func:`depthroute.ops.hyper_read`."""
    bias: Tensor | None = None
    factors: Tensor | None = None
    value_weight: Tensor | None = None
    """Of a layer's own value, where the gate is that of the first layer's."""
    value_query: Tensor | None = None
    """Of the read that attention's values come from, where it is one of its own."""
    read: int = 0
    """Which of the place's reads these are the parameters of."""

    @property
    def reads(self) -> tuple[SiteParameters, ...]:
        """The parameters of every read of the place, in the plan's order."""
        if self.value_query is None:
            return (self,)
        return self, replace(self, query=self.value_query, read=1)

    @property
    def slice_norm(self) -> bool:
        return self.head_norm == "slice"

    @property
    def has_gain(self) -> bool:
        return self.query is not None and self.key_weight is not None

    @property
    def queries(self) -> list[Tensor]:
        """Of its reads, in their order."""
        return [query for query in (self.query, self.value_query) if query is not None]

    @property
    def is_folded(self) -> bool:
        """Whether queries are all there is to it."""
        others = (self.key_weight, self.gate, self.logits, self.projection, self.value_weight)
        return self.query is not None and all(tensor is None for tensor in others)

    def folded(self, products: Iterator[Tensor]) -> SiteParameters:
        """With its gain in its queries: the next of ``products``."""
        names = ("query", "value_query")[: len(self.queries)]
        return replace(self, key_weight=None, **{name: next(products) for name in names})

    def boundary(self, mix: ops.Mix, wants: ops.Wants, backend: str) -> ops.Boundary:
        """What a stream has at this place, mixed."""
        if self.logits is not None:
            shifts = {"centered": mix.offset < 0, "adds_sources": mix.offset > 0}
            given = mix.sources, self.logits, mix.residual, backend
            options = {"scale": mix.scale, "dtype": mix.dtype, "hands_on": wants.hands_on}
            x, sources = ops.static_mix_carried(*given, **shifts, **options)
            return ops.Boundary(x, None, mix.residual, None, sources)
        return ops.boundary(mix, self.key_weight, wants, backend)

    def read_streams(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a sublayer reads of ``streams``, and the weights of its writing to them."""
        assert self.projection is not None and self.bias is not None and self.factors is not None
        given = self.projection, self.bias, self.factors
        return ops.hyper_read(streams, *given, eps=self.eps)

    @torch.no_grad()
    def stream_weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of reading, writing and mixing ``streams`` [..., n, D]: two [..., n] and [..., n, n]."""
        assert self.projection is not None and self.bias is not None and self.factors is not None
        given = self.projection, self.bias, self.factors
        return ops.reference.hyper_weights(streams, *given, eps=self.eps)

    def mix(self, sources: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
        """``residual + mix`` over ``sources``."""
        if self.logits is not None:
            return ops.static_mix(sources, self.logits, residual)
        assert self.query is not None, "this site has a gate alone"
        given = self.query, self.key_weight, residual, self.eps, self.heads
        return ops.depth_mix(sources, *given, head_norm=self.head_norm)

    @torch.no_grad()
    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """The softmax over depth, [S, ..., H]; of several streams, their shares of what is read."""
        shape = len(sources), *sources[0].shape[:-1], 1
        if self.projection is not None:
            pre, *_ = self.stream_weights(torch.stack(list(sources), -2))
            return (pre / pre.sum(-1, keepdim=True)).movedim(-1, 0).unsqueeze(-1)
        if self.logits is not None:
            alpha = ops.reference.static_weights(self.logits, sources)
            return alpha.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        if self.query is None:
            return torch.ones(shape, device=sources[0].device)
        logits = ops.reference.depth_logits(
            sources,
            self.query,
            self.key_weight,
            eps=self.eps,
            heads=self.heads,
            head_norm=self.head_norm,
        )
        return torch.softmax(logits, dim=0)

    def to(self, device: Any, non_blocking: bool = False) -> SiteParameters:
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return replace(self, **moved)


class Site(nn.Module):
    """One place that reads: a query and a key gain, or a logit for each source, or what the weights
    of several streams are computed by, and a gate (and the weight of the value beside it) where the
    plan asks for one.

    Queries and logits start at zero (uniform weights) and gains at one. A place with a single
    source has neither; a place with nothing to choose has no site at all. A site of several streams
    starts with what a single one does (``docs/methods.md``).
    """

    query: nn.Parameter | None
    key_weight: nn.Parameter | None
    gate: nn.Parameter | None
    logits: nn.Parameter | None
    projection: nn.Parameter | None
    bias: nn.Parameter | None
    factors: nn.Parameter | None
    value_weight: nn.Parameter | None
    value_query: nn.Parameter | None

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        heads: int = 1,
        head_norm: str = "full",
        num_queries: int = 1,
        gate: float | None = None,
        query_std: float = 0.0,
        num_logits: int = 0,
        num_streams: int = 0,
        own_stream: int = 0,
        value_weight: float | None = None,
    ) -> None:
        super().__init__()
        check_whole("width", width)
        check_whole("heads", heads)
        check_number("eps", eps, least=0.0)
        check_choice("head_norm", head_norm, ("full", "slice"))
        if width % heads:
            raise ConfigError(f"heads={heads} does not divide the width {width}")
        self.width, self.eps, self.heads, self.head_norm = width, eps, heads, head_norm
        self.gate_start, self.query_std, self.value_start = gate, query_std, value_weight
        self.num_streams, self.own_stream = num_streams, own_stream
        num_weights = num_streams * (2 + num_streams)
        for name, wanted, *size in (
            ("query", num_queries > 0, width),
            ("key_weight", num_queries > 0, width),
            ("logits", num_logits > 0, num_logits),
            ("gate", gate is not None, 1),  # one element, not a scalar: FSDP shards dimensions
            ("projection", num_streams > 0, num_weights, num_streams * width),
            ("bias", num_streams > 0, num_weights),
            ("factors", num_streams > 0, 3),
            ("value_weight", value_weight is not None, 1),
            ("value_query", num_queries > 1, width),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(size)) if wanted else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for query in (self.query, self.value_query):
            if query is not None and self.query_std:
                nn.init.normal_(query, 0.0, self.query_std)
            elif query is not None:
                nn.init.zeros_(query)
        if self.key_weight is not None:
            nn.init.ones_(self.key_weight)
        if self.logits is not None:
            nn.init.zeros_(self.logits)
        if self.gate is not None:
            nn.init.constant_(self.gate, self.gate_start or 0.0)
        if self.value_weight is not None:
            nn.init.constant_(self.value_weight, self.value_start or 0.0)
        if self.projection is not None and self.bias is not None and self.factors is not None:
            nn.init.zeros_(self.projection)
            nn.init.constant_(self.factors, STREAM_FACTOR)
            self.bias.copy_(self._start_of_streams())

    def _start_of_streams(self) -> Tensor:
        """Their mean is read, an output is added to it once, and mixing keeps it: whatever the
        streams are, their mean is the residual state of a single one."""
        count = self.num_streams
        reading = torch.full((count,), 1 / count, dtype=torch.float64)
        writing = torch.full_like(reading, (count - STREAM_OWN) / (count - 1))
        writing[self.own_stream] = STREAM_OWN
        mixing = torch.full((count, count), STREAM_APART).fill_diagonal_(0)
        return torch.cat([reading.logit(), (writing / 2).logit(), mixing.flatten()])

    def forward(self) -> SiteParameters:
        given = self.query, self.key_weight, self.gate, self.eps, self.heads, self.head_norm
        streams = self.projection, self.bias, self.factors
        return SiteParameters(*given, self.logits, *streams, self.value_weight, self.value_query)

    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """The softmax over depth, [S, ..., H]."""
        return self().weights(sources)

    def extra_repr(self) -> str:
        parts = [f"width={self.width}", f"heads={self.heads}"]
        names = "query", "value_query", "logits", "gate", "value_weight"
        parts += [name for name in names if getattr(self, name) is not None]
        parts += [f"streams={self.num_streams}"] if self.num_streams else []
        return ", ".join(parts)


class Queries(NamedTuple):
    """Of all places that choose, in their order."""

    places: tuple[int, ...]
    queries: Tensor
    """[G, D], and so the gains."""
    gains: Tensor

    def since(self, place: int) -> tuple[Tensor, Tensor]:
        """Queries and gains from ``place`` on."""
        first = self.places.index(place)
        return self.queries[first:], self.gains[first:]


@dataclass(frozen=True, eq=False)
class Routing:
    """What calling :class:`Sites` returns: every site's parameters, by the place that reads them.

    Travels with a stream as structure, never among its tensors: a checkpointed layer or a pipeline
    hop carries activations, not parameters.
    """

    plan: Plan
    sites: tuple[SiteParameters | None, ...]
    observer: Observer | None = None

    def at(self, index: int) -> SiteParameters | None:
        """Of the place before sublayer ``index``; None where there is nothing to choose."""
        return self.sites[index]

    def folded(self, dtype: torch.dtype) -> Routing:
        """With every gain in its query, at the precision of the statistics over sources of
        ``dtype``: all in one product, where each place would launch some of its own, forward and
        backward. Parameters that are spread over devices or ranks stay as they are."""
        chosen = [site for site in self.sites if site is not None and site.has_gain]
        rows = [(query, site.key_weight) for site in chosen for query in site.queries]
        held: list[Any] = [tensor for row in rows for tensor in row]
        kinds = {(t.device, t.dtype, hasattr(t, "device_mesh")) for t in held}
        if len(kinds) != 1 or hasattr(held[0], "device_mesh"):
            return self
        queries, gains = (torch.stack(tensors) for tensors in (held[::2], held[1::2]))
        products = iter(ops.folded(queries, gains, dtype).unbind())
        sites = (site.folded(products) if site in chosen else site for site in self.sites)
        return replace(self, sites=tuple(sites))

    @cached_property
    def queries(self) -> Queries:
        """Stacked, which is once a forward."""
        sites = {i: s for i, s in enumerate(self.sites) if s is not None and s.query is not None}
        queries = torch.stack([site.query for site in sites.values()])  # pyright: ignore
        gains = torch.stack([site.key_weight for site in sites.values()])  # pyright: ignore
        return Queries(tuple(sites), queries, gains)

    def windows(self, first: int) -> list[tuple[int, ...]]:
        """The places that choose from ``first`` on, those together that see the same finished
        sources and nothing else."""
        places, windows, before = self.queries.places, [], None
        for index in places[places.index(first) :]:
            place = self.plan.places[index]
            seen = None if place.reads_unfinished else place.num_finished
            if seen is None or seen != before or len(windows[-1]) == LONGEST_WINDOW:
                windows.append(())
            windows[-1] += (index,)
            before = seen
        return windows

    def to(self, device: Any, non_blocking: bool = False) -> Routing:
        moved = (None if site is None else site.to(device, non_blocking) for site in self.sites)
        return replace(self, sites=tuple(moved))


class Ahead(NamedTuple):
    """What a stream knows of places to come, where nothing but their queries is needed for it."""

    scores: tuple[Mapping[int, Tensor], ...] = ()
    """Of sources in their order, the logits of the places in a window, by the first of them."""
    mixes: Mapping[int, Tensor] = MappingProxyType({})
    """Of the places in a window, without what they are added to."""

    def taken(self, index: int) -> tuple[Tensor, Ahead]:
        """The mix of a place, and the others."""
        rest = {other: mix for other, mix in self.mixes.items() if other != index}
        return self.mixes[index], Ahead(self.scores, rest)

    def opened(
        self, routing: Routing, place: Place, sources: Sequence[Tensor]
    ) -> tuple[Ahead, Sequence[Tensor]]:
        """With the window mixed that ``place`` opens, over ``sources``; and these to hand on."""
        site, first, scores = routing.at(place.index), place.index, self.scores
        assert site is not None and site.query is not None and site.key_weight is not None
        settings, windows = (site.eps, site.heads, site.slice_norm), routing.windows(first)
        if any(first not in logits for logits in scores):  # amid a window that was not read
            scores = ()
        for source in sources[len(scores) : place.num_finished]:
            logits = ops.score(source, *routing.queries.since(first), *settings)
            rows = logits.split([len(window) for window in windows])
            scores += ({w[0]: of_window for w, of_window in zip(windows, rows, strict=True)},)
        logits = [of_source[first] for of_source in scores]
        if len(sources) > len(scores):  # what is unfinished is another source at the next place
            alone = site.query.unsqueeze(0), site.key_weight.unsqueeze(0)
            logits.append(ops.score(sources[-1], *alone, *settings))
        scale = 1.0 if place.has_gate else place.scale
        mixes, handed = ops.scored_mix(logits, sources, routing.plan.weight_offset, scale)
        return Ahead(scores, dict(zip(windows[0], mixes, strict=True))), handed


class Sites(nn.Module):
    """Every site of a model in reading order, by name (``layers.3.attention``) or by index.

    A model calls it once a forward and goes on with the :class:`Routing` that comes back.
    """

    held: Tensor | None = None
    """All queries with their gains in them, [G, D], while :meth:`holding`."""

    def __init__(self, plan: Plan, width: int) -> None:
        super().__init__()
        self._read_as(plan)
        self.width = width
        self.observer: Observer | None = None
        self.held = None  # here too, or a graph would notice when it is first set
        self._holders = 0
        mixes_values, is_closed = plan.values == "numbers", plan.init == "gate"
        gate_start = 0.0 if is_closed else 0.5 if mixes_values else float(plan.learned)
        value_start = 1.0 - gate_start if mixes_values else None
        self._names: dict[str, str] = {}
        self._by_index: dict[int, str] = {}
        for place in plan.places:
            if not place.has_site:
                continue
            site = Site(
                width,
                eps=plan.eps,
                heads=plan.heads,
                head_norm=plan.head_norm,
                num_queries=len(place.reads) if place.chooses and plan.softmax == "query" else 0,
                num_logits=place.num_sources if plan.softmax == "logits" and place.chooses else 0,
                gate=gate_start if place.has_gate else None,
                query_std=REFERENCE_STD if plan.init == "reference" else 0.0,
                num_streams=plan.streams if plan.has_streams else 0,
                own_stream=place.index % plan.streams,
                value_weight=value_start if place.has_gate else None,
            )
            key = place.name.replace(".", "_")
            self.add_module(key, site)
            self._names[place.name] = self._by_index[place.index] = key

    def within(self, plan: Plan, places: range) -> Sites:
        """The sites of ``places`` alone, themselves and under their names, read as ``plan`` says:
        what the part of a model holds that runs there."""
        part = Sites.__new__(Sites)
        nn.Module.__init__(part)
        part._read_as(plan)
        part.width, part.observer = self.width, self.observer
        part.held, part._holders = None, 0
        part._by_index = {i: key for i, key in self._by_index.items() if i in places}
        part._names = {
            name: key for name, key in self._names.items() if key in part._by_index.values()
        }
        for key in part._by_index.values():
            part.add_module(key, self._modules[key])
        return part

    def _read_as(self, plan: Plan) -> None:
        self.plan = plan
        self.digest = hashlib.sha256(repr(plan).encode()).hexdigest()
        """What a graph guards in place of the plan: models of other plans run the same code."""

    def forward(self, embedding: Tensor | None = None) -> Routing:
        """``embedding`` is not looked at: PEFT's wrapper of a module wants to hand one on."""
        plan = self.plan
        if torch.compiler.is_compiling():
            plan = Plan(*self._constant_fields(self.digest))
        if self.held is not None:
            return Routing(plan, self._held_sites(plan, self.held), self.observer)
        places = range(len(plan.places))
        sites = (None if (site := self.at(i)) is None else site() for i in places)
        return Routing(plan, tuple(sites), self.observer)

    def _held_sites(self, plan: Plan, held: Tensor) -> tuple[SiteParameters | None, ...]:
        queries, settings = iter(held.unbind()), (plan.eps, plan.heads, plan.head_norm)
        sites: list[SiteParameters | None] = []
        for place in plan.places:
            given = [next(queries) for _ in place.reads] if place.has_site else []
            site = SiteParameters(given[0], None, None, *settings) if given else None
            if site is not None and len(given) > 1:
                site = replace(site, value_query=given[1])
            sites.append(site)
        return tuple(sites)

    @contextmanager
    def holding(self, dtype: torch.dtype) -> Iterator[None]:
        """For many forwards between which no parameter changes, over sources of ``dtype``: sites
        are called and gains folded once, and a compiled call takes one tensor in place of all."""
        with _HOLDING:
            if self._holders == 0:
                self.held = self._folded(dtype)
            self._holders += 1
        try:
            yield
        finally:
            with _HOLDING:  # calls in several threads end in any order
                self._holders -= 1
                if self._holders == 0:
                    self.held = None

    @torch.no_grad()
    def _folded(self, dtype: torch.dtype) -> Tensor | None:
        """All queries with their gains in them; None where they are no one tensor."""
        sites = [site for site in self().folded(dtype).sites if site is not None]
        if not sites or not all(site.is_folded for site in sites):
            return None
        return torch.stack([query for site in sites for query in site.queries])

    @is_constant
    def _constant_fields(self, digest: str) -> tuple[Any, ...]:
        """Of the plan with that digest, for a graph that is traced. Fields of the plan and of its
        rows would be guarded one by one, which a compiled call pays for every time; these are
        copies, which a graph takes as they are, and only the digest is guarded."""
        values = (getattr(self.plan, field.name) for field in fields(self.plan) if field.init)
        return tuple(
            tuple(map(replace, value)) if value in (self.plan.places, self.plan.depth) else value
            for value in values
        )

    @property
    def active(self) -> Sites:
        """Itself: what a wrapper that passes attributes on to the module in use leads to."""
        return self

    def at(self, index: int) -> Site | None:
        """The site read before sublayer ``index``; None where there is nothing to choose."""
        key = self._by_index.get(index)
        return None if key is None else self._modules[key]  # pyright: ignore[reportReturnType]

    def __getitem__(self, name: str) -> Site:
        if name not in self._names:
            raise KeyError(f"no site {name!r}; places with nothing to choose are absent")
        return self._modules[self._names[name]]  # pyright: ignore[reportReturnType]

    def get(self, name: str) -> Site | None:
        return self[name] if name in self._names else None

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def keys(self):
        return self._names.keys()

    def items(self) -> list[tuple[str, Site]]:
        return [(name, self[name]) for name in self._names]

    def values(self) -> list[Site]:
        return [self[name] for name in self._names]
