"""Operand = conditioner x quantizer: how one tensor enters one GEMM.

`encode` returns the stored form of an operand, in codes and scales. `decode` restores the operand
from it, with the same bits as a direct call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack_with_values, unpack
from metis_hf.numerics.kernels.epilogue import error_along
from metis_hf.numerics.kernels.layout import has_kernel
from metis_hf.numerics.kernels.scratch import Measured, Scratch
from metis_hf.operands.conditioner import AroundQuantizer, Conditioner, Encoded, LowRank
from metis_hf.operands.conditioners.identity import IDENTITY


class Quantized(NamedTuple):
    """An operand of a GEMM: values * scale, possibly padded along the contracted dimension.

    Attributes:
        values: [t c] in the GEMM's dtype.
        scale: outer scale that the GEMM applies to its output, fp32: 0-dim, or one for each row
            [t 1]; or None.
        low: the low-rank part of a split operand.
    """

    values: Tensor
    scale: Tensor | None = None
    low: LowRank | None = None

    def transposed(self) -> Quantized:
        """Return the transpose of each matrix, without the low-rank part."""
        scale = self.scale
        return Quantized(self.values.mT, scale.mT if scale is not None and scale.dim() else scale)

    def factored(self, contracted: int) -> Quantized:
        """Multiply the scale into the values if it varies along the contracted dimension.

        The GEMM cannot apply such a scale to its output. The product is rounded to the values'
        dtype.
        """
        scale = self.scale
        if scale is None or scale.dim() == 0 or scale.shape[contracted] == 1:
            return self
        return Quantized((self.values * scale).to(self.values.dtype), None, self.low)

    def error_along(
        self, x: Tensor, directions: Tensor, lengths: Tensor, scratch: Scratch | None
    ) -> Tensor:
        """Return ((x - x_hat) @ directions) * lengths; see `epilogue.error_along`.

        Args:
            x: [t c]; the GEMM contracts c.
            directions: [c k]
            lengths: [k]
            scratch: of the call.
        """
        return error_along(x, self.values, self.scale, directions, lengths, scratch)


@dataclass(frozen=True)
class Operand:
    """Quantizes a tensor for a GEMM.

    Args:
        quantizer: None leaves the tensor in high precision.
        conditioner: transform around the quantizer.

    Raises:
        TypeError: the conditioner cannot be hashed.
    """

    quantizer: Quantizer | None = None
    conditioner: Conditioner = IDENTITY

    def __post_init__(self) -> None:
        if type(self.conditioner).__hash__ is None:
            raise TypeError(
                f"conditioner {type(self.conditioner).__name__} is not hashable, but quantized "
                "tensors are cached under it; make it a frozen dataclass: @dataclass(frozen=True)"
            )

    @property
    def draws(self) -> bool:
        """Return whether the result depends on the noise key."""
        if self.quantizer is None:
            return False
        return self.quantizer.needs_noise or self.conditioner.draws

    def bind(self, state: Any) -> Operand:
        """Return the operand of one call, bound to the layer's state as frozen for that call."""
        return replace(self, conditioner=self.conditioner.bind(state))

    def __call__(
        self,
        x: Tensor,
        *,
        dim: int,
        key: Key,
        dtype: torch.dtype,
        row_mask: Tensor | None = None,
    ) -> Quantized:
        """Quantize for a GEMM in `dtype`.

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
            amax = self.conditioner.tensor_amax()
            return Quantized(*self.quantizer.unscaled(x, dim=dim, key=key, dtype=dtype, amax=amax))
        x_hat, low = self.conditioner.with_factors(
            x, self.quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype
        )
        return Quantized(x_hat, low=low)

    def _keeps_scale_apart(self, dtype: torch.dtype) -> bool:
        if dtype is not torch.bfloat16 or self.quantizer is None:
            return False
        return self.conditioner.is_direct and bool(self.quantizer.two_level)

    def measured(self, x: Tensor, *, dim: int, key: Key) -> Measured | None:
        """Return the tensor whose amax kernels compute in a call with x [t c]; None: no tensor."""
        quantizer, conditioner = self.quantizer, self.conditioner
        if quantizer is None or not quantizer.two_level or not has_kernel(x, quantizer, dim):
            return None
        if quantizer.has_row_scales(x, dim):
            return None
        if conditioner.is_direct:
            return Measured(x) if conditioner.tensor_amax() is None else None
        if not isinstance(conditioner, AroundQuantizer):
            return None
        groups = conditioner.for_matrix(x, key).groups(x.shape[dim])
        return None if groups is None else Measured(x, groups, dim)

    def has_codes(self, x: Tensor) -> bool:
        """Return whether `encode` supports x [t c]."""
        known = isinstance(self.quantizer, Quantizer) and self.conditioner.has_codes
        return known and x.numel() > 0

    def encode(
        self,
        x: Tensor,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Encoded:
        """Quantize x [t c] to codes and scales: the first half of a call. See `has_codes`.

        `dtype` is the dtype of a GEMM that takes x_hat next; a kernel may then write the values of
        x_hat too.
        """
        assert self.quantizer is not None
        if dtype is not None and self.conditioner.is_direct:
            options: dict[str, Any] = {"amax": self.conditioner.tensor_amax(), "dtype": dtype}
            scaled = not self._keeps_scale_apart(dtype)
            packed, values = pack_with_values(
                x, self.quantizer, dim=dim, key=key, scaled=scaled, **options
            )
            return Encoded(packed, values=values)
        options = {"dtype": dtype} if self.conditioner.writes_values else {}
        return self.conditioner.encode(
            x, self.quantizer, dim=dim, key=key, row_mask=row_mask, **options
        )

    def decode(
        self,
        encoded: Encoded,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        factors: bool = True,
    ) -> Quantized:
        """Return the same bits as a call, from the codes of an x of this shape.

        With `factors=False` the low-rank part of a split matrix may be missing.
        """
        assert self.quantizer is not None
        if self._keeps_scale_apart(dtype):
            packed = Packed(*encoded.tensors)  # type: ignore[arg-type]
            if encoded.values is not None:
                return Quantized(encoded.values, packed.global_scale)
            values = unpack(packed, self.quantizer, dim=dim, shape=shape, dtype=dtype, scaled=False)
            return Quantized(values, packed.global_scale)
        if encoded.values is not None:
            return Quantized(encoded.values, low=encoded.low)
        options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype}
        if not factors:
            return Quantized(self.conditioner.decode(encoded, self.quantizer, **options))
        x_hat, low = self.conditioner.decode_with_factors(encoded, self.quantizer, **options)
        return Quantized(x_hat, low=low)


HIGH_PRECISION = Operand()
