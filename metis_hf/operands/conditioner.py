"""The base class of conditioners: transforms around the quantizer of a tensor.

A conditioner turns a matrix into a form that quantizes better, and back: identity is `qdq(x)`,
rotation is `unrotate(qdq(rotate(x)))`, spectral is `qdq(a) * lam @ qdq(v.T) + qdq(residual)`. To
add a method against outliers, write a conditioner. The published ones are in `conditioners`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, fused, pack, unpack, workspace
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.numerics.kernels.request import or_reference


class Part(NamedTuple):
    """One tensor that a conditioner quantizes, before and after; for statistics."""

    name: str
    before: Tensor
    after: Tensor


class LowRank(NamedTuple):
    """(left * lengths) @ right [t c]: the low-rank part of a split operand."""

    left: Tensor  # [t k], quantized
    lengths: Tensor  # [k]
    right: Tensor  # [k c], quantized

    def dense(self) -> Tensor:
        """Multiply out [t k] @ [k c] -> [t c]."""
        return workspace.matmul(self.left * self.lengths, self.right)


class Encoded(NamedTuple):
    """A matrix [t c] that is quantized and packed, but not yet decoded.

    Attributes:
        tensors: all that `decode` needs, in the conditioner's own order; None for a missing scale.
            If FP4 units can multiply the codes (`Conditioner.basis`), three of the packed matrix
            come first, and for a split matrix then three for each factor, left [t k] and right
            [k c].
        low: the low-rank part, if `encode` computed it; `decode` can recompute it.
        dense: the product [t c] of the low-rank part, likewise.
        found: a result of `encode` for later steps; see `Conditioner.take_over`.
        values: [t c] of the GEMM's operand, if `encode` wrote them.
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
        """Return a copy with `tensors` and `found` only; `decode` recomputes the rest."""
        return Encoded(self.tensors, found=self.found)


# If a class overrides the first of two methods but not the second, its codes do not match its
# calls.
_CODED_BY = {"__call__": "encode", "for_matrix": "decode"}
# A class that overrides one of these methods does not inherit `groups`.
_ROTATING = ("forward", "inverse", "__call__", "encode", "decode")


def _is_newer(kind: type, method: str, other: str) -> bool:
    """Return whether `method` is defined in a more derived class of `kind` than `other`."""
    names = next(vars(each) for each in kind.__mro__ if {method, other} & vars(each).keys())
    return method in names and other not in names


class Conditioner(ABC):
    """Maps x [t c] to x_hat [t c] in `dtype`, quantizing x or tensors derived from it.

    A subclass must define only `__call__`. x_hat may be padded along `dim`, which the GEMM
    contracts. Subclasses are frozen dataclasses, and equal ones must give equal results: layers
    that read the same tensor share its quantized form.

    Attributes:
        is_direct: it is the quantizer alone, so that a GEMM may apply the tensor scale to its
            output.
        draws: the result depends on the key even if the quantizer draws no noise, as with random
            signs.
        uses_row_mask: the result depends on which rows are padding. Without it, `row_mask` may be
            None even if some are.
        needs_state: it quantizes with the layer's state that `bind` provides; measurements
            without one are meaningless.
        has_codes: `encode` and `decode` reproduce a call. Derived for each class: it has an
            `encode`, and does not override `__call__` alone. Otherwise x_hat is saved densely.
        writes_values: `encode` also takes `dtype`, the dtype of a GEMM that takes x_hat next, or
            None, and may write x_hat too. A class that overrides `encode` must set it again.
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
            quantizer: of x, or of the tensors derived from it.
            dim: the dimension that the GEMM contracts, along which blocks run.
            key: noise key; of several quantized tensors, each takes its own `key.fold(n)`.
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
        """Return (result of a call, its low-rank part or None)."""
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
        """Return the tensors that a call quantizes, the largest last; by default x."""
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
        """Quantize x [t c], not empty, to codes and scales; see `has_codes`.

        `encode` followed by `decode` gives the same bits as a call.
        """
        raise NotImplementedError(f"{type(self).__name__} has no codes; check `has_codes` first")

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
        raise NotImplementedError(f"{type(self).__name__} has no codes; check `has_codes` first")

    def decode_with_factors(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, LowRank | None]:
        """Return (result of `decode`, its low-rank part or None)."""
        return self.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype), None

    def turned(self) -> Conditioner:
        """Return the conditioner with the same transform for blocks along the other dimension.

        By default this one, which is right if the transform does not depend on `dim`.
        """
        return self

    def basis(self, tensor: str) -> Hashable | None:
        """Return an identifier of the basis of `encode`'s codes; None if FP4 units cannot use them.

        The transforms of two operands with equal bases cancel in a GEMM, so that FP4 units can
        multiply their codes.

        Args:
            tensor: "input", "weight" or "grad_output".
        """
        return None

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> tuple[Encoded, tuple[int, int]]:
        """Return (codes that FP4 units multiply, their shape); only if `basis` is not None.

        `encoded` comes from `encode`, of a matrix of this shape. The result includes the low-rank
        part of a split matrix.
        """
        return encoded, shape

    def bind(self, state: Any) -> Conditioner:
        """Return the conditioner of one call, given the frozen state of the layer for that call."""
        return self

    def take_over(self, found: Any) -> None:
        """Keep for later steps the `Encoded.found` of another layer that read the same matrix."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing for later steps")

    @property
    def comes_again(self) -> bool:
        """Return whether later calls of the layer bind a conditioner equal to this bound one.

        It does not matter for a conditioner that `bind` returns unchanged.
        """
        return False

    def tensor_amax(self) -> Tensor | None:
        """Return the amax for a direct conditioner's tensor scale; None: the tensor's own."""
        return None

    def weight_gradient(self, dw: Tensor, w: Tensor, quantizer: Quantizer | None) -> Tensor:
        """Return dL/dw from dw = dL/dw_hat [o i]; by default dw (straight-through)."""
        return dw


class AroundQuantizer(Conditioner):
    """x_hat = inverse(Q(forward(x))): transformed, quantized, and transformed back.

    A subclass defines `forward` and `inverse`; both default to the identity.

    Attributes:
        transformed: the name of the transformed matrix in `parts`.
    """

    transformed: ClassVar[str] = "transformed"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "for_matrix" in vars(cls) and "draws" not in vars(cls):
            cls.draws = True
        if any(_is_newer(cls, method, "groups") for method in _ROTATING):
            cls.groups = AroundQuantizer.groups  # type: ignore[method-assign]

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform x [t c], fp32 or fp64 and not empty; the GEMM contracts `dim`."""
        return x

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        """Transform a quantized matrix back; padding that `forward` added may stay."""
        return x

    def transformed_shape(self, shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
        """Return the shape of `forward`'s result for this shape; override it if `forward` pads."""
        return shape

    def groups(self, n: int) -> Groups | None:
        """Return the rotation in groups that kernels can fuse with the quantizer, if it is one."""
        return None

    def for_matrix(self, x: Tensor, key: Key) -> AroundQuantizer:
        """Return the transform of one matrix, if it depends on the matrix or its noise.

        A class that overrides this must also override `decode`, or its codes are not stored.
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
        turned = own.forward(as_fp32(x), dim=dim)
        turned = quantizer(turned, dim=dim, key=key, out=workspace.own(turned))
        return own.inverse(turned, dim=dim).to(dtype)

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
        if transformed.shape != known:  # `decode` relies on it
            raise ValueError(
                f"{type(self).__name__}.forward turns a matrix of shape {tuple(x.shape)} into "
                f"{tuple(transformed.shape)}, but transformed_shape gives {known}; override "
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
