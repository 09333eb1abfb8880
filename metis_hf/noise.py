"""Noise without state: a pure function of a key and an element's index.

Layers derive their keys from (seed, layer, rank, operand) and a fingerprint of the very tensors
that they quantize. So nothing is drawn from torch's generators, a recomputed forward pass
(activation checkpointing of any kind) and a resumed run see the same noise as the original, and no
step counter has to be kept in step.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

_FINGERPRINT_SAMPLES = 256
_MASK32 = 0xFFFFFFFF
_CACHED_INDICES = 1 << 22  # 16 MB of int32; longer tensors hash their indices anew
# Multipliers of the "lowbias32" integer hash (C. Wellons, hash-prospector), as signed int32.
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)


class Key(NamedTuple):
    """What noise depends on besides the element index.

    Attributes:
        static: 32 bits known to the host; folding costs nothing on the device.
        data: 0-dim int32 tensor known to the device only (a fingerprint), or None.
    """

    static: int
    data: Tensor | None = None

    def fold(self, part: int) -> Key:
        """Another key, for another use of the same call."""
        return Key(_mix(self.static ^ (part * 0x9E3779B1 & _MASK32)), self.data)

    def with_data(self, data: Tensor) -> Key:
        """The same key that depends on `data` (0-dim int32) too."""
        return Key(self.static, data if self.data is None else self.data + data)


def key_of(*parts: int | str) -> Key:
    """A key from integers and strings."""
    return Key(_mix(zlib.crc32(repr(parts).encode())))


def _mix(h: int) -> int:
    """lowbias32 on a Python int."""
    h = ((h ^ h >> 16) * _M1) & _MASK32
    h = ((h ^ h >> 15) * _M2) & _MASK32
    return h ^ h >> 16


def _signed(h: int) -> int:
    """The same 32 bits as a number that int32 arithmetic accepts."""
    return (h & _MASK32) - ((h & 0x80000000) << 1)


def fingerprint(x: Tensor) -> Tensor:
    """32 bits that change when the tensor does: a hash of about 256 evenly spaced elements.

    Every sample is mixed with its place by itself before the sum: signs, powers of two and 16-bit
    values, which differ in few bits of their fp32 form, count in full.

    Returns:
        0-dim int32 tensor on the device of `x`; no synchronization.
    """
    flat = x.detach().reshape(-1)
    # An odd stride does not fall in step with a power-of-two row length.
    sample = flat[:: flat.numel() // _FINGERPRINT_SAMPLES | 1].float().view(torch.int32)
    h = sample ^ _hashed_indices(sample.numel(), x.device)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_M1)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_M2)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).sum(dtype=torch.int32)


def _index_hash(count: int, device: torch.device) -> Tensor:
    """lowbias32(index), int32 [count]."""
    dtype = torch.int32 if count < 2**31 else torch.int64
    h = torch.arange(count, device=device, dtype=dtype).to(torch.int32)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_M1)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_M2)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


@functools.lru_cache(maxsize=8)
def _cached_index_hash(device: torch.device) -> Tensor:
    return _index_hash(_CACHED_INDICES, device)


def _hashed_indices(count: int, device: torch.device) -> Tensor:
    """`_index_hash`, from the cache where there is one; do not write to it."""
    # torch.compile would trace through a cache, with a warning; in a graph hashing is cheap.
    if count > _CACHED_INDICES or torch.compiler.is_compiling():
        return _index_hash(count, device)
    return _cached_index_hash(device)[:count]


def random_bits(count: int, key: Key | int, device: torch.device | str | None = None) -> Tensor:
    """`count` hashed 32-bit integers (int32) of (key, index); the upper bits are the best."""
    device = torch.device(device or "cpu")
    key = Key(key) if isinstance(key, int) else key
    h = _hashed_indices(count, device) + _signed(_mix(key.static))
    if key.data is not None:
        h.bitwise_xor_(key.data)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_M1)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))
    # The key enters again, between the rounds: else two keys would give permuted copies.
    return h.add_(_signed(_mix(key.static ^ 0x5BD1E995))).mul_(_M2)


def uniform(
    shape: torch.Size | tuple[int, ...], key: Key | int, device: torch.device | str | None = None
) -> Tensor:
    """fp32 noise, uniform on the multiples of 2^-24 in [0, 1); row-major index order."""
    size = torch.Size(shape)
    bits = random_bits(size.numel(), key, device)
    return bits.bitwise_right_shift_(8).float().mul_(2.0**-24).add_(0.5).view(size)


def key_from_generator(generator: torch.Generator | None, device: torch.device) -> Key:
    """Draws one key from a torch generator (the device's default one if None)."""
    source = generator.device if generator is not None else device
    bits = torch.randint(-(1 << 31), 1 << 31, (), generator=generator, device=source)
    return Key(0, bits.to(torch.int32).to(device))
