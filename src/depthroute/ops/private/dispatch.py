"""Registration of ops, at the least cost a call can have.

:func:`torch.library.custom_op` crosses between Python and the dispatcher twice a call and checks
every result for aliasing: 25 to 45 us a boundary, more than its kernel takes. Here the usual call
(plain tensors, no gradient to record: inside a compiled graph or an ``autograd.Function``) crosses
once. Whatever else there is (recording, fake tensors, functionalisation, modes) takes the same
route as in ``custom_op``, and so does everything where torch has not the names that are used here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import torch
from torch.utils import _pytree as pytree

from depthroute.ops.backends import RUNS
from depthroute.ops.private.transforms import no_derivative

_library = torch.library.Library("depthroute", "FRAGMENT")
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_is_profiled: Any = getattr(torch.autograd, "_profiler_enabled", None)
IS_KNOWN = (
    hasattr(torch.library, "get_kernel")
    and hasattr(torch._C, "DispatchKeySet")
    and None not in (_num_modes, _is_profiled)
)
"""Whether this torch, as 2.11 to 2.15 do, lets a call be looked at before it is dispatched."""
PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, list, tuple, int, float, bool, type(None)}
"""What a record may hold so that nothing has to be dispatched: no tensor that is less than real."""


OPAQUE: dict[Any, Op] = {}
"""Ops that launch kernels, by what is dispatched."""


class Op:
    """``depthroute::name``: takes the fields of ``record`` and runs ``function`` on the record.

    ``function`` must return new tensors, none of them a view of another. It has no gradient of its
    own: the ``autograd.Function`` that calls it has.
    """

    def __init__(
        self, name: str, record: Any, results: Any, fake: Callable[..., Any], function: Any
    ) -> None:
        self.record, self._function = record, function
        hints = [*get_type_hints(record).values()]
        self._lists = [place for place, hint in enumerate(hints) if hint == list[torch.Tensor]]
        self._tensor = hints.index(torch.Tensor)
        backend = "triton" if "_triton" in name else "torch"
        self.counted = name.replace("_triton", ""), backend
        self.is_opaque = backend == "triton"
        _library.define(name + _schema(record, results), tags=(torch.Tag.pt2_compliant_tag,))
        run = self._runner()
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"depthroute::{name}", fake, lib=_library)
        torch.library.register_autograd(f"depthroute::{name}", no_derivative, lib=_library)
        self.dispatched = getattr(torch.ops.depthroute, name).default
        if self.is_opaque:
            OPAQUE[self.dispatched] = self
        for device in ("CPU", "CUDA") if IS_KNOWN else ():
            self._shorten(name, device, run)

    @cached_property
    def function(self) -> Callable[[Any], Any]:
        """What runs, on a record."""
        given = self._function
        return given.load() if isinstance(given, FromTriton) else given

    def __call__(self, record: Any) -> Any:
        """Without the dispatcher, which costs as much as all the rest, where nobody needs it: a
        compiler does, and of a launch whoever sees or replaces tensors."""
        if torch.compiler.is_compiling() or (self.is_opaque and not self._is_plain(record)):
            return self.dispatched(*record)
        RUNS[self.counted] += 1
        return self.function(record)

    def _is_plain(self, record: Any) -> bool:
        if not IS_KNOWN or _num_modes() or _is_profiled():
            return False
        kinds = {*map(type, record)}
        for place in self._lists:
            kinds.update(map(type, record[place]))
        return kinds <= PLAIN and not record[self._tensor].is_meta

    def _runner(self) -> Callable[..., Any]:
        """What the dispatcher calls. Everything in it is paid some hundred times a step."""
        counted, made = self.counted, partial(tuple.__new__, self.record)

        def run(*arguments: Any) -> Any:
            RUNS[counted] += 1
            return self.function(made(arguments))

        def run_in_order(*arguments: Any) -> Any:
            """As its fake says; eagerly the order of the inputs is kept, which saves copies."""
            return pytree.tree_map(torch.Tensor.contiguous, run(*arguments))

        return run if self.is_opaque else run_in_order

    def _shorten(self, name: str, device: str, run: Callable[..., Any]) -> None:
        """Calls the function at once where nothing between it and autograd would be."""
        general = torch.library.get_kernel(self.dispatched, f"Autograd{device}")
        is_grad_enabled = torch.is_grad_enabled
        keys = torch._C.DispatchKey.__members__
        plain = torch._C.DispatchKeySet(keys[device])
        plain = (plain | torch._C.DispatchKeySet(keys[f"Autograd{device}"])).raw_repr()

        def call(keyset, *arguments):
            if keyset.raw_repr() == plain and not is_grad_enabled():
                return run(*arguments)
            return general.call_boxed(keyset, *arguments)

        _library.impl(name, call, f"Autograd{device}", with_keyset=True)


def _schema(record: Any, results: Any) -> str:
    hints, kind = get_type_hints(record), inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind, annotation=hints[n]) for n in record._fields]

    def declared() -> None: ...

    signature = inspect.Signature(parameters, return_annotation=results)
    declared.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return torch.library.infer_schema(declared, mutates_args=())


class FromTriton(NamedTuple):
    """A function of :mod:`depthroute.ops._triton`, to be imported when it is first called."""

    module: str
    function: str

    def load(self) -> Callable[[Any], Any]:
        return getattr(import_module(f"depthroute.ops._triton.{self.module}"), self.function)


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` with no tensor twice, which Dynamo refuses: a stream starts with state and
    source the same."""
    if not torch.compiler.is_compiling():
        return function.apply(*arguments)
    apart: list[Any] = []
    for value in arguments:
        is_twice = isinstance(value, torch.Tensor) and any(value is other for other in apart)
        apart.append(value.view_as(value) if is_twice else value)
    return function.apply(*apart)
