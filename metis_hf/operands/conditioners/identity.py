"""No conditioning: the quantizer alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Conditioner, Encoded, Part


@dataclass(frozen=True)
class Identity(Conditioner):
    """Quantizes the matrix directly, with a tensor scale from `tensor_amax`."""

    is_direct: ClassVar[bool] = True

    def __call__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return quantizer(x, dim=dim, key=key, dtype=dtype, amax=self.tensor_amax())

    def basis(self, tensor: str) -> Hashable:
        return "plain"

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        return [Part("tensor", x, quantizer(x, dim=dim, key=key, amax=self.tensor_amax()))]

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        return Encoded(pack(x, quantizer, dim=dim, key=key, amax=self.tensor_amax()))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return unpack(Packed(*encoded.tensors), quantizer, dim=dim, shape=shape, dtype=dtype)


IDENTITY = Identity()
