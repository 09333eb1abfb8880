"""Tiles of a matrix, which the Triton kernels work on: where they lie, and how they are read.

A program works on a tile [GR 16 GC 16] of a matrix: GR x GC squares of 16 x 16. Blocks lie along
its LANES (the last dimension: row blocks), its ROWS (the second: column blocks), or both (squares).

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels.formulation import BLOCK
from metis_hf.numerics.kernels.layout import Groups, form_of, readable
from metis_hf.numerics.kernels.triton_direct import launch
from metis_hf.numerics.kernels.triton_numbers import bits_of
from metis_hf.numerics.layout import Tile

_ROTATED_TILE_BLOCKS = 8  # squares of a tile whose groups are rotated, if they are no higher
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def place_of_tile(rows, columns, GR: tl.constexpr, GC: tl.constexpr):
    """Return where this program's tile lies: indices of blocks and of elements."""
    across = tl.cdiv(columns, 16 * GC)
    tile = tl.program_id(0)
    row_block = (tile // across) * GR + tl.arange(0, GR)[:, None, None, None]
    column_block = (tile % across) * GC + tl.arange(0, GC)[None, None, :, None]
    row = row_block * 16 + tl.arange(0, 16)[None, :, None, None]
    column = column_block * 16 + tl.arange(0, 16)[None, None, None, :]
    return row_block, column_block, row, column


@triton.jit
def inside_of(place, rows, columns):
    """Return which elements of a tile lie in the matrix, and their places in a contiguous one."""
    _, _, row, column = place
    return (row < rows) & (column < columns), row.to(tl.int64) * columns + column


@triton.jit
def read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride):
    """Load a tile's (bits of x - minus in fp32, minus or 0.0); x is zero outside the matrix."""
    _, _, row, column = place
    inside, at = inside_of(place, rows, columns)
    offset = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    bits = bits_of(tl.load(x_ptr + offset, mask=inside, other=0.0))
    minus = 0.0
    if minus_ptr is not None:
        minus = tl.load(minus_ptr + at, mask=inside, other=0.0)
        bits = (bits.to(tl.float32, bitcast=True) - minus).to(tl.int32, bitcast=True)
    return bits, minus


def blocks_in(length: int) -> int:
    """Return the blocks of so many elements; the last one may be short."""
    return -(-length // BLOCK)


def matrix_of(x: Tensor, along_rows: bool, groups: Groups | None = None) -> Tensor:
    """Give a tensor two dimensions, with the same blocks and noise.

    Args:
        x: where there are groups, a matrix.
        along_rows: blocks lie along the last dimension, and along no other.
        groups: that are rotated; along the last dimension each becomes a row.
    """
    x = readable(x)
    if groups is not None:
        return form_of(x, Tile.ROW, -1).x.view(-1, groups.size) if along_rows else x
    if along_rows and x.is_contiguous() and x.shape[-1] % BLOCK == 0:
        return x.view(-1, BLOCK)  # so that no tile is half empty because rows are few or short
    return x.reshape(-1, x.shape[-1])


def launch_tiles(
    kernel: triton.JITFunction,
    tile_blocks: int,
    matrix: Tensor,
    groups: Groups | None = None,
    first: dict[str, Tensor] | None = None,
    more: int = 0,
    **arguments: object,
) -> None:
    """Run a kernel over all tiles of a matrix.

    Args:
        kernel: it takes the shape of the matrix, and what follows.
        tile_blocks: squares of a tile, a power of two.
        matrix: the kernel reads it, unless there is a `first`.
        groups: that are rotated, along LANES or else along rows; a tile holds whole ones.
        first: arguments in place of the matrix.
        more: elements for which there are more programs, of as many elements as a tile has.
        arguments: the others.
    """
    rows, columns = matrix.shape
    data, words, upright = None, (0, 0), 1
    if groups is not None:
        upright = 1 if arguments["LANES"] else groups.size // BLOCK
        # Two squares wide: rows are then read by 64 bytes.
        tile_blocks = max(_ROTATED_TILE_BLOCKS, 2 * upright)
        if groups.signs is not None:
            data, words = groups.signs.data, noise.static_words(groups.signs)
    if first is None:
        first = {"x_ptr": matrix}
        arguments |= {"row_stride": matrix.stride(0), "column_stride": matrix.stride(1)}
    down, across = blocks_in(rows), blocks_in(columns)
    wide = min(tile_blocks // upright, triton.next_power_of_2(across))
    high = tile_blocks // wide
    tiles = -(-down // high) * -(-across // wide)
    if "other_ptr" in arguments:
        arguments |= {"tiles": tiles, "count": more}
        tiles += -(-more // (tile_blocks * BLOCK * BLOCK))
    launch(
        kernel,
        (tiles,),
        _OPTIONS,
        **first,
        sign_ptr=data,
        sign0=words[0],
        sign1=words[1],
        rows=rows,
        columns=columns,
        GR=high,
        GC=wide,
        SIZE=0 if groups is None else groups.size,
        SIGNED=groups is not None and groups.signs is not None,
        **arguments,
    )
