"""Operands of GEMMs on FP4 units: codes and scales, and the thin factors of split operands.

A split operand [m n] is  far @ near + residual  with near [k n] and residual quantized along n,
which the GEMM contracts, and far [m k] in high precision. The product with b [p n] is

    residual @ b_residual^T                             in FP4, the large one
    + far @ (near @ b_residual^T)                       in FP4, then [m k] @ [k p] in high precision
    + (residual @ b_near^T + far @ (near @ b_near^T)) @ b_far^T     where b is split too
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels.scratch import Scratch
from metis_hf.numerics.native import NativeMatrix, multiply, native_matrix
from metis_hf.operands.conditioner import Encoded, LowRank
from metis_hf.operands.operand import Operand


class NativeOperand(NamedTuple):
    """An operand of an FP4 GEMM; emulated GEMMs take `Quantized`.

    Attributes:
        main: the matrix that is multiplied in FP4 (of a split operand, the residual); the GEMM
            contracts its second dimension.
        contracted: the dimension of the operand [t c] that the GEMM contracts.
        dtype: of results.
        near: [k n], the low-rank factor along the contracted dimension.
        far: [m k], the other factor times the lengths, in `dtype`.
        low: the low-rank part of the operand [t c].
    """

    main: NativeMatrix
    contracted: int
    dtype: torch.dtype
    near: NativeMatrix | None = None
    far: Tensor | None = None
    low: LowRank | None = None

    @classmethod
    def of(
        cls,
        encoded: Encoded,
        operand: Operand,
        *,
        dim: int,
        shape: tuple[int, int],
        contracted: int,
        dtype: torch.dtype,
    ) -> NativeOperand:
        """Make the operand from `operand.encode(.., dim=dim)` of a matrix of that shape."""
        quantizer = operand.quantizer
        assert isinstance(quantizer, Quantizer)
        encoded, shape = operand.conditioner.codes(encoded, quantizer, dim=dim, shape=shape)
        main = native_matrix(encoded.packed, quantizer, dim=dim, shape=shape, contracted=contracted)
        if encoded.low is None:
            return cls(main, contracted, dtype)
        left, lengths, right = encoded.low
        along_rows = contracted % 2 == 1
        near_shape = right.shape if along_rows else left.shape
        near = native_matrix(
            encoded.factors[int(along_rows)],
            quantizer,
            dim=dim,
            shape=(near_shape[0], near_shape[1]),
            contracted=contracted,
        )
        far = left * lengths if along_rows else (lengths[:, None] * right).T
        return cls(main, contracted, dtype, near, far.to(dtype), encoded.low)

    def transposed(self) -> NativeOperand:
        """Return the operand unchanged: its contracted dimension is already fixed."""
        return self

    def error_along(
        self, x: Tensor, directions: Tensor, lengths: Tensor, scratch: Scratch | None
    ) -> Tensor:
        """See `Quantized.error_along`."""
        x_hat, scale = self.main.values(), self.main.global_scale
        if scale is not None:
            x_hat = x_hat * scale[0]
        if self.low is not None:
            low = self.low.dense()
            x_hat = x_hat + (low if self.contracted % 2 else low.T)
        if self.low is not None or self.dtype is not torch.bfloat16:
            x_hat = x_hat.to(self.dtype)  # as emulation, which in BF16 applies the scale unrounded
        return ((x - x_hat).to(self.dtype) @ directions.to(self.dtype)) * lengths


def product(a: NativeOperand, b: NativeOperand) -> Tensor:
    """Return a [m n] @ b [p n]^T -> [m p]; see the module for the equation."""
    dtype = a.dtype
    out = multiply(a.main, b.main, dtype)
    if a.near is not None and a.far is not None:
        out.addmm_(a.far, multiply(a.near, b.main, dtype))
    if b.near is not None and b.far is not None:
        left = multiply(a.main, b.near, dtype)
        if a.near is not None and a.far is not None:
            left.addmm_(a.far, multiply(a.near, b.near, dtype))
        out.addmm_(left, b.far.T)
    return out
