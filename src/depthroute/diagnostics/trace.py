"""What a routed model does on some text: weights, magnitudes, gradients.

Tracing is an observer that travels in the stream; a model that is not being traced does not know
about it. ``trace(model, input_ids)`` never changes parameters or their ``.grad``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from depthroute.diagnostics import plots
from depthroute.errors import DepthrouteError
from depthroute.models.modes import evaluating
from depthroute.nn import ResidualStream, SiteParameters, Sites

_MOST_ROWS = 18
"""Of a trace that is printed."""


@dataclass(frozen=True)
class SiteTrace:
    """One place that chooses, averaged over tokens and heads."""

    name: str
    source_names: tuple[str, ...]
    weights: Tensor
    """Mean weight of each source, [S]."""
    max_weight: float
    normalised_max: float
    """(max - 1/S) / (1 - 1/S): 0 is uniform, 1 picks a single source."""
    normalised_entropy: float
    """Entropy over log S: 1 is uniform, 0 picks a single source."""
    writes: Tensor | None = None
    """Of several streams, what each is added of the output, [S]."""
    mixing: Tensor | None = None
    """Of several streams, how much of each (column) each (row) is made of, [S, S]."""


@dataclass(frozen=True)
class SublayerTrace:
    name: str
    output_rms: float
    """Of what the sublayer added."""
    stream_rms: float
    """Of the residual state it was added to."""
    gradient_rms: float | None
    """Of the loss with respect to the sublayer's output."""


@dataclass(frozen=True, repr=False)
class Trace:
    sites: dict[str, SiteTrace]
    """Places with a choice, in reading order."""
    sublayers: dict[str, SublayerTrace]
    loss: float | None

    @property
    def mean_normalised_max(self) -> float | None:
        """None where nothing chooses."""
        if not self.sites:
            return None
        return sum(s.normalised_max for s in self.sites.values()) / len(self.sites)

    def __repr__(self) -> str:
        """A small table: how sharply each site chooses, and what it reads most."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        head = f"{len(self.sites)} sites that choose, {len(self.sublayers)} sublayers{loss}"
        rows = [("site", "sources", "max", "entropy", "reads most")]
        for site in self.sites.values():
            top = int(site.weights.argmax())
            rows.append(
                (
                    site.name,
                    str(len(site.source_names)),
                    f"{site.normalised_max:.3f}",
                    f"{site.normalised_entropy:.3f}",
                    f"{site.source_names[top]} {site.weights[top]:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(lines) > _MOST_ROWS:
            half = _MOST_ROWS // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} more", *lines[-half:]]
        return "\n".join([head, *(lines if self.sites else [])])

    def to_frame(self) -> Any:
        """A pandas table: a row a site and source, with the mean weight."""
        rows = [
            {
                "site": site.name,
                "source": source,
                "weight": weight,
                "normalised_max": site.normalised_max,
                "normalised_entropy": site.normalised_entropy,
            }
            for site in self.sites.values()
            for source, weight in zip(site.source_names, site.weights.tolist(), strict=True)
        ]
        columns = ["site", "source", "weight", "normalised_max", "normalised_entropy"]
        return plots.optional("pandas").DataFrame(rows, columns=columns)

    def plot(self) -> Any:
        """The routing map, as a matplotlib figure."""
        return plots.routing_map(self.sites.values())


@dataclass
class _Recorder:
    """The observer: reads statistics off the stream as it passes."""

    keep_outputs: bool
    counted: Tensor | None
    """Which tokens [B, T] are text; None where all are."""
    sites: dict[str, SiteTrace] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    magnitudes: list[tuple[str, float, float]] = field(default_factory=list)

    def on_read(self, stream: ResidualStream, site: SiteParameters | None, x: Tensor) -> Tensor:
        if site is None or not stream.place.chooses:
            return x
        name = stream.place.reads[site.read]
        weights = self._of_text(site.weights([s.detach() for s in stream.visible()]), 1)
        self.sites[name] = summarise(name, stream.place.source_names, weights)
        if stream.plan.has_streams and stream.state is not None:
            _, *others = site.stream_weights(stream.state.detach())
            writes, mixing = (self._of_text(weights).flatten(0, 1) for weights in others)
            writes, mixing = writes.mean(0), mixing.mean(0)
            self.sites[name] = replace(self.sites[name], writes=writes, mixing=mixing)
        return x

    def on_depth_mix(
        self,
        layer: int,
        layers: tuple[int, ...],
        weights: Tensor,
        values: Sequence[Tensor],
        mixed: Tensor,
    ) -> Tensor:
        names = tuple(f"layers.{j}" for j in (*layers, layer))
        name, weights = values_name(layer), weights.detach()
        if weights.ndim > 1:  # [J, B, heads, T]
            weights = self._of_text(weights.movedim(-1, 2), 1)
        self.sites[name] = summarise(name, names, weights)
        return mixed

    def on_push(self, stream: ResidualStream, output: Tensor) -> Tensor:
        name = stream.place.name
        self.magnitudes.append((name, self.rms(output), self.rms(stream.value)))
        if self.keep_outputs:
            if not output.requires_grad:  # nothing before it is trained
                output = output.detach().requires_grad_()
            self.outputs.append(output)
        return output

    def rms(self, x: Tensor) -> float:
        return self._of_text(x.detach()).float().square().mean().sqrt().item()

    def _of_text(self, x: Tensor, dim: int = 0) -> Tensor:
        """Without padding, whose ``[B, T]`` from ``dim`` on become ``[1, N]``."""
        if self.counted is None:
            return x
        kept = self.counted.to(x.device).flatten().nonzero().squeeze(1)
        return x.flatten(dim, dim + 1).index_select(dim, kept).unsqueeze(dim)


def values_name(layer: int) -> str:
    """Of the site where a layer's values are mixed."""
    return f"layers.{layer}.values"


def summarise(name: str, names: tuple[str, ...], weights: Tensor) -> SiteTrace:
    """Statistics of weights [S, ..., H] over all tokens and heads."""
    count = weights.shape[0]
    flat = weights.reshape(count, -1).double()
    top = flat.amax(0).mean().item()
    entropy = -(flat * flat.clamp_min(1e-30).log()).sum(0).mean().item()
    return SiteTrace(
        name=name,
        source_names=names,
        weights=flat.mean(1),
        max_weight=top,
        normalised_max=(top - 1 / count) / (1 - 1 / count),
        normalised_entropy=entropy / math.log(count),
    )


@contextmanager
def observe(model: Any, observer: Any) -> Iterator[Any]:
    """Let ``observer`` watch every stream that ``model`` starts inside the block."""
    routings = [module for module in model.modules() if isinstance(module, Sites)]
    if any(sites.observer is not None for sites in routings):
        raise DepthrouteError("the model is already being observed; leave that block first")
    for sites in routings:  # PEFT keeps copies, of which the forward chooses one
        sites.observer = observer
    try:
        yield observer
    finally:
        for sites in routings:
            sites.observer = None


def trace(
    model: Any,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    gradients: bool = False,
    **kwargs,
) -> Trace:
    """Run ``model`` once on ``input_ids`` and report every site and sublayer.

    ``gradients=True`` also takes the loss (``labels`` default to ``input_ids``) and the magnitude
    of its gradient at every sublayer's output.

    The forward pass is the model's own in evaluation mode; extra arguments, such as
    ``attention_mask``, go to it. Tokens that a mask ``[batch, tokens]`` leaves out are not counted.
    """
    if not hasattr(model, "sites"):
        raise DepthrouteError(
            f"trace takes a routed model, not {type(model).__name__}; convert it first "
            "(method='standard' routes nothing and can be traced)"
        )
    counted = _counted(input_ids, kwargs.get("attention_mask"))
    if labels is None and gradients:
        labels = _targets(input_ids, counted)
    recorder = _Recorder(keep_outputs=gradients, counted=counted)
    with evaluating(model), observe(model, recorder), torch.set_grad_enabled(gradients):
        output = model(input_ids=input_ids, labels=labels, use_cache=False, **kwargs)
    rms: list[float | None] = [None] * len(recorder.magnitudes)
    if gradients:
        rms = [recorder.rms(g) for g in torch.autograd.grad(output.loss, recorder.outputs)]
    sublayers = {
        name: SublayerTrace(name, out, state, gradient)
        for (name, out, state), gradient in zip(recorder.magnitudes, rms, strict=True)
    }
    loss = None if labels is None else output.loss.item()
    return Trace(recorder.sites, sublayers, loss)


def _counted(input_ids: Tensor, mask: Any) -> Tensor | None:
    is_of_tokens = isinstance(mask, Tensor) and mask.shape == input_ids.shape
    return mask.bool() if is_of_tokens else None


def _targets(input_ids: Tensor, counted: Tensor | None) -> Tensor:
    """Every token that a token of the text comes before."""
    if counted is None:
        return input_ids
    known = counted.clone()
    known[:, 1:] &= counted[:, :-1]
    return input_ids.masked_fill(~known, -100)
