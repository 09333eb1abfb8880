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
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.transforms.hadamard import SIZE, rotate, unrotate
from metis_hf.transforms.spectral import default_rows, find_subspace, project


class Part(NamedTuple):
    """One tensor that a conditioner hands to the quantizer, before and after; for statistics."""

    name: str
    before: Tensor
    after: Tensor


class Encoded(NamedTuple):
    """A matrix [t c] between quantization and use.

    Attributes:
        tensors: what `decode` needs, in the order in which the conditioner knows them.
        low: the dense low-rank part [t c], where encoding has computed it; `decode` does without.
    """

    tensors: tuple[Tensor | None, ...]
    low: Tensor | None = None


class LowRank(NamedTuple):
    """left @ right [t c]: the thin part of a split operand, of quantized factors."""

    left: Tensor  # [t k], lengths included
    right: Tensor  # [k c]


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


@dataclass(frozen=True)
class Spectral:
    """Splits the dominant subspace off and quantizes factors and residual apart.

    arXiv 2509.00404: A Lambda B^T + X_R with A = `a`, Lambda = `lam`, B = `v`.

    Args:
        rank: k; fewer where the matrix has fewer rows or columns.
        sample_frac: share of rows that the subspace is estimated from.
        oversample: extra sketch columns.
        n_iter: power iterations.
        compensated: take the residual against the *quantized* low-rank part, so that the
            residual carries the rounding errors of the factors too; the paper takes it against
            the exact one.
        fixed_sketch: the range finder's noise is the same whatever the matrix, so that the
            subspace of one that changes little from step to step changes little too.
    """

    rank: int
    sample_frac: float = 0.01
    oversample: int = 8
    n_iter: int = 1
    compensated: bool = True
    fixed_sketch: bool = False

    uses_row_mask: ClassVar[bool] = True

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        if x.numel() == 0:
            return x.to(dtype)
        return self.with_factors(x, quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype)[0]

    def with_factors(
        self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32
    ) -> tuple[Tensor, LowRank]:
        """A call's result for x [t c] that is not empty, and its low-rank part."""
        low, exact, lam, a, v = self._split(x, quantizer, dim=dim, key=key, row_mask=row_mask)
        x_hat = quantizer(x, dim=dim, key=key.fold(3), dtype=dtype, minus=exact, plus=low)
        return x_hat, LowRank(a[1] * lam, v[1])

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        _, exact, _, a, v = self._split(x, quantizer, dim=dim, key=key, row_mask=row_mask)
        residual = x - exact
        return [
            Part("a", *a),
            Part("v", *v),
            Part("residual", residual, quantizer(residual, dim=dim, key=key.fold(3))),
        ]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        a, lam, v = self.split(x, key=key, row_mask=row_mask)
        factors = (
            *pack(a, quantizer, dim=dim, key=key.fold(1)),
            *pack(v.T, quantizer, dim=dim, key=key.fold(2)),
            lam,
        )
        low = self._low(factors, quantizer, dim=dim, shape=x.shape)
        exact = low if self.compensated else (a * lam) @ v.T
        residual = pack(x, quantizer, dim=dim, key=key.fold(3), minus=exact)
        return Encoded((*residual, *factors), low)

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        residual, factors = encoded.tensors[:3], encoded.tensors[3:]
        low = encoded.low
        if low is None:
            low = self._low(factors, quantizer, dim=dim, shape=shape)
        return unpack(Packed(*residual), quantizer, dim=dim, shape=shape, dtype=dtype, plus=low)

    def work(self, shape, *, dim) -> Work:
        """Range finder on the sampled rows (`transforms.spectral`), then the projection of all.

        n sampled rows, sketch width w, rank k, p power iterations (Halko, Martinsson, Tropp, arXiv
        0909.4061, algorithms 4.4 and 5.1): sketch 2ncw; each iteration 4ncw and a QR; thin 2ncw,
        its Gram 2nw^2, rotation 2cwk. Householder QR of [c w] with Q formed: 4(cw^2 - w^3/3);
        symmetric eigenproblem with vectors: 9w^3 (Golub & Van Loan, sections 5.2 and 8.3). Then all
        t rows: projection 2tck; low-rank part 2tck, twice where the residual is taken against the
        exact one; its subtraction and addition.
        """
        t, c = shape
        k = min(self.rank, t, c)
        rows = max(int(self.sample_frac * t + 0.999999), default_rows(k, self.oversample), k)
        n = min(rows, t)
        w = min(k + self.oversample, n, c)
        p = self.n_iter
        products = 1 if self.compensated else 2
        split = {
            "subspace": 2.0 * n * c * w * (2 + 2 * p) + 2.0 * n * w * w + 2.0 * c * w * k,
            "factorization": (p + 1) * 4.0 * (c * w * w - w**3 / 3) + 9.0 * w**3,
            "projection": 2.0 * t * c * k,
            "low_rank": 2.0 * products * t * c * k + 2.0 * t * c,
        }
        return Work(split, split, {"low_rank": 2.0 * t * c * k}, ((t, c), (t, k), (k, c)))

    def factors(self, encoded, quantizer, *, dim, shape) -> LowRank:
        """The low-rank part of what `encode` gave for a matrix of that shape."""
        return self._factors(encoded.tensors[3:], quantizer, dim=dim, shape=shape)

    @staticmethod
    def _factors(packed, quantizer, *, dim, shape) -> LowRank:
        lam = packed[6]
        (t, c), k = shape, lam.shape[0]
        a_hat = unpack(Packed(*packed[:3]), quantizer, dim=dim, shape=(t, k))
        vh_hat = unpack(Packed(*packed[3:6]), quantizer, dim=dim, shape=(k, c))
        return LowRank(a_hat.to(lam.dtype) * lam, vh_hat.to(lam.dtype))

    def _low(self, packed, quantizer, *, dim, shape) -> Tensor:
        """(a_hat * lam) @ vh_hat [t c] from the packed factors."""
        left, right = self._factors(packed, quantizer, dim=dim, shape=shape)
        return left @ right  # [t k] @ [k c] -> [t c]

    def _split(self, x, quantizer, *, dim, key, row_mask):
        a, lam, v = self.split(x, key=key, row_mask=row_mask)
        # Row blocks of every part run along the dimension that the GEMM contracts.
        a_hat = quantizer(a, dim=dim, key=key.fold(1)).to(v.dtype)
        vh_hat = quantizer(v.T, dim=dim, key=key.fold(2)).to(v.dtype)
        low = (a_hat * lam) @ vh_hat  # [t k] @ [k c] -> [t c]
        exact = low if self.compensated else (a * lam) @ v.T
        return low, exact, lam, (a, a_hat), (v.T, vh_hat)

    def split(self, x, *, key, row_mask=None) -> tuple[Tensor, Tensor, Tensor]:
        """(a [t k], lam [k], v [c k]), not quantized: x ~ a diag(lam) v^T.

        v from sampled rows, a and lam by projecting every row.
        """
        rank = min(self.rank, *x.shape)
        v = find_subspace(
            x,
            rank,
            sample_frac=self.sample_frac,
            min_rows=default_rows(rank, self.oversample),
            oversample=self.oversample,
            n_iter=self.n_iter,
            key=Key(key.static) if self.fixed_sketch else key,
            row_mask=row_mask,
        )  # [c k]
        a, lam = project(x.to(v.dtype), v)  # [t k] [k]
        return a, lam, v


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
    ) -> tuple[Tensor, Tensor | None]:
        """Quantizes for a GEMM in `dtype`.

        Args:
            x: [t c]
            dim: the dimension that the GEMM contracts.

        Returns:
            (x_hat [t c] in `dtype`, scale): the operand is x_hat * scale, perhaps padded along
            `dim`. scale is None unless `dtype` is bf16, which holds code * block scale exactly but
            not the product with the fp32 tensor scale; the GEMM then scales its output.
        """
        if self.quantizer is None:
            return x.to(dtype), None
        if self._keeps_scale_apart(dtype):
            return self.quantizer.unscaled(x, dim=dim, key=key, dtype=dtype)
        x_hat = self.conditioner(
            x, self.quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype
        )
        return x_hat, None

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
    ) -> tuple[Tensor, Tensor | None]:
        """The second half: what the call returns, bit for bit, for x of that shape."""
        assert self.quantizer is not None
        if self._keeps_scale_apart(dtype):
            packed = Packed(*encoded.tensors)  # type: ignore[arg-type]
            values = unpack(packed, self.quantizer, dim=dim, shape=shape, dtype=dtype, scaled=False)
            return values, packed.global_scale
        conditioner: Any = self.conditioner
        return conditioner.decode(encoded, self.quantizer, dim=dim, shape=shape, dtype=dtype), None


HIGH_PRECISION = Operand()
