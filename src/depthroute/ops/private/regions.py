"""Functions that are compiled for themselves, and modules that are called through one.

``Module.compile`` compiles one module in place, and all that are compiled so share the code that
torch counts compilations by. Known for torch 2.11 to 2.15: a module with ``_compiled_call_impl`` is
called through it, and ``copy`` and ``pickle`` leave it out. Without it a module is called as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from depthroute.errors import DepthrouteError

Made = TypeVar("Made", bound=Callable[..., Any])
KEEPS_MATERIALISED = "ban_recompute_materialized_backward"
IS_KNOWN = hasattr(nn.Module, "_compiled_call_impl") and hasattr(nn.Module, "_call_impl")


def is_constant(function: Made) -> Made:
    """Marked as ``torch.compiler.assume_constant_result`` does, which imports all of the compiler:
    a graph takes what ``function`` returns as it is and guards none of it. Unmarked it would be
    traced, with the same result."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def compiled_alone(name: str, function: Any, **options: Any) -> Callable[..., Any]:
    """``function`` as one graph, recompiled no more often than torch allows it by itself.

    Torch goes on uncompiled where a function that need not be one graph reaches that limit.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    code = function.__code__.replace(co_name=f"region_{name}")  # compilations are counted by this
    alone = FunctionType(code, function.__globals__, code.co_name)
    if "mode" not in options and "options" not in options:  # which are Inductor's own
        options["backend"] = recomputing(options.get("backend", "inductor"))
    compiled = torch.compile(alone, fullgraph=True, **options)

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except FailOnRecompileLimitHit as error:
            raise DepthrouteError(
                f"the region {name!r} of a model was compiled {config.recompile_limit} times, "
                "torch's limit, and now needs one more graph: its shapes, dtypes or flags keep "
                "changing, or as many layers differ. Give batches of one shape or compile with "
                "dynamic=True; TORCH_LOGS=recompiles says what differs, and "
                "torch._dynamo.config.recompile_limit is the limit"
            ) from error

    return call


def compile_whole(module: nn.Module, **options: Any) -> None:
    """``module.compile``, with an error where torch would go on uncompiled: at its limit of graphs,
    which all modules of a kind share."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    module.compile(**options)
    if not IS_KNOWN:
        return
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with config.patch(fail_on_recompile_limit_hit=True):
                return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise DepthrouteError(
                f"a {type(module).__name__} compiled as a whole needs one more graph, and there "
                f"are {config.recompile_limit}, torch's limit, of which every shape and each model "
                "like it takes one; raise torch._dynamo.config.recompile_limit, or compile regions "
                "instead (compile_scope='regions')"
            ) from error

    module._compiled_call_impl = call  # pyright: ignore


def recomputing(backend: Any) -> Any:
    """``backend``; Inductor keeps less of a region for its backward.

    By itself it keeps whatever a matrix product of the backward reads. What a kernel of the
    backward makes again from other things that are kept need not be, such as the output of a norm
    or the product with a gate.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    if backend != "inductor" or not hasattr(config, KEEPS_MATERIALISED):
        return backend
    inductor: Any = lookup_backend(backend)

    def compile_recomputing(graph: Any, inputs: Any) -> Any:
        with config.patch({KEEPS_MATERIALISED: False}):
            return inductor(graph, inputs)

    return compile_recomputing


def call_through(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have ``module`` called as ``call(plain_call, module, ...)`` while it is in training."""
    if not IS_KNOWN:
        return

    def through(*args: Any, **kwargs: Any) -> Any:
        if not module.training or torch.compiler.is_compiling():
            return plain_call(module, *args, **kwargs)
        return call(plain_call, module, *args, **kwargs)

    module._compiled_call_impl = through  # pyright: ignore


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)
