"""Kernels for CUDA devices that rotate a matrix or take off a low-rank part, in the same passes.

*A low-rank part*, low + Q(x - low): the packed factors are multiplied out for each tile, on tensor
cores, and no matrix of fp32 is read or written: see `triton_tiles.low_rank_of`. Sums differ in
their last bits from a GEMM's; half way and on (`pack_with_values`, `unpack`) are the whole way, to
the bit.

*A rotation* in groups of n = 2^s entries x, which become H D x: random signs D, and Sylvester's
matrix H / sqrt(n). In registers, by butterflies in fp32: entries times their sign / sqrt(n); then,
for d = 1, 2, 4 .. n/2, each two entries that lie d apart become their sum and their difference.
Back: times 1 / sqrt(n), the same stages, times the signs. Everywhere else `transforms.hadamard`
does it, as a product with a matrix, whose sums differ from the butterflies' in their last bits.
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

_WIDEST = 128  # rank of a low-rank part
_MOST = 2**30  # elements: places in padded tiles are counted in 32 bits


def taking_low(
    lengths: Tensor, quantizer: QuantizerDefinition, *, dim: int, shape: tuple[int, int]
) -> ModuleType | None:
    """Return the module of kernels that take a `low`, for [t c] and a part of these lengths.

    None where there is none. Its functions are named as in `kernels`.
    """
    (rows, columns), rank = shape, len(lengths)
    # Rows of whole pairs of blocks, or whole blocks of columns, in all that is packed.
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
    """Return the module of kernels that take `groups` along `dim`, as blocks lie; or None.

    Args:
        x: [t c], not empty; or codes of a rotated matrix, of this `shape`.
        quantizer, dim: as in `kernels`.
        dtype: of values.
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
