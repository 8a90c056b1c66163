"""Triton's CPU interpreter, used to test the kernels without a GPU."""

from __future__ import annotations

import os
from typing import Any


def enable() -> bool:
    """Whether kernels are interpreted; if so, mends three things in the interpreter of Triton 3.6.

    It turns a loop bound into an int by ``int(array)``, which numpy 2.4 refuses for its one-element
    arrays; it truncates to bf16 where the hardware rounds to nearest; and it multiplies matrices of
    bf16 as if their bits were integers.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from triton import language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_rounding(array, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bf16(array)
        if source == tl.bfloat16 and target == tl.float32:
            return array.view("uint16").astype("uint32") << 16
        return convert(array, source, target, rounding)

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_widened(self, a, b, total, *options):
        return dot(self, _widened(a), _widened(b), total, *options)

    def _widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.view("uint16").astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(wide, tl.float32)

    interpreter.InterpreterBuilder.create_dot = dot_widened
    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = convert_rounding
    return True


def _to_bf16(array: Any) -> Any:
    """Bits of the nearest bf16, ties to even."""
    bits = array.copy().view("uint32").astype("uint64")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")
    rounded[array != array] = 0x7FC0
    return rounded
