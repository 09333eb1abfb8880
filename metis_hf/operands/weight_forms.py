"""Forms of a stored weight, and how its parameters become the GEMM operand w_hat.

Dense: one matrix. Clipped: one matrix and a clipping strength per row. `split_weight` has the
third. The gradients are the chain rule through w_hat with straight-through quantizers.
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
    """A way to store a weight [o i]: which parameters there are, and what they stand for.

    `params` are the parameters in the order of `names`, each as `shapes` says. The last one is a
    matrix [o i]: whatever is added to it is added to the represented weight. Subclasses are frozen
    dataclasses: layers whose forms are equal can take each other's parameters, and see `fits`.

    Attributes:
        names: of the parameters in a layer and in its checkpoints.
        undecayed: names of parameters that weight decay leaves alone.
        is_split: the weight is stored as a low-rank part and a residual.
        rank: directions of the low-rank part; None where there is none.
        altered: a word for messages: what happens to the matrix before it is quantized.
    """

    names: ClassVar[tuple[str, ...]]
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_split: ClassVar[bool] = False
    altered: ClassVar[str] = ""
    rank: int | None

    def sized(self, out_features: int, in_features: int) -> WeightForm:
        """Return the form of a layer of this size, where constants of the form depend on it."""
        return self

    def fits(self, stored: WeightForm) -> bool:
        """Return whether parameters that are stored in another form are this one's as they are."""
        return self == stored

    @abstractmethod
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the parameters."""

    @abstractmethod
    def decompose(self, w: Tensor, key: Key) -> tuple[Tensor, ...]:
        """Make the parameters that represent a weight [o i]; where they are new, fp32 or fp64."""

    @abstractmethod
    def dense(self, params: Sequence[Tensor]) -> Tensor:
        """Return the represented weight [o i], in the parameters' dtype."""

    @abstractmethod
    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> Quantized:
        """Return w_hat [o i], as `Operand.__call__`."""

    def in_gemm(self, params: Sequence[Tensor]) -> tuple[WeightForm, Sequence[Tensor]]:
        """Return the form and the parameters that the layer's GEMMs multiply: all, mostly."""
        return self, params

    def beside(self, x: Tensor, params: Sequence[Tensor]) -> Tensor | None:
        """Compute what is added to the GEMM's output for the input x [... i]; None: nothing."""
        return None

    def encodes(self, params: Sequence[Tensor], operand: Operand) -> bool:
        """Return whether `quantize` has two halves, `encode` and `decode`."""
        return operand.has_codes(params[-1])

    @abstractmethod
    def encode(self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key) -> Encoded:
        """Do the first half of `quantize`: codes and scales of w_hat."""

    def decode(
        self,
        params: Sequence[Tensor],
        encoded: Encoded,
        operand: Operand,
        *,
        dim: int,
        dtype: torch.dtype,
    ) -> Quantized:
        """Do the second half: what `quantize` gives, bit for bit."""
        rows, columns = params[-1].shape
        return operand.decode(encoded, dim=dim, shape=(rows, columns), dtype=dtype)

    @abstractmethod
    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        """Carry dw = dL/dw_hat [o i] to each parameter."""

    def factor_bits(self, shape: tuple[int, int], bits: float) -> float:
        """Return the bits stored beside the matrix for each of its elements.

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
        """Share of a block's largest magnitude that its row's weights are clipped to [o]."""
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
        # Products rather than `where`: a NaN gradient shows in clipped elements too.
        through = g * ~over + shares * blocks.sign() * strength[:, None, None] * moved
        dclip = (moved * amax).sum((1, 2)) * strength * (1 - strength)
        return [dclip.to(clip.dtype), through.flatten(-2)[:, : w.shape[1]].to(w.dtype)]

    def _blocks(self, clip: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return w cut into blocks [o n 16], their largest magnitudes and t, both [o n 1]."""
        blocks = self._cut(w if w.dtype is torch.float64 else w.float())
        amax = blocks.abs().amax(-1, keepdim=True)
        return blocks, amax, self.strength(clip.to(blocks.dtype))[:, None, None] * amax

    def _cut(self, w: Tensor) -> Tensor:
        return F.pad(w, (0, -w.shape[1] % self.block)).unflatten(-1, (-1, self.block))
