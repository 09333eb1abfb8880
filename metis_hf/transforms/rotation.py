"""Orthogonal transforms of a whole dimension: randomized Hadamard, Kronecker product of factors.

A rotation of n entries is (F_1 x F_2 x ... ) D P: a permutation P, signs D, then a Kronecker
product of small orthogonal factors, so that it costs 2 n sum(f) FLOPs per column instead of 2 n^2.
It keeps the length n, without padding. Rotations are computed on the host in fp64, from (n, seed)
alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import constant, key_of, random_bits, uniform

LARGEST_HADAMARD = 128  # larger ones are Kronecker products of smaller ones: the same matrix
_NARROW = 8  # with fewer columns, one product per row is slower than two transposes
LARGEST_RANDOM = 1024  # a larger factor costs more than it helps: the identity replaces it


class Rotation(NamedTuple):
    """An orthogonal map of n entries.

    Attributes:
        order: [n] indices: entry i of the permuted vector is entry order[i]; None: no permutation.
        signs: [n] +-1, applied after the permutation; None: no signs.
        factors: (size, orthogonal [size size] or None for the identity); the sizes multiply to n.
    """

    order: Tensor | None
    signs: Tensor | None
    factors: tuple[tuple[int, Tensor | None], ...]

    def flops(self, columns: int) -> float:
        """Return the FLOPs of one application to [n columns]."""
        n = math.prod(size for size, _ in self.factors)
        return sum(2.0 * n * columns * size for size, factor in self.factors if factor is not None)


def random_orthogonal(size: int, seed: int) -> Tensor:
    """Draw an orthogonal matrix [size size] from the Haar measure; fp64.

    The QR decomposition of a Gaussian matrix, R's diagonal made positive (Mezzadri, arXiv
    math-ph/0609050).
    """
    u = uniform((2, size, size), key_of("orthogonal", size, seed)).double()
    gaussian = (-2 * (1 - u[0]).log()).sqrt() * (2 * math.pi * u[1]).cos()  # Box-Muller
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def sylvester(
    size: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Tensor:
    """Return Sylvester's Hadamard matrix / sqrt(size), [size size]: symmetric, orthogonal.

    `size` is a power of two. The matrix is created on the device that uses it, because
    torch.compile would trace a copy from the CPU into the GPU's graph. Its one magnitude is rounded
    to `dtype` once, on any device.
    """
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * (1 / size**0.5)


def randomized_hadamard(n: int, seed: int) -> Rotation:
    """Make the rotation (H x Q_m) D of n = 2^p m entries, m odd, with random signs D.

    H is a Hadamard matrix of size 2^p, Q_m a random orthogonal one. QuaRot (arXiv 2404.00456) has a
    Hadamard matrix of size m 2^q instead, which is known only for the widths of its models.
    """
    power = n & -n
    factors: list[tuple[int, Tensor | None]] = [(s, sylvester(s)) for s in _even_powers(power)]
    rest = n // power
    if rest > 1:
        factors.append((rest, _random_factor(rest, seed)))
    signs = 1.0 - 2.0 * (random_bits(n, key_of("signs", n, seed)) < 0)
    return Rotation(None, signs.double(), tuple(factors) or ((1, None),))


def _even_powers(power: int) -> list[int]:
    """Factor a power of two into powers of similar size, none above LARGEST_HADAMARD."""
    exponent, most = power.bit_length() - 1, LARGEST_HADAMARD.bit_length() - 1
    count = math.ceil(exponent / most)
    return [2 ** ((exponent + place) // count) for place in range(count)]


def random_kronecker(n: int, seed: int) -> Rotation:
    """Make a random permutation, then the Kronecker product of two random orthogonal matrices.

    Their sizes are the two factors of n closest to each other (QuIP, arXiv 2307.13304, section 4).
    """
    small = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    sizes = (small, n // small)
    order = uniform((n,), key_of("permutation", n, seed)).argsort(stable=True)
    factors = ((size, _random_factor(size, seed + place)) for place, size in enumerate(sizes))
    return Rotation(order, None, tuple(factors))


def _random_factor(size: int, seed: int) -> Tensor | None:
    return random_orthogonal(size, seed) if 1 < size <= LARGEST_RANDOM else None


# Size of the cache. A model has a few widths; rotations along tokens add one entry per length.
_KEPT = 32
_MAKERS = {"hadamard": randomized_hadamard, "kronecker": random_kronecker}


@functools.partial(constant, most=_KEPT)
def make_rotation(
    kind: str, n: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Rotation:
    """Make the rotation "hadamard" or "kronecker" of n entries, on a device, in a dtype."""
    order, signs, factors = _MAKERS[kind](n, seed)
    return Rotation(
        None if order is None else order.to(device),
        None if signs is None else signs.to(device, dtype),
        tuple((size, None if f is None else f.to(device, dtype)) for size, f in factors),
    )


def rotation_of(kind: str, n: int, seed: int, like: Tensor) -> Rotation:
    """Return `make_rotation` on the device and in the dtype of `like`."""
    return make_rotation(kind, n, seed, like.device, like.dtype)


def rotate_by(x: Tensor, kind: str, seed: int, *, dim: int, inverse: bool = False) -> Tensor:
    """Apply `make_rotation`, or its inverse, along `dim` of x [t c], fp32 or fp64."""
    if x.numel() == 0:
        return x
    # One node of torch.compile's graph: the factorization of n cannot be traced.
    rotate = _opaque if torch.compiler.is_compiling() else _rotate
    return rotate(x, kind, seed, dim, inverse)


def _rotate(x: Tensor, kind: str, seed: int, dim: int, inverse: bool) -> Tensor:
    rotation = rotation_of(kind, x.shape[dim], seed, x)
    return (unrotate_all if inverse else rotate_all)(x, rotation, dim=dim).contiguous()


_opaque = torch.library.custom_op("metis_hf::rotate", _rotate, mutates_args=())
_opaque.register_fake(lambda x, kind, seed, dim, inverse: x.new_empty(x.shape))


def rotate_all(x: Tensor, rotation: Rotation, *, dim: int) -> Tensor:
    """Apply a rotation along `dim` of x [t c], not empty, fp32 or fp64."""
    if rotation.order is not None:
        x = x.index_select(dim, rotation.order)
    if rotation.signs is not None:
        x = x * _along(rotation.signs, dim)
    return _apply_factors(x, rotation.factors, dim)


def unrotate_all(x: Tensor, rotation: Rotation, *, dim: int) -> Tensor:
    """Invert `rotate_all`."""
    inverse = [(size, None if factor is None else factor.T) for size, factor in rotation.factors]
    x = _apply_factors(x, inverse, dim)
    if rotation.signs is not None:
        x = x * _along(rotation.signs, dim)
    if rotation.order is not None:
        x = x.index_select(dim, rotation.order.argsort())
    return x


def _along(values: Tensor, dim: int) -> Tensor:
    return values if dim % 2 else values[:, None]


def _apply_factors(x: Tensor, factors: Sequence[tuple[int, Tensor | None]], dim: int) -> Tensor:
    """Apply each factor along its own axis of `dim`, which is cut into the factors' sizes."""
    shape = x.shape
    before, after = (shape[0], 1) if dim % 2 else (1, shape[1])
    after *= shape[dim]
    for size, factor in factors:
        after //= size
        if factor is not None and after == 1:  # [.., f] @ [f f]: one product, no transpose
            x = x.reshape(before, size) @ factor.T
        elif factor is not None and after < _NARROW:
            x = x.reshape(before, size, after).mT.reshape(-1, size) @ factor.T
            x = x.reshape(before, after, size).mT
        elif factor is not None:
            x = factor @ x.reshape(before, size, after)
        before *= size
    return x.reshape(shape)
