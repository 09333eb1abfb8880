"""The base class of conditioners, which work on a tensor around its quantizer.

A conditioner turns a matrix into something that quantizes better and back again: identity is
`qdq(x)`, rotation is `unrotate(qdq(rotate(x)))`, spectral is `qdq(a) * lam @ qdq(v.T) +
qdq(residual)`. A new outlier trick is one conditioner. The published ones are in `conditioners`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack


class Part(NamedTuple):
    """One tensor that a conditioner hands to the quantizer, before and after; for statistics."""

    name: str
    before: Tensor
    after: Tensor


class LowRank(NamedTuple):
    """(left * lengths) @ right [t c]: the thin part of a split operand."""

    left: Tensor  # [t k], quantized
    lengths: Tensor  # [k]
    right: Tensor  # [k c], quantized

    def dense(self) -> Tensor:
        """Multiply out [t k] @ [k c] -> [t c]."""
        return (self.left * self.lengths) @ self.right


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
        """Return it without what can be made again."""
        return Encoded(self.tensors)


class Codes(NamedTuple):
    """Codes of an encoded matrix [t c], for a GEMM that multiplies them as they are.

    Attributes:
        packed: of the matrix, in the basis that `Conditioner.basis` names; of what a split leaves.
        shape: of the matrix that was packed.
        factors: of a split matrix: left [t k] and right [k c], packed.
        low: of a split matrix: the same, unpacked.
    """

    packed: Packed
    shape: tuple[int, int]
    factors: tuple[Packed, Packed] | None = None
    low: LowRank | None = None


class Work(NamedTuple):
    """Work of a conditioner on a matrix [t c]: FLOPs by kind, see `costs.LayerCost`.

    Attributes:
        call: from the matrix to the operand.
        encode: to what is stored of it.
        decode: from there to the operand.
        quantized: shapes of the tensors that it hands to the quantizer.
        low_rank: rank of a part that a GEMM of FP4 codes has to multiply apart.
        channels: channels that are quantized twice, and so are as many more channels of a GEMM.
        sparse: elements that a GEMM multiplies apart, one by one, at most.
        rotated: (what tells rotations apart, dimension that is rotated); None: none is.
        gradient: to the gradient of a weight, from that of the operand.
    """

    call: Mapping[str, float]
    encode: Mapping[str, float]
    decode: Mapping[str, float]
    quantized: tuple[tuple[int, int], ...]
    low_rank: int = 0
    channels: int = 0
    sparse: int = 0
    rotated: tuple[Hashable, int] | None = None
    gradient: Mapping[str, float] = {}


def overrides(kind: type, method: str, other: str) -> bool:
    """Return whether a class defines one method after another one, in a class that derives from it.

    What the other one does is then of a version of the class that did not know it.
    """
    order = [each for each in kind.__mro__ if method in vars(each) or other in vars(each)]
    return method in vars(order[0]) and other not in vars(order[0])


class Conditioner(ABC):
    """x [t c] -> x_hat [t c] in `dtype`, quantizing what it likes on the way.

    `__call__` is all that a subclass must have. Along `dim`, which the GEMM contracts, x_hat may
    come with padding. Subclasses are frozen dataclasses: equal ones are taken to do the same, so
    that layers that read one tensor share what is quantized of it.

    Attributes:
        is_direct: it is the quantizer alone, so that a GEMM may take the tensor scale apart.
        draws: the result depends on the key where the quantizer draws nothing, as by random signs.
        uses_row_mask: the result depends on which rows are padding. Without it nobody looks for
            padding among the rows, and `row_mask` is None.
        needs_state: it quantizes by what `bind` gives it of the layer's state, and measures
            nothing of interest without.
        call_is_stored: `encode`, if there is one, knows what a call does; found of each class.
    """

    is_direct: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    uses_row_mask: ClassVar[bool] = False
    needs_state: ClassVar[bool] = False
    call_is_stored: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.call_is_stored = not overrides(cls, "__call__", "encode")
        if overrides(cls, "__call__", "is_direct"):
            cls.is_direct = False

    @abstractmethod
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
        """Quantize a matrix for a GEMM.

        Args:
            x: [t c]
            quantizer: how its parts are quantized.
            dim: the dimension that the GEMM contracts, along which blocks run.
            key: noise key; a part that is quantized beside others takes `key.fold(n)`.
            row_mask: [t] bool, False for rows of padding; None: all rows are tokens.
            dtype: of the result.
        """

    def with_factors(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, LowRank | None]:
        """Return the result of a call and its low-rank part; None where there is none."""
        return self(x, quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype), None

    def parts(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
    ) -> list[Part]:
        """Return what a call hands to the quantizer, the largest tensor last; by default x."""
        x_hat = self(x, quantizer, dim=dim, key=key, row_mask=row_mask)
        return [Part("tensor", x, x_hat[: x.shape[0], : x.shape[1]])]

    @property
    def has_codes(self) -> bool:
        """Return whether `encode` and `decode` give what a call gives; else x_hat is saved densely.

        They are overridden, and the call is not overridden after them.
        """
        return type(self).encode is not Conditioner.encode and self.call_is_stored

    def encode(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
    ) -> Encoded:
        """Return what is stored of x [t c], not empty, in codes and scales; see `has_codes`.

        Together with `decode` it gives what a call gives, bit for bit.
        """
        raise NotImplementedError(f"{type(self).__name__} has no codes: ask `has_codes` before")

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return x_hat of what `encode` gave for x of that shape."""
        raise NotImplementedError(f"{type(self).__name__} has no codes: ask `has_codes` before")

    def decode_with_factors(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, LowRank | None]:
        """Return the result of `decode` and its low-rank part; None where there is none."""
        return self.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype), None

    def turned(self) -> Conditioner:
        """Return what transforms the same where blocks run along the other dimension.

        By default itself: right for what does not look at `dim`.
        """
        return self

    def basis(self, tensor: str) -> Hashable | None:
        """Return a name for the basis that `encode`'s codes are in; None: in none with a name.

        Two operands of equal basis have the product of their codes: what is done to one cancels
        what is done to the other. So a GEMM of FP4 units can multiply them.

        Args:
            tensor: "input", "weight" or "grad_output": what the operand is made of.
        """
        return None

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> Codes:
        """Return the codes of what `encode` gave for x of that shape, where `basis` is not None."""
        return Codes(Packed(*encoded.tensors[:3]), shape)  # type: ignore[arg-type]

    def bind(self, state: Any) -> Conditioner:
        """Return the conditioner of one call, which knows what the layer's state froze for it."""
        return self

    @property
    def comes_again(self) -> bool:
        """Return whether later calls of the layer bind one that is equal to this bound one.

        One that `bind` leaves as it is comes again anyway.
        """
        return False

    def tensor_amax(self) -> Tensor | None:
        """Return what a direct conditioner has the tensor scale made of; None: of the tensor."""
        return None

    def weight_gradient(self, dw: Tensor, w: Tensor, quantizer: Quantizer | None) -> Tensor:
        """Return dL/dw of dw = dL/dw_hat [o i]; by default straight-through, which is dw."""
        return dw

    def work(self, shape: tuple[int, int], *, dim: int) -> Work:
        """Return what planning counts for a matrix; by default the quantizer's share alone.

        A conditioner that multiplies matrices overrides it, or plans of runs leave that out.
        """
        return Work({}, {}, {}, (shape,))


class AroundQuantizer(Conditioner):
    """x_hat = inverse(Q(forward(x))): transformed, quantized, and transformed back.

    A subclass has `forward` and `inverse`; by default both leave a matrix as it is.

    Attributes:
        transformed: the name of the transformed matrix among the parts.
    """

    transformed: ClassVar[str] = "transformed"

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform x [t c], fp32 or fp64 and not empty; `dim` is what the GEMM contracts."""
        return x

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform a quantized matrix back; padding that `forward` added may stay."""
        return x

    def transformed_shape(self, shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
        """Return the shape that `forward` gives a matrix of this shape; one that pads says so."""
        return shape

    def for_matrix(self, x: Tensor, key: Key) -> AroundQuantizer:
        """Return the transform of one matrix, where it depends on the matrix or its noise.

        Codes of such a transform need a `decode` that knows it; else they are not stored.
        """
        return self

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return type(self).for_matrix is not AroundQuantizer.for_matrix

    @property
    def has_codes(self) -> bool:
        own = type(self)
        fixed = own.for_matrix is AroundQuantizer.for_matrix
        return (fixed or own.decode is not AroundQuantizer.decode) and self.call_is_stored

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        if x.numel() == 0:
            return x.to(dtype)
        own = self.for_matrix(x, key)
        quantized = quantizer(own.forward(as_fp32(x), dim=dim), dim=dim, key=key)
        return own.inverse(quantized, dim=dim).to(dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        transformed = self.for_matrix(x, key).forward(as_fp32(x), dim=dim)
        return [Part(self.transformed, transformed, quantizer(transformed, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        transformed = self.for_matrix(x, key).forward(as_fp32(x), dim=dim)
        known = tuple(self.transformed_shape((x.shape[0], x.shape[1]), dim=dim))
        if transformed.shape != known:  # which `decode` reads
            raise ValueError(
                f"{type(self).__name__}.forward gives {tuple(transformed.shape)} of a matrix "
                f"{tuple(x.shape)}, and its transformed_shape says {known}; override "
                "transformed_shape"
            )
        return Encoded(pack(transformed, quantizer, dim=dim, key=key))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        packed, shape = Packed(*encoded.tensors), self.transformed_shape(shape, dim=dim)
        quantized = unpack(packed, quantizer, dim=dim, shape=shape)
        return self.inverse(quantized, dim=dim).to(dtype)

    def codes(self, encoded, quantizer, *, dim, shape) -> Codes:
        shape = self.transformed_shape(shape, dim=dim)
        return super().codes(encoded, quantizer, dim=dim, shape=shape)


def as_fp32(x: Tensor) -> Tensor:
    """Return x in the dtype that transforms compute in: fp32, or fp64 for fp64."""
    return x if x.dtype is torch.float64 else x.float()
