"""Orthonormal bases of a few rows in few launches, for CUDA devices; see `transforms.orthogonal`.

Each launch multiplies, and adds up the Gram matrix of its result in parts. The last of its programs
adds up the parts, and turns the sum into the inverse of a Cholesky factor. The launch after it
multiplies with that inverse.

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
from metis_hf.numerics.kernels.scratch import COUNTERS, Measured, counters_of, zero_of
from metis_hf.numerics.kernels.triton_direct import cdiv, launch, padded_block
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of
from metis_hf.numerics.kernels.triton_numbers import uniform as uniform_at

_TILE = 4096  # elements of a program that looks for the largest one
_COUNT = 32  # rows of a sample that a program multiplies at once
_COLUMNS = 32  # of a tile
_DEPTH = 32  # columns of an inverse factor that a program holds
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


@triton.jit
def _is_last(counter_ptr, count):
    """Count a program, which has written its share; return whether it is the last of `count`."""
    tl.debug_barrier()  # all of the share is written before it is counted
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)  # for the next launch
    return last


@triton.jit
def _keep_product(parts_ptr, part, a, b, width):
    """Write a @ b^T [width width], fp64, as one of the parts of a sum."""
    row = tl.arange(0, a.shape[0])[:, None]
    column = tl.arange(0, a.shape[0])[None, :]
    product = tl.zeros((a.shape[0], a.shape[0]), tl.float64)
    product = tl.dot(a, tl.trans(b), product, out_dtype=tl.float64)
    at = parts_ptr + (part * width + row) * width + column
    tl.store(at, product, mask=(row < width) & (column < width))


@triton.jit
def _sum(parts_ptr, count, step, at, inside):
    """Add up `count` matrices that other programs have written, `step` elements apart."""
    total = tl.zeros(at.shape, tl.float64)
    for part in range(0, count):
        part_ptr = parts_ptr + part * step + at
        total += tl.load(part_ptr, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _invert_sum(
    parts_ptr, counters_ptr, inverse_ptr, lengths_ptr, width, WIDTH: tl.constexpr,
    TRACE: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the inverse of the Cholesky factor of a Gram matrix, in the last program.

    Each program has written its part of y @ y^T. With lengths, the roots of the diagonal, which are
    written, the Gram matrix of y / length + TRACE b is meant, and a program's part of y @ b^T comes
    after its other one. Sums are in a fixed order, first in groups of programs.
    """
    KINDS: tl.constexpr = 1 if lengths_ptr is None else 2
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < width) & (column < width)
    at, size = row * width + column, width * width
    programs = tl.num_programs(0)
    step = tl.cdiv(programs, GROUPS)
    group = tl.program_id(0) // step
    members = tl.minimum(step, programs - group * step)
    if _is_last(counters_ptr + 1 + group, members):
        for kind in tl.static_range(KINDS):
            own_ptr = parts_ptr + (group * step * KINDS + kind) * size
            tl.store(own_ptr + at, _sum(own_ptr, members, KINDS * size, at, inside), mask=inside)
        groups, step = tl.cdiv(programs, step), step * KINDS * size
        if _is_last(counters_ptr, groups):
            whole = _sum(parts_ptr, groups, step, at, inside)
            if lengths_ptr is not None:
                squares = tl.where(row == column, whole, 0.0)
                down = tl.maximum(tl.sqrt(tl.sum(squares, 1, keep_dims=True)), ZERO)
                along = tl.trans(down)
                tl.store(lengths_ptr + row, down, mask=row < width)
                whole = whole / (down * along)
                cross_ptr, other = parts_ptr + size, column * width + row
                whole += _sum(cross_ptr, groups, step, at, inside) * (TRACE / down)
                whole += _sum(cross_ptr, groups, step, other, inside) * (TRACE / along)
                whole += tl.where((row == column) & inside, TRACE * TRACE, 0.0)  # of b @ b^T
            tl.store(inverse_ptr + at, _invert_factor(whole, width, SHIFT), mask=inside)


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


@triton.jit
def _basis_at(basis_ptr, row, column, columns, inside):
    """Load a tile of the basis before, of the identity if there is none."""
    if basis_ptr is None:
        tile = tl.where((column == row) & inside, 1.0, 0.0)
    else:
        at = row.to(tl.int64) * columns + column
        tile = tl.load(basis_ptr + at, mask=inside, other=0.0)
    return tile.to(tl.float64)


@triton.jit(do_not_specialize=["word0", "word1", "count", "width"])
def multiply(
    left_ptr, sample_ptr, largest_ptr, scaled_ptr, basis_ptr, out_ptr, parts_ptr, counters_ptr,
    inverse_ptr, lengths_ptr, data_ptr, word0, word1, count, columns, width,
    TRACE: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """Write y = left [width count] @ sample [count columns], its rows' lengths, and L^-1.

    L is the Cholesky factor of the Gram matrix of y / length + TRACE basis; the basis is the
    identity where there is none. Without `left` it is noise of the key, transposed, less a half,
    and the sample is made finite, its largest magnitude 1, and written first. Without `inverse` the
    scaled sample is all that counts.
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
    if inverse_ptr is not None:
        inside = (row < width) & (column < columns)
        tl.store(out_ptr + row.to(tl.int64) * columns + column, total, mask=inside)
        y, part = total.to(tl.float64), 2 * tl.program_id(0)
        _keep_product(parts_ptr, part, y, y, width)
        basis = _basis_at(basis_ptr, row, column, columns, inside)
        _keep_product(parts_ptr, part + 1, y, basis, width)
        _invert_sum(
            parts_ptr, counters_ptr, inverse_ptr, lengths_ptr, width, WIDTH,
            TRACE, ZERO, SHIFT, GROUPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def turn(
    y_ptr, lengths_ptr, basis_ptr, before_ptr, out_ptr, amax_ptr, parts_ptr, counters_ptr,
    inverse_ptr, columns, width,
    TRACE: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write before [width width] @ y [width columns], and the inverse factor of its Gram matrix.

    With `lengths` y stands for y / length + TRACE basis, as in `multiply`. Without `inverse` no
    factor is made. The largest magnitude goes, as bits, into the int32 at `amax_ptr`.

    A product with the inverse, unlike a solve row after row, carries errors of nearly dependent
    rows over to others: hence fp64, in which they are none.
    """
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    turned = tl.zeros((WIDTH, COLUMNS), tl.float64)
    for first in range(0, width, DEPTH):
        k = first + tl.arange(0, DEPTH)
        down = k[:, None]
        known = (row < width) & (k[None, :] < width)
        before = tl.load(before_ptr + row * width + k[None, :], mask=known, other=0.0)
        known = (down < width) & (column < columns)
        at = down.to(tl.int64) * columns + column
        y = tl.load(y_ptr + at, mask=known, other=0.0).to(tl.float64)
        if lengths_ptr is not None:
            y = y / tl.load(lengths_ptr + down, mask=down < width, other=1.0)
            y += _basis_at(basis_ptr, down, column, columns, known) * TRACE
        turned = tl.dot(before, y, turned, out_dtype=tl.float64)
    rows = turned.to(out_ptr.dtype.element_ty)
    at = row.to(tl.int64) * columns + column
    tl.store(out_ptr + at, rows, mask=(row < width) & (column < columns))
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(bits_of(rows) & MAGNITUDE), sem="relaxed")
    if inverse_ptr is not None:
        _keep_product(parts_ptr, tl.program_id(0), turned, turned, width)
        _invert_sum(
            parts_ptr, counters_ptr, inverse_ptr, None, width, WIDTH, TRACE, ZERO, SHIFT, GROUPS
        )


class _Rows(NamedTuple):
    """Rows y [w c], and what makes a basis of them; see `multiply`."""

    y: Tensor
    inverse: Tensor | None = None  # [w w], fp64
    lengths: Tensor | None = None  # [w], fp64
    basis: Tensor | None = None  # [w c], fp32


def _multiply(
    left: Tensor | None,
    sample: Tensor,
    width: int,
    key: noise.Key,
    limits: Limits,
    counters: Tensor | None,
    *,
    basis: Tensor | None = None,
    largest: Tensor | None = None,
    scaled: Tensor | None = None,
) -> _Rows:
    """Launch `multiply` of left [w n] and a sample [n c]; without counters it scales that alone."""
    count, columns = sample.shape
    word0, word1 = noise.static_words(key)
    lengths = sample.new_empty(width, dtype=torch.float64)
    given = {"left_ptr": left, "sample_ptr": sample, "largest_ptr": largest, "scaled_ptr": scaled}
    noise_of = {"data_ptr": key.data, "word0": word0, "word1": word1}
    constants = {"COUNT": _COUNT, "PRECISION": _PRECISION, "TINY": _TINY}
    y = sample.new_empty(width, columns, dtype=torch.float32)
    inverse = _launch(
        multiply, y, limits, counters, 2, **given, **noise_of, **constants, count=count,
        basis_ptr=basis, lengths_ptr=lengths,
    )  # fmt: skip
    return _Rows(y, inverse, lengths, basis)


def _turn(
    rows: _Rows,
    dtype: torch.dtype,
    limits: Limits,
    counters: Tensor | None = None,
    amax: Tensor | None = None,
) -> _Rows:
    """Launch `turn`; with counters for another pass."""
    before, lengths, basis = rows[1:]
    given = {"y_ptr": rows.y, "before_ptr": before, "lengths_ptr": lengths, "basis_ptr": basis}
    y = torch.empty_like(rows.y, dtype=dtype)
    depth = min(_DEPTH, padded_block(len(y)))
    return _Rows(y, _launch(turn, y, limits, counters, 1, **given, amax_ptr=amax, DEPTH=depth))


def _launch(
    kernel: Any, out: Tensor, limits: Limits, counters: Tensor | None, kinds: int, **given: Any
) -> Tensor | None:
    """Launch a kernel that writes rows [w c]; return, with counters, their inverse factor [w w].

    Its programs write parts of so many `kinds` of products.
    """
    (width, columns), parts, inverse = out.shape, None, None
    programs, padded = cdiv(columns, _COLUMNS), padded_block(width)
    if counters is not None:
        parts = out.new_empty(kinds * programs, width, width, dtype=torch.float64)
        inverse = out.new_empty(width, width, dtype=torch.float64)
    # 8 to 32 numbers of a Gram matrix in each thread
    warps = max(1 if kernel is turn else 4, min(16, padded * padded // 512))
    launch(
        kernel,
        (programs,),
        {"enable_fp_fusion": kernel is turn, "num_warps": warps},
        out_ptr=out,
        parts_ptr=parts,
        counters_ptr=counters,
        inverse_ptr=inverse,
        columns=columns,
        width=width,
        TRACE=limits.trace,
        ZERO=limits.zero,
        SHIFT=limits.shift,
        GROUPS=COUNTERS - 1,
        WIDTH=padded,
        COLUMNS=_COLUMNS,
        **given,
    )
    return inverse


def dominant_basis(
    sample: Tensor, rank: int, n_iter: int, key: noise.Key, start: Tensor | None, limits: Limits
) -> Tensor:
    """See `spectral.dominant_basis`; `start` and the result are [k c], fp32.

    The scratch memory of the call keeps the largest magnitude of the result.
    """
    sample = readable(sample.detach()).contiguous()
    scaled = torch.empty(sample.shape, dtype=torch.float32, device=sample.device)
    given: dict[str, Any] = {"largest": _largest_of(sample, key), "scaled": scaled}
    counters, amax = counters_of(key.scratch, sample.device), zero_of(key.scratch, sample.device)
    if start is None:
        rows = _multiply(None, sample, rank, key, limits, counters, **given)
    else:
        _multiply(None, sample, 1, key, limits, None, **given)
        rows = _multiply(start @ scaled.T, scaled, rank, key, limits, counters, basis=start)
    for _ in range(n_iter if start is None else n_iter - 1):
        basis = _turn(rows, torch.float32, limits).y
        rows = _multiply(basis @ scaled.T, scaled, rank, key, limits, counters, basis=basis)
    rows = _turn(rows, torch.float64, limits, counters)
    basis = _turn(rows, torch.float32, limits, amax=amax).y
    if key.scratch is not None:
        key.scratch.keep(Measured(basis), amax)
    return basis
