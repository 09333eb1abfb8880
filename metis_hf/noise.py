"""Noise without state: a pure function of a key and an element's index.

A key is a 32-bit number, as a Python int or a 0-dim int64 tensor. Layers derive theirs from
(seed, layer, rank, operand) and a fingerprint of the very tensors that they quantize. So nothing is
drawn from torch's generators, a recomputed forward pass (activation checkpointing of any kind) and
a resumed run see the same noise as the original, and no step counter has to be kept in step.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

Key = int | Tensor

_FINGERPRINT_SAMPLES = 256
_MASK32 = 0xFFFFFFFF
# Multipliers of the "lowbias32" integer hash (C. Wellons, hash-prospector), as signed int32.
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)


def key_of(*parts: int | str) -> int:
    """A 32-bit key from integers and strings: the static part of a key, computed once."""
    return zlib.crc32(repr(parts).encode())


def fold(key: Key, data: Key) -> Key:
    """A new key from a key and 32 bits of data; on tensors, without leaving the device."""
    mixed = ((key ^ data) * 0x9E3779B1 + 0x7F4A7C15) & _MASK32
    return mixed ^ (mixed >> 15)


def fingerprint(x: Tensor) -> Tensor:
    """32 bits that change when the tensor does: a hash of up to 256 evenly spaced elements.

    Returns:
        0-dim int64 tensor on the device of `x`; no synchronization.
    """
    flat = x.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    # An odd stride does not fall in step with a power-of-two row length.
    stride = max(1, flat.numel() // _FINGERPRINT_SAMPLES) | 1
    sample = flat[::stride].float().view(torch.int32).to(torch.int64)
    weights = torch.arange(1, 2 * sample.numel() + 1, 2, device=x.device)
    return ((sample * (weights * 0x9E3779B1)) >> 13).sum().bitwise_and_(_MASK32)


def _signed32(key: Key) -> Key:
    """The same 32 bits as a number that int32 arithmetic accepts."""
    if isinstance(key, int):
        return ((key & _MASK32) ^ 0x80000000) - 0x80000000
    return key.to(torch.int32)


def random_bits(count: int, key: Key, device: torch.device | str | None = None) -> Tensor:
    """`count` hashed 32-bit integers (int32) of (key, index)."""
    index = torch.arange(count, device=device, dtype=torch.int32 if count < 2**31 else torch.int64)
    h = index.to(torch.int32)
    h.bitwise_xor_(_signed32(key))
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_M1)
    # The key enters again, between the rounds: else two keys would give permuted copies.
    h.add_(_signed32(fold(key, 0x5BD1E995)))
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_M2)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def uniform(
    shape: torch.Size | tuple[int, ...], key: Key, device: torch.device | str | None = None
) -> Tensor:
    """fp32 noise, uniform on the multiples of 2^-24 in [0, 1); row-major index order."""
    size = torch.Size(shape)
    bits = random_bits(size.numel(), key, device)
    return (bits >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24).view(size)


def key_from_generator(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draws one key from a torch generator (the device's default one if None)."""
    return torch.randint(1 << 32, (), generator=generator, device=device, dtype=torch.int64)
