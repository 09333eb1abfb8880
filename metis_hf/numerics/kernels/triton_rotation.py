"""Device functions of the Triton kernels, for CUDA: rotation of groups in registers.

`fused` has the definition. Results differ from `transforms.hadamard` in their last bits.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metis_hf.numerics.kernels.triton_numbers import uniform


@triton.jit
def _stage(x, APART: tl.constexpr):
    """Replace pairs of entries that lie APART elements apart by their sums and differences."""
    COUNT: tl.constexpr = x.numel
    pairs = tl.permute(tl.reshape(x, (COUNT // (2 * APART), 2, APART)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))


@triton.jit
def _butterflies(x, SIZE: tl.constexpr, APART: tl.constexpr):
    """Return sqrt(SIZE) H x of groups whose entries lie APART elements of the tile apart."""
    turned = x
    for stage in tl.static_range(7):  # enough for groups of 128, the largest
        if (1 << stage) < SIZE:
            turned = _stage(turned, APART << stage)
    return tl.reshape(turned, x.shape)


@triton.jit
def rotate(
    x,
    place,
    signs,
    SIZE: tl.constexpr,
    SIGNED: tl.constexpr,
    LANES: tl.constexpr,
    BACK: tl.constexpr,
):
    """Return H D x of the groups of a tile [GR 16 GC 16], or with BACK D H x; fp32.

    Args:
        place: place of the tile, which holds whole groups.
        signs: (pointer to the data, two words) of the noise key of D.
        SIGNED: if False, D is the identity.
        LANES: whether groups run along the last dimension; else along the first.
    """
    _, _, row, column = place
    entry = row % SIZE
    APART: tl.constexpr = 1 if LANES else 16 * x.shape[2]
    if LANES:
        entry = column % SIZE
    sign = 1.0
    if SIGNED:
        sign = tl.where(uniform(entry // 16, entry % 16, signs) < 0.5, -1.0, 1.0)
    if BACK:
        turned = _butterflies(x * SIZE**-0.5, SIZE, APART) * sign
    else:
        turned = _butterflies(x * (sign * SIZE**-0.5), SIZE, APART)
    return turned


@triton.jit
def rotated(bits, place, signs, SIZE: tl.constexpr, SIGNED: tl.constexpr, LANES: tl.constexpr):
    """Rotate the groups of a tile, given and returned as fp32 bits."""
    x = rotate(bits.to(tl.float32, bitcast=True), place, signs, SIZE, SIGNED, LANES, False)
    return x.to(tl.int32, bitcast=True)
