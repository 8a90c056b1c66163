"""What a sublayer reads, made again in backward instead of kept for it.

A sublayer's projections keep what they read, for the gradients of their weights. Where that was
mixed from sources which backward needs anyway, it can be mixed from them once more: a read of them
and a write, in the same kernel. While the sublayer runs, whatever autograd saves of its input is
replaced by a note of where it comes from; all else that it saves is kept as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from depthroute.nn.site import SiteParameters
from depthroute.nn.stream import PreNorm, ResidualStream
from depthroute.ops.private.saved import may_be_hooked

LEAST_WIDTH = 1024
"""Of rows that are made again. What a sublayer computes grows with the square of the width and what
making its input again reads only with the width: at 768 half of the blocks cost 1% of a step."""


class Kept(NamedTuple):
    """A tensor that is needed in backward as it was. Torch does not look after that where saved
    tensors have hooks."""

    tensor: Tensor
    """Detached: what an operation made and saved would keep the operation, and so itself."""
    version: int

    @classmethod
    def now(cls, tensor: Tensor) -> Kept:
        return cls(tensor.detach(), tensor._version)

    def unpacked(self) -> Tensor:
        tensor, version = self
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        return tensor


class View(NamedTuple):
    """Of a sublayer's input, as one of its operations has saved it."""

    of: Remade
    size: Sequence[int]
    stride: Sequence[int]

    def unpacked(self) -> Tensor:
        return self.of.taken().as_strided(self.size, self.stride)


class Remade:
    """The input of one sublayer, in place of itself.

    Holds no more than backward needs without it, and the input only from when the first operation
    of a backward takes it until the last has."""

    def __init__(self, stream: ResidualStream, site: SiteParameters, norm: PreNorm) -> None:
        # as if the newest source had just been pushed, which takes a kernel that there is anyway
        self._stream, self._site, self._norm = stream.unread(), site, norm
        given = *stream.visible(), site.query, site.key_weight, norm.weight
        self._given = [Kept.now(tensor) for tensor in given if tensor is not None]
        self._made: Tensor | None = None
        self._num_saved = self._num_taken = 0

    def saved(self, tensor: Tensor) -> View:
        self._num_saved += 1
        return View(self, tensor.size(), tensor.stride())

    def taken(self) -> Tensor:
        """The input, which is dropped when all that saved it have it, and made anew for another
        backward."""
        made = self._remade() if self._made is None else self._made
        self._num_taken += 1
        is_last = self._num_taken >= self._num_saved
        self._made, self._num_taken = (None, 0) if is_last else (made, self._num_taken)
        return made

    def _remade(self) -> Tensor:
        for kept in self._given:
            kept.unpacked()
        with torch.no_grad():
            return self._stream.read(self._site, self._norm)[0].contiguous()


class Watch:
    """Of what autograd saves while one sublayer runs, and of which some is its input."""

    def __init__(self, x: Tensor, remade: Remade) -> None:
        self._like = type(x), x.dtype, x._version  # one that was written into is another
        self._storage = x.untyped_storage()._cdata  # nobody else's until the sublayer has run
        self._remade: Remade | None = remade

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            with saved_tensors_hooks(self._pack, _unpacked):
                return call(*args)
        finally:
            self._remade = None  # or whatever was saved would keep it: torch holds on to hooks

    def _pack(self, tensor: Tensor) -> Kept | View:
        remade, is_input = self._remade, False
        if (type(tensor), tensor.dtype, tensor._version) == self._like:
            is_input = tensor.untyped_storage()._cdata == self._storage
        if remade is None or not is_input or tensor.storage_offset() != 0:
            return Kept.now(tensor)
        return remade.saved(tensor)


def _unpacked(packed: Kept | View) -> Tensor:
    return packed.unpacked()


def remaking(
    call: Callable[..., Any],
    x: Tensor,
    stream: ResidualStream,
    site: SiteParameters | None,
    norm: PreNorm,
) -> Callable[..., Any]:
    """``call`` for a sublayer that reads ``x``, without keeping it; one kernel made it of what
    ``stream`` holds, ``norm`` and all.

    ``call`` itself where rows are short, where nothing is recorded, where a compiler sees the whole
    of it, and where somebody else decides what becomes of saved tensors, as checkpointing and
    offloading do.
    """
    if site is None or not x.requires_grad or torch.compiler.is_compiling():
        return call
    if x.shape[-1] < LEAST_WIDTH:
        return call
    if not may_be_hooked() or not x.is_contiguous() or x.storage_offset() != 0:
        return call
    return partial(Watch(x, Remade(stream, site, norm)).run, call)
