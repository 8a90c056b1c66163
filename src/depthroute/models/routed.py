"""The forward loop: any Hugging Face decoder's own sublayers, the stream threaded between them.

A transformers decoder computes embeddings, masks and rotary tables, runs
``hidden_states = layer(hidden_states, ...)`` over its layers and applies a final norm. Here the
value it hands from layer to layer is a :class:`LayerState` holding the residual stream, so every
family keeps its own preamble, cache and head, and this file holds the only layer body:

    x, stream = stream.read(site, norm)
    stream    = stream.push(sublayer(x))

The first layer starts the stream with the embedding, the last one returns what the final norm
reads. The classes are made from the family's own (``RoutedLlamaDecoderLayer`` is a
``LlamaDecoderLayer``) and share its parameters' names, so checkpoints, PEFT targets and device maps
stay valid.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from depthroute.errors import DepthrouteError
from depthroute.models import depth_attention
from depthroute.models.adoption import adopted, plain_class, routed_class
from depthroute.models.architecture import (
    Architecture,
    Sublayer,
    is_as_its_class,
    norm_eps,
    rms_norm_offset,
)
from depthroute.models.hooks import (
    EVERYONES,
    EVERYONES_BEFORE,
    StateHook,
    StatePreHook,
    show_state,
    show_to_everyone,
)
from depthroute.models.regions import NORM, Regions, called
from depthroute.models.state import LayerState
from depthroute.nn import DepthMemory, PreNorm, ResidualStream
from depthroute.nn.remade import remaking
from depthroute.ops import keeping_backend
from depthroute.ops.private.regions import plain_call


class RoutedLayer(nn.Module):
    """Mixed into a family's decoder layer."""

    argument_names: tuple[str, ...]
    """Of the family's layer, after the hidden states, for those who call by position."""
    architecture: Architecture
    is_parallel: bool
    is_latent: bool
    """Whether its attention caches a latent from which keys and values are expanded."""
    norm_offsets: dict[type, float]
    """What the pre-norms that are RMSNorms add to their weight, by class."""
    decoder_config: Any
    """The model's configuration, whose attention implementation may change after building."""
    decoder: tuple[Any] | None
    """Set on the first layer, which starts the stream with the routing of its decoder, whatever
    stands there then; in a tuple so as not to be a submodule."""
    regions: Regions | None
    """Compiled, if :func:`~depthroute.models.model.compile_regions` was asked to."""
    watchers: OrderedDict[int, Any]
    """The keys of all hooks on this layer."""

    def __init_subclass__(cls) -> None:
        names = list(inspect.signature(plain_class(cls, RoutedLayer).forward).parameters)
        cls.argument_names = tuple(n for n in names[2:] if n not in ("args", "kwargs"))

    def __call__(self, hidden_states: Tensor | LayerState, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs |= zip(self.argument_names, args, strict=False)
        # asked of the layer itself: torch's guards pass over hooks that come after compiling
        is_watched = len(self.watchers) or len(EVERYONES) or len(EVERYONES_BEFORE)
        if is_watched:
            show_to_everyone()
        state = hidden_states
        if isinstance(state, Tensor):
            state = self._start(state)
        num_layers = self.decoder_config.num_hidden_layers
        if _is_recomputed(self):
            return self._checkpointed(state, kwargs).handed_on(num_layers)
        if is_dynamo_compiling() and not is_watched:  # or all classes of the layer were guarded
            after = self.forward(state, **kwargs)
        else:
            after = nn.Module.__call__(self, state, **kwargs)
        if after is state or after.__class__ is not LayerState:
            after = state.skipped(after)
        return after.handed_on(num_layers)

    def _start(self, embedding: Tensor) -> LayerState:
        if self.decoder is None:
            raise DepthrouteError(
                f"a {type(self).__name__} was given a tensor of shape {tuple(embedding.shape)}; "
                "routed layers hand on their whole stream, and only the first takes a tensor. Run "
                "the model, and change the state between layers with hooks (docs/hooks.md)"
            )
        routing = self.decoder[0].routing(embedding)
        # not what reentrant checkpointing would go back through once for every layer
        if embedding.is_cuda and not _is_recomputed(self):
            routing = routing.folded(embedding.dtype)
        return LayerState.start(embedding, routing)

    def _checkpointed(self, state: LayerState, kwargs: dict[str, Any]) -> LayerState:
        kwargs |= {"use_cache": False, self.architecture.cache_argument: None}
        structure, layer = state.emptied(), state.layer

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            before = structure.with_tensors(list(tensors), layer)
            return tuple(nn.Module.__call__(self, before, **kwargs).tensors())

        run = keeping_backend(run)
        after = self._gradient_checkpointing_func(run, *state.tensors())  # pyright: ignore
        return structure.with_tensors(list(after), layer + 1)

    def forward(self, state: LayerState, **kwargs: Any) -> LayerState:
        spec, regions = self.architecture, self._regions_for(state, kwargs)
        for name in spec.ignored_arguments:
            kwargs.pop(name, None)
        self._shift_cache(state, kwargs)
        if spec.linear_attentions and spec.is_linear(self._attention):
            kwargs = spec.linear_arguments(kwargs)
        if regions is not None and not state.stream.plan.chooses:
            return self._repeated(state, kwargs, regions)
        return self._through(state, kwargs, called if regions is None else regions.call)

    def _through(
        self, state: LayerState, kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> LayerState:
        """The state after this layer, whose sublayers are run by ``call``."""
        stream, name = state.stream, self.architecture.cache_argument
        if not stream.plan.changes_values:
            return LayerState(self._routed(stream, kwargs, call), None)
        depth = self._depth(state, kwargs.get(name))
        if depth.cache.cache is not None or self.is_latent:
            kwargs = kwargs | {name: depth.cache}
        stream = self._routed(stream, kwargs | {"depth": depth}, call)
        return LayerState(stream, depth.memory_after())

    def _regions_for(self, state: LayerState, kwargs: dict[str, Any]) -> Regions | None:
        """To call: none where a graph would have to know the layer, as of a cache it writes to, or
        would leave out what somebody watches."""
        if self.regions is None or state.stream.observer is not None or is_compiling():
            return None
        if kwargs.get(self.architecture.cache_argument) is None:
            return self.regions if self.regions.sees_all_of(self) else None
        if self.training:
            raise DepthrouteError(
                "a model with compiled regions was given a cache in training, with which its "
                "layers would run uncompiled; pass use_cache=False, or set "
                "model.config.use_cache = False"
            )
        return None

    def _routed(
        self, stream: ResidualStream, kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> ResidualStream:
        """The stream after this layer, whose sublayers are run by ``call``."""
        spec = self.architecture
        num_reads = len(stream.place.reads)
        x, norm, stream, run = self._read(spec.attention, stream, call)
        for read in range(1, num_reads):  # what the values are projected of
            values, norm, stream, _ = self._read(spec.attention, stream, call, read)
            values = values if norm is None else getattr(self, norm)(values)
            kwargs = kwargs | {"depth": kwargs["depth"]._replace(value_input=values)}
        if self.is_parallel:  # one read feeds both, and their sum is one delta
            return stream.push(call("block", _run_both, self, x, kwargs))
        output = run("attention", _run, self, spec.attention, x, norm, kwargs)
        x, norm, stream, run = self._read(spec.mlp, stream.push(output), call)
        return stream.push(run("mlp", _run, self, spec.mlp, x, norm, {}))

    def _read(
        self, sublayer: Sublayer, stream: ResidualStream, call: Callable[..., Any], read: int = 0
    ) -> tuple[Tensor, str | None, ResidualStream, Callable[..., Any]]:
        """What a sublayer reads, the norm that is still to be applied to it, the stream, and what
        runs the sublayer: ``call``, or that without keeping what is read."""
        assert stream.sites is not None
        site, place = stream.sites.at(stream.index), stream.place
        site = site if site is None or read == 0 else site.reads[read]
        in_kernels = stream.most_fused > 0 and not self.is_parallel
        norm = known = self._kernel_norm(sublayer) if in_kernels else None
        if norm is not None and not stream.is_one_kernel:
            norm = None
        x, after = stream.read(site, norm)
        if norm is None and known is not None and not place.chooses:
            # apart, as where a kernel does it: the sublayer is then the graph of all others
            return call(NORM, plain_call, known.apply, x), None, after, call
        if norm is None:
            return x, sublayer.norm, after, call
        # a layer that is run again in backward keeps nothing, and would make it twice
        if place.remakes and not _is_recomputed(self):
            call = remaking(call, x, after, site, norm)
        return x, None, after, call

    def _kernel_norm(self, sublayer: Sublayer) -> PreNorm | None:
        """A sublayer's pre-norm where the kernels may apply it instead."""
        if sublayer.norm is None:
            return None
        module: Any = self._modules[sublayer.norm]
        offset = self.norm_offsets.get(type(module))
        if offset is None or not is_as_its_class(module):
            return None
        if sublayer.noise is not None and getattr(self.decoder_config, sublayer.noise):
            return None
        weight = module._parameters["weight"]
        if hasattr(weight, "device_mesh"):
            return None
        return PreNorm(module, weight if offset == 0 else weight.float() + offset, norm_eps(module))

    def _repeated(self, state: LayerState, kwargs: dict[str, Any], regions: Regions) -> LayerState:
        """Where nothing is chosen a region is all of the layer, the reads and adds with it; depth
        attention draws on ever more layers, so that there it is what lies before and after."""
        (stream, memory), count = state, len(state.stream.plan.sublayers)
        structure, tensors, after = stream.alone(count), stream.tensors(), stream.index + count
        if memory is not None and memory.draws_on_one:
            beside = memory.alone()
            given = self, structure, tensors, beside.emptied(), beside.tensors(), kwargs
            tensors, values = regions.call("layer", _run_beside, *given)
            memory = memory.push(*(2 * values or (None, None)))
            return LayerState(stream.with_tensors(tensors, after), memory)
        if memory is not None:
            paused = regions.call("projections", _project, self, structure, tensors, kwargs)
            depth = self._depth(state, None)
            kwargs = kwargs | {"depth": depth.resumed(self._attention, paused)}
            memory = depth.memory_after()
        tensors = regions.call("layer", _run_layer, self, structure, tensors, kwargs)
        return LayerState(stream.with_tensors(tensors, after), memory)

    @property
    def _attention(self) -> nn.Module:
        return self.architecture.attention.of(self)

    def _depth(self, state: LayerState, cache: Any) -> depth_attention.DepthContext:
        stream, memory = state
        assert stream.sites is not None
        return depth_attention.DepthContext(
            memory,
            stream.sites.at(stream.index),
            depth_attention.DeferredCache(cache),
            self.decoder_config._attn_implementation,
            self.architecture,
            self.is_latent,
        )

    def _shift_cache(self, state: LayerState, kwargs: dict[str, Any]) -> None:
        """Later visits of a looped stack use later cache layers."""
        plan, name = state.stream.plan, self.architecture.cache_argument
        if plan.loops > 1 and kwargs.get(name) is not None:
            depth = plan.num_layers // plan.loops
            kwargs[name] = depth_attention.VisitCache(kwargs[name], state.layer // depth * depth)

    def __getstate__(self) -> dict[str, Any]:
        """As of any module, a copy is not compiled."""
        return super().__getstate__() | {"regions": None}

    def register_forward_hook(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any
    ) -> Any:
        """As of any module; ``hook`` sees and may change the residual state after the layer."""
        hook = StateHook.around(hook, with_kwargs)
        handle = super().register_forward_hook(hook, with_kwargs=with_kwargs, **options)
        return self._watched_by(handle)

    def register_forward_pre_hook(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any
    ) -> Any:
        """As of any module; ``hook`` sees and may change the residual state before the layer."""
        hook = StatePreHook.around(hook, with_kwargs)
        handle = super().register_forward_pre_hook(hook, with_kwargs=with_kwargs, **options)
        return self._watched_by(handle)

    def _watched_by(self, handle: RemovableHandle) -> RemovableHandle:
        self.watchers[handle.id] = True
        handle.extra_dict_ref += (weakref.ref(self.watchers),)
        return handle

    def _refuse_backward_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise DepthrouteError(
            f"a backward hook on {type(self).__name__} would not see the gradients of all it hands "
            "on; take that of the residual state: layer.register_forward_hook(lambda layer, args, "
            "h: h.register_hook(hook) and None)"
        )

    register_full_backward_hook = register_full_backward_pre_hook = _refuse_backward_hook
    register_backward_hook = _refuse_backward_hook


def _is_recomputed(layer: RoutedLayer) -> bool:
    """Whether backward runs the layer again."""
    return layer.training and getattr(layer, "gradient_checkpointing", False)


# What regions are made of: functions of tensors, of the layer's modules and of a structure in which
# layers of one kind do not differ.


def _run(
    layer: RoutedLayer, sublayer: Sublayer, x: Tensor, norm: str | None, kwargs: dict[str, Any]
) -> Tensor:
    """A sublayer's output, of what it reads before ``norm``."""
    x = x if norm is None else getattr(layer, norm)(x)
    given = (x,)
    if sublayer.keyword is not None:
        given, kwargs = (), {sublayer.keyword: x, **kwargs}
    output = sublayer.of(layer)(*given, **kwargs)
    if isinstance(output, tuple):
        output = output[0]
    if output.ndim < x.ndim:  # experts may leave the tokens in one row
        output = output.view_as(x)
    for name in sublayer.after:
        output = getattr(layer, name)(output)
    multiplier = layer.architecture.multiplier
    return output if multiplier is None else output * getattr(layer, multiplier)


def _run_both(layer: RoutedLayer, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    spec, norm = layer.architecture, layer.architecture.mlp.norm
    if norm is not None and norm == spec.attention.norm:  # one for both
        x, norm = getattr(layer, norm)(x), None
        return _run(layer, spec.attention, x, norm, kwargs) + _run(layer, spec.mlp, x, norm, {})
    output = _run(layer, spec.attention, x, spec.attention.norm, kwargs)
    return output + _run(layer, spec.mlp, x, norm, {})


def _run_layer(
    layer: RoutedLayer, structure: ResidualStream, tensors: list[Tensor], kwargs: dict[str, Any]
) -> list[Tensor]:
    return layer._routed(structure.with_tensors(tensors), kwargs, called).tensors()


def _run_beside(
    layer: RoutedLayer,
    structure: ResidualStream,
    tensors: list[Tensor],
    held: DepthMemory,
    values: list[Tensor],
    kwargs: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor]]:
    """With the values that it draws on; its own are returned where later layers do."""
    before = LayerState(structure.with_tensors(tensors), held.with_values(values))
    stream, memory = layer._through(before, kwargs, called)
    assert memory is not None
    return stream.tensors(), memory.tensors()


def _project(
    layer: RoutedLayer, structure: ResidualStream, tensors: list[Tensor], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What depth attention starts from: the attention up to where queries meet keys."""
    spec = layer.architecture
    x, norm, *_ = layer._read(spec.attention, structure.with_tensors(tensors), called)
    paused = depth_attention.Paused(depth_attention.DeferredCache(None))
    if layer.is_latent:
        kwargs = kwargs | {spec.cache_argument: paused.cache}
    _run(layer, spec.attention, x, norm, kwargs | {"depth": paused})
    return paused.arguments


OWN = (
    "architecture",
    "is_parallel",
    "is_latent",
    "norm_offsets",
    "decoder_config",
    "decoder",
    "regions",
    "watchers",
)


def routed_layer(layer: nn.Module, architecture: Architecture, config: Any) -> RoutedLayer:
    """A routed layer of what the family's ``layer`` holds, hooks included."""
    routed = adopted(routed_class(type(layer), RoutedLayer), layer)
    routed.architecture = architecture
    routed.is_parallel = architecture.is_parallel(config)
    routed.is_latent = depth_attention.is_latent(architecture.attention.of(layer))
    routed.norm_offsets = _norm_offsets(layer, architecture)
    routed.decoder_config = config
    routed.decoder = routed.regions = None
    routed.watchers = OrderedDict.fromkeys((*routed._forward_hooks, *routed._forward_pre_hooks))
    show_state(
        *(routed._forward_hooks, routed._forward_hooks_with_kwargs),
        *(routed._forward_pre_hooks, routed._forward_pre_hooks_with_kwargs),
    )
    return routed


def plain_layer(layer: RoutedLayer) -> nn.Module:
    """The inverse of :func:`routed_layer`."""
    plain = adopted(plain_class(type(layer), RoutedLayer), layer)
    for name in OWN:
        delattr(plain, name)
    for hooks in (plain._forward_hooks, plain._forward_pre_hooks):
        for key, hook in hooks.items():
            hooks[key] = hook.hook if isinstance(hook, StateHook) else hook
    return plain


def _norm_offsets(layer: nn.Module, spec: Architecture) -> dict[type, float]:
    names = (spec.attention.norm, spec.mlp.norm)
    classes = {type(getattr(layer, name)) for name in names if name is not None}
    offsets = {cls: rms_norm_offset(cls) for cls in classes}
    return {cls: offset for cls, offset in offsets.items() if offset is not None}


class LoopedLayers(nn.ModuleList):
    """A layer list that a decoder runs through ``loops`` times, be it by ``layers[:n]`` or not."""

    def __init__(self, layers: list[RoutedLayer], loops: int) -> None:
        super().__init__(layers)
        self.loops = loops

    def __iter__(self) -> Any:
        return iter(self._visits())

    def __getitem__(self, idx: Any) -> Any:
        # not [*self], which Dynamo of torch 2.11 cannot look into
        return self._visits()[idx] if isinstance(idx, slice) else super().__getitem__(idx)

    def _visits(self) -> list[Any]:
        return [*self._modules.values()] * self.loops
