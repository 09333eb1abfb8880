"""Rotations of a whole dimension around the quantizer: Hadamard (QuaRot, HALO) and random (QuIP).

Blocks of 16 as in NVIDIA's recipe are in `hadamard`, groups with fresh signs in `ms_eden`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from metis_hf.operands.conditioner import AroundQuantizer
from metis_hf.transforms.rotation import rotate_by


@dataclass(frozen=True)
class _Rotated(AroundQuantizer):
    """x_hat = R^T Q(R x): rotated along one dimension, quantized, rotated back.

    If the GEMM contracts the rotated dimension, an equal rotation of the other operand cancels, and
    the result is the product of the two quantized matrices. A rotation of the other dimension
    factors out of the product, which is then rotated back. Blocks run along the contracted
    dimension either way.

    Args:
        seed: of the rotation, which is the same for all dimensions of the same length.
        across: rotate the dimension that the GEMM does not contract.
    """

    seed: int = 0
    across: bool = False

    kind: ClassVar[str]
    transformed: ClassVar[str] = "rotated"

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        return rotate_by(x, self.kind, self.seed, dim=self._axis(dim))

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        return rotate_by(x, self.kind, self.seed, dim=self._axis(dim), inverse=True)

    def turned(self) -> _Rotated:
        return replace(self, across=not self.across)

    def basis(self, tensor: str) -> Hashable | None:
        return None if self.across else self

    def _axis(self, dim: int) -> int:
        return (dim + self.across) % 2


@dataclass(frozen=True)
class FullHadamard(_Rotated):
    """Randomized Hadamard rotation; see `transforms.rotation.randomized_hadamard`."""

    kind: ClassVar[str] = "hadamard"


@dataclass(frozen=True)
class RandomKronecker(_Rotated):
    """Product of two random orthogonal factors; see `transforms.rotation.random_kronecker`."""

    kind: ClassVar[str] = "kronecker"
