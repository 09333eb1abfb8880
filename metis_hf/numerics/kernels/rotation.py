"""Quantizers of matrices that are rotated in groups, in the passes over memory of plain ones.

A group of n = 2^s entries x becomes H D x: random signs D, and Sylvester's matrix H / sqrt(n). On
CUDA devices the quantizer's kernel does that in registers, by butterflies in fp32: entries times
their sign / sqrt(n); then, for d = 1, 2, 4 .. n/2, each two entries that lie d apart become their
sum and their difference. Back: times 1 / sqrt(n), the same stages, times the signs.

Everywhere else `transforms.hadamard` does it, as a product with a matrix. Its sums differ from the
butterflies' in their last bits, since they are added up in another order; what is made of a rotated
matrix is equal to the bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels.choice import kernels_for, triton_backend
from metis_hf.numerics.kernels.layout import DTYPES, Groups, Packed, covers_rule, has_kernel
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.numerics.layout import Tile


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    groups: Groups,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Rotate a matrix, quantize it, and rotate it back; None where no kernel does it.

    Args:
        x: [t c], not empty.
        quantizer, key: as for `kernels.fake_quantize`.
        groups: they lie along `dim`, as blocks do.
        dim: rounded up to a multiple of 16 in the result.
        dtype: of the result, which is computed in fp32 and rounded once.
    """
    kernels = _kernels(x, quantizer, dtype) if _covers(x, quantizer, dim) else None
    if kernels is None:
        return None
    options: dict[str, Any] = {"dim": dim, "key": key, "dtype": dtype, "groups": groups}
    with or_reference:
        values: Tensor = kernels.fake_quantize(x.detach(), quantizer, scaled=True, **options)[0]
        return values
    return None


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    groups: Groups,
    *,
    dim: int,
    key: noise.Key | int | None,
) -> Packed | None:
    """Rotate a matrix, and quantize it to codes and scales; None where no kernel does it.

    Args:
        x, quantizer, groups, dim, key: as in `fake_quantize`.
    """
    kernels = _kernels(x, quantizer, torch.float32) if _covers(x, quantizer, dim) else None
    if kernels is None:
        return None
    with or_reference:
        packed: Packed = kernels.pack(x.detach(), quantizer, dim=dim, key=key, groups=groups)
        return packed
    return None


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    groups: Groups,
    *,
    dim: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """Unpack a rotated matrix, and rotate it back; None where no kernel does it.

    Args:
        packed: codes of a rotated matrix of this shape.
        quantizer, groups, dim, dtype: as in `fake_quantize`.
    """
    known = covers_rule(shape, quantizer, dim)
    kernels = _kernels(packed.codes, quantizer, dtype) if known else None
    if kernels is None:
        return None
    options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype, "groups": groups}
    with or_reference:
        values: Tensor = kernels.unpack(packed, quantizer, scaled=True, **options)
        return values
    return None


def _kernels(x: Tensor, quantizer: QuantizerDefinition, dtype: torch.dtype) -> ModuleType | None:
    """Return the kernels in force where x is, if they rotate."""
    if quantizer.fmt != NVFP4 or quantizer.tile is not Tile.ROW or dtype not in DTYPES:
        return None
    return triton_backend() if kernels_for(x) == "triton" else None


def _covers(x: Tensor, quantizer: QuantizerDefinition, dim: int) -> bool:
    return x.dim() == 2 and x.dtype in DTYPES and has_kernel(x, quantizer, dim)
