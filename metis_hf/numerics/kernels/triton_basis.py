"""Orthonormal bases of a few rows in few launches, for CUDA devices; see `transforms.orthogonal`.

A product writes sums of squares beside its rows. The next launch makes rows of unit length, and
adds up their Gram matrix in parts; its last program adds up the parts, and turns the sum into the
inverse of its Cholesky factor. The launch after that multiplies with the inverse.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels.layout import readable
from metis_hf.numerics.kernels.scratch import Measured, zero_of
from metis_hf.numerics.kernels.triton_direct import cdiv, launch, padded_block
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of
from metis_hf.numerics.kernels.triton_numbers import uniform as uniform_at

_TILE = 4096  # elements of a program that looks for the largest one
_COUNT = 32  # rows of a sample that a program multiplies at once
_COLUMNS = 32  # of a tile
_DEPTH = 32  # columns of an inverse factor that a program holds
_PARTS = 32  # of a Gram matrix, at most
_OPTIONS = {"enable_fp_fusion": False}
_TINY = torch.finfo(torch.float32).tiny
_LANES = tl.constexpr(noise._LANES)
# Three products on tensor cores, nearly as good as one in fp32; AMD's compiler has no such choice.
_PRECISION = "tf32x3" if torch.version.hip is None else "ieee"


class Limits(NamedTuple):
    """The share of the old basis in a new one, the length that counts as 0, and the shift."""

    trace: float
    zero: float
    shift: float


@triton.jit
def finite_bits(bits):
    """Return the bits of fp32 numbers, zero for those that are not finite."""
    return tl.where((bits & 0x7F800000) == 0x7F800000, 0, bits)


@triton.jit(do_not_specialize=["count"])
def find_largest(x_ptr, largest_ptr, count, TILE: tl.constexpr):
    """Write the largest finite magnitude, as bits, into an int32 that is 0."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = finite_bits(bits_of(tl.load(x_ptr + at, mask=at < count, other=0.0)))
    tl.atomic_max(largest_ptr, tl.max(bits & MAGNITUDE), sem="relaxed")


@triton.jit
def _scaled(x, largest_ptr, TINY: tl.constexpr):
    """Return the finite numbers over the largest magnitude, and 0 for others."""
    unit = tl.maximum(tl.load(largest_ptr).to(tl.float32, bitcast=True), TINY)
    value = finite_bits(bits_of(x)).to(tl.float32, bitcast=True)
    return tl.math.div_rn(value, unit + tl.zeros_like(value))


def _largest_of(sample: Tensor, key: noise.Key) -> Tensor:
    """Return the largest finite magnitude of a contiguous matrix, as bits."""
    measured, count = Measured(sample, finite=True), sample.numel()
    known = None if key.scratch is None else key.scratch.amax(measured)
    if known is not None:
        return known
    largest = zero_of(key.scratch, sample.device)
    grid = (cdiv(count, _TILE),)
    given = {"x_ptr": sample, "largest_ptr": largest, "count": count}
    launch(find_largest, grid, _OPTIONS, **given, TILE=_TILE)
    return largest


@triton.jit(do_not_specialize=["word0", "word1", "count", "width"])
def multiply(
    left_ptr, sample_ptr, largest_ptr, scaled_ptr, out_ptr, squares_ptr, data_ptr, word0, word1,
    count, columns, width,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """Write left [width count] @ sample [count columns], and each row's sum of squares in a tile.

    Without `left` it is noise of the key, transposed, less a half, and the sample is made finite,
    its largest magnitude 1, and written first.
    """
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((WIDTH, COLUMNS), tl.float32)
    for begin in range(0, count, COUNT):
        other = begin + tl.arange(0, COUNT)
        inside = (row < width) & (other[None, :] < count)
        if left_ptr is None:
            index = other[None, :] * tl.cdiv(width, _LANES) + row // _LANES
            left = uniform_at(index, row % _LANES, (data_ptr, word0, word1)) - 0.5
            left = tl.where(inside, left, 0.0)
        else:
            left = tl.load(left_ptr + row * count + other[None, :], mask=inside, other=0.0)
            left = left.to(tl.float32)
        inside = (other[:, None] < count) & (column < columns)
        at = other[:, None].to(tl.int64) * columns + column
        sample = tl.load(sample_ptr + at, mask=inside, other=0.0)
        if left_ptr is None:
            sample = _scaled(sample, largest_ptr, TINY)
            tl.store(scaled_ptr + at, sample, mask=inside)
        total = tl.dot(left, sample, total, input_precision=PRECISION)
    inside = row < width
    at = row.to(tl.int64) * columns + column
    tl.store(out_ptr + at, total, mask=inside & (column < columns))
    squares = tl.sum(total * total, 1, keep_dims=True)
    tl.store(squares_ptr + tl.program_id(0) * width + row, squares, mask=inside)


@triton.jit
def _invert_factor(left, width, SHIFT: tl.constexpr):
    """Return L^-1, where L L^T is a matrix [width width] with a diagonal a little larger.

    Elimination in place: before step j the columns up to j - 1 hold the inverse of the factor of
    the leading rows, and the others what is left of the matrix, which stays symmetric. Each step
    subtracts the product of the column j, below the diagonal, and the row j.
    """
    row = tl.arange(0, left.shape[0])[:, None]
    column = tl.arange(0, left.shape[0])[None, :]
    left += tl.where(row == column, left * SHIFT, 0.0)
    for j in range(0, width):
        of_row = tl.sum(tl.where(row == j, left, 0.0), 0, keep_dims=True)
        root = 1.0 / tl.sqrt(tl.sum(tl.where(column == j, of_row, 0.0), 1, keep_dims=True))
        of_row *= root
        of_column = tl.trans(of_row)
        of_row = tl.where(column == j, root, of_row)
        rest = tl.where(column == j, 0.0, left) - of_column * of_row
        left = tl.where(row > j, rest, tl.where(row == j, of_row, left))
    return tl.where(column <= row, left, 0.0)


@triton.jit(do_not_specialize=["width", "stretches"])
def turn(
    y_ptr, squares_ptr, basis_ptr, before_ptr, out_ptr, amax_ptr, grams_ptr, counter_ptr,
    inverse_ptr, columns, width, stretches,
    TRACE: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write before [width width] @ y [width columns], and the inverse factor of its Gram matrix.

    Without `before` write rows of y over their lengths, plus a trace of the rows of `basis`, or of
    the identity. The lengths are the roots of sums over `stretches` of squares. Without `grams`,
    where parts of the Gram matrix go, no factor is made. The largest magnitude goes, as bits, into
    the int32 at `amax_ptr`.

    A product with the inverse, unlike a solve row after row, carries errors of nearly dependent
    rows over to others: hence fp64, in which they are none.
    """
    row = tl.arange(0, WIDTH)[:, None]
    other = tl.arange(0, WIDTH)[None, :]
    square = (row < width) & (other < width)
    if before_ptr is None:
        squares = tl.zeros((WIDTH, 1), tl.float32)
        for stretch in range(0, stretches):
            squares += tl.load(squares_ptr + stretch * width + row, mask=row < width, other=0.0)
        length = tl.maximum(tl.sqrt_rn(squares), ZERO)
    gram = tl.zeros((WIDTH, WIDTH), tl.float64)
    for begin in range(tl.program_id(0) * COLUMNS, columns, tl.num_programs(0) * COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        inside = (row < width) & (column < columns)
        at = row.to(tl.int64) * columns + column
        turned = tl.zeros((WIDTH, COLUMNS), tl.float64)
        if before_ptr is None:
            y = tl.load(y_ptr + at, mask=inside, other=0.0)
            y = tl.math.div_rn(y, length + tl.zeros_like(y))
            if basis_ptr is None:
                y += tl.where((column == row) & inside, TRACE, 0.0)
            else:
                y += tl.load(basis_ptr + at, mask=inside, other=0.0) * TRACE
            turned += y.to(tl.float64)
        else:
            for first in range(0, width, DEPTH):
                k = first + tl.arange(0, DEPTH)
                known = (row < width) & (k[None, :] < width)
                before = tl.load(before_ptr + row * width + k[None, :], mask=known, other=0.0)
                known = (k[:, None] < width) & (column < columns)
                at_k = k[:, None].to(tl.int64) * columns + column
                y = tl.load(y_ptr + at_k, mask=known, other=0.0).to(tl.float64)
                turned = tl.dot(before, y, turned, out_dtype=tl.float64)
        rows = turned.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rows, mask=inside)
        if amax_ptr is not None:
            tl.atomic_max(amax_ptr, tl.max(bits_of(rows) & MAGNITUDE), sem="relaxed")
        if grams_ptr is not None:
            gram = tl.dot(turned, tl.trans(turned), gram, out_dtype=tl.float64)
    if grams_ptr is not None:
        place = row * width + other
        tl.store(grams_ptr + tl.program_id(0) * width * width + place, gram, mask=square)
        tl.debug_barrier()  # all of the program's part is written before it is counted
        parts = tl.num_programs(0)
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1:
            tl.store(counter_ptr, 0)  # for the next launch
            whole = tl.zeros((WIDTH, WIDTH), tl.float64)
            for part in range(0, parts):
                whole += tl.load(
                    grams_ptr + part * width * width + place, mask=square, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
            inverse = _invert_factor(whole, width, SHIFT)
            tl.store(inverse_ptr + place, inverse, mask=square)


def _multiply(
    left: Tensor | None,
    sample: Tensor,
    width: int,
    key: noise.Key,
    largest: Tensor | None = None,
    scaled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return left [w n] @ sample [n c], and sums of squares [.. w] of the rows' parts."""
    count, columns = sample.shape
    tiles = cdiv(columns, _COLUMNS)
    out = torch.empty(width, columns, dtype=torch.float32, device=sample.device)
    squares = torch.empty(tiles, width, dtype=torch.float32, device=sample.device)
    word0, word1 = noise.static_words(key)
    launch(
        multiply,
        (tiles,),
        _OPTIONS,
        left_ptr=left,
        sample_ptr=sample,
        largest_ptr=largest,
        scaled_ptr=scaled,
        out_ptr=out,
        squares_ptr=squares,
        data_ptr=key.data,
        word0=word0,
        word1=word1,
        count=count,
        columns=columns,
        width=width,
        WIDTH=padded_block(width),
        COUNT=_COUNT,
        COLUMNS=_COLUMNS,
        PRECISION=_PRECISION,
        TINY=_TINY,
    )
    return out, squares


def _turn(
    y: Tensor,
    dtype: torch.dtype,
    limits: Limits,
    *,
    squares: Tensor | None = None,
    basis: Tensor | None = None,
    before: Tensor | None = None,
    amax: Tensor | None = None,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch `turn` of y [w c]; with a counter, an int32 that is 0, for an inverse factor too."""
    width, columns = y.shape
    programs, padded = cdiv(columns, _COLUMNS), padded_block(width)
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    grams = inverse = None
    if counter is not None:
        programs = min(programs, _PARTS)
        grams = torch.empty(programs, width, width, dtype=torch.float64, device=y.device)
        inverse = torch.empty(width, width, dtype=torch.float64, device=y.device)
    options = {"num_warps": max(1, min(16, padded * padded // 512))}  # 8 to 32 numbers of a thread
    launch(
        turn,
        (programs,),
        options | {"enable_fp_fusion": True},
        y_ptr=y,
        squares_ptr=squares,
        basis_ptr=basis,
        before_ptr=before,
        out_ptr=out,
        amax_ptr=amax,
        grams_ptr=grams,
        counter_ptr=counter,
        inverse_ptr=inverse,
        columns=columns,
        width=width,
        stretches=0 if squares is None else squares.numel() // width,
        TRACE=limits.trace,
        ZERO=limits.zero,
        SHIFT=limits.shift,
        WIDTH=padded,
        COLUMNS=_COLUMNS,
        DEPTH=min(padded, _DEPTH),
    )
    return out, inverse


def next_basis(
    y: Tensor,
    basis: Tensor | None,
    passes: int,
    limits: Limits,
    squares: Tensor | None = None,
    counter: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """See `orthogonal.next_basis`; fp32. `squares` [.. w] are sums of squares of rows, in parts."""
    y = y.contiguous()
    basis = None if basis is None else basis.contiguous()
    squares = y.square().sum(1) if squares is None else squares
    counter = zero_of(None, y.device) if counter is None else counter
    first = {"squares": squares, "basis": basis}
    y, before = _turn(y, torch.float32, limits, **first, counter=counter)
    for _ in range(1, passes):
        y, before = _turn(y, torch.float64, limits, before=before, counter=counter)
    return _turn(y, torch.float32, limits, before=before, amax=amax)[0]


def dominant_basis(
    sample: Tensor, rank: int, n_iter: int, key: noise.Key, start: Tensor | None, limits: Limits
) -> Tensor:
    """See `spectral.dominant_basis`; `start` and the result are [k c], fp32.

    The scratch memory of the call keeps the largest magnitude of the result.
    """
    sample = readable(sample.detach()).contiguous()
    scaled = torch.empty(sample.shape, dtype=torch.float32, device=sample.device)
    largest = _largest_of(sample, key)
    counter, amax = (zero_of(key.scratch, sample.device) for _ in range(2))
    basis = start
    if basis is not None:
        _multiply(None, sample, 1, key, largest, scaled)  # which scales, too
    for left in reversed(range(n_iter + (start is None))):
        if basis is None:
            y, squares = _multiply(None, sample, rank, key, largest, scaled)
        else:
            y, squares = _multiply(basis @ scaled.T, scaled, rank, key)  # [k c] @ [c n] -> [k n]
        last: dict[str, Any] = {"amax": None if left else amax, "passes": 1 if left else 2}
        basis = next_basis(y, basis, limits=limits, squares=squares, counter=counter, **last)
    assert basis is not None
    if key.scratch is not None:
        key.scratch.keep(Measured(basis), amax)
    return basis
