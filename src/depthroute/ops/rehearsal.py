"""Which kernels a model will launch, found out by running it without numbers.

A copy of the model whose tensors have shapes and no storage (torch's fake tensors) is run by the
very code that will run it. Where that code reaches an op with kernels, the op's launches are called
with meta tensors, which makes threads compile what they would launch
(:mod:`depthroute.ops.private.ahead`), while the process goes on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from depthroute.ops import backends
from depthroute.ops.private import ahead
from depthroute.ops.private.dispatch import OPAQUE

logger = logging.getLogger("depthroute")


class Rehearsal:
    """What :func:`compile_ahead` has begun."""

    def __init__(self, pool: ahead.Pool | None) -> None:
        self._futures = [] if pool is None else list(pool.futures.values())

    @property
    def num_kernels(self) -> int:
        """That are compiled or found in Triton's cache."""
        return len(self._futures)

    def wait(self) -> None:
        """Until all of them are ready. No launch needs it: one that comes too early waits for its
        own kernel, or compiles it."""
        wait(self._futures)


def compile_ahead(model: nn.Module, run: Callable[[Any], Any]) -> Rehearsal:
    """Have threads compile the kernels that ``run(model)`` will launch, forward and backward.

    ``run`` is called at once with a copy of ``model`` whose tensors hold no numbers, and takes a
    step with it: ``lambda m: m(input_ids=ids, labels=ids).loss.backward()``. Tensors that it makes
    hold none either. Nothing is compiled ahead where cores are few, with a Triton whose inside is
    not known here, or with ``DEPTHROUTE_COMPILE_THREADS=0``; and what goes wrong costs only time.
    """
    threads, device = ahead.num_threads(), next(model.parameters()).device
    if not threads or backends.triton_obstacle(device.type) is not None:
        return Rehearsal(None)
    pool = ahead.Pool(threads, device.index)
    ran = backends.RUNS.copy()
    try:
        _run_without_numbers(model, run, pool)
    except Exception as error:  # what was found until then is compiled
        logger.debug("the kernels ahead are not all known: %s: %s", type(error).__name__, error)
    finally:
        backends.RUNS.clear()
        backends.RUNS.update(ran)
    return Rehearsal(pool)


def _run_without_numbers(model: nn.Module, run: Callable[[Any], Any], pool: ahead.Pool) -> None:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.compiler.set_stance("force_eager"):
        with FakeCopyMode(mode):
            fake = copy.deepcopy(model)
        _silence_strangers(fake)
        with _Launches(pool):
            run(fake)


def _silence_strangers(model: nn.Module) -> None:
    """Whoever watches is not shown tensors without numbers; that somebody does is still seen."""
    for module in model.modules():
        tables: Any = (module._forward_hooks, module._forward_pre_hooks)
        tables += (module._backward_hooks, module._backward_pre_hooks)
        for table in tables:
            for key, hook in table.items():
                is_ours = (getattr(hook, "__module__", None) or "").startswith("depthroute.")
                if is_ours and hasattr(hook, "hook"):  # of what a layer shows its hooks
                    hook.hook = _watch_nothing
                elif not is_ours:
                    table[key] = _watch_nothing


def _watch_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Launches(TorchDispatchMode):
    """Has what ops would launch compiled."""

    def __init__(self, pool: ahead.Pool) -> None:
        super().__init__()
        self.pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        op = OPAQUE.get(func)
        if op is not None:
            self._prepare(op, args)
        return func(*args, **(kwargs or {}))

    def _prepare(self, op: Any, args: tuple[Any, ...]) -> None:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily(), ahead.preparing(self.pool):
            op.function(op.record._make(pytree.tree_map(_without_storage, args)))


def _without_storage(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
