"""MS-EDEN's random basis (Quartet II, arXiv 2601.22813): a Hadamard rotation with fresh signs.

The quantizer's part (nearest elements, corrected scales) is `numerics.scaling.corrected_scale`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key, signs
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.operands.conditioner import AroundQuantizer, Encoded
from metis_hf.transforms.hadamard import (
    group_size,
    padded_shape,
    rotate_groups,
    unrotate_groups,
)


class Contents(NamedTuple):
    """Data of the noise keys of weight and input, the partners of a gradient; 0-dim int32."""

    weight: Tensor
    input: Tensor


@dataclass(frozen=True)
class RandomHadamard(AroundQuantizer):
    """x_hat = R^T Q(R x), R = H D: groups of 128 along `dim`, signs D from a tensor's content.

    Both operands of a GEMM take their signs from the same tensor, the weight in dgrad and the input
    in wgrad, so that they share a basis, as hardware needs. Every input and every state of a weight
    thus gets fresh signs, equal calls get equal signs, and nothing is drawn from a generator. The
    result keeps the padding along `dim` to a multiple of 16, which the product of the rotated
    copies includes. If 128 does not divide the padded length, the group size is the largest power
    of two that does.

    Args:
        seed: of the signs, besides the content.
        partner: "weight" or "input", the tensor whose signs a gradient takes; None: signs from the
            data of the matrix's own noise key.
        content: of the partner, 0-dim int32, set by `bind`; None: the matrix's own.
    """

    seed: int = 0
    partner: str | None = None
    content: Tensor | None = None

    needs_state: ClassVar[bool] = True
    transformed: ClassVar[str] = "rotated"

    def bind(self, state: Contents) -> RandomHadamard:
        if self.partner is None:
            return self
        return replace(self, content=getattr(state, self.partner))

    def for_matrix(self, x: Tensor, key: Key) -> RandomHadamard:
        return replace(self, content=self._content(x, key))

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        return rotate_groups(x, self._signs(x.shape[dim]), dim=dim)

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        return unrotate_groups(x, self._signs(x.shape[dim]), dim=dim)

    def groups(self, n: int) -> Groups:
        return Groups(group_size(n), self._key)

    def transformed_shape(self, shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
        return padded_shape(shape, dim=dim)

    def basis(self, tensor: str) -> Hashable:
        return type(self), self.seed, self.partner or tensor

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        codes = super().encode(x, quantizer, dim=dim, key=key)
        return Encoded((*codes.tensors, self._content(x, key)))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        *codes, content = encoded.tensors
        own = replace(self, content=content)
        rotated = Encoded(tuple(codes))
        return AroundQuantizer.decode(own, rotated, quantizer, dim=dim, shape=shape, dtype=dtype)

    def _content(self, x: Tensor, key: Key) -> Tensor:
        if self.content is not None:
            return self.content
        if key.data is not None:
            return key.data
        return torch.full((), key.static >> 1, dtype=torch.int32, device=x.device)

    @property
    def _key(self) -> Key:
        assert self.content is not None
        return Key(self.seed, self.content)

    def _signs(self, n: int) -> Tensor:
        """Return +-1 [group], fp32, for groups of n entries, padded or not."""
        return signs(group_size(n), self._key)
