"""Noise and fingerprints on CUDA devices, in one launch each, with the same bits as `noise`.

As torch operations they take 30 and 10 launches, and a "metis" layer draws noise for three matrices
of a few thousand elements.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels.layout import DTYPES as DTYPES
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.numerics.kernels.scratch import FINGERPRINTS, WORDS, Scratch
from metis_hf.numerics.kernels.triton_direct import cdiv, launch
from metis_hf.numerics.kernels.triton_numbers import bits_of, hash_bits
from metis_hf.numerics.kernels.triton_numbers import uniform as uniform_at

_TILE = 1024  # elements per program
_LANES = tl.constexpr(noise._LANES)


@triton.jit(do_not_specialize=["word0", "word1", "count", "width"])
def draw(out_ptr, data_ptr, word0, word1, count, width, TILE: tl.constexpr):
    """Write `count` uniform numbers, in rows of `width`."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, column = at // width, at % width
    index = row * tl.cdiv(width, _LANES) + column // _LANES
    value = uniform_at(index, column % _LANES, (data_ptr, word0, word1))
    tl.store(out_ptr + at, value, mask=at < count)


@triton.jit
def _hash_of(x_ptr, count, SAMPLES: tl.constexpr):
    """Return the sum of the hashes of a fingerprint's samples, each mixed with its number."""
    number = tl.arange(0, SAMPLES)
    own = hash_bits(number)
    samples = tl.minimum(count, SAMPLES)
    inside = number < samples
    part = number.to(tl.int64)
    first, behind = part * count // samples, (part + 1) * count // samples
    shift = (own.to(tl.int64) & 0xFFFFFFFF) % (behind - first)  # as in `noise._places`
    bits = bits_of(tl.load(x_ptr + first + shift, mask=inside, other=0.0))
    hashes = tl.where(inside, hash_bits(bits ^ own), 0)
    return tl.sum(hashes.to(tl.int64), 0).to(tl.int32)  # int64: no overflow


@triton.jit(do_not_specialize=["count"])
def hash_samples(x_ptr, out_ptr, count, SAMPLES: tl.constexpr):
    """Write the fingerprint of a tensor of `count` elements."""
    tl.store(out_ptr, _hash_of(x_ptr, count, SAMPLES))


@triton.jit(do_not_specialize=["x_count", "other_count", "added"])
def hash_both(
    x_ptr, other_ptr, out_ptr, x_count, other_count, added,
    SAMPLES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write the four words of `fingerprints` for two tensors, followed by zeros."""
    other = _hash_of(other_ptr, other_count, SAMPLES)
    first = tl.add(_hash_of(x_ptr, x_count, SAMPLES), added, sanitize_overflow=False)
    second = tl.add(other, added, sanitize_overflow=False)
    both = tl.add(first, second, sanitize_overflow=False)
    place = tl.arange(0, WORDS)
    word = tl.where(place == 0, first, tl.where(place == 1, second, 0))
    word = tl.where(place == 2, both, tl.where(place == 3, other, word))
    tl.store(out_ptr + place, word)


def uniform(shape: torch.Size, key: noise.Key, device: torch.device) -> Tensor | None:
    """Compute `noise.uniform`, of 1 to 2^31 - 1 elements; None if the kernel cannot be compiled."""
    out = torch.empty(shape, dtype=torch.float32, device=device)
    count, width = out.numel(), shape[-1] if shape else 1
    word0, word1 = noise.static_words(key)
    with or_reference:
        launch(
            draw,
            (cdiv(count, _TILE),),
            {"enable_fp_fusion": False},
            out_ptr=out,
            data_ptr=key.data,
            word0=word0,
            word1=word1,
            count=count,
            width=width,
            TILE=_TILE,
        )
        return out
    return None


def fingerprint(x: Tensor) -> Tensor | None:
    """Compute `noise.fingerprint` of a non-empty x in `DTYPES`; None if compiling failed."""
    given = _contiguous(x)
    out = torch.empty((), dtype=torch.int32, device=x.device)
    with or_reference:
        sizes = {"count": given.numel(), "SAMPLES": noise.SAMPLES}
        launch(hash_samples, (1,), {}, x_ptr=given, out_ptr=out, **sizes)
        return out
    return None


def fingerprints(
    x: Tensor, other: Tensor, added: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Scratch] | None:
    """Compute `noise.fingerprints`; None if compiling failed."""
    x, other = _contiguous(x), _contiguous(other)
    out = torch.empty(WORDS, dtype=torch.int32, device=x.device)
    with or_reference:
        launch(
            hash_both,
            (1,),
            {},
            x_ptr=x,
            other_ptr=other,
            out_ptr=out,
            x_count=x.numel(),
            other_count=other.numel(),
            added=added,
            SAMPLES=noise.SAMPLES,
            WORDS=WORDS,
        )
        first, second, both, plain = out[:FINGERPRINTS].unbind()
        return first, second, both, plain, Scratch(out)
    return None


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the samples of x."""
    x = x.detach()
    return x if x.is_contiguous() else noise.samples(x)  # at most SAMPLES: all are hashed
