"""Who else computes the depth mix, each behind the same call: a list of sources and a query.

A peer is imported only when asked for. Its key gain is set to one, since
``w . (g * khat) = (g * w) . khat`` and this library folds the gain into the query beforehand.
What a peer needs around its kernel, such as stacking the sources, is part of its time. What it
cannot run is said with the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthroute.bench.accuracy import Mix
from depthroute.bench.operators import OURS, our_mix
from depthroute.bench.record import one_line
from depthroute.errors import unknown
from depthroute.ops import reference

EPS = 1e-6
INT32_ELEMENTS = 2**31
REGISTER_TILE = 2**17
"""Elements of one program's tile up to which a kernel that keeps all sources in registers is
compiled, though from 2^16 on it spills most of them and its settings take minutes to compile."""
COMPILED_SOURCES = 9
TUNE_FASTER = 5
TUNED_ON_DISK = ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")
"""Switches for keeping the fastest setting that a peer found. They are off, so that each is tuned
in the process that times it, at that size and with the device to itself: the keys of fla's two
large kernels do not hold the number of tokens, and what another process had found, beside others
and with the few tokens that compiling takes, would be used at any size."""


def _never(sources: int, tokens: int, width: int) -> str | None:
    return None


def _itself(sources: int) -> int:
    return sources


@dataclass(frozen=True)
class Contender:
    name: str
    distribution: str | None
    mix: Mix
    query_dtype: torch.dtype = torch.float32
    stacks: bool = False
    """Whether the sources are copied into one tensor first, which its time includes."""
    refuses: Callable[[int, int, int], str | None] = field(default=_never)
    """Why it cannot run a number of sources, tokens and a width; None if it can."""
    tuned_for: Callable[[int], int] = field(default=_itself)
    """Numbers of sources with the same value share the settings that the first of them found."""
    tunes: bool = False
    """Whether it times settings of its own at the first call, all of which have to be compiled."""

    @property
    def version(self) -> str | None:
        return version_of(self.distribution) if self.distribution else None


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiled(backend: str = "inductor") -> Contender:
    def refuses(sources: int, tokens: int, width: int) -> str | None:
        if sources > COMPILED_SOURCES:
            return (
                f"the definition is unrolled, up to {COMPILED_SOURCES} sources here; "
                "torch.compile-stacked takes more"
            )
        return None

    mix = partial(reference.depth_mix, eps=EPS)
    return Contender("torch.compile", "torch", _one_graph(mix, backend), refuses=refuses)


def _compiled_stacked(backend: str = "inductor") -> Contender:
    def mix(sources: Sequence[Tensor], query: Tensor) -> Tensor:
        stacked = torch.stack(list(sources)).float()
        keys = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + EPS)
        weights = torch.softmax((keys * query).sum(-1), dim=0)
        return (weights.unsqueeze(-1) * stacked).sum(0).to(sources[0].dtype)

    return Contender("torch.compile-stacked", "torch", _one_graph(mix, backend), stacks=True)


def _one_graph(mix: Mix, backend: str) -> Mix:
    """Compiled for every shape, or an error: without ``fullgraph`` Dynamo goes on uncompiled, and
    silently, once it has compiled a function eight times."""
    return torch.compile(mix, backend=backend, dynamic=False, fullgraph=True)


def _fla(level: int) -> Contender:
    os.environ.update(dict.fromkeys(TUNED_ON_DISK, "0"))  # read when it is imported
    attnres = importlib.import_module("fla.ops.attnres")
    _tune_quickly("fla.ops.attnres.fused")

    def mix(sources: Sequence[Tensor], query: Tensor) -> Tensor:
        return attnres.fused_attnres(
            query, sources, _gain(query), rms_eps=EPS, checkpoint_level=level
        )

    name = "fla" if level == 1 else f"fla, level {level}"
    return Contender(
        name,
        "fla-core",
        mix,
        tuned_for=lambda s: max(8, 1 << (s - 1).bit_length()),
        tunes=True,
    )


def _liger() -> Contender:
    attn_res = importlib.import_module("liger_kernel.ops.attn_res")

    def mix(sources: Sequence[Tensor], query: Tensor) -> Tensor:
        stacked = torch.stack(list(sources))
        return attn_res.LigerAttnResFunction.apply(stacked, query, _gain(query), EPS)

    return Contender("liger", "liger-kernel", mix, stacks=True, refuses=_offsets_overflow)


def _flash() -> Contender:
    phase = importlib.import_module("flash_attn_res.ops.phase_1")

    def mix(sources: Sequence[Tensor], query: Tensor) -> Tensor:
        stacked = torch.stack(list(sources)).unsqueeze(1)  # [S, B, T, D] with one long sequence
        out, _ = phase.phase_1_batched_attention_triton_op(stacked, query.unsqueeze(0), EPS)
        return out.view(sources[0].shape)

    def refuses(sources: int, tokens: int, width: int) -> str | None:
        padded = 1 << (sources - 1).bit_length()
        if width & (width - 1):
            return f"it takes widths that are powers of two, not {width}"
        if padded * width > REGISTER_TILE:
            return f"it keeps {padded} x {width} elements in one program's registers"
        return _offsets_overflow(sources, tokens, width)

    return Contender(
        "flash-attn-res", "flash-attn-res", mix, stacks=True, refuses=refuses, tunes=True
    )


def _fast() -> Contender:
    attnres = importlib.import_module("attnres")
    _tune_quickly("attnres._kernels.fla_full_sources")
    return Contender(
        "fast-attnres",
        "fast-attnres",
        lambda sources, query: attnres.attnres(list(sources), query, eps=EPS),
        query_dtype=torch.bfloat16,  # it takes no other
        tunes=True,
    )


def _tune_quickly(name: str) -> None:
    """Times every setting of the kernels in a module for a fifth as long as they ask for: 20 ms, or
    ten graphs of 4, instead of 100 and ten of 20. There are a hundred settings a shape."""
    try:
        module = importlib.import_module(name)
    except ImportError:  # another version may keep its kernels elsewhere
        return
    testing = importlib.import_module("triton.testing")
    shorter = {
        None: partial(testing.do_bench, warmup=25 // TUNE_FASTER, rep=100 // TUNE_FASTER),
        testing.do_bench_cudagraph: partial(testing.do_bench_cudagraph, rep=20 // TUNE_FASTER),
    }
    for tuner in vars(module).values():
        if hasattr(tuner, "_do_bench"):
            tuner._do_bench = shorter.get(tuner._do_bench, tuner._do_bench)


_gains: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _gain(query: Tensor) -> Tensor:
    """Ones, made once: filling them is not a peer's work."""
    key = query.shape[0], query.dtype, query.device
    if key not in _gains:
        _gains[key] = torch.ones_like(query, requires_grad=False)
    return _gains[key]


def _offsets_overflow(sources: int, tokens: int, width: int) -> str | None:
    if sources * tokens * width >= INT32_ELEMENTS:
        return "its offsets are 32 bits wide: S x N x D must stay below 2^31"
    return None


MAKERS: dict[str, tuple[str | None, Callable[[], Contender]]] = {
    OURS: (None, lambda: Contender(OURS, None, our_mix)),
    "fla": ("fla-core", lambda: _fla(1)),
    "fla-level-0": ("fla-core", lambda: _fla(0)),
    "liger": ("liger-kernel", _liger),
    "flash-attn-res": ("flash-attn-res", _flash),
    "torch.compile": ("torch", _compiled),
    "torch.compile-stacked": ("torch", _compiled_stacked),
    "fast-attnres": ("fast-attnres", _fast),
}
"""The distribution to install and the adapter; quick to compile first."""


def parse(text: str) -> list[str]:
    """``"all"``, ``"none"`` or names separated by commas."""
    if text == "all":
        return [name for name in MAKERS if name != OURS]
    names = [part.strip() for part in text.split(",") if part.strip()]
    if names == ["none"]:
        return []
    for name in names:
        if name not in MAKERS or name == OURS:
            raise unknown("peer", name, ["all", "none", *(n for n in MAKERS if n != OURS)])
    return names


def find(names: Sequence[str]) -> tuple[dict[str, Contender], list[dict[str, Any]]]:
    """The contenders that are here, and for every name its version or why it is missing."""
    contenders: dict[str, Contender] = {}
    notes: list[dict[str, Any]] = []
    for name in names:
        distribution, make = MAKERS[name]
        note: dict[str, Any] = {"name": name, "distribution": distribution}
        note["version"] = version_of(distribution) if distribution else None
        try:
            contenders[name] = make()
        except ImportError as error:
            note["missing"] = one_line(error)
        except Exception as error:  # a peer that cannot even be imported is no reason to stop
            note["missing"] = f"its import failed: {one_line(error)}"
        notes.append(note)
    return contenders, notes
