"""How a layer stores its weight, and how the stored parameters become the GEMM operand w_hat.

Dense: one matrix. Clipped: one matrix and a clipping strength per row. Split: u [o k], s [k],
vh [k i], residual [o i], all trainable, with w = gain * (u * s) @ vh + residual. The gradients are
the chain rule through w_hat with straight-through quantizers; written out they are the paper's five
equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands import Encoded, LowRank, Operand, Quantized
from metis_hf.transforms import decompose_weight


class WeightForm(Protocol):
    """A way to store a weight."""

    def dense(self, params: Sequence[Tensor]) -> Tensor:
        """The represented weight [o i], in the parameters' dtype."""

    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        """w_hat [o i], as `Operand.__call__`."""

    def encodes(self, params: Sequence[Tensor], operand: Operand) -> bool:
        """Whether `quantize` has two halves, `encode` and `decode`."""

    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        """The first half of `quantize`: codes and scales of w_hat."""

    def decode(
        self,
        params: Sequence[Tensor],
        encoded: Encoded,
        operand: Operand,
        *,
        dim: int,
        dtype: torch.dtype,
    ) -> Quantized:
        """The second half: what `quantize` gives, bit for bit."""

    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        """dw = dL/dw_hat [o i] carried to each parameter."""


class HeldWeight:
    """Codes and scales of one layer's w_hat, for as long as the parameters do not change.

    4.5 bits an element for each operand; the dense w_hat is made of them at each use.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[Any, ...], Encoded] = {}

    def operand(
        self,
        form: WeightForm,
        params: Sequence[Tensor],
        operand: Operand,
        *,
        dim: int,
        key: Key,
        dtype: torch.dtype,
    ) -> Quantized:
        """`WeightForm.quantize`, of which the first half is done once."""
        encoded = self._find(form, params, operand, dim, key)
        if encoded is None:
            return form.quantize(params, operand, dim=dim, key=key, dtype=dtype)
        return form.decode(params, encoded, operand, dim=dim, dtype=dtype)

    def _find(
        self, form: WeightForm, params: Sequence[Tensor], operand: Operand, dim: int, key: Key
    ) -> Encoded | None:
        """The codes of these parameters, made if they are not there; None where there are none."""
        if not form.encodes(params, operand) or params[-1].is_inference():
            return None
        # Storage and version guard against most changes that should not have happened.
        seen = tuple((param.data_ptr(), param._version) for param in params)
        name = (operand, dim, key.static, seen)
        if name not in self._encoded:
            encoded = form.encode(params, operand, dim=dim, key=key)
            self._encoded[name] = encoded.stored()
        return self._encoded[name]


@dataclass(frozen=True)
class DenseWeight:
    """One matrix."""

    def dense(self, params):
        return params[0]

    def quantize(self, params, operand, *, dim, key, dtype):
        return operand(params[0].detach(), dim=dim, key=key, dtype=dtype)

    def encodes(self, params, operand):
        return operand.has_codes(params[0])

    def encode(self, params, operand, *, dim, key):
        return operand.encode(params[0].detach(), dim=dim, key=key)

    def decode(self, params, encoded, operand, *, dim, dtype):
        return operand.decode(encoded, dim=dim, shape=tuple(params[0].shape), dtype=dtype)

    def gradients(self, params, dw, operand, *, key):
        estimate = getattr(operand.conditioner, "weight_gradient", None)
        if estimate is not None:  # instead of the straight-through 1
            dw = estimate(dw, params[0].detach(), operand.quantizer)
        return [dw.to(params[0].dtype)]


@dataclass(frozen=True)
class ClippedWeight:
    """clip [o] and one matrix w: w_hat = Q(C(w)) with C(w) = clamp(w, -t, t).

    t = strength * amax, one strength per output row, one amax per block of 16 along the row
    (OmniQuant, arXiv 2308.13137, equation 2, with the group size of NVFP4; one strength for both
    signs, as NVFP4 is symmetric). strength = sigmoid(start + clip): clip is what training has added
    to the start, so that weight decay pulls strengths back to .982 rather than to 1/2.

    The quantizer is straight-through, C is differentiated as it is: a clipped element's gradient
    goes to the element that sets amax, and to clip. The represented weight is w, not clipped.

    Args:
        block: elements of a row that share an amax.
        start: logit of the strength at clip = 0; OmniQuant's 4.
    """

    block: int = 16
    start: float = 4.0

    def dense(self, params):
        return params[1]

    def quantize(self, params, operand, *, dim, key, dtype):
        w = params[1].detach() if operand.quantizer is None else self._clipped(params)
        return operand(w, dim=dim, key=key, dtype=dtype)

    def encodes(self, params, operand):
        return operand.has_codes(params[1])

    def encode(self, params, operand, *, dim, key):
        return operand.encode(self._clipped(params), dim=dim, key=key)

    def decode(self, params, encoded, operand, *, dim, dtype):
        return operand.decode(encoded, dim=dim, shape=tuple(params[1].shape), dtype=dtype)

    def strength(self, clip: Tensor) -> Tensor:
        """Share of a block's largest magnitude that its row's weights are clipped to [o]."""
        return torch.sigmoid(self.start + clip)

    def _clipped(self, params) -> Tensor:
        clip, w = (p.detach() for p in params)
        blocks, _, limit = self._blocks(clip, w)
        return blocks.clamp(-limit, limit).flatten(-2)[:, : w.shape[1]]

    def gradients(self, params, dw, operand, *, key):
        clip, w = (p.detach() for p in params)
        if operand.quantizer is None:
            return [torch.zeros_like(clip), dw.to(w.dtype)]
        blocks, amax, limit = self._blocks(clip, w)
        strength = self.strength(clip.to(blocks.dtype))
        g = self._cut(dw.to(blocks.dtype))
        over = blocks.abs() > limit
        moved = (g * blocks.sign() * over).sum(-1, keepdim=True)  # dL/dt [o n 1]
        largest = blocks.abs() == amax
        shares = largest / largest.sum(-1, keepdim=True).clamp_min(1)
        # Products rather than `where`: a NaN gradient shows in clipped elements too.
        through = g * ~over + shares * blocks.sign() * strength[:, None, None] * moved
        dclip = (moved * amax).sum((1, 2)) * strength * (1 - strength)
        return [dclip.to(clip.dtype), through.flatten(-2)[:, : w.shape[1]].to(w.dtype)]

    def _blocks(self, clip: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w cut into blocks [o n 16], their largest magnitudes and t, both [o n 1]."""
        blocks = self._cut(w if w.dtype is torch.float64 else w.float())
        amax = blocks.abs().amax(-1, keepdim=True)
        return blocks, amax, self.strength(clip.to(blocks.dtype))[:, None, None] * amax

    def _cut(self, w: Tensor) -> Tensor:
        return F.pad(w, (0, -w.shape[1] % self.block)).unflatten(-1, (-1, self.block))


@dataclass(frozen=True)
class SplitWeight:
    """u, s, vh and residual: w = gain * (u * s) @ vh + residual.

    Args:
        gain: 1 for orthonormal factors, as published. 1 / sqrt(out_features in_features) for
            factors whose entries have unit RMS (orthonormal ones times sqrt(out_features) and
            sqrt(in_features)). Adam moves every entry by about the learning rate, so entries of
            1/sqrt(n) turn by a share sqrt(n) times as large, and the split would train the
            dominant part at a much higher rate than the same weight stored densely.
        compensated: w_hat = low + Q(residual + (u * s) @ vh - low) with low = Q(u) * s @ Q(vh);
            the correction is a constant to autograd. The paper has w_hat = low + Q(residual).
        exact_factors: the factors stay in high precision (arXiv 2411.05007), so that there is
            nothing to compensate: w_hat = (u * s) @ vh + Q(residual), with the operand's
            conditioner around Q.
    """

    compensated: bool = True
    gain: float = 1.0
    exact_factors: bool = False

    def dense(self, params):
        u, s, vh, residual = params
        return torch.addmm(residual, u * (s * self.gain), vh)

    def quantize(self, params, operand, *, dim, key, dtype):
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

    def encodes(self, params, operand):
        return operand.has_codes(params[-1]) and not self.exact_factors

    def encode(self, params, operand, *, dim, key):
        u, s, vh, residual = (p.detach() for p in params)
        factors = (
            *pack(u, operand.quantizer, dim=dim, key=key.fold(1)),
            *pack(vh, operand.quantizer, dim=dim, key=key.fold(2)),
        )
        low = self._unpacked(factors, (u, s, vh), operand, dim=dim)
        dense = self._product(low)
        x, minus = self._outside(u, s, vh, residual, dense)
        rest = pack(x, operand.quantizer, dim=dim, key=key.fold(3), minus=minus)
        return Encoded((*rest, *factors), low, dense)

    def decode(self, params, encoded, operand, *, dim, dtype):
        low, dense = encoded.low, encoded.dense
        if low is None:
            stored = tuple(p.detach() for p in params[:3])
            low = self._unpacked(encoded.tensors[3:], stored, operand, dim=dim)
        if dense is None:
            dense = self._product(low)
        options = {"dim": dim, "shape": tuple(params[-1].shape), "dtype": dtype, "plus": dense}
        w_hat = unpack(Packed(*encoded.tensors[:3]), operand.quantizer, **options)
        return Quantized(w_hat, low=low)

    def _unpacked(self, packed, stored, operand, *, dim) -> LowRank:
        """Packed factors of the stored ones."""
        u, s, vh = stored
        u_hat, vh_hat = (
            unpack(Packed(*codes), operand.quantizer, dim=dim, shape=tuple(like.shape))
            for codes, like in ((packed[:3], u), (packed[3:], vh))
        )
        return LowRank(u_hat.to(u.dtype), s * self.gain, vh_hat.to(vh.dtype))

    @staticmethod
    def _product(low: LowRank) -> Tensor:
        """gain * (u_hat * s) @ vh_hat [o i], fp32 or fp64."""
        dense = low.dense()
        return dense if dense.dtype is torch.float64 else dense.float()

    def _outside(self, u, s, vh, residual, low) -> tuple[Tensor, Tensor | None]:
        """What is quantized outside the factors: (a matrix, what is taken off it or None)."""
        return (self.dense((u, s, vh, residual)), low) if self.compensated else (residual, None)

    def gradients(self, params, dw, operand, *, key):
        # low = g u_hat diag(s) vh_hat and dL/dlow = dw:
        #   du = g dw vh_hat^T diag(s), ds = g diag(u_hat^T dw vh_hat^T), dvh = g diag(s) u_hat^T dw
        u, s, vh, residual = (p.detach() for p in params)
        dw = dw.to(residual.dtype)
        u_hat, vh_hat = self._factors(u, vh, operand, dim=-1, key=key)
        dw_v = dw @ (vh_hat.T * self.gain)  # [o i] @ [i k] -> [o k]
        u_dw = (u_hat.T * self.gain) @ dw  # [k o] @ [o i] -> [k i]
        return [dw_v * s, (u_hat * dw_v).sum(0), s[:, None] * u_dw, dw]

    def decompose(self, w: Tensor, rank: int, key: Key) -> tuple[Tensor, ...]:
        """(u, s, vh, residual) of a weight [o i], in this form's units; fp32 or fp64."""
        u, s, vh, residual = decompose_weight(w, rank, key=key)
        if self.gain != 1:
            # The root of the size, not the size of the root: exact where it is a power of two.
            u, vh = u * w.shape[0] ** 0.5, vh * w.shape[1] ** 0.5
            residual = w.to(u.dtype) - (u * (s * self.gain)) @ vh
        return u, s, vh, residual

    def orthonormal(self, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """u and vh in the units in which they start out orthonormal."""
        u, _, vh, _ = params
        return (u, vh) if self.gain == 1 else (u / u.shape[0] ** 0.5, vh / vh.shape[1] ** 0.5)

    def _factors(self, u, vh, operand, *, dim, key):
        if operand.quantizer is None or self.exact_factors:
            return u, vh
        u_hat = operand.quantizer(u, dim=dim, key=key.fold(1)).to(u.dtype)
        vh_hat = operand.quantizer(vh, dim=dim, key=key.fold(2)).to(vh.dtype)
        return u_hat, vh_hat
