"""The base class of conditioners, which work on a tensor around its quantizer.

A conditioner turns a matrix into something that quantizes better and back again: identity is
`qdq(x)`, rotation is `unrotate(qdq(rotate(x)))`, spectral is `qdq(a) * lam @ qdq(v.T) +
qdq(residual)`. A new outlier trick is one conditioner. The published ones are in `conditioners`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, fused, pack, unpack
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.numerics.kernels.request import or_reference


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
    """A matrix [t c] between quantization and use, packed.

    Attributes:
        tensors: all that `decode` needs, in an order of the conditioner's own; None for a scale
            that does not exist. Where FP4 units multiply the codes (`Conditioner.basis`): three of
            the packed matrix first, and of a split matrix then three for each factor, left [t k]
            and right [k c].
        low: the low-rank part, where encoding has computed it; `decode` does without.
        dense: the product [t c] of the low-rank part, likewise.
        found: what encoding has found for later steps; see `Conditioner.take_over`.
        values: [t c] of the operand that the GEMM takes, likewise.
    """

    tensors: tuple[Any, ...]
    low: LowRank | None = None
    dense: Tensor | None = None
    found: Any = None
    values: Tensor | None = None

    @property
    def packed(self) -> Packed:
        """The packed matrix, or the residual of a split one."""
        return Packed(*self.tensors[:3])  # type: ignore[arg-type]

    @property
    def factors(self) -> tuple[Packed, Packed]:
        """The packed factors of a split matrix."""
        return Packed(*self.tensors[3:6]), Packed(*self.tensors[6:9])  # type: ignore[arg-type]

    def stored(self) -> Encoded:
        """Return the tensors and what was found, without what `decode` can compute again."""
        return Encoded(self.tensors, found=self.found)


# A class that overrides the first of two methods, and not the second, has codes that do not know
# what the first one does now.
_CODED_BY = {"__call__": "encode", "for_matrix": "decode"}
# Methods that `groups` of a class further up knows nothing about.
_ROTATING = ("forward", "inverse", "__call__", "encode", "decode")


def _is_newer(kind: type, method: str, other: str) -> bool:
    """Return whether a class has one method from a class that is derived from the other's owner."""
    names = next(vars(each) for each in kind.__mro__ if {method, other} & vars(each).keys())
    return method in names and other not in names


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
        has_codes: `encode` and `decode` give the result of a call. Found for each class: it has an
            `encode`, and does not override the call alone. Otherwise x_hat is saved densely.
        writes_values: `encode` takes `dtype`, too, the dtype of a GEMM that takes x_hat next or
            None, and may write x_hat at once. A class with an `encode` of its own says so itself.
    """

    is_direct: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    uses_row_mask: ClassVar[bool] = False
    needs_state: ClassVar[bool] = False
    has_codes: ClassVar[bool] = False
    writes_values: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _is_newer(cls, "encode", "writes_values"):
            cls.writes_values = False
        if _is_newer(cls, "__call__", "is_direct"):
            cls.is_direct = False
        if "has_codes" in vars(cls):
            return
        if any(_is_newer(cls, method, other) for method, other in _CODED_BY.items()):
            cls.has_codes = False
        elif "encode" in vars(cls):
            cls.has_codes = True

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
        """Return the tensors that a call hands to the quantizer, the largest last; by default x."""
        x_hat = self(x, quantizer, dim=dim, key=key, row_mask=row_mask)
        return [Part("tensor", x, x_hat[: x.shape[0], : x.shape[1]])]

    def encode(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
    ) -> Encoded:
        """Quantize x [t c], which is not empty, to codes and scales; see `has_codes`.

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
        """Return x_hat from the result of `encode` for an x of this shape."""
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
        """Return the conditioner with the same transform for blocks along the other dimension.

        By default itself, which is right where `dim` does not matter.
        """
        return self

    def basis(self, tensor: str) -> Hashable | None:
        """Return a name for the basis that `encode`'s codes are in; None: in none with a name.

        The transforms of two operands with equal bases cancel, and the product of their codes is
        the product of the operands: a GEMM of FP4 units can multiply them.

        Args:
            tensor: "input", "weight" or "grad_output".
        """
        return None

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> tuple[Encoded, tuple[int, int]]:
        """Return the codes that a GEMM multiplies as they are, where `basis` is not None.

        `encoded` is from `encode`, of a matrix of this shape. The result is the encoded matrix,
        with the low-rank part of a split one, and the shape of its codes.
        """
        return encoded, shape

    def bind(self, state: Any) -> Conditioner:
        """Return the conditioner of one call, given the frozen state of the layer for that call."""
        return self

    def take_over(self, found: Any) -> None:
        """Note for later steps what another layer found in the same matrix (`Encoded.found`)."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing for later steps")

    @property
    def comes_again(self) -> bool:
        """Return whether later calls of the layer bind one that is equal to this bound one.

        One that `bind` leaves as it is comes again anyway.
        """
        return False

    def tensor_amax(self) -> Tensor | None:
        """Return the amax of a direct conditioner's tensor scale; None: the tensor's own."""
        return None

    def weight_gradient(self, dw: Tensor, w: Tensor, quantizer: Quantizer | None) -> Tensor:
        """Return dL/dw of dw = dL/dw_hat [o i]; by default straight-through, which is dw."""
        return dw


class AroundQuantizer(Conditioner):
    """x_hat = inverse(Q(forward(x))): transformed, quantized, and transformed back.

    A subclass has `forward` and `inverse`; by default both leave a matrix as it is.

    Attributes:
        transformed: the name of the transformed matrix among the parts.
    """

    transformed: ClassVar[str] = "transformed"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "for_matrix" in vars(cls) and "draws" not in vars(cls):
            cls.draws = True
        if any(_is_newer(cls, method, "groups") for method in _ROTATING):
            cls.groups = AroundQuantizer.groups  # type: ignore[method-assign]

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform x [t c], fp32 or fp64 and not empty; `dim` is what the GEMM contracts."""
        return x

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform a quantized matrix back; padding that `forward` added may stay."""
        return x

    def transformed_shape(self, shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
        """Return the shape that `forward` gives a matrix of this shape; one that pads says so."""
        return shape

    def groups(self, n: int) -> Groups | None:
        """Return the rotation that `forward` and `inverse` are, of a dimension of n entries.

        Quantizers can rotate by themselves. None: these are something else.
        """
        return None

    def for_matrix(self, x: Tensor, key: Key) -> AroundQuantizer:
        """Return the transform of one matrix, where it depends on the matrix or its noise.

        Codes of such a transform need a `decode` that knows it; else they are not stored.
        """
        return self

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
        if x.numel() == 0:
            return x.to(dtype)
        own = self.for_matrix(x, key)
        groups = own.groups(x.shape[dim])
        kernels = None
        if groups is not None and type(quantizer) is Quantizer:
            kernels = fused.taking_groups(x, quantizer, dim=dim, dtype=dtype)
        if kernels is not None:
            given: dict[str, Any] = {"dim": dim, "key": key, "dtype": dtype, "groups": groups}
            with or_reference:
                found: tuple[Tensor, Any] = kernels.fake_quantize(
                    x.detach(), quantizer, scaled=True, **given
                )
                return found[0]
        quantized = quantizer(own.forward(as_fp32(x), dim=dim), dim=dim, key=key)
        return own.inverse(quantized, dim=dim).to(dtype)

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        transformed = self.for_matrix(x, key).forward(as_fp32(x), dim=dim)
        return [Part(self.transformed, transformed, quantizer(transformed, dim=dim, key=key))]

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        own = self.for_matrix(x, key)
        groups = own.groups(x.shape[dim])
        kernels = None if groups is None else fused.taking_groups(x, quantizer, dim=dim)
        if kernels is not None:
            with or_reference:
                return Encoded(kernels.pack(x.detach(), quantizer, dim=dim, key=key, groups=groups))
        transformed = own.forward(as_fp32(x), dim=dim)
        known = tuple(self.transformed_shape((x.shape[0], x.shape[1]), dim=dim))
        if transformed.shape != known:  # which `decode` reads
            raise ValueError(
                f"{type(self).__name__}.forward gives {tuple(transformed.shape)} of a matrix "
                f"{tuple(x.shape)}, and its transformed_shape says {known}; override "
                "transformed_shape"
            )
        return Encoded(pack(transformed, quantizer, dim=dim, key=key))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        packed, shape = Packed(*encoded.tensors), self.transformed_shape(shape, dim=dim)
        options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype}
        groups = self.groups(shape[dim])
        kernels = (
            None if groups is None else fused.taking_groups(packed.codes, quantizer, **options)
        )
        if kernels is not None:
            with or_reference:
                x_hat: Tensor = kernels.unpack(
                    packed, quantizer, scaled=True, groups=groups, **options
                )
                return x_hat
        quantized = unpack(packed, quantizer, dim=dim, shape=shape)
        return self.inverse(quantized, dim=dim).to(dtype)

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> tuple[Encoded, tuple[int, int]]:
        return encoded, self.transformed_shape(shape, dim=dim)


def as_fp32(x: Tensor) -> Tensor:
    """Return x in the dtype that transforms compute in: fp32, or fp64 for fp64."""
    return x if x.dtype is torch.float64 else x.float()
