"""Operand = conditioner x quantizer: how one tensor enters one GEMM.

A conditioner turns a matrix into something that quantizes better and back again:
identity is `qdq(x)`, rotation is `unrotate(qdq(rotate(x)))`, spectral is
`qdq(a) * lam @ qdq(v.T) + qdq(residual)`. A new outlier trick is one conditioner.

Each can also stop half way: `encode` gives what is stored of the operand, in codes and scales, and
`decode` the operand from that, bit for bit what the conditioner gives directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.transforms.hadamard import SIZE, rotate, unrotate


class Part(NamedTuple):
    """One tensor that a conditioner hands to the quantizer, before and after; for statistics."""

    name: str
    before: Tensor
    after: Tensor


class Encoded(NamedTuple):
    """A matrix [t c] between quantization and use.

    Attributes:
        tensors: what `decode` needs, in the order in which the conditioner knows them.
        low: the low-rank part, where encoding has computed it; `decode` does without.
        dense: its product [t c], likewise.
    """

    tensors: tuple[Tensor | None, ...]
    low: LowRank | None = None
    dense: Tensor | None = None

    def stored(self) -> Encoded:
        """Without what can be made again."""
        return Encoded(self.tensors)


class LowRank(NamedTuple):
    """(left * lengths) @ right [t c]: the thin part of a split operand."""

    left: Tensor  # [t k], quantized
    lengths: Tensor  # [k]
    right: Tensor  # [k c], quantized

    def dense(self) -> Tensor:
        """[t k] @ [k c] -> [t c]"""
        return (self.left * self.lengths) @ self.right


class Quantized(NamedTuple):
    """An operand of a GEMM: values * scale, perhaps padded along the contracted dimension.

    Attributes:
        values: [t c] in the GEMM's dtype.
        scale: 0-dim tensor scale that the GEMM applies to its output, or None.
        low: the low-rank part of an operand that is split.
    """

    values: Tensor
    scale: Tensor | None = None
    low: LowRank | None = None

    def error(self, x: Tensor) -> Tensor:
        """x [t c] less what stands for it, [t c] in the dtype of x or wider."""
        values = self.values if self.scale is None else self.values * self.scale
        return x - values


class Work(NamedTuple):
    """What a conditioner computes of a matrix [t c]: FLOPs by kind, see `costs.LayerCost`.

    Attributes:
        call: from the matrix to the operand.
        encode: to what is stored of it.
        decode: from there to the operand.
        quantized: shapes of the tensors that it hands to the quantizer.
    """

    call: Mapping[str, float]
    encode: Mapping[str, float]
    decode: Mapping[str, float]
    quantized: tuple[tuple[int, int], ...]


class Conditioner(Protocol):
    """x [t c] -> x_hat [t c] in `dtype`, quantizing what it likes on the way.

    Along `dim`, which the GEMM contracts, x_hat may come with padding. A conditioner may have more,
    as those here do: `encode` and `decode`, without which operands are saved densely;
    `work(shape, dim=...) -> Work`, without which runs cannot be planned; `uses_row_mask = True`,
    without which nobody looks for padding among the rows.
    """

    def __call__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor: ...

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None
    ) -> list[Part]: ...


@dataclass(frozen=True)
class Identity:
    """Quantizes the matrix as it is."""

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        return quantizer(x, dim=dim, key=key, dtype=dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        return [Part("tensor", x, quantizer(x, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        return Encoded(pack(x, quantizer, dim=dim, key=key))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        return unpack(Packed(*encoded.tensors), quantizer, dim=dim, shape=shape, dtype=dtype)

    def work(self, shape, *, dim) -> Work:
        return Work({}, {}, {}, (shape,))


@dataclass(frozen=True)
class Hadamard:
    """Rotates blocks of 16 along the contraction dimension, quantizes, rotates back.

    Both operands of a GEMM rotated with the same seed give the product of the rotated copies,
    since the rotation is orthonormal and cancels in the contraction. The result keeps the padding
    along `dim`, a multiple of 16: rounding in the rotated basis makes it non-zero, and the product
    of the rotated copies contains it.
    """

    seed: int = 0

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        rotated = rotate(_fp32(x), dim=dim, seed=self.seed)
        quantized = quantizer(rotated, dim=dim, key=key)
        return unrotate(quantized, dim=dim, seed=self.seed).to(dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        rotated = rotate(_fp32(x), dim=dim, seed=self.seed)
        return [Part("rotated", rotated, quantizer(rotated, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        rotated = rotate(_fp32(x), dim=dim, seed=self.seed)
        return Encoded(pack(rotated, quantizer, dim=dim, key=key))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        shape = _rotated_shape(shape, dim=dim)
        quantized = unpack(Packed(*encoded.tensors), quantizer, dim=dim, shape=shape)
        return unrotate(quantized, dim=dim, seed=self.seed).to(dtype)

    def work(self, shape, *, dim) -> Work:
        t, c = shape
        product = 2.0 * SIZE * t * c  # of every block with the 16 x 16 matrix
        once = {"rotation": product}
        return Work({"rotation": 2 * product}, once, once, (shape,))


def _rotated_shape(shape, *, dim) -> tuple[int, int]:
    """Of what `rotate` makes of a matrix."""
    rows, columns = shape
    if dim % 2:
        return rows, columns + -columns % SIZE
    return rows + -rows % SIZE, columns


def _fp32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


IDENTITY = Identity()


@dataclass(frozen=True)
class Operand:
    """A tensor on its way into a GEMM.

    Args:
        quantizer: None leaves the tensor in high precision.
        conditioner: what is done around the quantizer.
    """

    quantizer: Quantizer | None = None
    conditioner: Conditioner = IDENTITY

    def __call__(
        self,
        x: Tensor,
        *,
        dim: int,
        key: Key,
        dtype: torch.dtype,
        row_mask: Tensor | None = None,
    ) -> Quantized:
        """Quantizes for a GEMM in `dtype`.

        Args:
            x: [t c]
            dim: the dimension that the GEMM contracts.

        Returns:
            x_hat [t c]. It has a scale only if `dtype` is bf16, which holds code * block scale
            exactly but not the product with the fp32 tensor scale.
        """
        if self.quantizer is None:
            return Quantized(x.to(dtype))
        if self._keeps_scale_apart(dtype):
            return Quantized(*self.quantizer.unscaled(x, dim=dim, key=key, dtype=dtype))
        conditioner: Any = self.conditioner
        options = {"dim": dim, "key": key, "row_mask": row_mask, "dtype": dtype}
        if hasattr(conditioner, "with_factors") and x.numel() > 0:
            x_hat, low = conditioner.with_factors(x, self.quantizer, **options)
            return Quantized(x_hat, low=low)
        return Quantized(conditioner(x, self.quantizer, **options))

    def _keeps_scale_apart(self, dtype: torch.dtype) -> bool:
        if dtype is not torch.bfloat16 or self.quantizer is None:
            return False
        direct = isinstance(self.conditioner, Identity)  # a copied or unpickled one too
        return direct and bool(self.quantizer.two_level)

    def has_codes(self, x: Tensor) -> bool:
        """Whether `encode` takes x [t c]."""
        known = isinstance(self.quantizer, Quantizer) and hasattr(self.conditioner, "encode")
        return known and x.numel() > 0

    def encode(self, x: Tensor, *, dim: int, key: Key, row_mask: Tensor | None = None) -> Encoded:
        """The first half of a call: what is stored of x [t c]. See `has_codes`."""
        conditioner: Any = self.conditioner
        return conditioner.encode(x, self.quantizer, dim=dim, key=key, row_mask=row_mask)

    def decode(
        self, encoded: Encoded, *, dim: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantized:
        """The second half: what the call returns, bit for bit, for x of that shape."""
        assert self.quantizer is not None
        if self._keeps_scale_apart(dtype):
            packed = Packed(*encoded.tensors)  # type: ignore[arg-type]
            values = unpack(packed, self.quantizer, dim=dim, shape=shape, dtype=dtype, scaled=False)
            return Quantized(values, packed.global_scale)
        conditioner: Any = self.conditioner
        options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype}
        if hasattr(conditioner, "decode_with_factors"):
            x_hat, low = conditioner.decode_with_factors(encoded, self.quantizer, **options)
            return Quantized(x_hat, low=low)
        return Quantized(conditioner.decode(encoded, self.quantizer, **options))


HIGH_PRECISION = Operand()
