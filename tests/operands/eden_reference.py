"""MS-EDEN's quantizer in plain loops: arXiv 2601.22813, algorithm 1, for one matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from reference import E4M3_GRID, dequantized, global_encode
from reference_formats import F32, FORMATS, e2m1_nearest, e4m3_nearest

CLIP = F32(0.93 * 17 / 16)  # amax goes to 6 / CLIP = 6.07


class Eden(NamedTuple):
    """Of x [t c], blocks of 16 along `dim`."""

    codes: np.ndarray  # [t c]
    wanted: np.ndarray  # float64 [lines blocks]: corrected scales before they are rounded
    chance: np.ndarray  # float64, of the larger neighbour
    scales: np.ndarray  # fp32, rounded with the noise that was given
    values: np.ndarray  # [t c]
    inverse: np.float32  # 1 / S


def eden(x: np.ndarray, noise: np.ndarray, dim: int = -1) -> Eden:
    """Quantizes to nearest, corrects each block's scale by <y, y> / <y, codes>, and rounds that.

    Args:
        x: fp32 [t c]
        noise: uniform on [0, 1), [t blocks] for dim -1, [blocks c] for dim 0.
    """
    if dim == 0:
        turned = eden(x.T, noise.T)
        return turned._replace(codes=turned.codes.T, values=turned.values.T)
    with np.errstate(all="ignore"):
        s_enc = global_encode(x, FORMATS["nvfp4"], "four-over-six")  # its largest scale is 256 too
        inverse = F32(1) / s_enc
        codes, wanted = np.zeros_like(x), np.zeros(noise.shape)
        for line, block in np.ndindex(noise.shape):
            cut = slice(16 * block, 16 * block + 16)
            amax = F32(np.abs(x[line, cut]).max())
            scale = e4m3_nearest((amax * CLIP) * (s_enc * (F32(1) / F32(6))))
            encode = min(F32(1) / (scale * inverse), np.finfo(F32).max)
            y = [value * encode for value in x[line, cut]]
            codes[line, cut] = [e2m1_nearest(min(max(v, F32(-6)), F32(6))) for v in y]
            energy = sum(float(v) ** 2 for v in y)
            projection = sum(float(v) * float(c) for v, c in zip(y, codes[line, cut]))
            usable = scale > 0 and projection > 0
            wanted[line, block] = float(scale) * (energy / projection if usable else 1)
        grid = np.array(E4M3_GRID, np.float64)
        above = np.searchsorted(grid, wanted).clip(1)
        low, high = grid[above - 1], grid[above]
        chance = (wanted - low) / (high - low)
        scales = np.where(noise < chance, high, low).astype(F32)
        spread = scales.repeat(16, 1)[:, : x.shape[1]]
        values = np.array(
            [dequantized(c, s, inverse) for c, s in zip(codes.flat, spread.flat)], F32
        ).reshape(x.shape)
        return Eden(codes, wanted, chance, scales, values, inverse)
