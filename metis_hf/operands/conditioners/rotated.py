"""Rotations of a whole dimension around the quantizer: Hadamard (QuaRot, HALO) and random (QuIP).

Blocks of 16 as in NVIDIA's recipe are `operands.Hadamard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands import Encoded, Part, Work
from metis_hf.transforms.rotation import rotate_by, rotation_of


@dataclass(frozen=True)
class _Rotated:
    """x_hat = R^T Q(R x): rotated along one dimension, quantized, rotated back.

    In a GEMM that contracts the rotated dimension, an equal rotation of the other operand cancels:
    the product is that of the two quantized matrices. Along the other dimension the rotation comes
    out of the product, which is then rotated back. Blocks run along the contracted one either way.

    Args:
        seed: of the rotation, which is the same for every tensor of that length.
        across: rotate the dimension that the GEMM does not contract.
    """

    seed: int = 0
    across: bool = False

    kind: ClassVar[str]

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        rotated = self._rotate(x, dim)
        return self._unrotate(quantizer(rotated, dim=dim, key=key), dim).to(dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        rotated = self._rotate(x, dim)
        return [Part("rotated", rotated, quantizer(rotated, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        return Encoded(pack(self._rotate(x, dim), quantizer, dim=dim, key=key))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        packed = Packed(*encoded.tensors)
        quantized = unpack(packed, quantizer, dim=dim, shape=shape)
        return self._unrotate(quantized, dim).to(dtype)

    def work(self, shape, *, dim) -> Work:
        axis = self._axis(dim)
        rotation = rotation_of(self.kind, shape[axis], self.seed, torch.empty(0))
        flops = rotation.flops(shape[1 - axis])
        once = {"rotation": flops}
        return Work({"rotation": 2 * flops}, once, once, (shape,))

    def _axis(self, dim: int) -> int:
        return (dim + self.across) % 2

    def _rotate(self, x: Tensor, dim: int) -> Tensor:
        x = x if x.dtype is torch.float64 else x.float()
        return rotate_by(x, self.kind, self.seed, dim=self._axis(dim))

    def _unrotate(self, x: Tensor, dim: int) -> Tensor:
        return rotate_by(x, self.kind, self.seed, dim=self._axis(dim), inverse=True)


@dataclass(frozen=True)
class FullHadamard(_Rotated):
    """Randomized Hadamard rotation; see `transforms.rotation.randomized_hadamard`."""

    kind: ClassVar[str] = "hadamard"


@dataclass(frozen=True)
class RandomKronecker(_Rotated):
    """Product of two random orthogonal factors; see `transforms.rotation.random_kronecker`."""

    kind: ClassVar[str] = "kronecker"
