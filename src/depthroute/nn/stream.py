"""The residual stream: explicit, immutable, and the only place that knows what a source is.

    x, stream = stream.read(site, norm)
    stream    = stream.push(sublayer(x))
    out       = stream.finish(final_site)

Both return a new stream and change nothing, so activation checkpointing may run a layer twice,
``torch.compile`` can trace it and a pipeline stage can send it. A stream is a pytree: its tensors
are leaves, its plan and position are structure.

Where the kernels can do a whole boundary at once (:func:`depthroute.ops.depth_boundary`), ``push``
only notes the output and the next ``read`` adds it, mixes and applies the pre-norm. Every other way
of looking at a stream sees the output added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute import ops
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError, shown
from depthroute.nn.site import Ahead, Routing, Site, SiteParameters, Sites
from depthroute.plan import Place, Plan


class Observer(Protocol):
    """Something that watches a stream; :func:`depthroute.trace` is one. Absent by default.

    What a call returns goes on in place of ``x``, the sublayer's output or the mixed values.
    Where no softmax weights the values, ``weights`` are shares [J] and ``values`` terms of a sum.
    """

    def on_read(self, stream: ResidualStream, site: SiteParameters | None, x: Tensor) -> Tensor: ...

    def on_push(self, stream: ResidualStream, output: Tensor) -> Tensor: ...

    def on_depth_mix(
        self,
        layer: int,
        layers: tuple[int, ...],
        weights: Tensor,
        values: Sequence[Tensor],
        mixed: Tensor,
    ) -> Tensor: ...


class PreNorm(NamedTuple):
    """The norm that a sublayer applies to what it reads."""

    apply: Callable[[Tensor], Tensor]
    weight: Tensor | None = None
    """The factor of an RMSNorm, which the kernels can then apply; None leaves it to ``apply``. They
    may need what they gave for backward, so that a sublayer must not write into it."""
    eps: float = 0.0


@dataclass(frozen=True)
class ResidualStream:
    plan: Plan
    index: int
    """Of the next sublayer."""
    sources: tuple[Tensor, ...]
    """Finished sources, oldest first."""
    partial: Tensor | None = None
    """Sum of the current block's outputs so far."""
    state: Tensor | None = None
    """The plain residual sum, where the method needs it; of several streams, all [..., n, D]."""
    pending: Tensor | None = None
    """The last output, noted but not yet added to the others."""
    priors: tuple[tuple[Tensor, Tensor], ...] = ()
    """Phase-1 output and log-sum-exp of every read of this and the group's later places."""
    links: tuple[Tensor, ...] = ()
    """Of several streams, between a read and its push: the weights of writing and of mixing."""
    ahead: Ahead | None = None
    """None where every read is computed on its own."""
    sites: Routing | None = None
    """All sites, if two-phase groups are wanted: phase 1 needs the queries ahead of time."""
    observer: Observer | None = None
    backend: str = "torch"
    """Of every mix; chosen at the start, for the device where the stream is."""
    most_fused: int = 0
    """Sources of a place that is one kernel, at most."""

    @classmethod
    def start(
        cls,
        embedding: Tensor,
        config: RoutingConfig | Plan,
        *,
        num_layers: int | None = None,
        sites: Sites | Routing | None = None,
        observer: Observer | None = None,
    ) -> ResidualStream:
        """A stream that holds the token embedding as the first layer receives it."""
        _check_tensor("the embedding", embedding)
        if isinstance(config, RoutingConfig):
            if num_layers is None:
                raise ConfigError(
                    "ResidualStream.start needs num_layers=... to lay out the sources of a "
                    "RoutingConfig; or pass config.resolve(num_layers)"
                )
            config = config.resolve(num_layers, width=embedding.shape[-1])
        if not isinstance(config, Plan):
            raise ConfigError(
                f"a stream is started with {shown(config)}; give a RoutingConfig, or its plan "
                "(config.resolve(num_layers))"
            )
        if sites is not None and sites.plan is not config and sites.plan != config:
            raise ConfigError(
                f"the sites are laid out for {sites.plan.num_sublayers} sublayers of method "
                f"{sites.plan.method!r} and the stream for {config.num_sublayers} of "
                f"{config.method!r}, or with other settings; make both from one plan"
            )
        backend = _chosen_backend(embedding) if config.chooses else "torch"
        most_fused = ops.most_fused(backend, embedding)
        holds = config.places[0].num_finished > 0
        state = embedding if config.keeps_state else None
        if config.streams > 1:
            state = torch.stack([embedding] * config.streams, -2)
        return cls(
            plan=config,
            index=0,
            sources=(embedding,) if holds else (),
            state=state,
            ahead=Ahead() if _reads_ahead(config, backend) else None,
            sites=sites(embedding) if isinstance(sites, Sites) else sites,
            observer=observer,
            backend=backend,
            most_fused=most_fused,
        )

    @property
    def place(self) -> Place:
        """What the plan says of the place ahead."""
        return self.plan.places[self.index]

    @property
    def example(self) -> Tensor:
        """Some tensor of the stream: its shape, dtype and device are those of all."""
        held = self.sources[0] if self.sources else self.state
        assert held is not None
        return held.select(-2, 0) if self.plan.streams > 1 else held

    @property
    def value(self) -> Tensor:
        """The residual state h: kept, or the sum of the sources where they are complete; of several
        streams the mean."""
        if self.pending is not None:
            return self.settled().value
        if self.state is not None:
            return self.state.mean(-2) if self.plan.streams > 1 else self.state
        parts = [*self.sources] + ([self.partial] if self.partial is not None else [])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def visible(self) -> tuple[Tensor, ...]:
        """The sources that the place before sublayer ``index`` reads."""
        if self.pending is not None:
            return self.settled().visible()
        if self.plan.streams > 1 and self.state is not None:
            return self.state.unbind(-2)
        if not self.place.reads_unfinished:
            return self.sources
        unfinished = self.state if self.partial is None else self.partial
        assert unfinished is not None
        return (*self.sources, unfinished)

    def read(
        self, site: Site | SiteParameters | None = None, norm: PreNorm | None = None
    ) -> tuple[Tensor, ResidualStream]:
        """What the next sublayer receives, through its norm if one is given, and the stream to go
        on with.

        The stream holds the same values. Where the kernels can, its sources are those the read
        handed on (:mod:`depthroute.ops.mix`), so that in backward every source's gradient is
        accumulated inside the kernels instead of by autograd, three passes a source and site.
        """
        chosen: SiteParameters | None = site() if isinstance(site, torch.nn.Module) else site
        place = self.plan.places[self.index]
        if self._fuses(place):
            if not place.chooses:
                chosen = self._single()
            if chosen is not None:
                return self._mix(place, chosen, norm)
        stream = self if self.pending is None else self.settled()
        x, after = stream._route(place, chosen)
        if stream.observer is not None:
            x = stream.observer.on_read(stream, chosen, x)
        return (x if norm is None else norm.apply(x)), after

    @property
    def is_one_kernel(self) -> bool:
        """Whether the next read is one call of the boundary kernel, which can apply a norm too."""
        return self._fuses(self.place)

    def _fuses(self, place: Place) -> bool:
        """Whether the place ahead is one call of the boundary kernel."""
        if not self.most_fused or not place.fuses or self.observer is not None:
            return False
        newer = place.num_sources - (place.num_grouped if self.priors else 0)
        return 0 < newer <= self.most_fused

    def _single(self) -> SiteParameters:
        """For a place with one source, whose weight is 1 whatever the query."""
        plan, width = self.plan, self.example.shape[-1]
        query = self.example.new_zeros(width, dtype=torch.float32)
        return SiteParameters(query, None, None, plan.eps, plan.heads, plan.head_norm)

    def _route(self, place: Place, site: SiteParameters | None) -> tuple[Tensor, ResidualStream]:
        """With nothing pending."""
        if not place.reads_mix:
            return self.value, self
        if site is None and place.has_site:
            raise DepthrouteError(
                f"{place.name} chooses among {place.num_sources} sources but was read without "
                "a site; pass the nn.Site of this place (nn.Sites(plan, width) makes them all)"
            )
        if self.plan.streams > 1:
            assert site is not None and self.state is not None
            x, *links = site.read_streams(self.state)
            return x, _changed(self, links=tuple(links))
        if place.chooses:
            assert site is not None
            is_known = self.ahead is not None and self._knows(site)
            x, after = self._mix_ahead(place) if is_known else self._mix(place, site, None)
        else:
            (x,), after = self.visible(), self
        if place.has_gate:
            assert site is not None and site.gate is not None and self.state is not None
            return self.state + site.gate.to(x.dtype) * x, after
        if not place.chooses:
            if self.plan.sums_sources:  # the source itself, and once more for its weight of 1
                x = 2 * x if self.partial is None else torch.add(self.partial, x, alpha=2)
            elif self.plan.adds_state:
                x = self.value + x
            x = x if place.scale == 1.0 else x * place.scale
        return x, after

    def _mix(
        self, place: Place, site: SiteParameters, norm: PreNorm | None
    ) -> tuple[Tensor, ResidualStream]:
        """Push what is pending, mix over everything visible (or, after a group's phase 1, what came
        since) and apply the norm."""
        plan, pending = self.plan, self.pending
        prior, prior_lse, grouped = None, None, 0
        if self.priors:
            (prior, prior_lse), grouped = self.priors[site.read], place.num_grouped
        reads_newest = place.num_sources > len(self.sources)
        sources, residual, output, partial = self._parts(place, reads_newest)
        hands_on = place.hands_on or site.read + 1 < len(place.reads)
        hands_on = hands_on or (partial is not None and reads_newest)
        norm_weight, norm_eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        mix = ops.Mix(
            list(sources[grouped:]),
            *(site.query, residual, prior, prior_lse, norm_weight, output, partial),  # pyright: ignore
            *(output is not None and reads_newest, site.eps, site.heads, site.slice_norm),
            *(plan.weight_offset, 1.0 if place.has_gate else place.scale),
            *(norm_eps, self.example.dtype),
        )
        wants = ops.Wants(
            returns_x=norm_weight is None,
            returns_last=(hands_on or partial is not None)
            and (reads_newest or not plan.sums_sources),
            hands_on=hands_on,
            hands_state_on=hands_on and residual is not None,
        )
        made = site.boundary(mix, wants, self.backend)
        x: Any = made.y if made.x is None else made.x
        if norm is not None and norm_weight is None:
            x = norm.apply(x)
        if pending is None and made.sources is mix.sources:
            return x, self
        return x, self._after(place, (*sources[:grouped], *made.sources), made, reads_newest)

    def _knows(self, site: SiteParameters) -> bool:
        """Whether ``site`` is what :attr:`sites` has for this place, so that others to come are
        known. Only for training: at a token or two a call costs more than its arithmetic."""
        if self.sites is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        known = self.sites.at(self.index)
        if known is None or not known.has_gain:
            return False
        return site.query is known.query and site.key_weight is known.key_weight

    def _mix_ahead(self, place: Place) -> tuple[Tensor, ResidualStream]:
        """As :meth:`_mix`, for this place and those to come that see the same sources."""
        assert self.ahead is not None and self.sites is not None
        count, fields = len(self.sources), {}
        sources, residual, _, _ = self._parts(place, place.num_sources > count)
        ahead = self.ahead
        if place.index not in ahead.mixes:
            ahead, handed = ahead.opened(self.sites, place, sources)
            fields["sources"] = tuple(handed[:count])
            if len(handed) > count:
                fields["state" if self.partial is None else "partial"] = handed[-1]
        x, ahead = ahead.taken(place.index)
        if residual is not None:
            x = torch.add(x, residual, alpha=1.0 if place.has_gate else place.scale)
        return x.to(self.example.dtype), _changed(self, ahead=ahead, **fields)

    def _parts(self, place: Place, reads_newest: bool) -> tuple[Any, ...]:
        """Sources, residual, output and partial of the mix at the place ahead."""
        plan, output, partial = self.plan, self.pending, self.partial
        sources, residual = self.sources, None
        if plan.adds_state and not place.has_gate:
            residual = self.state
        if output is None:
            sources, partial = self.visible(), None
        if plan.sums_sources and not reads_newest:
            # the block's sum takes the place of the state: x is it and what the sources give
            residual, partial = self.partial, None
            if residual is None:
                residual, output = output, None
        return sources, residual, output, partial

    def _after(
        self, place: Place, handed: tuple[Tensor, ...], made: ops.Boundary, reads_newest: bool
    ) -> ResidualStream:
        """The stream with what a mix has ``handed`` on and ``made`` of what was pending."""
        is_sum = self.plan.sums_sources and not reads_newest
        state = self.state if is_sum or made.state is None else made.state
        if self.pending is None:
            count, partial = len(self.sources), self.partial
            if partial is not None and (reads_newest or is_sum):
                partial = handed[count] if reads_newest else made.state
            return _changed(self, sources=handed[:count], partial=partial, state=state)
        newest = made.state if is_sum else made.last
        if newest is None:  # a block of one that nobody reads
            newest = self.pending
        sources, partial = (handed, newest)
        if place.starts_block:
            sources, partial = (*handed, newest), None
        return _changed(self, sources=sources, partial=partial, state=state, pending=None)

    def push(self, output: Tensor) -> ResidualStream:
        """The stream after a sublayer added ``output``."""
        plan, index = self.plan, self.index
        place = plan.places[index]
        if index + 1 >= len(plan.places):
            raise DepthrouteError(
                f"the plan has {plan.num_sublayers} sublayers and all were pushed; resolve the "
                "routing configuration for the number of layers that are run"
            )
        if self.observer is not None:
            _check_tensor(f"what {place.name} pushed", output)
            output = self.observer.on_push(self, output)
        if self.pending is not None:
            return self.settled().push(output)
        output = self._checked(place, output)
        ahead, priors = plan.places[index + 1], self.priors[len(place.reads) :]
        if self.most_fused:
            waiting = _changed(self, index=index + 1, pending=output, priors=priors)
            if waiting._fuses(ahead):
                return waiting
        return self._added(ahead, output, priors)

    def _checked(self, place: Place, output: Tensor) -> Tensor:
        """In the stream's dtype: under autocast a sublayer's output is narrower."""
        held = self.example
        is_alike = isinstance(output, Tensor) and output.shape == held.shape
        if not is_alike or output.dtype != held.dtype:
            _check_tensor(f"what {place.name} pushed", output)
        if not is_alike:
            raise DepthrouteError(
                f"{place.name} pushed an output of shape {tuple(output.shape)} onto a "
                f"stream of {tuple(held.shape)}; a sublayer must keep the shape"
            )
        if output.device != held.device:
            raise DepthrouteError(
                f"{place.name} pushed an output on {output.device} onto a stream on "
                f"{held.device}; move one of them (stream.to(device))"
            )
        return output if output.dtype == held.dtype else output.to(held.dtype)

    def settled(self) -> ResidualStream:
        """The stream with a pending output added."""
        if self.pending is None:
            return self
        return self._added(self.place, self.pending, self.priors)

    def unread(self) -> ResidualStream:
        """After a read, a stream that gives the same once more, whose newest source is pending."""
        *older, newest = self.visible()
        return _changed(self, sources=tuple(older), partial=None, pending=newest)

    def _added(self, place: Place, output: Tensor, priors: tuple[Any, ...]) -> ResidualStream:
        """The stream before ``place`` with the ``output`` of the sublayer before it."""
        stores, sources, partial = self.plan.stores, self.sources, None
        state = None if self.state is None else self._sum(output)
        if stores == "deltas":
            partial = output if self.partial is None else self.partial + output
            if place.starts_block:
                sources, partial = (*sources, partial), None
        elif stores == "states" and place.starts_block:
            assert state is not None
            sources += (state,)
        elif stores == "reference" and self.plan.places[place.index - 1].starts_block:
            # released code: before the first sublayer of a block is added, store h - last source
            assert self.state is not None
            sources += (self.state - sources[-1] if sources else self.state,)
        after = _changed(
            self,
            index=place.index,
            sources=sources,
            partial=partial,
            state=state,
            pending=None,
            priors=priors,
            links=(),
        )
        return after.opened()

    def _sum(self, output: Tensor) -> Tensor:
        """The state with ``output`` added."""
        assert self.state is not None
        if self.plan.streams == 1:
            return self.state + output
        if not self.links:
            raise DepthrouteError(
                f"{self.place.name} is pushed to {self.plan.streams} streams by weights that its "
                "read computes; push to the stream that read returned"
            )
        post, res = self.links
        return ops.hyper_write(self.state, output, post, res)

    def edited(self, delta: Tensor, value: Tensor | None = None) -> ResidualStream:
        """The stream as if the last sublayer had put out ``delta`` more; before any has run, as if
        the embedding had been larger by it. Several streams are all larger by it.

        ``value`` is what the residual state becomes, where adding would round it."""
        if self.pending is not None:
            return self.settled().edited(delta, value)
        plan, sources, partial, ahead = self.plan, self.sources, self.partial, self.ahead
        # whether the newest source holds what was put out last
        is_newest = self.place.starts_block and plan.stores in ("deltas", "states")
        if partial is not None:
            partial = partial + delta
        elif sources and (is_newest or self.index == 0):
            sources = (*sources[:-1], sources[-1] + delta)
            ahead = None if ahead is None else Ahead()
        state = self.state
        if state is not None and plan.streams > 1:
            state = state + delta.unsqueeze(-2)
        elif state is not None:
            state = state + delta if value is None else value
        after = _changed(self, sources=sources, partial=partial, state=state, ahead=ahead)
        return after.opened() if self.priors else after

    def opened(self) -> ResidualStream:
        """With phase 1 done for the group that starts here, if the queries ahead are known.

        The queries after a cut are on the other side of it, and so it is done there.
        """
        group = self.plan.places[self.index].opens_group
        if self.sites is None or group is None:
            return self
        at = (self.sites.at(i) for i in group)
        sites = [read for site in at for read in ((None,) if site is None else site.reads)]
        # a place of the group that does not choose lends its slot to one that does
        some = next((site for site in sites if site is not None), None)
        if some is None:
            return self
        queries, gains, plan = torch.stack([(s or some).query for s in sites]), None, self.plan  # pyright: ignore
        if some.has_gain:
            gains = torch.stack([(s or some).key_weight for s in sites])  # pyright: ignore
        # rounded for the kernels: outputs are kept for backward, and a boundary holds one dtype
        dtype = self.sources[0].dtype if self.backend == "triton" else None
        outputs, lses, handed = ops.depth_mix_group_carried(
            *(self.sources, queries, gains, plan.eps, plan.heads, self.backend),
            head_norm=plan.head_norm,
            dtype=dtype,
        )
        sources = tuple(handed) if plan.places[group.stop - 1].hands_on else self.sources
        priors = tuple(zip(outputs, lses.unbind(), strict=True))
        return _changed(self, sources=sources, priors=priors)

    def finish(self, site: Site | SiteParameters | None = None) -> Tensor:
        """What the final norm reads."""
        if self.index != self.plan.num_sublayers:
            raise DepthrouteError(
                f"finish was called after {self.index} of {self.plan.num_sublayers} sublayers; "
                "push every sublayer's output first"
            )
        return self.read(site)[0]

    # structure: what a pytree, a checkpointed layer or a pipeline stage needs

    def to(self, device: Any, non_blocking: bool = False) -> ResidualStream:
        """The stream and the parameters it is read with on ``device``, for a layer that is there
        (accelerate moves what a layer is given this way)."""
        names = "sources", "partial", "state", "pending", "priors", "links"

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        there = pytree.tree_map_only(Tensor, moved, {name: getattr(self, name) for name in names})
        sites = None if self.sites is None else self.sites.to(device, non_blocking)
        stream = _changed(self, **there, sites=sites, ahead=None)
        is_same = stream.example.device == self.example.device
        if is_same or not self.plan.chooses:
            return stream
        backend = _chosen_backend(stream.example)
        most_fused = ops.most_fused(backend, stream.example)
        return _changed(stream, backend=backend, most_fused=most_fused)

    def alone(self, count: int) -> ResidualStream:
        """The structure for the next ``count`` sublayers, as if the stack began with them: the
        same for all that do the same, so that these can share a compiled graph."""
        plan, sites = self.plan.window(self.index, count), self.sites
        if sites is not None:
            rows = zip(plan.places[:count], sites.sites[self.index :], strict=False)
            is_kept = plan.values == "numbers"  # read by attention, and by every layer alike
            kept = (site if row.reads_mix or is_kept else None for row, site in rows)
            sites = Routing(plan, tuple(kept))
        return _changed(self.emptied(), plan=plan, index=0, sites=sites)

    def emptied(self) -> ResidualStream:
        """The structure without the tensors."""
        nothing = dict.fromkeys(("sources", "priors", "links"), ())
        return _changed(self, **nothing, partial=None, state=None, pending=None, ahead=None)

    def tensors(self) -> list[Tensor]:
        if self.pending is not None:
            return self.settled().tensors()
        held = [*self.sources]
        held += [t for t in (self.partial, self.state, *self.links) if t is not None]
        return held + [t for pair in self.priors for t in pair]

    def with_tensors(self, tensors: list[Any], index: int | None = None) -> ResidualStream:
        """The stream at ``index`` that holds ``tensors``: the inverse of :meth:`tensors`.

        The plan alone decides how many tensors of each kind a stream holds at a position.
        """
        index, plan = self.index if index is None else index, self.plan
        rest = list(tensors)
        place = plan.places[index]
        sources = tuple(rest.pop(0) for _ in range(place.num_finished))
        partial = rest.pop(0) if place.has_partial else None
        state = rest.pop(0) if plan.keeps_state else None
        links, rest = (tuple(rest), []) if plan.streams > 1 else ((), rest)
        priors = tuple(zip(rest[::2], rest[1::2], strict=True))
        return _changed(
            self,
            index=index,
            sources=sources,
            partial=partial,
            state=state,
            pending=None,
            priors=priors,
            links=links,
            ahead=None,
        )


def _changed(stream: ResidualStream, **fields: Any) -> ResidualStream:
    """``dataclasses.replace`` at a third of its time, which a CPU pays at every place."""
    if torch.compiler.is_compiling():
        return replace(stream, **fields)
    changed = object.__new__(ResidualStream)
    vars(changed).update(vars(stream), **fields)
    return changed


def _check_tensor(what: str, tensor: Any) -> None:
    """A stream of whole numbers would cut off everything that is added to it."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim == 0:
        kind = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, Tensor)
            else shown(tensor)
        )
        raise DepthrouteError(f"{what} is {kind}; a stream takes floating tensors [..., D]")


def _reads_ahead(plan: Plan, backend: str) -> bool:
    """Whether places are read together, wherever those to come are known."""
    is_plain = plan.softmax == "query" and not plan.value_reads
    return backend == "torch" and is_plain and not plan.groups


def _chosen_backend(example: Tensor) -> str:
    device, dtype, width = example.device.type, example.dtype, example.shape[-1]
    return ops.choose("depth_mix", device, "auto", dtype, width).backend


pytree.register_pytree_node(
    ResidualStream,
    lambda s: (s.tensors(), s.emptied()),
    lambda leaves, s: s.with_tensors(list(leaves)),
    serialized_type_name="depthroute.nn.ResidualStream",
)
