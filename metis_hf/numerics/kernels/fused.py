"""Finds the CUDA kernels that rotate a matrix or subtract a low-rank part while they quantize it.

*Low-rank part*: low + Q(x - low). The kernels multiply the packed factors for each tile, on tensor
cores, without an fp32 matrix in memory; see `triton_tiles.low_rank_of`. The sums differ from a
GEMM's in their last bits. `pack_with_values` followed by `unpack` gives the same bits as
`fake_quantize`.

*Rotation*: groups x of n = 2^s entries become H D x, with random signs D and Sylvester's matrix
H / sqrt(n). The kernels use fp32 butterflies in registers: they multiply each entry by its sign /
sqrt(n); then, for d = 1, 2, 4 .. n/2, they replace entries d apart by their sum and difference. The
inverse multiplies by 1 / sqrt(n), runs the same stages, and multiplies by the signs. Everywhere
else `transforms.hadamard` multiplies by a matrix; its sums differ from the butterflies' in their
last bits.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from metis_hf.numerics.definition import OuterScale, QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels.choice import kernels_for, triton_backend
from metis_hf.numerics.kernels.layout import BLOCK, DTYPES, covers_rule, has_kernel
from metis_hf.numerics.layout import Tile

_WIDEST = 128  # largest rank of a low-rank part
_MOST = 2**30  # elements: indices in padded tiles have 32 bits


def taking_low(
    lengths: Tensor, quantizer: QuantizerDefinition, *, dim: int, shape: tuple[int, int]
) -> ModuleType | None:
    """Return the module of kernels that take a `low` with these lengths; None if there is none.

    `shape` is the shape of the matrix [t c]. The module's functions are named as in `kernels`.
    """
    (rows, columns), rank = shape, len(lengths)
    # Row blocks: rows are whole pairs of blocks. Column blocks: widths are multiples of 16.
    whole = columns % (2 * BLOCK) == 0 if dim % 2 else (columns | rank) % BLOCK == 0
    known = (
        whole
        and 0 < rank <= _WIDEST
        and 0 < rows * columns <= _MOST
        and lengths.dtype is torch.float32
        and quantizer.outer_scale is not OuterScale.TOKEN
    )
    return _kernels(lengths, quantizer, dim, shape) if known else None


def taking_groups(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int] | None = None,
) -> ModuleType | None:
    """Return the module of kernels that take `groups` along the blocks' dimension `dim`; or None.

    Args:
        x: [t c], not empty; or the codes of a rotated matrix.
        quantizer, dim: as in `kernels`.
        dtype: dtype of the values.
        shape: shape of the rotated matrix, if `x` holds its codes.
    """
    known = dtype in DTYPES
    if shape is None:
        known = known and x.dim() == 2 and x.dtype in DTYPES and has_kernel(x, quantizer, dim)
    return _kernels(x, quantizer, dim, shape or tuple(x.shape)) if known else None


def _kernels(
    x: Tensor, quantizer: QuantizerDefinition, dim: int, shape: tuple[int, ...]
) -> ModuleType | None:
    fused = quantizer.fmt == NVFP4 and quantizer.tile is Tile.ROW
    if fused and covers_rule(shape, quantizer, dim) and kernels_for(x) == "triton":
        return triton_backend()
    return None
