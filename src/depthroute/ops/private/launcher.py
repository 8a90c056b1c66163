"""Launching a kernel that is compiled already, without asking Triton again which one it is.

``kernel[grid](...)`` binds the arguments, derives from each its type and whether it is 1 or
divisible by 16, looks the compiled kernel up under all of that and calls its hooks: 15 to 30 us for
the 25 to 50 arguments here. A :class:`Prepared` belongs to one set of constants and argument types,
so it asks once a device and from then on hands addresses to the driver. Whoever keeps one must key
it by everything that Triton looks at:

- the constants,
- the dtype of every tensor, whether it is None, and how many there are in each list,
- of numbers that the kernel specialises on, :func:`kinds`.

Fractions must be floats: of a whole number Triton makes another kernel, and of 1 a constant.

The rest is checked at every launch: addresses are multiples of 16, all tensors are on one device,
and sizes fit 32 bits. Where that fails, where somebody watches launches (Triton's profiler) or has
asked Triton for another kind of compilation, in the interpreter, and with a Triton whose inside is
not known here, the launch is Triton's own.

A launch of meta tensors compiles the kernel and launches nothing; see
:mod:`depthroute.ops.private.ahead`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, reduce
from operator import itemgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from depthroute.ops.private import ahead

# called through map(), which is faster than a comprehension
_address = Tensor.data_ptr
_device = Tensor.get_device
_is_contiguous = Tensor.is_contiguous

MAX_INT32 = 2**31 - 1
IS_KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton's compiled kernels take what is passed to them below."""
FUSED: dict[str, Any] = (
    {} if "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}
)
"""Products and sums in one rounding, with which everything was measured. Said with every launch:
Triton 3.9 warns where it is not, and 3.10 is to leave it out."""


@lru_cache(maxsize=1024)
def kinds(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton makes a kernel of its own for: 1, a multiple of 16, or neither."""
    return tuple(1 if n == 1 else 16 if n % 16 == 0 else 0 for n in numbers)


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous and 16-byte aligned, copied only if it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_SAME_DEVICE = contextlib.nullcontext()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """For launches that are Triton's own: its driver's device is the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(tensor.device)


def _is_watched() -> bool:
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain may be empty
            return True
    return bool(runtime.debug or knobs.compilation.instrumentation_mode)


def _present(
    lists: Sequence[Sequence[Tensor] | None], tensors: Sequence[Tensor | None]
) -> list[Tensor]:
    present = []
    for listed in lists:
        if listed is not None:
            present += listed
    present += [t for t in tensors if t is not None]
    return present


def _in_order(
    lists: Sequence[Sequence[Tensor] | None], tensors: Sequence[Tensor | None]
) -> tuple[list[list[Tensor] | None], list[Tensor | None]]:
    copied = [None if t is None else list(map(aligned, t)) for t in lists]
    return copied, [None if t is None else aligned(t) for t in tensors]


def _in_turn(
    lists: Sequence[Sequence[Tensor] | None], tensors: Sequence[Tensor | None]
) -> Callable[[tuple[int | None, ...]], tuple[Any, ...]]:
    """Makes the arguments of the addresses of those that are there (:func:`_present`) and a None:
    which of them are is the same at every launch."""
    end, places = 0, []
    for listed in lists:
        start, end = end, end + len(listed or ())
        places.append(-1 if listed is None else slice(start, end))
    for tensor in tensors:
        places.append(-1 if tensor is None else end)
        end += tensor is not None
    if len(places) == 1:  # of one alone, itemgetter makes no tuple
        return lambda addresses: (addresses[places[0]],)
    return itemgetter(*places)


_launched: dict[int, Any] = {}
"""Compiled kernels, each by its id: those that were counted."""


def by_triton(kernel: Any, programs: int) -> Callable[..., None]:
    """A call of it launches ``kernel`` as Triton itself does; of meta tensors it compiles it."""

    def call(*arguments: Any, **constants: Any) -> None:
        if next(a for a in arguments if isinstance(a, Tensor)).is_meta:
            compile_ahead(kernel, arguments, constants)
        else:
            _counted(kernel, programs, arguments, constants)

    return call


def _counted(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    future: Future[float] | None = None,
) -> Any:
    """``future``: of a thread that compiles it."""
    started = time.perf_counter()
    elsewhere = 0.0 if future is None else ahead.settled(future)
    settled = time.perf_counter()
    made = kernel[(programs,)](*arguments, **constants)
    if made is not None and id(made) not in _launched:  # the interpreter makes nothing
        _launched[id(made)] = made
        now = time.perf_counter()
        ahead.count(elsewhere + now - settled, now - started)
    return made


def _kind(argument: Any, parameter: Any) -> Any:
    """What of an argument Triton makes a kernel of its own for."""
    if isinstance(argument, tuple):
        return tuple(a.dtype for a in argument)
    if isinstance(argument, Tensor):
        return argument.dtype
    if not isinstance(argument, int):
        return type(argument)
    return argument > MAX_INT32, None if parameter.do_not_specialize else kinds((argument,))


def compile_ahead(
    kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]
) -> Future[float] | None:
    """A thread compiles it where launches of this one are to be prepared, once of its kind."""
    pool = ahead.current()
    if pool is None or not IS_KNOWN or not isinstance(kernel, JITFunction):
        return None
    types = map(_kind, arguments, kernel.params)
    key = kernel.fn, *types, *constants.items()
    if (found := pool.futures.get(key)) is not None:
        return found
    active: Any = driver.active
    device = active.get_current_device() if pool.device is None else pool.device
    _ = kernel.device_caches[device]  # made here, not by two threads at once

    def compile_one() -> None:
        made = kernel.warmup(*arguments, grid=(1,), **constants)
        if made is not None:
            active.launcher_cls(made.src, made.metadata)  # C, which Triton compiles and keeps

    return pool.submit(key, compile_one)


class Prepared:
    """``kernel`` with its constants, for arguments of types that never change.

    ``reads_in_order``: it takes all tensors to be contiguous, so that those which are not, or are
    not aligned, are copied first. None that it writes to may be such.
    """

    __slots__ = (
        *("_ahead", "_compiled", "_constants", "_in_turn", "_kernel", "_reads_in_order", "_tail"),
    )

    def __init__(
        self, kernel: Any, num_warps: int, reads_in_order: bool = False, **constants: Any
    ) -> None:
        self._kernel, self._constants = kernel, {**constants, "num_warps": num_warps, **FUSED}
        self._reads_in_order = reads_in_order
        self._compiled: dict[int, Any] = {}
        self._ahead: Future[float] | None = None
        self._tail: tuple[Any, ...] = ()
        self._in_turn: Callable[[tuple[int | None, ...]], tuple[Any, ...]] = tuple
        if isinstance(kernel, JITFunction):
            self._tail = tuple(constants[p.name] for p in kernel.params if p.is_constexpr)
            last = kernel.params[-len(constants) :]
            assert all(p.is_constexpr for p in last), f"constants of {kernel} must come last"

    def __call__(
        self,
        programs: int,
        lists: Sequence[Sequence[Tensor] | None],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> None:
        """The kernel's parameters in this order: lists of tensors, tensors, numbers, constants."""
        given = _present(lists, tensors)
        devices = set(map(_device, given))
        index = devices.pop()
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(programs, lists, tensors, numbers)
            return
        addresses = tuple(map(_address, given))
        is_aligned = not reduce(or_, addresses) & 15
        if self._reads_in_order and not (is_aligned and all(map(_is_contiguous, given))):
            self(programs, *_in_order(lists, tensors), numbers)
            return
        is_usual = (
            IS_KNOWN
            and is_aligned
            and not devices
            and (not numbers or max(numbers) <= MAX_INT32)
            and not _is_watched()
        )
        compiled = self._compiled.get(index) if is_usual else None
        if compiled is None:
            made = self._by_triton(programs, lists, tensors, numbers)
            if is_usual and made is not None:  # the interpreter makes nothing
                self._compiled[index] = made
                self._in_turn = _in_turn(lists, tensors)
            return
        active: Any = driver.active
        stream = active.get_current_stream(index if index >= 0 else active.get_current_device())
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,  # for hooks, of which there are none
            None,
            None,
            *self._in_turn((*addresses, None)),
            *numbers,
            *self._tail,
        )

    def _by_triton(
        self,
        programs: int,
        lists: Sequence[Sequence[Tensor] | None],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> Any:
        """The compiled kernel, launched; of meta tensors None, and a thread that compiles it."""
        tuples = [None if t is None else tuple(t) for t in lists]
        arguments = *tuples, *tensors, *numbers
        if not _present(lists, tensors)[0].is_meta:
            return _counted(self._kernel, programs, arguments, self._constants, self._ahead)
        if not self._compiled:
            self._ahead = compile_ahead(self._kernel, arguments, self._constants)
        return None
