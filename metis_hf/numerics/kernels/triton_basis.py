"""Subspace iteration in few launches, on CUDA devices; see `transforms.spectral.dominant_basis`.

Each launch multiplies matrices; each of its programs also writes its part of the result's Gram
matrix. The last program to finish adds up the parts and computes the inverse of the Cholesky factor
of the sum. The next launch multiplies by this inverse. Results differ from the torch operations of
`transforms.orthogonal` in their last bits.

This module imports triton; import it only where it is used.
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

_TILE = 4096  # elements per program of `find_largest`
_COUNT = 32  # rows of a sample that a program multiplies at once
_COLUMNS = 32  # columns per program
_DEPTH = 32  # columns of an inverse factor that a program holds at once
_OPTIONS = {"enable_fp_fusion": False}
_TINY = torch.finfo(torch.float32).tiny
_LANES = tl.constexpr(noise._LANES)
# Three TF32 products on tensor cores, nearly as precise as fp32; AMD's compiler lacks this option.
_PRECISION = "tf32x3" if torch.version.hip is None else "ieee"


class Limits(NamedTuple):
    """`orthogonal.LIMITS`: weight of the old basis, length that counts as 0, diagonal shift."""

    trace: float
    zero: float
    shift: float


@triton.jit
def finite_bits(bits):
    """Return the bits of fp32 numbers, with zero for non-finite ones."""
    return tl.where((bits & 0x7F800000) == 0x7F800000, 0, bits)


@triton.jit(do_not_specialize=["count"])
def find_largest(x_ptr, largest_ptr, count, TILE: tl.constexpr):
    """Write the largest finite magnitude, as bits, into an int32 that is 0."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = finite_bits(bits_of(tl.load(x_ptr + at, mask=at < count, other=0.0)))
    tl.atomic_max(largest_ptr, tl.max(bits & MAGNITUDE), sem="relaxed")


@triton.jit
def _scaled(x, largest_ptr, TINY: tl.constexpr):
    """Divide finite numbers by the largest magnitude; return 0 for the others."""
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
    """Count a program that has written its part; return whether it is the last of `count`."""
    tl.debug_barrier()  # the whole part is written before it is counted
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)  # reset for the next launch
    return last


@triton.jit
def _keep_product(parts_ptr, part, a, b, width):
    """Write a @ b^T [width width], fp64, as part number `part` of a sum."""
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
    """Let the last program write the inverse of the Cholesky factor of a Gram matrix.

    Each program has written its part of y @ y^T. With `lengths_ptr` the Gram matrix is instead the
    one of y / length + TRACE b: each program has also written its part of y @ b^T, behind the first
    part, and the lengths, the roots of the diagonal of y @ y^T, are written to `lengths_ptr`. Sums
    have a fixed order: first within groups of programs, then over the groups.
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
                whole += tl.where((row == column) & inside, TRACE * TRACE, 0.0)  # b @ b^T, nearly I
            tl.store(inverse_ptr + at, _invert_factor(whole, width, SHIFT), mask=inside)


@triton.jit
def _invert_factor(left, width, SHIFT: tl.constexpr):
    """Return L^-1, where L L^T is a matrix [width width] with its diagonal times 1 + SHIFT.

    Elimination in place: before step j, the columns up to j - 1 hold the inverse of the leading
    rows' factor; the other columns hold the rest of the matrix, which stays symmetric. Each step
    subtracts the product of column j, below the diagonal, and row j.
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
    """Load a tile of the previous basis, or of the identity if there is none; fp64."""
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

    L is the Cholesky factor of the Gram matrix of y / length + TRACE basis; without `basis_ptr` the
    basis is the identity. Without `left_ptr`, left is the transposed noise of the key minus a half;
    the sample is then first made finite, scaled to a largest magnitude of 1, and written to
    `scaled_ptr`. Without `inverse_ptr` only the scaled sample is written.
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

    With `lengths_ptr`, y is replaced by y / length + TRACE basis, as in `multiply`. Without
    `inverse_ptr` no factor is computed. The largest magnitude goes, as bits, into the int32 at
    `amax_ptr`.

    Unlike a row-by-row solve, a product with the inverse spreads errors of nearly dependent rows to
    other rows. The product is therefore in fp64, where these errors are negligible.
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
    """Rows y [w c], and the factors that turn them into a basis; see `multiply`."""

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
    """Launch `multiply` for left [w n], sample [n c]; without counters only scale the sample."""
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
    """Launch `turn`; with counters also compute the factor for another pass."""
    before, lengths, basis = rows[1:]
    given = {"y_ptr": rows.y, "before_ptr": before, "lengths_ptr": lengths, "basis_ptr": basis}
    y = torch.empty_like(rows.y, dtype=dtype)
    depth = min(_DEPTH, padded_block(len(y)))
    return _Rows(y, _launch(turn, y, limits, counters, 1, **given, amax_ptr=amax, DEPTH=depth))


def _launch(
    kernel: Any, out: Tensor, limits: Limits, counters: Tensor | None, kinds: int, **given: Any
) -> Tensor | None:
    """Launch a kernel that writes rows [w c]; with counters return their inverse factor [w w].

    Each program writes its parts of `kinds` different products.
    """
    (width, columns), parts, inverse = out.shape, None, None
    programs, padded = cdiv(columns, _COLUMNS), padded_block(width)
    if counters is not None:
        parts = out.new_empty(kinds * programs, width, width, dtype=torch.float64)
        inverse = out.new_empty(width, width, dtype=torch.float64)
    # At most 32 numbers of a Gram matrix per thread.
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

    The key's scratch memory caches the largest magnitude of the result.
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
