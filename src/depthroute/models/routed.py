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
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

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
from depthroute.models.hooks import StateHook, StatePreHook
from depthroute.models.state import LayerState
from depthroute.nn import DepthMemory, PreNorm, SiteParameters
from depthroute.ops import keeping_backend


class RoutedLayer(nn.Module):
    """Mixed into a family's decoder layer."""

    argument_names: tuple[str, ...]
    """Of the family's layer, after the hidden states, for those who call by position."""
    architecture: Architecture
    is_parallel: bool
    norm_offsets: dict[type, float]
    """What the pre-norms that are RMSNorms add to their weight, by class."""
    decoder_config: Any
    """The model's configuration, whose attention implementation may change after building."""
    decoder: tuple[Any] | None
    """Set on the first layer, which starts the stream with the routing of its decoder, whatever
    stands there then; in a tuple so as not to be a submodule."""

    def __init_subclass__(cls) -> None:
        names = list(inspect.signature(plain_class(cls, RoutedLayer).forward).parameters)
        cls.argument_names = tuple(n for n in names[2:] if n not in ("args", "kwargs"))

    def __call__(self, hidden_states: Tensor | LayerState, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs |= zip(self.argument_names, args, strict=False)
        state = hidden_states
        if isinstance(state, Tensor):
            assert self.decoder is not None, "only the first layer receives a plain tensor"
            state = LayerState.start(state, self.decoder[0].routing(state))
        if getattr(self, "gradient_checkpointing", False) and self.training:
            return self._checkpointed(state, kwargs).handed_on()
        return nn.Module.__call__(self, state, **kwargs).handed_on()

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
        spec, stream, memory = self.architecture, state.stream, state.memory
        sites = stream.sites
        assert sites is not None
        for name in spec.ignored_arguments:
            kwargs.pop(name, None)
        self._shift_cache(state, kwargs)
        if spec.adapt_arguments is not None:
            kwargs = spec.adapt_arguments(self, kwargs)
        site, norm = sites.at(stream.index), self._norm(spec.attention)
        read, stream = stream.read(site, None if self.is_parallel else norm)
        x = norm.apply(read) if self.is_parallel and norm is not None else read
        if not stream.plan.changes_values:
            output = self._run(spec.attention, x, **kwargs)
        else:
            value_input = None
            for value_site in () if site is None else site.reads[1:]:
                value_input, stream = stream.read(value_site, norm)
            output, memory = self._attend_over_depth(x, value_input, kwargs, memory, site)
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
        module: Any = self._modules[sublayer.norm]
        offset = self.norm_offsets.get(type(module))
        if offset is None or not is_as_its_class(module):
            return PreNorm(module)
        weight = module._parameters["weight"]
        if hasattr(weight, "device_mesh"):
            return PreNorm(module)
        return PreNorm(module, weight if offset == 0 else weight.float() + offset, norm_eps(module))

    def _run(self, sublayer: Sublayer, x: Tensor, **kwargs: Any) -> Tensor:
        output = getattr(self, sublayer.module)(x, **kwargs)
        if isinstance(output, tuple):
            output = output[0]
        for name in sublayer.after:
            output = getattr(self, name)(output)
        multiplier = self.architecture.multiplier
        return output if multiplier is None else output * getattr(self, multiplier)

    def _attend_over_depth(
        self,
        x: Tensor,
        value_input: Tensor | None,
        kwargs: dict[str, Any],
        memory: DepthMemory | None,
        site: SiteParameters | None,
    ) -> tuple[Tensor, DepthMemory | None]:
        spec = self.architecture
        deferred = depth_attention.DeferredCache(kwargs.get(spec.cache_argument))
        implementation = self.decoder_config._attn_implementation
        depth = depth_attention.DepthContext(
            memory, site, deferred, implementation, spec, value_input
        )
        if deferred.cache is not None or depth_attention.is_latent(
            getattr(self, spec.attention.module)
        ):
            kwargs = kwargs | {spec.cache_argument: deferred}
        output = self._run(spec.attention, x, depth=depth, **kwargs)
        return output, None if memory is None else memory.push(*deferred.mixed)

    def _shift_cache(self, state: LayerState, kwargs: dict[str, Any]) -> None:
        """Later visits of a looped stack use later cache layers."""
        plan, name = state.stream.plan, self.architecture.cache_argument
        if plan.loops > 1 and kwargs.get(name) is not None:
            depth = plan.num_layers // plan.loops
            kwargs[name] = depth_attention.VisitCache(kwargs[name], state.layer // depth * depth)

    def register_forward_hook(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any
    ) -> Any:
        """As of any module; ``hook`` sees and may change the residual state after the layer."""
        hook = StateHook.around(hook, with_kwargs)
        return super().register_forward_hook(hook, with_kwargs=with_kwargs, **options)

    def register_forward_pre_hook(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any
    ) -> Any:
        """As of any module; ``hook`` sees and may change the residual state before the layer."""
        hook = StatePreHook.around(hook, with_kwargs)
        return super().register_forward_pre_hook(hook, with_kwargs=with_kwargs, **options)

    def _refuse_backward_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise DepthrouteError(
            f"a backward hook on {type(self).__name__} would not see the gradients of all it hands "
            "on; take that of the residual state: layer.register_forward_hook(lambda layer, args, "
            "h: h.register_hook(hook) and None)"
        )

    register_full_backward_hook = register_full_backward_pre_hook = _refuse_backward_hook
    register_backward_hook = _refuse_backward_hook


OWN = ("architecture", "is_parallel", "norm_offsets", "decoder_config", "decoder")


def routed_layer(layer: nn.Module, architecture: Architecture, config: Any) -> RoutedLayer:
    """A routed layer of what the family's ``layer`` holds, hooks included."""
    routed = adopted(routed_class(type(layer), RoutedLayer), layer)
    routed.architecture = architecture
    routed.is_parallel = architecture.is_parallel(config)
    routed.norm_offsets = _norm_offsets(layer, architecture)
    routed.decoder_config = config
    routed.decoder = None
    for hooks, kind, with_kwargs in (
        (routed._forward_hooks, StateHook, routed._forward_hooks_with_kwargs),
        (routed._forward_pre_hooks, StatePreHook, routed._forward_pre_hooks_with_kwargs),
    ):
        for key, hook in hooks.items():
            hooks[key] = kind.around(hook, key in with_kwargs)
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
        return iter([*self._modules.values()] * self.loops)

    def __getitem__(self, idx: Any) -> Any:
        return [*self][idx] if isinstance(idx, slice) else super().__getitem__(idx)
