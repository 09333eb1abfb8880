"""Rotation in blocks of 16 by Hadamard's matrix: NVIDIA's with random signs (arXiv 2509.25149)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.operands.conditioner import AroundQuantizer
from metis_hf.transforms.hadamard import SIZE, padded_shape, rotate, unrotate


@dataclass(frozen=True)
class Hadamard(AroundQuantizer):
    """Rotates blocks of 16 along the contraction dimension, quantizes, rotates back.

    If both operands of a GEMM have the same seed, the GEMM gives the product of the rotated copies:
    the rotation is orthonormal and cancels in the contraction. The result keeps the padding along
    `dim` to a multiple of 16, because rounding in the rotated basis makes the padding non-zero, and
    the product of the rotated copies includes it.

    Args:
        seed: of random signs, the same in every block; None: the plain matrix, without signs.
    """

    seed: int | None = 0

    transformed: ClassVar[str] = "rotated"

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        return rotate(x, dim=dim, seed=self.seed)

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        return unrotate(x, dim=dim, seed=self.seed)

    def groups(self, n: int) -> Groups:
        return Groups(SIZE, None if self.seed is None else Key(self.seed))

    def transformed_shape(self, shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
        return padded_shape(shape, dim=dim)

    def basis(self, tensor: str) -> Hashable:
        return self
