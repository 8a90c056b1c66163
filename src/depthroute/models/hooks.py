"""Forward hooks on a routed layer, which see the residual state as a tensor and may change it.

Between routed layers passes a :class:`LayerState`, of which the residual state is a part or a sum.
A hook is shown that state, and what it adds counts as if the last sublayer before it had put it
out: for the state, for the block that is being summed and for every later read. Of several streams
it is shown the mean, and what it adds is added to each. What it is shown has a gradient where the
model has one, the loss's with respect to such an addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module

from depthroute.errors import DepthrouteError
from depthroute.models.recording import is_recorder, is_recording
from depthroute.models.state import LayerState

PLACING = ("torch.distributed", "torch.utils", "accelerate", "deepspeed")
"""Libraries that gather, move or free parameters around a layer, or follow tensors: their hooks are
given the whole state, since a gradient may come back through any of its tensors."""

EVERYONES, EVERYONES_BEFORE = module._global_forward_hooks, module._global_forward_pre_hooks
"""Torch's tables of hooks that every module calls."""


class StateHook:
    """A forward hook as the layer keeps it."""

    def __init__(self, hook: Callable[..., Any], with_kwargs: bool) -> None:
        self.hook, self.with_kwargs = hook, with_kwargs

    @classmethod
    def around(cls, hook: Callable[..., Any], with_kwargs: bool) -> Callable[..., Any]:
        if isinstance(hook, StateHook):
            return hook
        inner = hook.func if isinstance(hook, functools.partial) else hook
        places = (getattr(inner, "__module__", None) or "").startswith(PLACING)
        return hook if places else cls(hook, with_kwargs)

    def __call__(self, layer: Any, args: tuple[Any, ...], *rest: Any) -> LayerState | None:
        if is_recorder(self.hook) and not is_recording():
            return None
        *kwargs, state = rest
        args = tuple(a.stream.value if isinstance(a, LayerState) else a for a in args)
        if not isinstance(state, LayerState):  # another module's, or of a layer that was skipped
            return self.hook(layer, args, *kwargs, state)
        shown = _Shown(state)
        return shown.after(layer, self.hook(layer, args, *kwargs, shown.tensor))


class StatePreHook(StateHook):
    """A forward pre-hook as the layer keeps it."""

    def __call__(self, layer: Any, args: tuple[Any, ...], *rest: Any) -> Any:
        if not args or not isinstance(args[0], LayerState):  # everyone's, on another module
            return self.hook(layer, args, *rest)
        state, *others = args
        shown = _Shown(state)
        answer, kwargs = self.hook(layer, (shown.tensor, *others), *rest), rest
        if self.with_kwargs and answer is not None:
            answer, *kwargs = answer
        if isinstance(answer, tuple):
            answer, *others = answer
        args = (shown.after(layer, answer) or state, *others)
        return (args, *kwargs) if self.with_kwargs else args


def show_to_everyone() -> None:
    """The residual state to hooks of all modules, which are given anything else as it is."""
    show_state(EVERYONES, module._global_forward_hooks_with_kwargs, EVERYONES_BEFORE, ())


def show_state(hooks: Any, with_kwargs: Any, pre_hooks: Any, pre_with_kwargs: Any) -> None:
    """To the hooks in tables of torch's, under their keys, so that handles still remove them."""
    for key, hook in hooks.items():
        hooks[key] = StateHook.around(hook, key in with_kwargs)
    for key, hook in pre_hooks.items():
        pre_hooks[key] = StatePreHook.around(hook, key in pre_with_kwargs)


class _Shown:
    """A copy of the residual state, so that what is done to it is noticed and harms nothing."""

    def __init__(self, state: LayerState) -> None:
        self.state = state._replace(stream=state.stream.settled())
        self.tensor = self.state.stream.value.clone()
        self.version = self._version()

    def after(self, layer: Any, answer: Any) -> LayerState | None:
        """The state after a hook that gave ``answer``; None where nothing can have changed."""
        tensor = self.tensor
        if answer is None:
            if self.version is not None and self.version == self._version():
                return None
            answer = tensor
        if not isinstance(answer, Tensor) or answer.shape != tensor.shape:
            kind = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise DepthrouteError(
                f"a hook on {type(layer).__name__} returned {kind}; return the residual state as a "
                f"tensor of shape {tuple(tensor.shape)}, or None to leave it as it is"
            )
        return self.state.replaced(answer)

    def _version(self) -> int | None:
        """Counts writes; None where nobody counts, or a gradient is to reach what was shown."""
        tensor = self.tensor
        if torch.compiler.is_compiling() or tensor.is_inference() or tensor.requires_grad:
            return None
        return tensor._version
