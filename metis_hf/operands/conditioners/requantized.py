"""Backward operands made from the forward pass's quantized copy (TetraJet, arXiv 2502.20853)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands.conditioner import Conditioner, Encoded, Part


@dataclass(frozen=True)
class Requantized(Conditioner):
    """Quantizes to nearest along the columns, as fprop does, then quantizes Q(x) along `dim`.

    The second quantization is unbiased, so the expected gradient is the gradient at the operands of
    the forward pass. Quantizing x itself would not give that gradient.

    Args:
        second: the conditioner of the second quantization.
    """

    second: Conditioner

    @property
    def has_codes(self) -> bool:  # type: ignore[override]
        return self.second.has_codes

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.second.draws

    @property
    def uses_row_mask(self) -> bool:  # type: ignore[override]
        return self.second.uses_row_mask

    @property
    def needs_state(self) -> bool:  # type: ignore[override]
        return self.second.needs_state

    def bind(self, state: Any) -> Requantized:
        return replace(self, second=self.second.bind(state))

    def turned(self) -> Requantized:
        return replace(self, second=self.second.turned())

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
        x = first_copy(x, quantizer, key)
        return self.second(x, quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype)

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        x = first_copy(x, quantizer, key)
        return self.second.parts(x, quantizer, dim=dim, key=key, row_mask=row_mask)

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        x = first_copy(x, quantizer, key)
        return self.second.encode(x, quantizer, dim=dim, key=key, row_mask=row_mask)

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return self.second.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype)

    def basis(self, tensor: str) -> Hashable | None:
        return self.second.basis(tensor)

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> tuple[Encoded, tuple[int, int]]:
        return self.second.codes(encoded, quantizer, dim=dim, shape=shape)


def first_copy(x: Tensor, quantizer: Quantizer, key: Key | None = None) -> Tensor:
    """Return the first quantization of x: nearest, in blocks along the columns."""
    return quantizer.deterministic()(x, dim=-1, key=key)
