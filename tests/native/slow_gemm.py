"""A slow `scaled_mm`, which reads the buffers that the real one gets; imports nothing of metis_hf.

Where a scale lies is written out from cuBLAS's manual ("1D block scaling factors layout"): tiles of
128 rows by 4 columns, row by row, 512 bytes each; inside one the scale of row r and column c is at
16 (r % 32) + 4 (r / 32) + c. Sums are in float64 and rounded once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])  # by code: the sign is the high bit
BLOCKS = {ScalingType.BlockWise1x16: 16, ScalingType.BlockWise1x32: 32}
SCALES = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}


def elements(codes: Tensor) -> np.ndarray:
    """fp32 [rows n] of bytes [rows n/2]."""
    data = codes.numpy()
    values = np.empty((data.shape[0], 2 * data.shape[1]), np.float32)
    values[:, 0::2] = VALUES[data % 16]
    values[:, 1::2] = VALUES[data // 16]
    return values


def place_of_scale(row: int, column: int, columns: int) -> int:
    """Where the scale of a row and a block of that row is, among `columns` blocks."""
    tile = (row // 128) * -(-columns // 4) + column // 4
    row, column = row % 128, column % 4
    return 512 * tile + 16 * (row % 32) + 4 * (row // 32) + column


def block_values(codes: Tensor, scale: Tensor, size: int) -> np.ndarray:
    """code * block scale, fp32 [rows n]; the product is exact."""
    values, numbers = elements(codes), scale.float().numpy()
    blocks = -(-values.shape[1] // size)
    for row in range(values.shape[0]):
        for block in range(blocks):
            factor = numbers[place_of_scale(row, block, blocks)]
            values[row, block * size : (block + 1) * size] *= factor
    return values


def check(matrix: Tensor, scales: list[Tensor], recipe, swizzle) -> int:
    """What torch's CUDA kernel demands of an operand [rows K/2]; returns the block size."""
    size = BLOCKS[recipe[0]]
    rows, length = matrix.shape[0], 2 * matrix.shape[1]
    assert matrix.dtype is torch.float4_e2m1fn_x2
    assert matrix.is_contiguous()
    assert length % 32 == 0
    assert swizzle[0] is SwizzleType.SWIZZLE_32_4_4
    padded = 128 * -(-rows // 128) * 4 * -(-length // size // 4)
    assert scales[0].dtype is SCALES[size]
    assert scales[0].shape == (padded,)
    assert scales[0].is_contiguous()
    if size == 16:
        assert recipe[1:] == [ScalingType.TensorWise]
        assert swizzle[1:] == [SwizzleType.NO_SWIZZLE]
        assert (scales[1].dtype, scales[1].shape) == (torch.float32, (1,))
    assert len(scales) == len(recipe) == len(swizzle) == (2 if size == 16 else 1)
    return size


class SlowGemm:
    """`torch.nn.functional.scaled_mm` for FP4; it counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # (m, n, k)

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: list[Tensor],
        scale_recipe_a,
        scale_b: list[Tensor],
        scale_recipe_b,
        swizzle_a=None,
        swizzle_b=None,
        bias=None,
        output_dtype=torch.bfloat16,
    ) -> Tensor:
        a, b = mat_a, mat_b.t()
        size = check(a, scale_a, scale_recipe_a, swizzle_a)
        assert size == check(b, scale_b, scale_recipe_b, swizzle_b)
        assert a.shape[1] == b.shape[1]
        assert b.shape[0] % 16 == 0
        assert bias is None
        assert size == 16 or output_dtype is torch.bfloat16
        self.calls.append((a.shape[0], b.shape[0], 2 * a.shape[1]))
        left = block_values(a.view(torch.uint8), scale_a[0], size).astype(np.float64)
        right = block_values(b.view(torch.uint8), scale_b[0], size).astype(np.float64)
        out = torch.from_numpy(left @ right.T)
        for _, *scale in (scale_a, scale_b):
            if scale:
                out *= scale[0].double()
        return out.to(output_dtype)
