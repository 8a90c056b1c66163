"""The forward loop: any Hugging Face decoder's own sublayers, the stream threaded between them.

A transformers decoder computes embeddings, masks and rotary tables, runs
``hidden_states = layer(hidden_states, ...)`` over its layers and applies a final norm. Here the
value it hands from layer to layer is a :class:`LayerState` holding the residual stream, so every
family keeps its own preamble, cache and head, and this file holds the only layer body:

    x, stream = stream.read(site, norm)
    stream    = stream.push(sublayer(x))

The classes are made from the family's own (``RoutedLlamaDecoderLayer`` is a ``LlamaDecoderLayer``)
and share its parameters' names, so checkpoints, PEFT targets and device maps stay valid.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.models import depth_attention
from depthroute.models.architecture import (
    ARCHITECTURES,
    Architecture,
    Sublayer,
    architecture_for,
    is_as_its_class,
    norm_eps,
    rms_norm_offset,
)
from depthroute.nn import (
    DepthMemory,
    PreNorm,
    ResidualStream,
    Routing,
    Site,
    SiteParameters,
    Sites,
)
from depthroute.ops import keeping_backend
from depthroute.plan import Plan


class LayerState(NamedTuple):
    """What one layer hands to the next."""

    stream: ResidualStream
    memory: DepthMemory | None

    @classmethod
    def start(cls, embedding: Tensor, routing: Routing) -> LayerState:
        plan, observer = routing.plan, routing.observer
        stream = ResidualStream.start(embedding, plan, sites=routing, observer=observer)
        if plan.method != "depth_attention":
            return cls(stream, None)
        return cls(stream, DepthMemory(plan, observer=observer))

    def tensors(self) -> list[Tensor]:
        held = self.stream.tensors()
        if self.memory is not None:
            held += [*self.memory.keys, *self.memory.values]
        return held

    def emptied(self) -> LayerState:
        return LayerState(self.stream.emptied(), self.memory and self.memory.emptied())

    def with_tensors(self, tensors: list[Tensor], layer: int) -> LayerState:
        """The state before ``layer`` that holds ``tensors``."""
        memory, rest = self.memory, list(tensors)
        if memory is not None:
            kept = 2 * memory.num_held(layer)
            rest, held = rest[: len(rest) - kept], rest[len(rest) - kept :]
            memory = memory.with_tensors(held, layer)
        index = layer * len(self.stream.plan.sublayers)
        return LayerState(self.stream.with_tensors(rest, index), memory)


class RoutedLayer(nn.Module):
    """Mixed into a family's decoder layer."""

    architecture: Architecture
    argument_names: tuple[str, ...]
    """Of the family's layer, after the hidden states, for those who call by position."""
    is_parallel: bool
    norm_offsets: dict[type, float]
    """What the pre-norms that are RMSNorms add to their weight, by class."""
    decoder_config: Any
    """The model's configuration, whose attention implementation may change after building."""
    decoder: tuple[Any] | None
    """Set on the first layer, which starts the stream with the routing of its decoder, whatever
    stands there then; in a tuple so as not to be a submodule."""

    def __call__(self, hidden_states: Tensor | LayerState, *args: Any, **kwargs: Any):
        kwargs |= zip(self.argument_names, args, strict=False)
        state = hidden_states
        if isinstance(state, Tensor):
            assert self.decoder is not None, "only the first layer receives a plain tensor"
            state = LayerState.start(state, self.decoder[0].routing(state))
        if not (getattr(self, "gradient_checkpointing", False) and self.training):
            return super().__call__(state, **kwargs)
        kwargs |= {"use_cache": False, self.architecture.cache_argument: None}
        structure, layer = state.emptied(), _layer_index(state.stream)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            before = structure.with_tensors(list(tensors), layer)
            return tuple(nn.Module.__call__(self, before, **kwargs).tensors())

        run = keeping_backend(run)
        after = self._gradient_checkpointing_func(run, *state.tensors())  # pyright: ignore
        return structure.with_tensors(list(after), layer + 1)

    def forward(self, state: LayerState, **kwargs: Any) -> LayerState:
        spec, stream, memory = self.architecture, state.stream, state.memory
        sites = stream.sites
        assert sites is not None
        for name in spec.ignored_arguments:
            kwargs.pop(name, None)
        self._shift_cache(stream, kwargs)
        site, norm = sites.at(stream.index), self._norm(spec.attention)
        read, stream = stream.read(site, None if self.is_parallel else norm)
        x = norm.apply(read) if self.is_parallel and norm is not None else read
        if memory is None:
            output = self._attend(x, kwargs)
        else:
            output, memory = self._attend_over_depth(x, kwargs, memory, site)
        norm = self._norm(spec.mlp)
        if self.is_parallel:  # one read feeds both, and their sum is one delta
            x = read if norm is None else norm.apply(read)
            stream = stream.push(output + self._run(spec.mlp, x))
        else:
            stream = stream.push(output)
            x, stream = stream.read(sites.at(stream.index), norm)
            stream = stream.push(self._run(spec.mlp, x))
        return LayerState(stream, memory)

    def _norm(self, sublayer: Sublayer) -> PreNorm | None:
        """A sublayer's pre-norm, with its parameters where the kernels may apply it instead."""
        if sublayer.norm is None:
            return None
        module = getattr(self, sublayer.norm)
        offset = self.norm_offsets.get(type(module))
        is_plain = offset is not None and is_as_its_class(module)
        if not is_plain or hasattr(module.weight, "device_mesh"):
            return PreNorm(module)
        weight = module.weight if offset == 0 else module.weight.float() + offset
        return PreNorm(module, weight, norm_eps(module))

    def _run(self, sublayer: Sublayer, x: Tensor, **kwargs: Any) -> Tensor:
        return self._after(sublayer, self._module(sublayer, x, **kwargs))

    def _module(self, sublayer: Sublayer, x: Tensor, **kwargs: Any) -> Any:
        return getattr(self, sublayer.module)(x, **kwargs)

    def _after(self, sublayer: Sublayer, output: Any) -> Tensor:
        if isinstance(output, tuple):
            output = output[0]
        for name in sublayer.after:
            output = getattr(self, name)(output)
        multiplier = self.architecture.multiplier
        return output if multiplier is None else output * getattr(self, multiplier)

    def _attention_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        adapt = self.architecture.adapt_arguments
        return kwargs if adapt is None else adapt(self, dict(kwargs))

    def _attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        return self._run(self.architecture.attention, x, **self._attention_arguments(kwargs))

    def _attend_over_depth(
        self, x: Tensor, kwargs: dict[str, Any], memory: DepthMemory, site: SiteParameters | None
    ) -> tuple[Tensor, DepthMemory]:
        spec = self.architecture
        deferred = depth_attention.DeferredCache(kwargs.get(spec.cache_argument))
        depth = depth_attention.DepthContext(
            memory, site, deferred, self.decoder_config._attn_implementation
        )
        if deferred.cache is not None or depth_attention.is_latent(
            getattr(self, spec.attention.module)
        ):
            kwargs = kwargs | {spec.cache_argument: deferred}
        arguments = self._attention_arguments(kwargs) | {"depth": depth}
        output, record = self._module(spec.attention, x, **arguments)
        return self._after(spec.attention, output), memory.push(record.key, record.value)

    def _shift_cache(self, stream: ResidualStream, kwargs: dict[str, Any]) -> None:
        """Later visits of a looped stack use later cache layers."""
        plan, name = stream.plan, self.architecture.cache_argument
        depth = plan.num_layers // plan.loops
        visit = _layer_index(stream) // depth
        if visit and kwargs.get(name) is not None:
            kwargs[name] = depth_attention.VisitCache(kwargs[name], visit * depth)


class RoutedNorm(nn.Module):
    """Mixed into a family's final norm: reads what the stream ends in."""

    def forward(self, hidden_states: Tensor | LayerState) -> Tensor:
        if isinstance(hidden_states, LayerState):
            stream = hidden_states.stream
            assert stream.sites is not None
            hidden_states = stream.finish(stream.sites.at(stream.index))
        return super().forward(hidden_states)


class LoopedLayers(nn.ModuleList):
    """A layer list that a decoder runs through ``loops`` times, be it by ``layers[:n]`` or not."""

    loops: int

    def __iter__(self) -> Any:
        return iter([*self._modules.values()] * self.loops)

    def __getitem__(self, idx: Any) -> Any:
        return [*self][idx] if isinstance(idx, slice) else super().__getitem__(idx)


class RoutedDecoder(nn.Module):
    """Mixed into a family's decoder: turns recorded layer states back into hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if isinstance(outputs, tuple):
            return tuple(_plain(value) for value in outputs)
        for name in ("hidden_states", "attentions"):
            if outputs.get(name) is not None:
                outputs[name] = _plain(outputs[name])
        return outputs

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Site):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]


def _plain(recorded: Any) -> Any:
    """The tensor in a layer state, and the attention weights in a depth attention's record."""
    if isinstance(recorded, LayerState):
        return recorded.stream.value
    if isinstance(recorded, ResidualStream):
        return recorded.value
    if isinstance(recorded, depth_attention.DepthRecord):
        return recorded.weights
    if isinstance(recorded, tuple):
        return tuple(_plain(value) for value in recorded)
    return recorded


def _layer_index(stream: ResidualStream) -> int:
    return stream.index // len(stream.plan.sublayers)


def plan_for(config: Any, routing: RoutingConfig, *, converting: bool = False) -> Plan:
    """The plan of a Hugging Face configuration whose ``num_hidden_layers`` counts every visit."""
    spec = architecture_for(config)
    return routing.resolve(
        config.num_hidden_layers,
        width=config.hidden_size,
        eps=getattr(config, spec.eps),
        converting=converting,
        sublayers=spec.sublayers(config),
    )


def install(model: Any, plan: Plan) -> None:
    """Give a freshly built or cloned causal LM of a known family its routing, in place.

    Classes are swapped, nothing is copied: every parameter keeps its name and storage.
    """
    config = model.config
    spec = architecture_for(config)
    _refuse_replaced_forwards(model)
    decoder = getattr(model, spec.decoder)
    layers = getattr(decoder, spec.layers)
    depth = plan.num_layers // plan.loops
    if plan.loops > 1:
        del layers[depth:]
    weight = next(filter(_is_wide, decoder.parameters()))
    sites = Sites(plan, config.hidden_size).to(device=weight.device, dtype=weight.dtype)
    decoder.__class__ = routed_class(type(decoder), RoutedDecoder)
    decoder.routing = sites
    for layer in layers:
        layer.__class__ = routed_class(type(layer), RoutedLayer)
        layer.architecture = spec
        layer.is_parallel = spec.is_parallel(config)
        layer.norm_offsets = _norm_offsets(layer, spec)
        layer.decoder_config = config
        layer.decoder = None
    layers[0].decoder = (decoder,)
    norm = getattr(decoder, spec.final_norm)
    norm.__class__ = routed_class(type(norm), RoutedNorm)
    attentions = [getattr(layer, spec.attention.module) for layer in layers]
    _refuse_linear(attentions, plan, spec)
    if plan.method == "depth_attention":
        depth_attention.enable(attentions, config)
        if plan.key_norm == "after_rope":
            _delay_key_norms(attentions, spec)
    for part in (model, decoder):
        names = set(part._no_split_modules or ())
        part._no_split_modules = names | {type(layer).__name__ for layer in layers}
    if plan.loops > 1:
        layers.__class__ = LoopedLayers
        layers.loops = plan.loops


def _is_wide(parameter: Tensor) -> bool:
    """Whether routing can be kept in its dtype; quantised weights are bytes or whole numbers."""
    return parameter.is_floating_point() and parameter.element_size() > 1


def _refuse_replaced_forwards(model: Any) -> None:
    """Where somebody has put a ``forward`` on a module itself, swapping its class is in vain.

    The one that was put there would go on calling the class's of before.
    """
    spec = architecture_for(model.config)
    decoder = getattr(model, spec.decoder)
    for part in (decoder, getattr(decoder, spec.final_norm), *getattr(decoder, spec.layers)):
        if "forward" in vars(part):
            raise ConfigError(
                f"the model's {type(part).__name__} has a forward of its own, as accelerate gives "
                "it for a device_map over several devices, and patches do; convert or revert the "
                "model first, then spread, offload or patch it (a routed model that was saved is "
                "loaded with device_map like any other)"
            )


def _norm_offsets(layer: nn.Module, spec: Architecture) -> dict[type, float]:
    names = (spec.attention.norm, spec.mlp.norm)
    classes = {type(getattr(layer, name)) for name in names if name is not None}
    found = {cls: rms_norm_offset(cls) for cls in classes}
    return {cls: offset for cls, offset in found.items() if offset is not None}


def _refuse_linear(attentions: list[Any], plan: Plan, spec: Architecture) -> None:
    linear = ", ".join(str(i) for i, a in enumerate(attentions) if spec.is_linear(a))
    where = f"layers {linear} of this {spec.model_type} model are linear attention"
    if linear and plan.method == "depth_attention":
        raise ConfigError(
            f"depth attention mixes the values of softmax attention, and {where}; use "
            "method='attnres' or 'delta'"
        )
    if linear and plan.loops > 1:
        raise ConfigError(
            f"routing.loops={plan.loops} needs a cache with keys and values of every visit, and "
            f"{where}, whose one state the visits would overwrite; leave loops out"
        )


def _delay_key_norms(attentions: list[Any], spec: Architecture) -> None:
    for attention in attentions:
        if not hasattr(attention, "k_norm"):
            raise ConfigError(
                f"routing.key_norm='after_rope' moves a key norm, and {spec.model_type} has none; "
                "leave it out, or use a family with QK-norm such as qwen3"
            )
        attention.k_norm.__class__ = routed_class(type(attention.k_norm), depth_attention.LateNorm)


def uninstall(model: Any) -> None:
    """The inverse of :func:`install`, in place."""
    spec = architecture_for(model.config)
    _refuse_replaced_forwards(model)
    decoder = getattr(model, spec.decoder)
    layers = getattr(decoder, spec.layers)
    if decoder.routing.plan.loops > 1:
        raise ConfigError(
            "a looped model has no plain counterpart: its layers are run "
            f"{decoder.routing.plan.loops} times with the same weights"
        )
    norm = getattr(decoder, spec.final_norm)
    for layer in layers:
        attention = getattr(layer, spec.attention.module)
        if hasattr(attention, "config"):
            attention.config = model.config
        key_norm = getattr(attention, "k_norm", None)
        if isinstance(key_norm, depth_attention.LateNorm):
            key_norm.__class__ = type(key_norm).__mro__[2]
        for name in ("architecture", "is_parallel", "norm_offsets", "decoder_config", "decoder"):
            delattr(layer, name)
    del decoder.routing
    for part in (model, decoder):
        routed = {type(layer).__name__ for layer in layers}
        part._no_split_modules = set(part._no_split_modules or ()) - routed
    for part in (decoder, norm, *layers):
        part.__class__ = type(part).__mro__[2]


@cache
def routed_class(base: type, mixin: type) -> type:
    """``base`` with ``mixin`` in front, named so that pickle finds it again."""
    body: dict[str, Any] = {"__module__": __name__, "__doc__": mixin.__doc__}
    if mixin is RoutedLayer:
        names = list(inspect.signature(base.forward).parameters)
        body["argument_names"] = tuple(n for n in names[2:] if n not in ("args", "kwargs"))
    if mixin is RoutedDecoder:
        body["forward"] = _signed_like(base.forward)
    prefix = "Late" if mixin is depth_attention.LateNorm else "Routed"
    cls = type(f"{prefix}{base.__name__}", (mixin, base), body)
    setattr(sys.modules[__name__], cls.__name__, cls)
    if mixin is RoutedDecoder:
        _record_like(cls, base)
    return cls


def _signed_like(like: Callable[..., Any]) -> Callable[..., Any]:
    """The routed decoder's forward with the family's own signature, which transformers inspects."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return RoutedDecoder.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(like)  # pyright: ignore[reportFunctionMemberAccess]
    return forward


def _record_like(cls: type, base: Any) -> None:
    """Let ``output_hidden_states`` and ``output_attentions`` work: transformers looks the
    recordable modules up by class when a model is built, and ours are made by swapping."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    _CAN_RECORD_REGISTRY[str(cls)] = base._can_record_outputs


def __getattr__(name: str) -> Any:
    """Classes are made when first needed; unpickling in a new process needs them by name."""
    for prefix in ("Routed", "Late"):
        base = _family_class(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if base is None:
            continue
        if prefix == "Late":
            return routed_class(base, depth_attention.LateNorm)
        if issubclass(base, transformers.PreTrainedModel):
            return routed_class(base, RoutedDecoder)
        return routed_class(base, RoutedNorm if "Norm" in base.__name__ else RoutedLayer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _family_class(name: str) -> Any:
    """A class of some family's modelling file, or torch's own norms."""
    for architecture in ARCHITECTURES.values():
        family = sys.modules[getattr(transformers, architecture.causal_lm).__module__]
        if isinstance(getattr(family, name, None), type):
            return getattr(family, name)
    return getattr(nn, name, None)
