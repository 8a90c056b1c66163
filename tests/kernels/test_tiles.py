"""Which tiles and launches a width gets: a rule that the widths which were tuned follow, too."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")

from bench.widths import WIDTHS
from depthroute.ops import _record
from depthroute.ops._triton import layout
from depthroute.schedule import FEW_REMADE

TUNED = (1024, 2048, 4096, 7168)
COUNTS = (2, 3, 5, 9, 13, 17)


def resident(width, heads=1, more=False):
    return layout.resident_tiles(width, heads, more)


def backward(width, count, rows=None, heads=1, carried=False):
    """Tiles and launch of a backward over so many sources."""
    block = layout.resident_tiles(width, heads, carried, count)
    rows = count + 1 if rows is None else rows
    return block, layout.resident_backward_launch(block, width, count, rows, 2, carried)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16])
def test_tiles_cover_a_row_of_any_width(heads):
    for slice_width in (
        *(1, 2, 5, 24, 48, 100, 144, 288, 640, 1000, 1152, 2560, 5120, 8192),
        *(16384, 17000, 20480, 32768),
    ):
        width = heads * slice_width
        for block in (
            layout.tiles(width, heads),
            layout.forward_tiles(width, heads),
            resident(width, heads),
            resident(width, heads, True),
            *(layout.resident_tiles(width, heads, False, count) for count in COUNTS),
        ):
            assert block.heads >= heads and block.columns * block.count >= slice_width
            for n in (block.heads, block.columns):
                assert n & (n - 1) == 0
            assert block.columns * (block.count - 1) < slice_width, "no tile is empty"


@pytest.mark.parametrize("width", WIDTHS)
def test_held_rows_are_a_third_padding_at_most(width):
    for more in (False, True):
        block = resident(width, more=more)
        assert 3 * block.elements <= 4 * width
        assert block.count <= 3 or block.elements > layout.WIDEST


@pytest.mark.parametrize("width", WIDTHS)
def test_a_thread_reads_at_least_8_bytes_of_a_tile_and_16_where_rows_are_streamed(width):
    for count in COUNTS:
        if not _record.fits(count, width, 2):
            continue
        block = resident(width)
        forward = block, layout.resident_forward_launch(block, width, count, 2, False)
        for block, launch in (forward, backward(width, count)):
            assert 2 * block.columns >= 8 * 32 * launch.warps
            ahead = launch.sources * block.elements * 2 * launch.programs
            assert (launch.stages - 1) * ahead <= layout.SHARED_BYTES
    block = layout.tiles(width, 1)
    forward = layout.forward_tiles(width, 1)
    for tile, launch, least in (
        (forward, layout.forward_launch(forward, 33, 2), 8 if width < 768 else 16),
        (block, layout.backward_launch(block, 33, 2, True, False), 16),
    ):
        assert 2 * tile.columns >= least * 32 * launch.warps


@pytest.mark.parametrize("width", [576, 640, 1152, 1280, 2304, 2560, 2880])
def test_backward_holds_a_padded_row_as_one_tile_where_it_holds_many(width):
    """So that every thread reads 16 bytes at once; few sources, or more than fit so, are three."""
    for count in (6, 9):
        block, launch = backward(width, count)
        assert block.count == 1 and block.elements == 16 * 32 * launch.warps
    assert backward(width, 5)[0].count == backward(width, 10)[0].count == 3
    assert _record.most_that_fit(width, 2) == (13 if width < 768 else 9)


@pytest.mark.parametrize("width", WIDTHS)
def test_few_sources_have_enough_bytes_on_their_way(width):
    """As far as the registers go: what a kernel of so many rows takes of them, compiled for Hopper,
    is at most 3 for each row and column of a thread."""
    for count in (2, 3, 5):
        block = resident(width)
        forward = layout.resident_forward_launch(block, width, count, 2, False)
        behind, launch = backward(width, count)
        for rows, tile, made, least, per_row in (
            (count, block, forward, layout.FORWARD_BYTES, 3 * count - 1),
            (count + 1, behind, launch, layout.BACKWARD_BYTES, 3 * count + 3),
        ):
            on_their_way = 2 * rows * width * 2 * made.programs
            full = (made.programs + 1) * tile.elements // 32 * per_row > layout.REGISTERS
            assert on_their_way >= least or full


def test_what_forward_holds_does_not_spill():
    """As compiled for Hopper: 10 rows of 24 numbers a thread did."""
    for width in WIDTHS:
        for rows in range(1, 18):
            block = resident(width)
            for more in (False, True):
                warps = layout.resident_forward_launch(block, width, rows, 2, more).warps
                assert warps == 8 or rows * block.elements <= layout.HELD_ELEMENTS * 32 * warps


def test_two_or_three_wide_rows_are_left_to_two_programs():
    """Where 4 warps hold them without spilling: 3 rows of 8192, or two in fp32, are not."""
    for count, width, itemsize, more, wanted in (
        *((2, w, 2, False, (4, 2)) for w in (4608, 5376, 6656, 8192)),
        *((3, w, 2, False, (4, 2)) for w in (4608, 5120, 6144)),
        *((3, w, 2, False, (8, 1)) for w in (7168, 8192)),
        (2, 6656, 4, False, (8, 1)),
        (2, 6656, 2, True, (8, 1)),
    ):
        launch = layout.resident_forward_launch(resident(width), width, count, itemsize, more)
        assert (launch.warps, launch.programs) == wanted, (count, width, itemsize, more)


def test_programs_that_stay_fill_the_registers_once():
    """16 warps of 154 registers would be 12, and then 4 alone."""
    launched = {w: layout.backward_launch(layout.tiles(w, 1), 25, 2, True, False) for w in WIDTHS}
    assert {w: launched[w].programs for w in (576, 640, 768, 896, 1152)} == {
        576: 12, 640: 12, 768: 12, 896: 16, 1152: 16
    }  # fmt: skip


@pytest.mark.parametrize(("width", "warps"), [(768, 1), (1536, 2)])
def test_three_quarters_of_a_power_of_two_are_three_tiles(width, warps):
    """Forward, and where a backward holds more than its sources, however many; with 24 columns a
    thread a boundary has a warp for each quarter of an SM."""
    three = layout.Tiles(1, width // 3, 3)
    assert resident(width) == three
    for rows, more, programs in ((4, True, 4), (8, True, 4), (5, False, 8)):
        launch = layout.resident_forward_launch(three, width, rows, 2, more)
        assert (launch.warps, launch.programs) == (warps, programs // warps)
    for count in (2, 4, 7):
        block, launch = backward(width, count, rows=2 * count + 2, carried=True)
        assert block == three and launch.warps == 2
        assert launch.programs == 4 or width > 768  # as far as shared memory goes
        assert backward(width, count)[0] == layout.Tiles(1, width * 4 // 3, 1)


def test_narrow_rows_are_streamed_forward_without_the_padding_of_wider_tiles():
    found = {w: layout.forward_tiles(w, 1) for w in WIDTHS}
    assert {w: (t.columns, t.count) for w, t in found.items() if t.columns < 256} == {
        576: (128, 5), 640: (128, 5)
    }  # fmt: skip
    for sources in (9, 33):
        launch = layout.forward_launch(found[576], sources, 2)
        assert (launch.sources, launch.warps, launch.stages, launch.programs) == (2, 1, 3, 0)
    for width in (576, 768):
        assert layout.forward_tiles(width, 4) == layout.tiles(width, 4)


def test_heads_of_very_wide_rows_are_read_as_eight_tiles_at_most():
    """Of 16, as wide as those of fewer warps, the last would be empty."""
    assert layout.forward_tiles(9 * 3592, 9) == layout.Tiles(16, 512, 8)


def test_several_heads_are_not_padded_as_one():
    assert backward(1152, 9, heads=4)[0] == layout.Tiles(4, 128, 3)


@pytest.mark.parametrize(
    ("width", "heads"), [(1024, 4), (1024, 8), (2048, 2), (2048, 8), (4096, 4)]
)
def test_one_tile_of_several_heads_is_read_as_four(width, heads):
    """No lane more, and still 16 bytes a thread."""
    tile = layout.forward_tiles(width, heads)
    assert layout.tiles(width, heads).count == 1 and tile.count == 4
    assert tile.elements == layout.tiles(width, heads).elements
    launch = layout.forward_launch(tile, 9, 2)
    assert launch.sources == 1 and 2 * heads * tile.columns == 16 * 32 * launch.warps


def test_slices_of_heads_stay_64_bytes_in_a_row():
    assert layout.forward_tiles(1024, 16) == layout.Tiles(16, 32, 2)
    assert layout.forward_tiles(2048, 64) == layout.tiles(2048, 64)


def test_backward_of_several_heads_splits_2048_lanes_and_a_padded_tile():
    """Not where it holds more than its sources, or where three quarters are of padded heads."""
    for width, heads, tile, warps in (
        *((768, heads, layout.Tiles(heads, 256 // heads, 3), 2) for heads in (4, 8)),
        *((1536, heads, layout.Tiles(heads, 1024 // heads, 2), 4) for heads in (4, 8)),
        *((2048, heads, layout.Tiles(heads, 1024 // heads, 2), 4) for heads in (4, 8)),
        (2048, 2, layout.Tiles(2, 1024, 1), 4),
        (1024, 4, layout.Tiles(4, 256, 1), 4),
        (768, 3, layout.Tiles(4, 256, 1), 4),
    ):
        block, launch = backward(width, 9, heads=heads)
        assert (block, launch.warps) == (tile, warps), (width, heads)
        assert launch.programs == 1 if width == 2048 else launch.programs >= 2
    assert backward(2048, 4, heads=4, carried=True)[0] == layout.Tiles(4, 512, 1)


def test_the_widths_that_were_tuned_keep_their_settings():
    """Timed on an H200; see bench/results/tune_h200_launches.json."""
    tiles = {w: (layout.tiles(w, 1), resident(w), resident(w, more=True)) for w in TUNED}
    shape = {w: [(t.columns, t.count) for t in found] for w, found in tiles.items()}
    assert shape == {
        1024: [(1024, 1)] * 3,
        2048: [(2048, 1)] * 3,
        4096: [(4096, 1)] * 3,
        7168: [(1024, 7), (4096, 2), (1024, 7)],
    }
    assert (resident(768).columns, resident(768).count) == (256, 3)
    assert backward(768, 5)[0] == layout.Tiles(1, 1024, 1)
    forward = {w: layout.resident_forward_launch(tiles[w][1], w, 5, 2, False) for w in TUNED}
    assert {w: (x.warps, x.stages, x.programs) for w, x in forward.items()} == {
        1024: (2, 3, 4), 2048: (4, 3, 2), 4096: (8, 3, 1), 7168: (8, 3, 1)
    }  # fmt: skip
    behind = {w: backward(w, 5)[1] for w in TUNED}
    assert {w: (x.warps, x.stages, x.programs) for w, x in behind.items()} == {
        1024: (4, 3, 2), 2048: (4, 3, 1), 4096: (8, 3, 1), 7168: (8, 3, 1)
    }  # fmt: skip


@pytest.mark.parametrize("width", [*WIDTHS, *TUNED])
def test_what_is_made_again_is_summed_by_as_many_threads_as_at_first(width):
    """With a push a token has one row more to load, and another number of warps would add in
    another order."""
    for heads, itemsize in product((1, 4), (2, 4)):
        block = resident(width, heads)
        for count in range(2, min(FEW_REMADE, _record.most_that_fit(width, itemsize)) + 1):
            pushed, plain = (
                layout.resident_forward_launch(block, width, rows, itemsize, True)
                for rows in (count + 1, count)
            )
            assert pushed.warps == plain.warps
