"""Launching a kernel that is compiled already, without asking Triton again which one it is.

``kernel[grid](...)`` binds the arguments, derives from each its type and whether it is 1 or
divisible by 16, looks the compiled kernel up under all of that and calls its hooks: 15 to 30 us for
the 25 to 50 arguments here. A :class:`Prepared` belongs to one set of constants and argument types,
so it asks once a device and from then on hands addresses to the driver. Whoever keeps one must key
it by everything that Triton looks at:

- the constants,
- the dtype of every tensor, whether it is None, and how many there are in each list,
- of numbers that the kernel specialises on, :func:`kinds`.

The rest is checked at every launch: addresses are multiples of 16, all tensors are on one device,
and sizes fit 32 bits. Where that fails, where somebody watches launches (Triton's profiler) or has
asked Triton for another kind of compilation, in the interpreter, and with a Triton whose inside is
not known here, the launch is Triton's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import islice
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all are contiguous and start at a multiple of 16 bytes."""
    return all(map(_is_contiguous, tensors)) and not reduce(or_, map(_address, tensors)) & 15


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


class Prepared:
    """``kernel`` with its constants, for arguments of types that never change."""

    __slots__ = ("_compiled", "_constants", "_kernel", "_tail")

    def __init__(self, kernel: Any, num_warps: int, **constants: Any) -> None:
        self._kernel, self._constants = kernel, {**constants, "num_warps": num_warps, **FUSED}
        self._compiled: dict[int, Any] = {}
        self._tail: tuple[Any, ...] = ()
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
        addresses = list(map(_address, given))
        is_usual = (
            IS_KNOWN
            and not devices
            and not reduce(or_, addresses) & 15
            and max(numbers, default=0) <= MAX_INT32
            and not _is_watched()
        )
        compiled = self._compiled.get(index) if is_usual else None
        if compiled is None:
            lists = [None if t is None else tuple(t) for t in lists]
            made = self._kernel[(programs,)](*lists, *tensors, *numbers, **self._constants)
            if is_usual and made is not None:  # the interpreter makes nothing
                self._compiled[index] = made
            return
        active, address = driver.active, iter(addresses)
        compiled.run(
            programs,
            1,
            1,
            active.get_current_stream(active.get_current_device()),  # pyright: ignore
            compiled.function,
            compiled.packed_metadata,
            None,  # for hooks, of which there are none
            None,
            None,
            *[None if t is None else tuple(islice(address, len(t))) for t in lists],
            *[None if t is None else next(address) for t in tensors],
            *numbers,
            *self._tail,
        )
