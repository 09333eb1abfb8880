"""Tiles of a matrix for the Triton kernels on CUDA devices; a program processes one tile.

This module locates, loads and decodes tiles, and launches kernels over all tiles of a matrix. It
computes exactly, except that low-rank parts are summed in their own order.

A tile is [GR 16 GC 16]: GR x GC squares of 16 x 16. Blocks lie along its LANES (the last dimension:
row blocks), its ROWS (the second: column blocks), or both (squares).

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels.layout import BLOCK, Groups, Low, form_of, readable
from metis_hf.numerics.kernels.triton_direct import launch, padded_block
from metis_hf.numerics.kernels.triton_numbers import (
    DROPPED,
    E4M3_NAN,
    E4M3_OFFSET,
    SCALE_SPACING,
    add_product,
    bits_of,
    cast,
)
from metis_hf.numerics.layout import Tile

_ROTATED_TILE_BLOCKS = 8  # least number of squares in a tile whose groups are rotated
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# For tiles with a low-rank part: 4 x 4 squares, so that a load of a factor serves 64 rows or
# columns.
_LOW_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_LOW_SIDE = 4


_NAMES = "left_ptr", "left_scale_ptr", "left_decode_ptr", "right_ptr", "right_scale_ptr"
_NO_LOW = dict.fromkeys((*_NAMES, "right_decode_ptr", "lengths_ptr")) | {"width": 0, "WIDTH": 0}


@triton.jit
def place_of_tile(rows, columns, GR: tl.constexpr, GC: tl.constexpr):
    """Return the place of this program's tile: (row block, column block, row, column) indices."""
    across = tl.cdiv(columns, 16 * GC)
    tile = tl.program_id(0)
    row_block = (tile // across) * GR + tl.arange(0, GR)[:, None, None, None]
    column_block = (tile % across) * GC + tl.arange(0, GC)[None, None, :, None]
    row = row_block * 16 + tl.arange(0, 16)[None, :, None, None]
    column = column_block * 16 + tl.arange(0, 16)[None, None, None, :]
    return row_block, column_block, row, column


@triton.jit
def inside_of(place, rows, columns):
    """Return the mask of a tile's elements in the matrix, and their indices in a contiguous one."""
    _, _, row, column = place
    return (row < rows) & (column < columns), row.to(tl.int64) * columns + column


@triton.jit
def packed_values(
    codes_ptr, scale_ptr, row, column, columns, inside, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """Return code * block scale for entries of a matrix in the layout of `layout.Packed`."""
    row_block, column_block = row // 16, column // 16
    if LANES and not ROWS:
        block = row * tl.cdiv(columns, 16) + column_block
        byte, shift = (block // 2).to(tl.int64) * 16 + column % 16, (block % 2) * 4
        scale_at = block.to(tl.int64) + 0 * column
    else:
        byte = (row_block * 8 + row % 8).to(tl.int64) * columns + column
        shift = ((row % 16) // 8) * 4
        if LANES:
            scale_at = row_block.to(tl.int64) * tl.cdiv(columns, 16) + column_block + 0 * column
        else:
            scale_at = row_block.to(tl.int64) * columns + column
    code = (tl.load(codes_ptr + byte, mask=inside, other=0).to(tl.int32) >> shift) & 15
    size = (code & 7).to(tl.float32)
    value = tl.where(size < 4.0, size * 0.5, tl.where(size < 6.0, size - 2.0, size * 2.0 - 8.0))
    value = (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    # Without the sign bit, which NaN may have.
    bits = tl.load(scale_ptr + scale_at, mask=inside, other=0).to(tl.int32) & E4M3_NAN
    normal = ((bits + E4M3_OFFSET) << DROPPED).to(tl.float32, bitcast=True)
    scale = tl.where(bits >= 8, normal, bits.to(tl.float32) * SCALE_SPACING)
    return value * tl.where(bits == E4M3_NAN, float("nan"), scale)


@triton.jit
def low_rank_of(
    low, rows, columns, GR: tl.constexpr, GC: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return this program's tile of (left * lengths) @ right, both packed; see `layout.Low`.

    The right factor is exact in bf16; left * lengths is split into a sum of three bf16 matrices.
    Tensor cores multiply them and accumulate in fp32.
    """
    codes, scales, decode, lengths_ptr, right_codes, right_scales, right_decode, width = low
    across = tl.cdiv(columns, 16 * GC)
    tile = tl.program_id(0)
    row = (tile // across) * (16 * GR) + tl.arange(0, 16 * GR)[:, None]
    column = (tile % across) * (16 * GC) + tl.arange(0, 16 * GC)[None, :]
    k = tl.arange(0, WIDTH)
    inside = (row < rows) & (k[None, :] < width)
    left = packed_values(codes, scales, row, k[None, :], width, inside, LANES, not LANES)
    lengths = tl.load(lengths_ptr + k[None, :], mask=k[None, :] < width, other=0.0)
    if decode is not None:
        lengths = lengths * (tl.load(decode) * tl.load(right_decode))
    left = left * lengths
    inside = (k[:, None] < width) & (column < columns)
    right = packed_values(
        right_codes, right_scales, k[:, None], column, columns, inside, LANES, not LANES
    )
    right = cast(right, tl.bfloat16)
    total = tl.zeros((16 * GR, 16 * GC), tl.float32)
    total = add_product(total, left, right, True)
    return tl.reshape(total, (GR, 16, GC, 16))


@triton.jit
def read(
    x_ptr, minus_ptr, low, place, rows, columns, strides, LANES: tl.constexpr, WIDTH: tl.constexpr
):
    """Load a tile's (fp32 bits of x - minus, minus or 0.0); x is zero outside the matrix.

    If WIDTH > 0, `minus` is the low-rank matrix `low`.
    """
    _, _, row, column = place
    inside, at = inside_of(place, rows, columns)
    offset = row.to(tl.int64) * strides[0] + column.to(tl.int64) * strides[1]
    bits = bits_of(tl.load(x_ptr + offset, mask=inside, other=0.0))
    minus = 0.0
    if WIDTH:
        minus = low_rank_of(low, rows, columns, row.shape[0], column.shape[2], LANES, WIDTH)
    elif minus_ptr is not None:
        minus = tl.load(minus_ptr + at, mask=inside, other=0.0)
    if WIDTH or minus_ptr is not None:
        bits = (bits.to(tl.float32, bitcast=True) - minus).to(tl.int32, bitcast=True)
    return bits, minus


def blocks_in(length: int) -> int:
    """Return the number of blocks in `length` elements; the last block may be short."""
    return -(-length // BLOCK)


def matrix_of(x: Tensor, along_rows: bool, groups: Groups | None = None) -> Tensor:
    """Reshape a tensor to two dimensions, with the same blocks and noise.

    Args:
        x: the tensor; a matrix if there are groups.
        along_rows: whether blocks lie along the last dimension only.
        groups: the rotation; along the last dimension each group becomes a row.
    """
    x = readable(x)
    if groups is not None:
        return form_of(x, Tile.ROW, -1).view(-1, groups.size) if along_rows else x
    if along_rows and x.is_contiguous() and x.shape[-1] % BLOCK == 0:
        return x.view(-1, BLOCK)  # so that no tile is half empty because rows are few or short
    return x.reshape(-1, x.shape[-1])


def _arguments(low: Low) -> dict[str, Any]:
    """Return a low-rank matrix as a kernel's arguments."""
    (left, left_scale, left_decode), lengths, (right, right_scale, right_decode) = low
    width = len(lengths)
    return {
        "left_ptr": left,
        "left_scale_ptr": left_scale.view(torch.uint8),
        "left_decode_ptr": left_decode,
        "lengths_ptr": lengths,
        "right_ptr": right,
        "right_scale_ptr": right_scale.view(torch.uint8),
        "right_decode_ptr": right_decode,
        "width": width,
        "WIDTH": padded_block(width),
    }


def launch_tiles(
    kernel: triton.JITFunction,
    tile_blocks: int,
    matrix: Tensor,
    groups: Groups | None = None,
    first: dict[str, Tensor] | None = None,
    more: int = 0,
    low: Low | None = None,
    **arguments: object,
) -> None:
    """Run a kernel over all tiles of a matrix.

    Args:
        kernel: a kernel with the arguments that this function passes.
        tile_blocks: squares in a tile, a power of two.
        matrix: the matrix to read, as `x_ptr`; only its shape counts if there is a `first`.
        groups: the rotation, along LANES or else along rows; a tile holds whole groups.
        first: arguments that replace `x_ptr` and its strides.
        more: number of elements at `other_ptr`; extra programs read as many of them as a tile has.
        low: a low-rank matrix in the shape of `matrix`, which the kernel subtracts or adds.
        arguments: the other arguments of the kernel.
    """
    rows, columns = matrix.shape
    data, words, upright = None, (0, 0), 1
    if groups is not None:
        upright = 1 if arguments["LANES"] else groups.size // BLOCK
        # Two squares wide, so that rows are read in pieces of 64 bytes.
        tile_blocks = max(_ROTATED_TILE_BLOCKS, 2 * upright)
        if groups.signs is not None:
            data, words = groups.signs.data, noise.static_words(groups.signs)
    if first is None:
        first = {"x_ptr": matrix}
        arguments |= {"row_stride": matrix.stride(0), "column_stride": matrix.stride(1)}
    down, across = blocks_in(rows), blocks_in(columns)
    wide = min(tile_blocks // upright, 1 << (across - 1).bit_length())
    high = tile_blocks // wide
    if low is not None:
        wide = high = _LOW_SIDE
    tiles = -(-down // high) * -(-across // wide)
    if "other_ptr" in arguments:
        arguments |= {"tiles": tiles, "count": more}
        tiles += -(-more // (wide * high * BLOCK * BLOCK))
    launch(
        kernel,
        (tiles,),
        _OPTIONS if low is None else _LOW_OPTIONS,
        **first,
        **(_NO_LOW if low is None else _arguments(low)),
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
