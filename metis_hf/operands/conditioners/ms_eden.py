"""MS-EDEN's random basis (Quartet II, arXiv 2601.22813): a Hadamard rotation with fresh signs.

The quantizer's part, nearest elements and corrected scales, is `numerics.scaling.corrected_scale`.
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
    """Data of the noise keys of weight and input, which a gradient meets; 0-dim int32."""

    weight: Tensor
    input: Tensor


@dataclass(frozen=True)
class RandomHadamard(AroundQuantizer):
    """x_hat = R^T Q(R x), R = H D: groups of 128 along `dim`, signs D of the content of a tensor.

    Both operands of a GEMM that have their signs of the same tensor are in the same basis, as
    hardware wants them: in dgrad the weight's signs, in wgrad the input's. So every input
    and every state of a weight has fresh signs, an equal call equal ones, and nothing is drawn. The
    result keeps the padding along `dim`, a multiple of 16: the product of the rotated copies
    contains it. Where 128 does not divide that, groups are of the largest power of two that does.

    Args:
        seed: what signs depend on besides that content.
        partner: "weight" or "input", whose signs a gradient takes; None: signs of the matrix's own
            content, as its noise key has it.
        content: of the partner, 0-dim int32; `bind` puts it in. Without, the matrix's own counts.
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
