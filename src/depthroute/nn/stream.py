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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute import ops
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError, shown
from depthroute.nn.site import Routing, Site, SiteParameters, Sites
from depthroute.plan import Place, Plan


class Observer(Protocol):
    """Something that watches a stream; :func:`depthroute.trace` is one. Absent by default."""

    def on_read(self, stream: ResidualStream, site: SiteParameters | None, x: Tensor) -> None: ...

    def on_push(self, stream: ResidualStream, output: Tensor) -> Tensor: ...

    def on_depth_mix(self, layer: int, layers: tuple[int, ...], weights: Tensor) -> None: ...


class PreNorm(NamedTuple):
    """The norm that a sublayer applies to what it reads."""

    apply: Callable[[Tensor], Tensor]
    weight: Tensor | None = None
    """The factor of an RMSNorm, which the kernels can then apply; None leaves it to ``apply``."""
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
    """The plain residual sum, where the method needs it."""
    pending: Tensor | None = None
    """The last output, noted but not yet added to the others."""
    priors: tuple[tuple[Tensor, Tensor], ...] = ()
    """Phase-1 output and log-sum-exp of this and the group's later sublayers."""
    sites: Routing | None = None
    """All sites, if two-phase groups are wanted: phase 1 needs the queries ahead of time."""
    observer: Observer | None = None

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
        holds = config.places[0].num_finished > 0
        return cls(
            plan=config,
            index=0,
            sources=(embedding,) if holds else (),
            state=embedding if config.keeps_state else None,
            sites=sites(embedding) if isinstance(sites, Sites) else sites,
            observer=observer,
        )

    @property
    def place(self) -> Place:
        """What the plan says of the place ahead."""
        return self.plan.places[self.index]

    @property
    def value(self) -> Tensor:
        """The residual state h: kept, or the sum of the sources where they are complete."""
        if self.pending is not None:
            return self.settled().value
        if self.state is not None:
            return self.state
        parts = [*self.sources] + ([self.partial] if self.partial is not None else [])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def visible(self) -> tuple[Tensor, ...]:
        """The sources that the place before sublayer ``index`` reads."""
        if self.pending is not None:
            return self.settled().visible()
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
        handed on (:mod:`depthroute.ops.carry`), so that in backward every source's gradient is
        accumulated inside the kernels instead of by autograd, three passes a source and site.
        """
        site = _called(site)
        if site is not None and self._fuses():
            return self._boundary(site, norm)
        held = self.sources[0] if self.sources else self.state
        assert held is not None
        carries = torch.is_grad_enabled() and held.device.type == "cuda"
        carries = carries and self.place.hands_on
        x, after = self.settled()._read(site, carries)
        return (x if norm is None else norm.apply(x)), after

    def _fuses(self) -> bool:
        """Whether the place ahead is one call of the boundary kernel."""
        place, held = self.place, self.sources[0] if self.sources else self.state
        if not place.fuses or self.observer is not None or held is None:
            return False
        return ops.fuses_boundary(held, place.num_sources - self._num_grouped)

    @property
    def _num_grouped(self) -> int:
        """Sources that phase 1 has read for the place ahead; only what came since is left."""
        return self.place.num_grouped if self.priors else 0

    def _boundary(
        self, site: SiteParameters, norm: PreNorm | None
    ) -> tuple[Tensor, ResidualStream]:
        """Push what is pending, mix and apply the norm, in one kernel."""
        plan, place = self.plan, self.place
        residual = self.state if plan.adds_state else None
        pushed, partial, is_read = self.pending, self.partial, False
        sources = self.sources
        if pushed is None:
            residual = self._unread if plan.sums_sources else residual
            sources, partial = self.visible(), None
        else:
            is_read = place.num_sources > len(sources)
            if plan.sums_sources and not is_read:
                # the block's sum takes the place of the state: x is it and what the sources give
                starts = partial is None
                residual, partial = (pushed, None) if starts else (partial, None)
                pushed = None if starts else pushed
        finished, prior = self._num_grouped, {}
        if self.priors:
            prior = {"prior": self.priors[0][0], "prior_lse": self.priors[0][1]}
        fused = norm is not None and norm.weight is not None
        goes_on = partial is not None  # the kernel makes the block's sum
        hands_on = place.hands_on or (goes_on and is_read)
        done = site.boundary(
            pushed,
            sources[finished:],
            residual,
            partial,
            reads_last=is_read,
            scale=place.scale,
            centered=plan.is_centered,
            adds_sources=plan.sums_sources,
            dtype=self._dtype,
            norm_weight=norm.weight if norm is not None else None,
            norm_eps=norm.eps if norm is not None else 0.0,
            returns_x=not fused,
            returns_last=(hands_on or goes_on) and (is_read or not plan.sums_sources),
            hands_on=hands_on,
            hands_state_on=hands_on and residual is not None,
            **prior,
        )
        handed = (*sources[:finished], *done.sources)
        if self.pending is None:
            after = self._with_visible(handed)
            if plan.adds_state:
                after = replace(after, state=done.state)
            elif residual is not None:
                after = replace(after, partial=done.state)
        else:
            last = done.state if plan.sums_sources and not is_read else done.last
            last = pushed if last is None else last  # a block of one that nobody reads
            assert last is not None
            closes = place.starts_block
            after = replace(
                self,
                sources=(*handed, last) if closes else handed,
                partial=None if closes else last,
                state=None if self.state is None else done.state,
                pending=None,
            )
        x = done.y if fused else done.x
        assert x is not None
        return (x if fused or norm is None else norm.apply(x)), after

    @property
    def _unread(self) -> Tensor | None:
        """The block's sum where the place ahead does not list it among its sources."""
        return self.partial if len(self.visible()) == len(self.sources) else None

    @property
    def _dtype(self) -> torch.dtype:
        held = self.sources[0] if self.sources else self.state
        assert held is not None
        return held.dtype

    def _read(self, site: SiteParameters | None, carries: bool) -> tuple[Tensor, ResidualStream]:
        x, after = self._route(site, carries)
        if self.observer is not None:
            self.observer.on_read(self, site, x)
        return x, after

    def _route(self, site: SiteParameters | None, carries: bool) -> tuple[Tensor, ResidualStream]:
        plan, place = self.plan, self.place
        if not place.reads_mix:
            return (self.state if self.state is not None else self.value), self
        sources = self.visible()
        count = len(sources)
        if site is None and place.has_site:
            raise DepthrouteError(
                f"{place.name} chooses among {count} sources but was read without "
                "a site; pass the nn.Site of this place (nn.Sites(plan, width) makes them all)"
            )
        residual = self.state if plan.adds_state else None
        if place.has_gate:
            assert site is not None and site.gate is not None and self.state is not None
            mix, after = sources[0], self
            if place.has_query:
                mix, after = self._mix(site, carries)
            return self.state + site.gate.to(mix.dtype) * mix, after
        scale = place.scale
        if not place.has_query:
            residual = self.value if plan.sums_sources else residual
            x = sources[0] if residual is None else residual + sources[0]
            return (x if scale == 1.0 else x * scale), self
        assert site is not None
        residual = self._unread if plan.sums_sources else residual
        return self._mix(site, carries, residual, scale)

    def _mix(
        self,
        site: SiteParameters,
        carries: bool,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, ResidualStream]:
        """One pass over everything visible, or phase 2 after a group's phase 1."""
        sources, plan, finished = self.visible(), self.plan, self._num_grouped
        prior, lse = self.priors[0] if self.priors else (None, None)
        newer = sources[finished:]
        options: dict[str, Any] = {"scale": scale}
        if prior is None:
            options |= {"centered": plan.is_centered, "adds_sources": plan.sums_sources}
        else:
            options |= {"prior": prior, "prior_lse": lse, "dtype": sources[0].dtype}
        if not carries:
            return site.mix(newer, residual, **options), self
        x, handed = site.mix_carried(newer, residual, **options)
        return x, self._with_visible((*sources[:finished], *handed))

    def _with_visible(self, sources: tuple[Tensor, ...]) -> ResidualStream:
        count = len(self.sources)
        partial = sources[count] if len(sources) > count else self.partial
        return replace(self, sources=sources[:count], partial=partial)

    def push(self, output: Tensor) -> ResidualStream:
        """The stream after a sublayer added ``output``."""
        plan, index = self.plan, self.index
        if index >= plan.num_sublayers:
            raise DepthrouteError(
                f"the plan has {plan.num_sublayers} sublayers and all were pushed; resolve the "
                "routing configuration for the number of layers that are run"
            )
        _check_tensor(f"what {self.place.name} pushed", output)
        if self.observer is not None:
            output = self.observer.on_push(self, output)
        if self.pending is not None:
            return self.settled().push(output)
        held = self.state if self.state is not None else self.sources[0]
        if output.shape != held.shape:
            raise DepthrouteError(
                f"{self.place.name} pushed an output of shape {tuple(output.shape)} onto a "
                f"stream of {tuple(held.shape)}; a sublayer must keep the shape"
            )
        output = output.to(held.dtype)  # under autocast a sublayer's output is narrower
        noted = replace(self, index=index + 1, pending=output, priors=self.priors[1:])
        return noted if noted._fuses() else noted.settled()

    def settled(self) -> ResidualStream:
        """The stream with a pending output added."""
        if self.pending is None:
            return self
        plan, output, closes = self.plan, self.pending, self.place.starts_block
        state = None if self.state is None else self.state + output
        sources, partial = self.sources, None
        if plan.chooses and plan.sources == "reference":
            # released code: before the first sublayer of a block is added, store h - last source
            if plan.places[self.index - 1].starts_block:
                assert self.state is not None
                sources += (self.state - sources[-1] if sources else self.state,)
        elif plan.chooses and plan.sources == "cumulative":
            if closes:
                assert state is not None
                sources += (state,)
        elif plan.chooses:
            partial = output if self.partial is None else self.partial + output
            if closes:
                sources, partial = (*sources, partial), None
        after = replace(self, sources=sources, partial=partial, state=state, pending=None)
        return (
            after if self.place.opens_group is None else after._open_group(self.place.opens_group)
        )

    def edited(self, delta: Tensor) -> ResidualStream:
        """The stream as if the last sublayer had put out ``delta`` more; before any has run, as if
        the embedding had been larger by it."""
        if self.pending is not None:
            return self.settled().edited(delta)
        plan, sources, partial = self.plan, self.sources, self.partial
        # whether the newest source holds what was put out last
        is_newest = self.place.starts_block and plan.chooses and plan.sources != "reference"
        if partial is not None:
            partial = partial + delta
        elif sources and (is_newest or self.index == 0):
            sources = (*sources[:-1], sources[-1] + delta)
        state = None if self.state is None else self.state + delta
        after = replace(self, sources=sources, partial=partial, state=state)
        group = self.place.opens_group if self.priors else None
        return after if group is None else after._open_group(group)

    def _open_group(self, group: range) -> ResidualStream:
        """Phase 1 for the group that starts here, if the queries ahead are known."""
        if self.sites is None:
            return self
        sites = [self.sites.at(i) for i in group]
        # a place of the group that does not choose lends its slot to one that does
        some = next(site for site in sites if site is not None)
        queries = torch.stack([(s or some).query for s in sites])  # pyright: ignore
        gains = torch.stack([(s or some).key_weight for s in sites])  # pyright: ignore
        options: dict[str, Any] = {"head_norm": self.plan.head_norm}
        arguments = self.sources, queries, gains, self.plan.eps, self.plan.heads
        after, has_kernels = self, queries.device.type == "cuda"
        if has_kernels:
            # rounded: outputs are kept for backward, and the boundary kernel holds one dtype
            options["dtype"] = self.sources[0].dtype
        if has_kernels and self.plan.places[group.stop - 1].hands_on:
            outputs, lses, handed = ops.depth_mix_group_carried(*arguments, **options)
            after = replace(self, sources=tuple(handed))
        else:
            outputs, lses = ops.depth_mix_group(*arguments, **options)
        return replace(after, priors=tuple(zip(outputs.unbind(), lses.unbind(), strict=True)))

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
        tensors = (self.sources, self.partial, self.state, self.pending, self.priors)

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        sources, partial, state, pending, priors = pytree.tree_map_only(Tensor, moved, tensors)
        sites = None if self.sites is None else self.sites.to(device, non_blocking)
        return replace(
            self,
            sources=sources,
            partial=partial,
            state=state,
            pending=pending,
            priors=priors,
            sites=sites,
        )

    def emptied(self) -> ResidualStream:
        """The structure without the tensors."""
        return replace(self, sources=(), partial=None, state=None, pending=None, priors=())

    def tensors(self) -> list[Tensor]:
        if self.pending is not None:
            return self.settled().tensors()
        held = [*self.sources]
        held += [t for t in (self.partial, self.state) if t is not None]
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
        priors = tuple(zip(rest[::2], rest[1::2], strict=True))
        return replace(
            self,
            index=index,
            sources=sources,
            partial=partial,
            state=state,
            pending=None,
            priors=priors,
        )


def _check_tensor(what: str, tensor: Any) -> None:
    """A stream of whole numbers would cut off everything that is added to it."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim == 0:
        kind = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, Tensor)
            else shown(tensor)
        )
        raise DepthrouteError(f"{what} is {kind}; a stream takes floating tensors [..., D]")


def _called(site: Site | SiteParameters | None) -> SiteParameters | None:
    return site() if isinstance(site, torch.nn.Module) else site


pytree.register_pytree_node(
    ResidualStream,
    lambda s: (s.tensors(), s.emptied()),
    lambda leaves, s: s.with_tensors(list(leaves)),
    serialized_type_name="depthroute.nn.ResidualStream",
)
