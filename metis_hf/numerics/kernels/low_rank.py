"""Quantizers of the rest of a matrix beside a low-rank part, low + Q(x - low).

A CUDA device's kernels multiply the packed factors out for each tile, on tensor cores, and neither
read nor write a matrix of fp32: see `triton_tiles.low_rank_of`. Sums differ in their last bits from
a GEMM's; half way and on (`pack_with_values`, `unpack`) are the whole way, to the bit.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from metis_hf.numerics.definition import OuterScale, QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels.choice import kernels_for, triton_backend
from metis_hf.numerics.kernels.layout import BLOCK, covers_rule
from metis_hf.numerics.layout import Tile

_WIDEST = 128  # rank of a low-rank part
_MOST = 2**30  # elements: places in padded tiles are counted in 32 bits


def backend(
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
        and quantizer.fmt == NVFP4
        and quantizer.tile is Tile.ROW
        and quantizer.outer_scale is not OuterScale.TOKEN
        and covers_rule(shape, quantizer, dim)
    )
    return triton_backend() if known and kernels_for(lengths) == "triton" else None
