"""Slow, plain reference for the numerics: lists, loops and numpy float32 scalars.

Imports nothing of metis_hf and uses no float8/float4 cast of any library, so that an error shared
with the package is unlikely. Every equation appears once, in the order in which it is evaluated.
Grids are enumerated from their definitions (OCP Microscaling v1.0 for E2M1, OCP FP8 v1.0 for
E4M3); the order of the block-scaling operations is TransformerEngine's (core_nvfp4.cuh).
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
BLOCK = 16

# Sign bit apart, list index == bit pattern: the parity of an index is the parity of the code.
E2M1_GRID: list[float] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_MAX = E2M1_GRID[-1]


def _enumerate_e4m3() -> list[float]:
    """The 127 finite values >= 0 of E4M3 (bias 7, no infinity, exponent 15 mantissa 7 is NaN)."""
    grid = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 15 and mantissa == 7:
                continue
            if exponent == 0:
                grid.append(mantissa / 8 * 2.0**-6)
            else:
                grid.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return grid


E4M3_GRID: list[float] = _enumerate_e4m3()
E4M3_MAX = E4M3_GRID[-1]


def midpoints(grid: list[float]) -> list[float]:
    """The ties of nearest rounding: the middle of each pair of neighbours (exact in float64)."""
    return [(low + high) / 2 for low, high in itertools.pairwise(grid)]


def _nearest_even(magnitude: float, grid: list[float]) -> float:
    """Nearest grid point of a value >= 0, ties to the even code, saturating at the last point.

    Compares with the midpoints, which float64 holds exactly, rather than comparing two distances,
    which it would have to round for subnormal values.
    """
    for index, middle in enumerate(midpoints(grid)):
        if magnitude < middle:
            return grid[index]
        if magnitude == middle:
            return grid[index] if index % 2 == 0 else grid[index + 1]
    return grid[-1]


def e2m1_nearest(value: float) -> np.float32:
    """E2M1 value nearest to `value`, ties to even, saturating at 6; the sign of zero is kept."""
    value = float(value)
    if math.isnan(value):
        return F32(math.nan)
    return F32(math.copysign(_nearest_even(abs(value), E2M1_GRID), value))


def e4m3_nearest(value: float) -> np.float32:
    """E4M3 value nearest to `value`, ties to even, saturating at 448.

    An infinity becomes NaN, not 448: an overflow upstream has to stay visible.
    """
    value = float(value)
    if not math.isfinite(value):
        return F32(math.nan)
    return F32(math.copysign(_nearest_even(abs(value), E4M3_GRID), value))


def e4m3_up(value: float) -> np.float32:
    """The smallest E4M3 value >= `value` for `value` >= 0, saturating at 448; infinity is NaN."""
    value = float(value)
    if not math.isfinite(value):
        return F32(math.nan)
    for point in E4M3_GRID:
        if point >= value:
            return F32(point)
    return F32(E4M3_MAX)


def stochastic_neighbours(scaled: float) -> tuple[float, float, float]:
    """What stochastic rounding of `scaled` may give: (toward zero, away from zero, P(away)).

    Clamps to [-6, 6] first. The expectation toward + P * (away - toward) is the clamped value. A
    value on the grid gives itself twice, with probability 0.
    """
    scaled = float(scaled)
    magnitude = min(abs(scaled), E2M1_MAX)
    for low, high in itertools.pairwise(E2M1_GRID):
        if low <= magnitude < high:
            probability = (magnitude - low) / (high - low)
            if probability == 0.0:
                high = low
            return math.copysign(low, scaled), math.copysign(high, scaled), probability
    top = math.copysign(E2M1_MAX, scaled)
    return top, top, 0.0


class Quantized(NamedTuple):
    """All fp32 and in the shape of x: a block's scale is repeated for each of its elements."""

    codes: np.ndarray  # E2M1 values (nearest), not bit patterns
    scales: np.ndarray  # E4M3 block scale, as decoded
    scaled: np.ndarray  # x * enc before the clamp: what gets rounded
    values: np.ndarray  # dequantized
    inv_global: np.float32  # 1 / S_enc


def global_encode(x: np.ndarray, two_level: bool) -> np.float32:
    """S_enc = min(2688 / amax, FLT_MAX), 1 for an all-zero tensor and for one-level scaling."""
    if not two_level or x.size == 0:
        return F32(1)
    amax = F32(0)
    for value in x.reshape(-1):
        if np.isnan(value):
            return F32(math.nan)
        amax = max(amax, F32(abs(value)))
    if amax == 0:
        return F32(1)
    return min(F32(E2M1_MAX * E4M3_MAX) / amax, FLT_MAX)


def quantize_block(
    block: np.ndarray,  # [n] fp32, one scale for all of it
    s_enc: np.float32,
    scale_rounding: Literal["nearest", "up"],
) -> tuple[np.ndarray, np.float32, np.ndarray, np.ndarray]:
    """Codes [n], scale [], scaled [n], values [n] of one block. Do not reorder the products."""
    amax = F32(0)
    for value in block:
        amax = F32(math.nan) if np.isnan(value) or np.isnan(amax) else max(amax, F32(abs(value)))
    wanted = amax * (s_enc * (F32(1) / F32(6)))
    scale = e4m3_nearest(wanted) if scale_rounding == "nearest" else e4m3_up(wanted)
    inv_global = F32(1) / s_enc
    decode = scale * inv_global
    enc = F32(math.nan) if np.isnan(decode) else min(F32(1) / decode, FLT_MAX)
    codes, scaled, values = [], [], []
    for value in block:
        product = F32(value * enc)
        clamped = product if np.isnan(product) else max(min(product, F32(6)), F32(-6))
        code = e2m1_nearest(clamped)
        scaled.append(product)
        codes.append(code)
        values.append((code * scale) * inv_global)
    return np.array(codes, F32), scale, np.array(scaled, F32), np.array(values, F32)


def fake_quantize(
    x: np.ndarray,
    *,
    dim: int = -1,
    scale_rounding: Literal["nearest", "up"] = "nearest",
    two_level: bool = True,
    tile: Literal["row", "square"] = "row",
) -> Quantized:
    """NVFP4 quantize and dequantize of an array of any shape, with nearest element rounding.

    `tile="row"`: blocks of 16 along `dim`. `tile="square"`: 16x16 blocks of the last two dims.
    The last block of a line may be short: zero padding would change neither amax nor a code.
    """
    x = np.asarray(x, F32)
    with np.errstate(all="ignore"):
        s_enc = global_encode(x, two_level)
        codes, scales = np.zeros_like(x), np.zeros_like(x)
        scaled, values = np.zeros_like(x), np.zeros_like(x)
        for index in _blocks(x.shape, dim, tile):
            flat = x[index].reshape(-1)
            block = quantize_block(flat, s_enc, scale_rounding)
            shape = x[index].shape
            codes[index] = block[0].reshape(shape)
            scales[index] = block[1]
            scaled[index] = block[2].reshape(shape)
            values[index] = block[3].reshape(shape)
        return Quantized(codes, scales, scaled, values, F32(1) / s_enc)


def _blocks(shape: tuple[int, ...], dim: int, tile: str) -> list[tuple]:
    """One index tuple for each block of an array of this shape."""
    blocked = [dim % len(shape)] if tile == "row" else [len(shape) - 2, len(shape) - 1]
    indices: list[tuple] = [()]
    for axis, length in enumerate(shape):
        step = BLOCK if axis in blocked else 1
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


def stochastic(x: np.ndarray, **options) -> Stochastic:
    """What stochastic rounding may return for each element of x, and its mean and variance.

    Options are those of `fake_quantize`. Where nothing clips, the mean is x.
    """
    ref = fake_quantize(x, **options)
    toward, away = np.zeros_like(ref.values), np.zeros_like(ref.values)
    mean, variance = np.zeros(ref.values.shape), np.zeros(ref.values.shape)
    for index in np.ndindex(ref.values.shape):
        low, high, probability = stochastic_neighbours(ref.scaled[index])
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


class LinearGradients(NamedTuple):
    y: np.ndarray  # [t o]
    dx: np.ndarray  # [t i]
    dw: np.ndarray  # [o i]
    db: np.ndarray  # [o]


def linear(
    x: np.ndarray,  # [t i]
    w: np.ndarray,  # [o i]
    dy: np.ndarray,  # [t o]
    bias: np.ndarray | None = None,  # [o]
) -> LinearGradients:
    """y = x w' + b and the three gradients for an upstream gradient dy, in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y = x @ w.T  # [t i] @ [i o] -> [t o]
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return LinearGradients(y=y, dx=dy @ w, dw=dy.T @ x, db=dy.sum(axis=0))
