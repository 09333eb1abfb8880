"""A weight stored as a low-rank part and a residual.

u [o k], s [k], vh [k i], residual [o i], all trainable, with w = gain * (u * s) @ vh + residual.
Gradients follow the chain rule through w_hat with straight-through quantizers; written out, they
are the paper's five equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Encoded, LowRank
from metis_hf.operands.operand import Operand, Quantized
from metis_hf.operands.weight_forms import DENSE, HIGH_PRECISION_BITS, WeightForm
from metis_hf.transforms import decompose_weight


@dataclass(frozen=True)
class SplitWeight(WeightForm):
    """u, s, vh and residual: w = gain * (u * s) @ vh + residual.

    Args:
        rank: k
        compensated: w_hat = low + Q(residual + (u * s) @ vh - low) with low = Q(u) * s @ Q(vh);
            the correction is a constant to autograd. The paper has w_hat = low + Q(residual).
        unit_rms: u and vh have entries of unit RMS: they are orthonormal factors times
            sqrt(out_features) and sqrt(in_features). Adam moves every entry by about the learning
            rate, so orthonormal factors, with entries of 1/sqrt(n), would change sqrt(n) times as
            much relative to their size, and the dominant part would train at a much higher rate
            than in a dense weight.
        exact_factors: the factors stay in high precision (arXiv 2411.05007), so that there is
            nothing to compensate: w_hat = (u * s) @ vh + Q(residual), with the operand's
            conditioner around Q.
        side_branch: the exact factors are a separate branch that reads the unquantized input:
            y = s (x vh^T) u^T + x_hat Q(residual)^T. Autograd differentiates the branch, so the
            factors train like plain layers.
        gain: 1 for orthonormal factors, as published; 1 / sqrt(out_features in_features) with
            `unit_rms`, set by `sized`.
    """

    rank: int
    compensated: bool = True
    unit_rms: bool = False
    exact_factors: bool = False
    side_branch: bool = False
    gain: float = 1.0

    names: ClassVar[tuple[str, ...]] = ("u", "s", "vh", "weight_residual")
    undecayed: ClassVar[tuple[str, ...]] = ("u", "vh")
    is_split: ClassVar[bool] = True

    @classmethod
    def beside_gemm(cls, rank: int) -> SplitWeight:
        """Return the form with a side branch that the authors of arXiv 2509.00404 train."""
        return cls(rank, compensated=False, exact_factors=True, side_branch=True)

    def sized(self, out_features: int, in_features: int) -> SplitWeight:
        gain = (out_features * in_features) ** -0.5 if self.unit_rms else 1.0
        return replace(self, gain=gain)

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        o, i, k = out_features, in_features, self.rank
        return (o, k), (k,), (k, i), (o, i)

    def dense(self, params: Sequence[Tensor]) -> Tensor:
        u, s, vh, residual = params
        kind = residual.device.type if residual.device.type != "meta" else "cpu"
        with torch.autocast(kind, enabled=False):  # autocast would round factors and sum
            return torch.addmm(residual, u * (s * self.gain), vh)

    def in_gemm(self, params: Sequence[Tensor]) -> tuple[WeightForm, Sequence[Tensor]]:
        return (DENSE, params[-1:]) if self.side_branch else (self, params)

    def beside(self, x: Tensor, params: Sequence[Tensor]) -> Tensor | None:
        if not self.side_branch:
            return None
        u, s, vh, _ = params
        return F.linear(F.linear(x, vh) * (s * self.gain), u)

    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        if operand.quantizer is None:
            return Quantized(self.dense(tuple(p.detach() for p in params)).to(dtype))
        u, s, vh, residual = (p.detach() for p in params)
        u_hat, vh_hat = self._factors(u, vh, operand, dim=dim, key=key)
        low = LowRank(u_hat, s * self.gain, vh_hat)
        dense = self._product(low)
        if self.exact_factors:
            w_hat = operand(residual, dim=dim, key=key.fold(3), dtype=dense.dtype).values
            return Quantized((w_hat + dense).to(dtype), low=low)
        x, minus = self._outside(u, s, vh, residual, dense)
        w_hat = operand.quantizer(x, dim=dim, key=key.fold(3), dtype=dtype, minus=minus, plus=dense)
        return Quantized(w_hat, low=low)

    def encodes(self, params: Sequence[Tensor], operand: Operand) -> bool:
        return super().encodes(params, operand) and not self.exact_factors

    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        quantizer = operand.quantizer
        assert quantizer is not None
        u, s, vh, residual = (p.detach() for p in params)
        factors = (
            *pack(u, quantizer, dim=dim, key=key.fold(1)),
            *pack(vh, quantizer, dim=dim, key=key.fold(2)),
        )
        low = self._unpacked(factors, (u, s, vh), quantizer, dim=dim)
        dense = self._product(low)
        x, minus = self._outside(u, s, vh, residual, dense)
        rest = pack(x, quantizer, dim=dim, key=key.fold(3), minus=minus)
        return Encoded((*rest, *factors), low, dense)

    def decode(
        self,
        params: Sequence[Tensor],
        encoded: Encoded,
        operand: Operand,
        *,
        dim: int,
        dtype: torch.dtype,
    ) -> Quantized:
        quantizer, low, dense = operand.quantizer, encoded.low, encoded.dense
        assert quantizer is not None
        if low is None:
            stored = tuple(p.detach() for p in params[:3])
            low = self._unpacked(encoded.tensors[3:], stored, quantizer, dim=dim)
        if dense is None:
            dense = self._product(low)
        shape = (params[-1].shape[0], params[-1].shape[1])
        packed = Packed(*encoded.tensors[:3])
        w_hat = unpack(packed, quantizer, dim=dim, shape=shape, dtype=dtype, plus=dense)
        return Quantized(w_hat, low=low)

    def _unpacked(
        self, packed: Sequence[Any], stored: Sequence[Tensor], quantizer: Quantizer, *, dim: int
    ) -> LowRank:
        u, s, vh = stored
        u_hat, vh_hat = (
            unpack(Packed(*codes), quantizer, dim=dim, shape=(like.shape[0], like.shape[1]))
            for codes, like in ((packed[:3], u), (packed[3:], vh))
        )
        return LowRank(u_hat.to(u.dtype), s * self.gain, vh_hat.to(vh.dtype))

    @staticmethod
    def _product(low: LowRank) -> Tensor:
        """Return gain * (u_hat * s) @ vh_hat [o i], fp32 or fp64."""
        dense = low.dense()
        return dense if dense.dtype is torch.float64 else dense.float()

    def _outside(
        self, u: Tensor, s: Tensor, vh: Tensor, residual: Tensor, low: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return (matrix quantized outside the factors, part subtracted from it or None)."""
        return (self.dense((u, s, vh, residual)), low) if self.compensated else (residual, None)

    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        # low = g u_hat diag(s) vh_hat and dL/dlow = dw:
        #   du = g dw vh_hat^T diag(s), ds = g diag(u_hat^T dw vh_hat^T), dvh = g diag(s) u_hat^T dw
        u, s, vh, residual = (p.detach() for p in params)
        dw = dw.to(residual.dtype)
        u_hat, vh_hat = self._factors(u, vh, operand, dim=-1, key=key)
        dw_v = dw @ (vh_hat.T * self.gain)  # [o i] @ [i k] -> [o k]
        u_dw = (u_hat.T * self.gain) @ dw  # [k o] @ [o i] -> [k i]
        return [dw_v * s, (u_hat * dw_v).sum(0), s[:, None] * u_dw, dw]

    def decompose(self, w: Tensor, key: Key) -> tuple[Tensor, ...]:
        u, s, vh, residual = decompose_weight(w, self.rank, key=key)
        if self.gain != 1:
            # Exact where the root is a power of two.
            u, vh = u * w.shape[0] ** 0.5, vh * w.shape[1] ** 0.5
            residual = w.to(u.dtype) - (u * (s * self.gain)) @ vh
        return u, s, vh, residual

    def stored(self, w: Tensor, key: Key, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the parameters of a weight [o i] in the dtype in which they are stored.

        The residual is computed from the rounded factors, so it contains their rounding error.
        """
        *factors, residual = self.decompose(w, key)
        factors = [factor.to(dtype) for factor in factors]
        if dtype.itemsize < residual.dtype.itemsize:
            wide = [factor.to(residual.dtype) for factor in factors]
            residual = w.to(residual.dtype) - self.dense((*wide, torch.zeros_like(residual)))
        return (*factors, residual.to(dtype))

    def factor_bits(self, shape: tuple[int, int], bits: float) -> float:
        (o, i), k = shape, self.rank
        factors = (HIGH_PRECISION_BITS if self.exact_factors else bits) * (o + i) * k
        return (factors + 32 * k) / (o * i)

    def orthonormal(self, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return u and vh without unit-RMS scaling; they are orthonormal at initialization."""
        u, _, vh, _ = params
        return (u, vh) if self.gain == 1 else (u / u.shape[0] ** 0.5, vh / vh.shape[1] ** 0.5)

    def _factors(
        self, u: Tensor, vh: Tensor, operand: Operand, *, dim: int, key: Key
    ) -> tuple[Tensor, Tensor]:
        if operand.quantizer is None or self.exact_factors:
            return u, vh
        u_hat = operand.quantizer(u, dim=dim, key=key.fold(1)).to(u.dtype)
        vh_hat = operand.quantizer(vh, dim=dim, key=key.fold(2)).to(vh.dtype)
        return u_hat, vh_hat
