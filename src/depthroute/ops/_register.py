"""Registration of the ops over kernels, at the least cost a call can have.

:func:`torch.library.custom_op` crosses between Python and the dispatcher twice a call and checks
every result for aliasing: 25 to 45 us a boundary, more than its kernel takes. Here the usual call
(plain tensors, no gradient to record: inside a compiled graph or an ``autograd.Function``) crosses
once. Whatever else there is (recording, fake tensors, functionalisation, modes) takes the same
route as in ``custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from depthroute.ops._transforms import no_second_derivative
from depthroute.ops.backends import ran

_library = torch.library.Library("depthroute", "FRAGMENT")


class KernelOp:
    """``depthroute::name``, as the types of ``declared`` say; ``function`` runs it.

    ``function`` must return new tensors, none of them a view of another.
    """

    def __init__(self, name: str, declared: Callable[..., Any], function: Callable[..., Any]):
        self.name, self.function = name, function
        schema = torch.library.infer_schema(declared, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")

    def register_fake(self, function: Callable[..., Any]) -> None:
        torch.library.register_fake(f"depthroute::{self.name}", function, lib=_library)

    def register_autograd(
        self,
        backward: Callable[..., Any] = no_second_derivative,
        setup: Callable[..., Any] | None = None,
    ) -> None:
        torch.library.register_autograd(
            f"depthroute::{self.name}", backward, setup_context=setup, lib=_library
        )
        for device in ("CPU", "CUDA"):
            self._shorten(device)

    def _shorten(self, device: str) -> None:
        """Calls the function at once where nothing between it and autograd would be."""
        operator = getattr(torch.ops.depthroute, self.name).default
        general = torch.library.get_kernel(operator, f"Autograd{device}")
        function, is_grad_enabled = self.function, torch.is_grad_enabled
        keys = torch._C.DispatchKey.__members__
        plain = torch._C.DispatchKeySet(keys[device])
        plain = (plain | torch._C.DispatchKeySet(keys[f"Autograd{device}"])).raw_repr()

        def call(keyset, *args):
            if keyset.raw_repr() == plain and not is_grad_enabled():
                return function(*args)
            return general.call_boxed(keyset, *args)

        _library.impl(self.name, call, f"Autograd{device}", with_keyset=True)


def kernel_op(
    name: str, counted: str = "", launcher: str = ""
) -> Callable[[Callable[..., Any]], KernelOp]:
    """Registers what is decorated, or what it declares: ``launcher``, "module.function" of
    :mod:`depthroute.ops._triton`, imported when first called and counted as ``counted``."""
    module, _, attribute = launcher.rpartition(".")

    @cache
    def load() -> Callable[..., Any]:
        return getattr(import_module(f"depthroute.ops._triton.{module}"), attribute)

    def function(*args):
        ran(counted, "triton")
        return load()(*args)

    return lambda declared: KernelOp(name, declared, function if launcher else declared)
