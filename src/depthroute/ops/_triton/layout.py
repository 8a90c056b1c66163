"""Tiles and launch settings, whose reasons are in docs/launches.md, and the small kernels around
the others: tables of addresses, and sums of the rows that every program left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops._record import PADDED_SOURCES, dtype_of
from depthroute.ops._triton import interpreter
from depthroute.ops.private.launcher import Prepared

INTERPRETED = interpreter.enable()

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """A row [H, D/H] as ``count`` blocks [heads, columns], both powers of two."""

    heads: int
    columns: int
    count: int

    @property
    def elements(self) -> int:
        return self.heads * self.columns * self.count


NARROWEST = 256
"""Elements of a tile that one warp reads as 16 bytes a thread, in 16-bit dtypes."""
LEAST_SLICE = 32
"""Columns of one head in such a tile: 64 bytes in a row."""
WIDEST = 4096
SHARED_BYTES = 216 * 1024
"""Of a Hopper SM's 227 KB, what rows on their way may take."""


@cache
def tiles(width: int, heads: int, narrowest: int = NARROWEST) -> Tiles:
    """The fewest padded lanes with at most 8 tiles, then the fewest tiles; none so narrow that a
    warp reads less than 16 bytes a thread, unless the row is."""
    slice_width, rows = width // heads, triton.next_power_of_2(heads)
    single = triton.next_power_of_2(slice_width)
    least = min(single, narrowest // min(rows, narrowest))
    columns = {count: triton.next_power_of_2(-(-slice_width // count)) for count in range(1, 9)}
    lanes, count = min((c * count, count) for count, c in columns.items() if c >= least)
    return Tiles(rows, lanes // count, count)


@cache
def forward_tiles(width: int, heads: int) -> Tiles:
    """Of the streaming forward: 8 bytes a thread cost less than an eighth of all lanes (17 sources
    of 576: 0.81 of the copy speed, as 5 tiles of 128 columns 0.98). One tile of several heads is
    read as four (9 sources of 4096 with 4 heads: 0.67, as four 0.96)."""
    block = tiles(width, heads)
    if heads > 1 and block.count == 1:
        least = max(LEAST_SLICE, NARROWEST * warps_for(block.elements, 32) // block.heads)
        count = min(8, max(1, block.columns // least))
        return Tiles(block.heads, block.columns // count, count)
    is_padded = heads == 1 and 8 * width < 7 * block.elements
    return tiles(width, heads, NARROWEST // 2) if is_padded else block


@cache
def resident_tiles(width: int, heads: int, holds_more: bool, num_backward: int = 0) -> Tiles:
    """Of a kernel that holds its rows: one tile where at most a quarter of it is padding (of 4096
    lanes, less), else three. Beyond 4096 lanes two tiles are as one, but not where a kernel
    ``holds_more`` than its sources and has no registers to waste.

    In the backward of ``num_backward`` sources, 6 to 9, it is one, however padded: three would need
    twice the warps, whose threads read half as much at once. Several heads are padded each, which
    costs more than that: see :func:`_tiles_of_heads`. Where three are without any padding, they are
    better forward and in what ``holds_more``: see :func:`is_three_quarters`.
    """
    if heads > 1 and num_backward and not holds_more and (block := _tiles_of_heads(width, heads)):
        return block
    rows, single = triton.next_power_of_2(heads), triton.next_power_of_2(width // heads)
    if is_three_quarters(width, heads) and (holds_more or num_backward == 0):
        return Tiles(1, width // 3, 3)
    most = width * 4 // 3 - (single * rows == WIDEST)
    is_one = heads == 1 and 6 <= num_backward <= PADDED_SOURCES
    is_one = is_one or width <= NARROWEST or single * rows <= most
    if is_one and single * rows <= WIDEST:
        return Tiles(rows, single, 1)
    third = triton.next_power_of_2(-(-width // (3 * heads)))
    columns, count = (single, 1) if single < 3 * third else (third, 3)
    if columns * count * rows > WIDEST and (holds_more or heads > 1):
        return tiles(width, heads)
    columns = min(columns, WIDEST)
    return Tiles(rows, columns, -(-width // (heads * columns)))


def _tiles_of_heads(width: int, heads: int) -> Tiles | None:
    """In the backward of several heads: 1024 lanes of which a quarter is padding are three tiles
    without any, and 2048 with no more padding than that are two, for fewer warps (9 sources of 1536
    with 4 heads: 0.64 of the copy speed as one tile, 0.85 as two), but not of two whole heads."""
    rows, slice_width = triton.next_power_of_2(heads), width // heads
    single = triton.next_power_of_2(slice_width)
    if rows * single == 1024 and 4 * slice_width == 3 * single and single >= 4 * LEAST_SLICE:
        return Tiles(rows, single // 4, 3)
    if rows * single == 2048 and 4 * width >= 3 * 2048 and single >= 2 * LEAST_SLICE:
        return None if width == 2048 and heads == 2 else Tiles(rows, single // 2, 2)
    return None


def is_three_quarters(width: int, heads: int) -> bool:
    """Of a power of two, as 768 and 1536 are."""
    return heads == 1 and width in (3 * NARROWEST, 6 * NARROWEST)


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched; chosen by :func:`forward_launch` and its like."""

    sources: int
    """Read at a time by one program (BS)."""
    warps: int
    stages: int
    programs: int
    """Per multiprocessor, each taking every P-th token; 0 gives every token its own program."""
    columns: int = 0
    """Of a tile, where another tiling than that of :func:`tiles` is forced; see :func:`retiled`."""


Changes = tuple[tuple[str, int], ...] | None
"""Fields of a launch and what they are instead; hashable, so that a plan's key can hold them."""

_forced: dict[str, Changes] = {}
forced_changes = _forced.get
"""By kernel: ``mix`` (and boundary), ``attention`` and those on tensor cores under their names."""


@contextlib.contextmanager
def forced(kernel: str, **fields: int) -> Iterator[None]:
    """Launch ``kernel`` inside with these settings instead of those chosen, to tune them."""
    before = _forced.get(kernel)
    _forced[kernel] = tuple(sorted(fields.items())) or None
    try:
        yield
    finally:
        _forced[kernel] = before


def changed(launch: Any, changes: Changes) -> Any:
    return replace(launch, **dict(changes)) if changes else launch


def retiled(block: Tiles, width: int, heads: int, changes: Changes) -> Tiles:
    """``block``, or tiles of as many columns as are forced."""
    columns = dict(changes or ()).get("columns", 0)
    return Tiles(block.heads, columns, -(-width // heads // columns)) if columns else block


def warps_for(elements: int, per_thread: int) -> int:
    wanted = max(1, elements // (32 * per_thread))
    return min(16, 1 << (wanted.bit_length() - 1))


def stages_for(wanted: int, bytes_ahead: int, programs: int = 1) -> int:
    """Pipeline stages, each but one with ``bytes_ahead`` in the shared memory of every program."""
    return max(1, min(wanted, 1 + SHARED_BYTES // (bytes_ahead * programs)))


def forward_launch(block: Tiles, num_sources: int, itemsize: int) -> Launch:
    """With few sources, as many stages as put nearly all of them on their way. Two at a time pay
    where they are many, or where one thread has 48 columns or more of a row in several tiles, or
    less than 16 bytes of each."""
    warps = warps_for(block.elements, 32)
    is_either = block.elements >= 48 * 32 * warps or block.heads * block.columns < NARROWEST
    pays = num_sources > 13 or (is_either and num_sources > 1)
    at_once = 2 if block.count > 1 and pays else 1
    wanted = 4 if num_sources <= 8 and block.elements >= 2048 else 3
    stages = stages_for(wanted, at_once * block.elements * itemsize)
    programs = 4 if at_once > 1 and block.elements > 4096 and num_sources <= 12 else 0
    return Launch(at_once, warps, stages, programs)


def backward_launch(
    block: Tiles, num_sources: int, itemsize: int, once: bool, carried: bool
) -> Launch:
    """One sweep is pipelined; with two, what counts is that the second finds its rows in L2.
    Threads of 24 columns have 154 registers, of which an SM has room for 12 warps: 16 would be 12
    and then 4 (25 sources of 576: 0.68 of the copy speed, with 12 0.83)."""
    warps = warps_for(block.elements, 32)
    num_warps = 12 if block.elements == 24 * 32 * warps else 16
    fits = block.count == 1 and block.columns >= 256 * warps and num_sources > 1
    at_once = 2 if fits else 1
    ahead = at_once * block.elements * itemsize * (1 + carried)
    return Launch(at_once, warps, stages_for(3, ahead) if once else 1, max(2, num_warps // warps))


HELD_ELEMENTS = 208
"""Of all rows, that a thread of forward holds before it spills: 10 rows of 16 do not, of 24 do."""
WIDE_BYTES = 336
"""The same in bytes, of one of 128 threads that have rows of more than 4096 lanes: 3 rows of 6144
do not spill, of 8192 do."""
FORWARD_BYTES, BACKWARD_BYTES = 64 * 1024, 48 * 1024
"""On their way to each SM at least: 2 sources forward reach 0.75 of the copy speed with 25 KB, 0.83
with 33, 0.92 with 41 (widths_h200_first.json)."""
REGISTERS = 65536 // 32
"""Of an SM, for each lane of a warp."""
LEAST_REGISTERS = 64
"""Of a program, which at most 32 of an SM's have to share."""


def _resident_launch(
    rows: int, warps: int, programs: int, enough: int, registers: int, ahead: int
) -> Launch:
    """More programs where it takes that to have ``enough`` on their way (each looks two tokens
    ahead), as far as ``registers`` a lane and shared memory have room for."""
    programs = max(programs, min(enough, REGISTERS // max(registers, LEAST_REGISTERS)))
    programs = max(1, min(programs, SHARED_BYTES // (2 * ahead)))
    return Launch(rows, warps, stages_for(3, ahead, programs), programs)


def resident_forward_launch(
    block: Tiles, width: int, rows: int, itemsize: int, holds_more: bool
) -> Launch:
    """``rows`` are read by each program and token, and those of the next two fetched meanwhile: 16
    columns a thread and 8 warps to an SM, at every width, and more where rows are few.

    Two or three wide rows are left to two programs of 4 warps, so that one works while the other
    waits (3 sources of 4608: 0.75 with one of 8, 0.95), unless a kernel ``holds_more``. One that
    does and has 24 columns a thread and no padding is best with a warp for each quarter of an SM.
    """
    ahead = rows * block.elements * itemsize
    if block.elements > WIDEST and not holds_more and ahead <= WIDE_BYTES * 32 * 4:
        return _resident_launch(rows, 4, 2, 2, 0, ahead)
    warps = warps_for(block.elements, 16 if rows <= 10 else 8)
    if rows * block.elements > HELD_ELEMENTS * 32 * warps:
        warps *= 2
    warps = min(8, warps)  # more would have too few registers
    enough = triton.cdiv(FORWARD_BYTES, 2 * rows * width * itemsize)
    registers = block.elements // 32 * (3 * rows - 1)  # as compiled for Hopper, of all warps
    if holds_more and rows > 3 and is_three_quarters(width, block.heads):
        return _resident_launch(rows, warps, max(1, 4 // warps), 0, registers, ahead)
    return _resident_launch(rows, warps, max(1, 8 // warps), enough, registers, ahead)


def resident_backward_launch(
    block: Tiles, width: int, num_sources: int, rows: int, itemsize: int, carried: bool
) -> Launch:
    """About 70 KB on their way to each SM, which is one program from a width of 2048 on; fewer
    columns a thread than forward, since it holds more of them, but as many where more than a
    quarter of a tile is padding, or whole warps would have nothing to do. Several heads that fill
    2048 lanes are left to one program of 4 warps (9 sources with 2, 4 and 8: 0.92 to 0.93 of the
    copy speed; two programs, 0.87 to 0.90)."""
    is_padded = block.count == 1 and 4 * width < 3 * block.elements
    is_few = block.elements == 2048 and num_sources <= 6
    warps = min(8, warps_for(block.elements, 16 if is_few or is_padded else 8))
    if 1 < block.count <= 3 and block.elements <= WIDEST:
        # 5 sources of 2304: 0.86 with 4 and two programs, 0.70 with 8
        warps = min(2 if is_three_quarters(width, block.heads) else 4, warps)
    programs, ahead = max(1, 2048 // block.elements), rows * block.elements * itemsize
    if block.count > 1 or is_padded:
        programs = max(1, 8 // warps)
    elif block.elements == 1024 and carried:
        programs = 3 if ahead <= 11 * 1024 else 2 if ahead <= 30 * 1024 else 1
    is_plain = not carried and rows == num_sources + 1
    if block.heads > 1 and width == block.elements == 2048 and is_plain:
        warps, programs = 4, 1
    enough = triton.cdiv(BACKWARD_BYTES, 2 * rows * width * itemsize)
    registers = block.elements // 32 * 3 * rows
    return _resident_launch(rows, warps, programs, enough, registers, ahead)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(launch: Launch, tokens: int, device: torch.device) -> int:
    available = num_multiprocessors(device)
    most = launch.programs * available or tokens
    return min(tokens, most if available else 3)  # interpreted, 3: the second stage is tested


@triton.jit
def _table_kernel(pointers, p_table, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        tl.store(p_table + i, pointers[i].to(tl.int64))


@cache
def _fill_table(dtypes: tuple[torch.dtype, ...]) -> Prepared:
    return Prepared(_table_kernel, 1, COUNT=len(dtypes))


def pack(lists: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
    """Tables of addresses, one for each list of tensors.

    They are filled by a kernel whose arguments are the addresses (2 us), not copied from the host:
    such a copy would synchronise, and replaying a captured graph would read a host buffer that is
    gone. Choosing among arguments inside the kernels, without a table, was slower from 9 on.
    """
    flat, starts = [], []
    for tensors in lists:
        starts.append(len(flat))
        # every table starts at a multiple of 16 bytes
        flat += [*tensors, *tensors[-1:]] if len(tensors) % 2 else tensors
    table = torch.empty(len(flat) + 128, dtype=torch.int64, device=like.device)
    for start in range(0, len(flat), 128):
        chunk = flat[start : start + 128]
        count = max(16, triton.next_power_of_2(len(chunk)))
        chunk += [chunk[-1]] * (count - len(chunk))
        fill = _fill_table(tuple(map(dtype_of, chunk)))
        fill(1, (chunk,), (table[start:] if start else table,), ())
    return [table[start:] if start else table for start in starts]


# interpreted: few programs, and a loop that repeats although there are three rows
ROWS, COLUMNS = (2, 512) if INTERPRETED else (128, 16)


@triton.jit(do_not_specialize=["P"])
def sum_rows_kernel(p_rows, p_sum, P, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """BC of the C sums; always in the same order."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    o_p = tl.arange(0, BP)[:, None].to(tl.int64)
    b_sum = tl.zeros([BP, BC], tl.float32)
    for i in tl.range(0, P, BP, num_stages=4):
        b_sum += tl.load(p_rows + (i + o_p) * C + o_c, (i + o_p < P) & (o_c < C), 0.0)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(p_sum + o_c, tl.sum(b_sum, 0), o_c < C)


@cache
def _sum_rows(columns: int) -> Prepared:
    return Prepared(sum_rows_kernel, 4, C=columns, BP=ROWS, BC=COLUMNS)


def sum_rows(rows: Tensor) -> Tensor:
    """The sum over the first axis of a contiguous fp32 tensor; a program takes a few columns, so
    that many share a sum that is long and narrow."""
    count, *shape = rows.shape
    total = rows.new_empty(*shape)  # at a third of the time that one shape takes
    columns = total.numel()
    _sum_rows(columns)(-(-columns // COLUMNS), (), (rows, total), (count,))
    return total
