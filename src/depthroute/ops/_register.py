"""Registration of the ops over kernels, at the least cost a call can have.

:func:`torch.library.custom_op` crosses between Python and the dispatcher twice a call and checks
every result for aliasing: 25 to 45 us a boundary, more than its kernel takes. Here the usual call
(plain tensors, no gradient to record: inside a compiled graph or an ``autograd.Function``) crosses
once. Whatever else there is (recording, fake tensors, functionalisation, modes) takes the same
route as in ``custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("depthroute", "FRAGMENT")


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the kernels have no second derivative; use backend='torch' with create_graph=True, or "
        "differentiate once"
    )


class KernelOp:
    """``depthroute::name``, as it is declared by the types of ``function``.

    ``function`` must return new tensors, none of them a view of another.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = f"depthroute::{name}", function
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")

    def register_fake(self, function: Callable[..., Any]) -> None:
        torch.library.register_fake(self.name, function, lib=_library)

    def register_autograd(
        self,
        backward: Callable[..., Any] = _no_second_derivative,
        setup: Callable[..., Any] | None = None,
    ) -> None:
        torch.library.register_autograd(self.name, backward, setup_context=setup, lib=_library)
        for device in ("CPU", "CUDA"):
            self._shorten(device)

    def _shorten(self, device: str) -> None:
        """Calls the function at once where nothing between it and autograd would be."""
        operator = getattr(torch.ops.depthroute, self.name.split("::")[1]).default
        general = torch.library.get_kernel(operator, f"Autograd{device}")
        function, is_grad_enabled = self.function, torch.is_grad_enabled
        keys = torch._C.DispatchKey.__members__
        plain = torch._C.DispatchKeySet(keys[device])
        plain = (plain | torch._C.DispatchKeySet(keys[f"Autograd{device}"])).raw_repr()

        def call(keyset, *args):
            if keyset.raw_repr() == plain and not is_grad_enabled():
                return function(*args)
            return general.call_boxed(keyset, *args)

        _library.impl(self.name.split("::")[1], call, f"Autograd{device}", with_keyset=True)


def kernel_op(name: str) -> Callable[[Callable[..., Any]], KernelOp]:
    return lambda function: KernelOp(name, function)
