"""The projection of a tall matrix on a thin basis, for CUDA devices; see `transforms.products`.

Operation by operation it is twenty launches around one GEMM. Here one launch makes the GEMM's right
side, and two turn its result into unit columns and their lengths.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.triton_direct import launch
from metis_hf.numerics.kernels.triton_numbers import bits_of, cast

_TILE = 1024  # elements of a program that splits
_ROWS = 128  # of a program that adds up
_COLUMNS = 16
_OPTIONS = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["width"])
def split(
    v_ptr, out_ptr, columns, width, rows, row_stride, column_stride,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write PARTS matrices [rows columns] in bf16, whose sum is the transpose of v [columns k]."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, column = at // columns, at % columns
    place = column.to(tl.int64) * row_stride + row.to(tl.int64) * column_stride
    rest = tl.load(v_ptr + place, mask=row < width, other=0.0)
    for part in tl.static_range(PARTS):
        rounded = cast(rest, tl.bfloat16)
        tl.store(out_ptr + part * rows * columns + at, rounded, mask=row < rows)
        rest = rest - bits_of(rounded).to(tl.float32, bitcast=True)


def bf16_parts(v: Tensor, parts: int, rows: int) -> Tensor:
    """Split v [c k] in fp32 into matrices in bf16 whose sum is its transpose: [parts rows c].

    Rows from k on are zero.
    """
    columns, width = v.shape
    out = torch.empty(parts, rows, columns, dtype=torch.bfloat16, device=v.device)
    with torch.cuda.device_of(v):
        launch(
            split,
            (triton.cdiv(rows * columns, _TILE),),
            _OPTIONS,
            v_ptr=v,
            out_ptr=out,
            columns=columns,
            width=width,
            rows=rows,
            row_stride=v.stride(0),
            column_stride=v.stride(1),
            PARTS=parts,
            TILE=_TILE,
        )
    return out


@triton.jit
def _divide(a, b):
    """Divide a matrix by a row."""
    return tl.math.div_rn(a, b + tl.zeros_like(a))


@triton.jit(do_not_specialize=["count"])
def add_parts(
    products_ptr, out_ptr, largest_ptr, squares_ptr, count, width, padded,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up PARTS products, and write each column's largest magnitude and its sum of squares.

    These are of the program's rows; the squares are in units of that magnitude's, so that they do
    not leave fp32.
    """
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < width)
    at = row.to(tl.int64) * (PARTS * padded) + column
    total = tl.load(products_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(products_ptr + at + part * padded, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * width + column, total, mask=inside)
    largest = tl.max(tl.abs(total), 0, keep_dims=True)
    scaled = _divide(total, tl.where(largest == 0, 1.0, largest))
    squares = tl.sum(scaled * scaled, 0, keep_dims=True)  # NaN, where there is one
    of_block = block * width + column
    tl.store(largest_ptr + of_block, largest, mask=column < width)
    tl.store(squares_ptr + of_block, squares, mask=column < width)


@triton.jit(do_not_specialize=["count", "blocks"])
def to_unit_columns(
    out_ptr, largest_ptr, squares_ptr, lengths_ptr, count, width, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Divide each column by its length, in place, and write the lengths."""
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    largest = tl.zeros((1, COLUMNS), tl.float32)
    for begin in range(0, blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)[:, None]
        inside = (other < blocks) & (column < width)
        found = tl.load(largest_ptr + other * width + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(found, 0, keep_dims=True))
    unit = tl.where(largest == 0, 1.0, largest)
    squares = tl.zeros((1, COLUMNS), tl.float32)
    for begin in range(0, blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)[:, None]
        inside = (other < blocks) & (column < width)
        found = tl.load(largest_ptr + other * width + column, mask=inside, other=0.0)
        found = _divide(found, unit)
        share = tl.load(squares_ptr + other * width + column, mask=inside, other=0.0)
        squares += tl.sum(found * found * share, 0, keep_dims=True)
    length = tl.sqrt_rn(squares)
    if block == 0:
        tl.store(lengths_ptr + column, length * largest, mask=column < width)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < count) & (column < width)
    at = row.to(tl.int64) * width + column
    value = _divide(tl.load(out_ptr + at, mask=inside, other=0.0), unit)
    # At least 1 where there is an entry; a NaN stays.
    tl.store(out_ptr + at, _divide(value, tl.where(length < 1.0, 1.0, length)), mask=inside)


def unit_columns(products: Tensor, parts: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the sum of products [t parts*k'], without padding, as unit columns and lengths.

    Sums are in a fixed order: equal products give equal bits.

    Returns:
        [t k] and [k], fp32.
    """
    count, padded = products.shape[0], products.shape[1] // parts
    blocks = triton.cdiv(count, _ROWS)
    out = torch.empty(count, width, dtype=torch.float32, device=products.device)
    lengths = torch.empty(width, dtype=torch.float32, device=products.device)
    largest, squares = torch.empty(2, blocks, width, dtype=torch.float32, device=products.device)
    grid = (blocks, triton.cdiv(width, _COLUMNS))
    sizes = {"count": count, "width": width, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    with torch.cuda.device_of(products):
        launch(
            add_parts,
            grid,
            _OPTIONS,
            products_ptr=products,
            out_ptr=out,
            largest_ptr=largest,
            squares_ptr=squares,
            padded=padded,
            PARTS=parts,
            **sizes,
        )
        launch(
            to_unit_columns,
            grid,
            _OPTIONS,
            out_ptr=out,
            largest_ptr=largest,
            squares_ptr=squares,
            lengths_ptr=lengths,
            blocks=blocks,
            BLOCKS=_ROWS,
            **sizes,
        )
    return out, lengths
