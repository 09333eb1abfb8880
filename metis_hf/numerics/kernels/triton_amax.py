"""Largest magnitudes for outer scales on CUDA devices, of several tensors in one launch.

The results are exact. Magnitudes are compared as integers, which are ordered like the numbers, with
NaN above infinity: a GPU's float maximum drops NaN, and an atomic integer maximum gives the same
result in any order.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.layout import DTYPES, Groups, Low, readable
from metis_hf.numerics.kernels.scratch import Measured, Scratch, zero_of
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of
from metis_hf.numerics.kernels.triton_rotation import rotated
from metis_hf.numerics.kernels.triton_tiles import (
    blocks_in,
    launch_tiles,
    matrix_of,
    place_of_tile,
    read,
)

_TILE_BLOCKS = 32  # squares in a program's tile
_POINTERS = "amax_ptr", "rotated_ptr", "other_ptr", "other_amax_ptr"


@triton.jit
def _keep(bits, amax_ptr, row, rows, BY_ROW: tl.constexpr):
    """Raise the stored magnitudes to the largest one of a tile, or of each of its rows."""
    if BY_ROW:
        largest = tl.max(tl.max(bits & MAGNITUDE, 3, keep_dims=True), 2, keep_dims=True)
        tl.atomic_max(amax_ptr + row, largest, mask=row < rows, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(bits & MAGNITUDE), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "width", "sign0", "sign1", "tiles"])
def find_amax(
    x_ptr, minus_ptr, amax_ptr, rotated_ptr, other_ptr, other_amax_ptr, sign_ptr, sign0, sign1,
    rows, columns, row_stride, column_stride, tiles, count, left_ptr, left_scale_ptr,
    left_decode_ptr, lengths_ptr, right_ptr, right_scale_ptr, right_decode_ptr, width,
    GR: tl.constexpr, GC: tl.constexpr, BY_ROW: tl.constexpr, SIZE: tl.constexpr,
    SIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write largest magnitudes, as bits, into int32 words that are 0.

    The magnitude of x - minus goes to `amax_ptr`, after rotation to `rotated_ptr`; with BY_ROW
    there is one per row. If WIDTH > 0, `minus` is a low-rank matrix. Programs from number `tiles`
    on read the `count` elements at `other_ptr`, whose magnitude goes to `other_amax_ptr`.
    """
    if other_ptr is None or tl.program_id(0) < tiles:
        place = place_of_tile(rows, columns, GR, GC)
        low = (
            left_ptr, left_scale_ptr, left_decode_ptr, lengths_ptr,
            right_ptr, right_scale_ptr, right_decode_ptr, width,
        )  # fmt: skip
        strides = (row_stride, column_stride)
        bits, _ = read(x_ptr, minus_ptr, low, place, rows, columns, strides, LANES, WIDTH)
        if amax_ptr is not None:
            _keep(bits, amax_ptr, place[2], rows, BY_ROW)
        if rotated_ptr is not None:
            turned = rotated(bits, place, (sign_ptr, sign0, sign1), SIZE, SIGNED, LANES)
            _keep(turned, rotated_ptr, place[2], rows, BY_ROW)
    else:
        TILE: tl.constexpr = GR * GC * 256
        at = (tl.program_id(0) - tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
        others = bits_of(tl.load(other_ptr + at, mask=at < count, other=0.0))
        _keep(others, other_amax_ptr, 0, 0, False)


class Outer(NamedTuple):
    """The outer scale of a tensor, or of its rows."""

    amax: Tensor | None = None  # int32, bits of the largest magnitudes
    decode: Tensor | None = None  # fp32; the quantizing kernel writes it
    blocks: int = 1  # row blocks in the tensor, if its rows have scales
    per_row: int = 1  # row blocks in a row


def outer_of(
    x: Tensor,
    dim: int,
    *,
    by_row: bool,
    minus: Tensor | None = None,
    given: Tensor | None = None,
    scratch: Scratch | None = None,
    groups: Groups | None = None,
    low: Low | None = None,
) -> Outer:
    """Find the largest magnitudes of x - minus, from which outer scales are computed.

    Args:
        x: the tensor before it is cut into blocks along `dim`.
        by_row: whether each row of x has a scale.
        minus: contiguous, in the shape of `x`.
        given: the largest magnitude, if it is known.
        scratch: memory of the layer's call, which caches magnitudes of whole tensors.
        groups: rotation that is applied first.
        low: a low-rank matrix in place of `minus`.
    """
    shape = x.shape[:-1].numel() if by_row else ()
    decode = torch.empty(shape, dtype=torch.float32, device=x.device)
    if given is not None:
        return Outer(given.view(torch.int32), decode)
    measured, remembers = Measured(x, groups, dim), minus is low is None and not by_row
    if by_row:
        amax = torch.zeros(shape, dtype=torch.int32, device=x.device)
    else:
        known = scratch.amax(measured) if scratch is not None and remembers else None
        if known is not None:
            return Outer(known, decode)
        amax = zero_of(scratch, x.device)
    pointers = {"amax_ptr" if groups is None else "rotated_ptr": amax}
    found = [(measured, amax)] if remembers else []
    turned = measured
    if scratch is not None and not by_row:
        turned = _find_beside(measured, scratch, pointers, found)
    _launch(turned, pointers, by_row, minus, low)
    if scratch is not None:
        for each, largest in found:
            scratch.keep(each, largest)
    per_row = blocks_in(x.shape[-1])
    return Outer(amax, decode, amax.numel() * per_row, per_row)


def _find_beside(
    measured: Measured,
    scratch: Scratch,
    pointers: dict[str, Tensor],
    found: list[tuple[Measured, Tensor]],
) -> Measured:
    """Add expected magnitudes that fit into the launch, of the same tensor and of one other.

    If `found` is empty, the launch subtracts a matrix from the tensor, so that other magnitudes of
    the tensor do not fit.

    Returns:
        The measured tensor, with the rotation that the launch applies.
    """
    turned, whole = measured, bool(found)
    for each in scratch.expected():
        same, plain = each.is_of(measured.x), each.groups is None
        slot = "other_amax_ptr" if not same else "amax_ptr" if plain else "rotated_ptr"
        fits = whole if same else plain and _is_dense(each.x)
        fits = fits and slot not in pointers
        zero = scratch.zero() if fits else None
        if zero is None:
            continue
        found.append((each, zero))
        pointers[slot] = zero
        if not same:
            pointers["other_ptr"] = each.x
        elif not plain:
            turned = each
    return turned


def _is_dense(x: Tensor) -> bool:
    return x.dtype in DTYPES and (x.is_contiguous() or x.mT.is_contiguous())


def _launch(
    turned: Measured,
    pointers: dict[str, Tensor],
    by_row: bool,
    minus: Tensor | None,
    low: Low | None,
) -> None:
    x, groups, dim, _ = turned
    lanes = dim % x.dim() == x.dim() - 1
    rows = readable(x.reshape(-1, x.shape[-1])) if by_row else None
    if low is not None:
        rows = readable(x)
    matrix = matrix_of(x, lanes or groups is None, groups) if rows is None else rows
    other = pointers.get("other_ptr")
    given: dict[str, Any] = {name: pointers.get(name) for name in _POINTERS}
    launch_tiles(
        find_amax,
        _TILE_BLOCKS,
        matrix,
        groups,
        more=0 if other is None else other.numel(),
        low=low,
        minus_ptr=minus,
        BY_ROW=by_row,
        LANES=lanes,
        **given,
    )
