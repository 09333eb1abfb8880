"""Slow, plain reference for the numerics: lists, loops and numpy float32 scalars.

Imports nothing of metis_hf and uses no float8/float4 cast of any library, so that an error shared
with the package is unlikely. Every equation appears once, in the order in which it is evaluated.
Number formats and scalar casts are in reference_formats; the order of the block-scaling operations
is TransformerEngine's (core_nvfp4.cuh) for scales with a mantissa and OCP MX v1.0 for E8M0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from reference_formats import E2M1_GRID as E2M1_GRID
from reference_formats import E4M3_GRID as E4M3_GRID
from reference_formats import (
    E4M3_MAX,
    F32,
    FLT_MAX,
    FORMATS,
    Element,
    Format,
    ScaleRounding,
    e4m3_nearest,
    e4m3_up,
    e8m0_exponent,
    element_nearest,
    neighbours,
)

Tile = Literal["row", "square", "tensor"]
ScaleRule = Literal["absmax", "four-over-six", "search", "six", "unbiased"]

# Four Over Six: the tensor's largest block has to be able to grow by 1.5 without saturating.
FOUR_OVER_SIX_MAX = 256.0


class Quantized(NamedTuple):
    """All fp32 and in the shape of x: a block's scale is repeated for each of its elements."""

    codes: np.ndarray  # element values (nearest), not bit patterns
    scales: np.ndarray  # block scale, as decoded
    scaled: np.ndarray  # x * enc before the clamp: what gets rounded
    values: np.ndarray  # dequantized
    inv_global: np.float32  # 1 / S_enc


class Scale(NamedTuple):
    """A block's decode scale, and what its elements are multiplied by."""

    decode: np.float32
    encode: np.float32


def _amax(values: np.ndarray) -> np.float32:
    """Largest magnitude, NaN if there is one, 0 of nothing."""
    amax = F32(0)
    for value in values.reshape(-1):
        if np.isnan(value):
            return F32(np.nan)
        amax = max(amax, F32(abs(value)))
    return amax


def _encode(amax: np.float32, largest: float) -> np.float32:
    """min(largest / amax, FLT_MAX), 1 where amax is 0."""
    if np.isnan(amax) or amax == 0:
        return F32(1) if amax == 0 else amax
    return min(F32(largest) / amax, FLT_MAX)


def global_encode(
    x: np.ndarray, fmt: Format, scale_rule: ScaleRule, amax: float | None = None
) -> np.float32:
    """S_enc: brings the tensor's amax to the largest element times the largest block scale."""
    largest_scale = E4M3_MAX if scale_rule in ("absmax", "unbiased") else FOUR_OVER_SIX_MAX
    largest = largest_code(fmt, scale_rule) * largest_scale
    return _encode(_amax(x) if amax is None else F32(amax), largest)


def largest_code(fmt: Format, scale_rule: ScaleRule) -> float:
    """What a block's amax is scaled to: 16/17 of the largest code where nothing may clip."""
    return fmt.element.max * (16 / 17 if scale_rule == "unbiased" else 1)


def _e4m3_scale(wanted: np.float32, inv_global: np.float32, rounding: ScaleRounding) -> Scale:
    scale = e4m3_nearest(wanted) if rounding == "nearest" else e4m3_up(wanted)
    decode = scale * inv_global
    return Scale(scale, decode if np.isnan(decode) else min(F32(1) / decode, FLT_MAX))


def absmax_scale(
    amax: np.float32,
    fmt: Format,
    s_enc: np.float32,
    rounding: ScaleRounding,
    scale_rule: ScaleRule = "absmax",
) -> Scale:
    """The scale that brings `amax` to `largest_code`. Do not reorder the products."""
    if not np.isfinite(amax):
        return Scale(F32(np.nan), F32(np.nan))
    if fmt.scale == "fp32":
        encode = _encode(amax, fmt.element.max)
        return Scale(F32(1) / encode, encode)
    if fmt.scale == "e8m0":
        below, largest = fmt.element.grid[-2:]
        decode = F32(2.0 ** e8m0_exponent(amax, largest, rounding, largest - below))
        return Scale(decode, F32(1) / decode)
    wanted = amax * (s_enc * F32(1 / largest_code(fmt, scale_rule)))
    return _e4m3_scale(wanted, F32(1) / s_enc, rounding)


def _codes(block: np.ndarray, encode: np.float32, element: Element) -> tuple[list, list]:
    """(codes, x * encode) of each element of a block."""
    codes, scaled = [], []
    for value in block:
        product = F32(value * encode)
        scaled.append(product)
        codes.append(element_nearest(product, element))  # saturates
    return codes, scaled


def _squared_error(
    codes: list, scale: np.float32, wanted: list, base: np.float32, count: int
) -> int:
    """Of code * scale against x * S_enc, in units of the scale that has amax on 6.

    Each is cut to a multiple of 4 / 2^24 over the elements of a block, so that their sum is exact.
    Two scales whose errors differ by less are a tie.
    """
    to_base = F32(1) / max(base, F32(2.0**-12))
    total = 0
    for code, value in zip(codes, wanted):
        error = (F32(code) * scale - value) * to_base
        square = error * error
        total += int((square if square < 4 else F32(4)) * F32(2.0**22 / count))  # NaN: 4
    return total


TRIED = {
    "six": (1.0,),
    "four-over-six": (1.0, 1.5),
    "search": (1.0, 0.95, 1.05, 1.4, 1.5, 1.6),
}


def least_error_scale(
    block: np.ndarray,
    fmt: Format,
    s_enc: np.float32,
    rounding: ScaleRounding,
    scale_rule: ScaleRule,
    count: int,
) -> Scale:
    """TransformerEngine's 4over6: amax on 6 or on 4, 4 only if its squared error is smaller.

    "search" tries further scales in the same way. "six" always takes 6, with the same tensor scale
    and the same two roundings. `count`: elements of a whole block.
    """
    base = (_amax(block) / F32(6)) * s_enc
    if not np.isfinite(base):
        return Scale(F32(np.nan), F32(np.nan))
    wanted = [value * s_enc for value in block]
    best, smallest = None, np.inf
    for factor in TRIED[scale_rule]:
        scale = _e4m3_scale(base * F32(factor), F32(1) / s_enc, rounding)
        codes = _codes(block, scale.encode, fmt.element)[0]
        error = _squared_error(codes, scale.decode, wanted, base, count)
        if best is None or error < smallest:
            best, smallest = scale, error
    assert best is not None
    return best


def mixed_scale(
    block: np.ndarray,
    fmt: Format,
    s_enc: np.float32,
    rounding: ScaleRounding,
    scale_rule: ScaleRule,
    count: int,
) -> tuple[Scale, Element]:
    """What codes of a block are multiplied by, and their format: of two, the one that is nearer.

    Each has amax on its largest code, and its scale is rounded before the unit is multiplied in.
    """
    assert fmt.other is not None
    share = 16 / 17 if scale_rule == "unbiased" else 1
    wanted = [value * s_enc for value in block]
    base = (_amax(block) / F32(fmt.element.max)) * s_enc
    found = []
    for element, unit in ((fmt.element, 1.0), fmt.other):
        exact_scale = _amax(block) * (s_enc * F32(1 / (element.max * unit * share)))
        scale = _e4m3_scale(exact_scale, F32(1) / s_enc, rounding)
        step = scale.decode * F32(unit)
        encode = min(F32(1) / (step * (F32(1) / s_enc)), FLT_MAX)
        codes = _codes(block, encode, element)[0]
        error = _squared_error(codes, step, wanted, base, count)
        found.append((error, Scale(step, encode), element))
    first, second = found
    return (second if second[0] < first[0] else first)[1:]


def fake_quantize(
    x: np.ndarray,
    fmt: str = "nvfp4",
    *,
    dim: int = -1,
    scale_rounding: ScaleRounding | None = None,
    two_level: bool | None = None,
    tile: Tile = "row",
    scale_rule: ScaleRule = "absmax",
    amax: float | None = None,
) -> Quantized:
    """Quantize and dequantize of an array of any shape, with nearest element rounding.

    `tile="row"`: blocks along `dim`, the whole line where the format has no block size.
    `tile="square"`: blocks of the last two dims. `tile="tensor"`: one block.
    The last block of a line may be short: zero padding would change neither amax nor a code.
    """
    form = FORMATS[fmt]
    if scale_rounding is None:
        scale_rounding = "floor" if form.scale == "e8m0" else "nearest"
    if two_level is None:
        two_level = form.scale == "e4m3"
    x = np.asarray(x, F32)
    with np.errstate(all="ignore"):
        s_enc = global_encode(x, form, scale_rule, amax) if two_level else F32(1)
        inv_global = F32(1) / s_enc
        codes, scales = np.zeros_like(x), np.zeros_like(x)
        scaled, values = np.zeros_like(x), np.zeros_like(x)
        count = (form.block or 1) ** (1 + (tile == "square"))
        for index in _blocks(x.shape, dim, tile, form.block):
            flat, shape = x[index].reshape(-1), x[index].shape
            element = form.element
            if form.other is not None:
                scale, element = mixed_scale(flat, form, s_enc, scale_rounding, scale_rule, count)
            elif scale_rule in ("absmax", "unbiased"):
                scale = absmax_scale(_amax(flat), form, s_enc, scale_rounding, scale_rule)
            else:
                scale = least_error_scale(flat, form, s_enc, scale_rounding, scale_rule, count)
            block_codes, block_scaled = _codes(flat, scale.encode, element)
            block_values = [(code * scale.decode) * inv_global for code in block_codes]
            codes[index] = np.array(block_codes, F32).reshape(shape)
            scales[index] = scale.decode
            scaled[index] = np.array(block_scaled, F32).reshape(shape)
            values[index] = np.array(block_values, F32).reshape(shape)
        return Quantized(codes, scales, scaled, values, inv_global)


def _blocks(shape: tuple[int, ...], dim: int, tile: Tile, size: int | None) -> list[tuple]:
    """One index tuple for each block of an array of this shape."""
    if tile == "tensor" or not shape:
        return [(Ellipsis,)] if 0 not in shape else []
    blocked = [dim % len(shape)] if tile == "row" else [len(shape) - 2, len(shape) - 1]
    indices: list[tuple] = [()]
    for axis, length in enumerate(shape):
        step = (size or max(length, 1)) if axis in blocked else 1
        parts = [slice(start, min(start + step, length)) for start in range(0, length, step)]
        indices = [(*index, part) for index in indices for part in parts]
    return indices


def dequantized(code: float, scale: np.float32, inv_global: np.float32) -> np.float32:
    """(code * scale) / S_enc as the equations evaluate it."""
    with np.errstate(all="ignore"):
        return (F32(code) * scale) * inv_global


class Stochastic(NamedTuple):
    """Per element of x: the two possible fp32 results, and the moments of the draw (float64)."""

    toward: np.ndarray
    away: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


def stochastic(x: np.ndarray, fmt: str = "nvfp4", **options) -> Stochastic:
    """What stochastic rounding may return for each element of x, and its mean and variance.

    Options are those of `fake_quantize`. Where nothing clips, the mean is x.
    """
    ref, element = fake_quantize(x, fmt, **options), FORMATS[fmt].element
    toward, away = np.zeros_like(ref.values), np.zeros_like(ref.values)
    mean, variance = np.zeros(ref.values.shape), np.zeros(ref.values.shape)
    for index in np.ndindex(ref.values.shape):
        low, high, probability = neighbours(ref.scaled[index], element)
        toward[index] = dequantized(low, ref.scales[index], ref.inv_global)
        away[index] = dequantized(high, ref.scales[index], ref.inv_global)
        gap = float(away[index]) - float(toward[index])
        mean[index] = float(toward[index]) + probability * gap
        variance[index] = probability * (1 - probability) * gap * gap
    return Stochastic(toward, away, mean, variance)


def sqnr_db(x: np.ndarray, approximation: np.ndarray) -> float:
    """10 log10(|x|^2 / |x - approximation|^2) in float64."""
    x, approximation = np.asarray(x, np.float64), np.asarray(approximation, np.float64)
    return float(10 * np.log10(np.sum(x * x) / np.sum((x - approximation) ** 2)))


class Split(NamedTuple):
    """Best rank-k approximation in float64: x = (u * s) @ vh + residual."""

    u: np.ndarray  # [t k]
    s: np.ndarray  # [k]
    vh: np.ndarray  # [k c]
    residual: np.ndarray  # [t c]


def spectral_split(x: np.ndarray, rank: int) -> Split:
    """The optimal split (Eckart-Young), by a full SVD in float64."""
    x = np.asarray(x, np.float64)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    return Split(u, s, vh, x - (u * s) @ vh)


def captured_energy(x: np.ndarray, vh: np.ndarray) -> float:
    """Energy of x inside the row space of vh over the most that any subspace of that rank holds.

    vh [k c] need not be orthonormal: it is orthonormalized in float64 first.
    """
    x = np.asarray(x, np.float64)
    basis, _ = np.linalg.qr(np.asarray(vh, np.float64).T)
    best = np.linalg.eigvalsh(x.T @ x)[-basis.shape[1] :].sum()
    return float(np.sum((x @ basis) ** 2) / best)
