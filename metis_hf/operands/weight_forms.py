"""Forms of a stored weight, and how its parameters become the GEMM operand w_hat.

Dense: one matrix. Clipped: one matrix and a clipping strength per row. `split_weight` has the third
form. Gradients follow the chain rule through w_hat with straight-through quantizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.operands.conditioner import Encoded
from metis_hf.operands.operand import Operand, Quantized

HIGH_PRECISION_BITS = 16.0  # of tensors that are not quantized, in BF16


class WeightForm(ABC):
    """A way to store a weight [o i]: its parameters, and the matrix that they represent.

    `params` are the parameters in the order of `names`, with the shapes of `shapes`. The last one
    is a matrix [o i]; adding to it adds to the represented weight. Subclasses are frozen
    dataclasses. Layers with equal forms can exchange parameters; see also `fits`.

    Attributes:
        names: of the parameters in a layer and in its checkpoints.
        undecayed: names of parameters without weight decay.
        is_split: the weight is stored as a low-rank part and a residual.
        rank: of the low-rank part; None if there is none.
        altered: participle for messages, if the matrix is changed before it is quantized.
    """

    names: ClassVar[tuple[str, ...]]
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_split: ClassVar[bool] = False
    altered: ClassVar[str] = ""
    rank: int | None

    def sized(self, out_features: int, in_features: int) -> WeightForm:
        """Return the form for a layer of this size, with its size-dependent constants set."""
        return self

    def fits(self, stored: WeightForm) -> bool:
        """Return whether this form can use parameters of the form `stored` unchanged."""
        return self == stored

    @abstractmethod
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the parameters."""

    @abstractmethod
    def decompose(self, w: Tensor, key: Key) -> tuple[Tensor, ...]:
        """Return parameters that represent a weight [o i]; computed ones are in fp32 or fp64."""

    @abstractmethod
    def dense(self, params: Sequence[Tensor]) -> Tensor:
        """Return the represented weight [o i], in the parameters' dtype."""

    @abstractmethod
    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        """Return w_hat [o i]; arguments as in `Operand.__call__`."""

    def in_gemm(self, params: Sequence[Tensor]) -> tuple[WeightForm, Sequence[Tensor]]:
        """Return the form and the parameters that the layer's GEMMs use; by default all."""
        return self, params

    def beside(self, x: Tensor, params: Sequence[Tensor]) -> Tensor | None:
        """Return the term added to the GEMM's output for the input x [... i]; None: no term."""
        return None

    def encodes(self, params: Sequence[Tensor], operand: Operand) -> bool:
        """Return whether `encode` and `decode` can replace `quantize`."""
        return operand.has_codes(params[-1])

    @abstractmethod
    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        """Return codes and scales of w_hat: the first half of `quantize`."""

    def decode(
        self,
        params: Sequence[Tensor],
        encoded: Encoded,
        operand: Operand,
        *,
        dim: int,
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the same bits as `quantize`, from the result of `encode`."""
        rows, columns = params[-1].shape
        return operand.decode(encoded, dim=dim, shape=(rows, columns), dtype=dtype)

    @abstractmethod
    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        """Return the gradient of each parameter from dw = dL/dw_hat [o i]."""

    def factor_bits(self, shape: tuple[int, int], bits: float) -> float:
        """Return the bits of the low-rank factors per element of the matrix.

        Args:
            shape: of the matrix, [o i].
            bits: of a quantized element.
        """
        return 0.0


@dataclass(frozen=True)
class DenseWeight(WeightForm):
    """One matrix."""

    names: ClassVar[tuple[str, ...]] = ("weight",)
    rank = None

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        return ((out_features, in_features),)

    def decompose(self, w: Tensor, key: Key) -> tuple[Tensor, ...]:
        return (w,)

    def dense(self, params: Sequence[Tensor]) -> Tensor:
        return params[0]

    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        return operand(params[0].detach(), dim=dim, key=key, dtype=dtype)

    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        return operand.encode(params[0].detach(), dim=dim, key=key)

    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        w = params[0].detach()
        return [operand.conditioner.weight_gradient(dw, w, operand.quantizer).to(w.dtype)]


DENSE = DenseWeight()


@dataclass(frozen=True)
class ClippedWeight(WeightForm):
    """One matrix w, clipped by clip [o]: w_hat = Q(C(w)) with C(w) = clamp(w, -t, t).

    t = strength * amax, one strength per output row, one amax per block of 16 along the row
    (OmniQuant, arXiv 2308.13137, equation 2, with the group size of NVFP4; one strength for both
    signs, as NVFP4 is symmetric). strength = sigmoid(start + clip): clip starts at zero, so weight
    decay pulls strengths to .982 rather than to 1/2.

    The quantizer is straight-through; C is differentiated exactly: a clipped element's gradient
    goes to the element that sets amax, and to clip. The represented weight is w, not clipped.

    Args:
        block: elements of a row that share an amax.
        start: logit of the strength at clip = 0; OmniQuant's 4.
    """

    block: int = 16
    start: float = 4.0

    names: ClassVar[tuple[str, ...]] = ("weight_clip", "weight")
    altered: ClassVar[str] = "clipped"
    rank = None

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        return (out_features,), (out_features, in_features)

    def fits(self, stored: WeightForm) -> bool:
        return isinstance(stored, ClippedWeight) and self.start == stored.start

    def decompose(self, w: Tensor, key: Key) -> tuple[Tensor, ...]:
        return w.new_zeros(w.shape[0]), w

    def dense(self, params: Sequence[Tensor]) -> Tensor:
        return params[1]

    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        w = params[1].detach() if operand.quantizer is None else self._clipped(params)
        return operand(w, dim=dim, key=key, dtype=dtype)

    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        return operand.encode(self._clipped(params), dim=dim, key=key)

    def strength(self, clip: Tensor) -> Tensor:
        """Return the shares of their blocks' amax to which the rows are clipped, [o]."""
        return torch.sigmoid(self.start + clip)

    def _clipped(self, params: Sequence[Tensor]) -> Tensor:
        clip, w = (p.detach() for p in params)
        blocks, _, limit = self._blocks(clip, w)
        return blocks.clamp(-limit, limit).flatten(-2)[:, : w.shape[1]]

    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
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
        # Products, not `where`, so that NaN gradients also show in clipped elements.
        through = g * ~over + shares * blocks.sign() * strength[:, None, None] * moved
        dclip = (moved * amax).sum((1, 2)) * strength * (1 - strength)
        return [dclip.to(clip.dtype), through.flatten(-2)[:, : w.shape[1]].to(w.dtype)]

    def _blocks(self, clip: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return w cut into blocks [o n 16], their amax and t, both [o n 1]."""
        blocks = self._cut(w if w.dtype is torch.float64 else w.float())
        amax = blocks.abs().amax(-1, keepdim=True)
        return blocks, amax, self.strength(clip.to(blocks.dtype))[:, None, None] * amax

    def _cut(self, w: Tensor) -> Tensor:
        return F.pad(w, (0, -w.shape[1] % self.block)).unflatten(-1, (-1, self.block))
