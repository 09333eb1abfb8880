"""What hypothesis draws: matrices with ties and zeros, and any finite fp32 numbers at all."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def matrices(draw, max_rows: int = 4, max_columns: int = 50) -> Tensor:
    """[r c] fp32 with rows of very different sizes, repeated values, zeros and exact ties."""
    rows = draw(st.integers(1, max_rows))
    columns = draw(st.integers(1, max_columns))
    seed = draw(st.integers(0, 2**31 - 1))
    spread = draw(st.sampled_from([0, 3, 12]))
    coarse = draw(st.booleans())
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns))
    if coarse:  # quarters: exact zeros, ties and duplicates
        x = np.round(x * 4) / 4
    x = x * np.exp2(rng.integers(-spread, spread + 1, (rows, 1)))
    return torch.from_numpy(x.astype(np.float32))


@st.composite
def any_finite(draw) -> Tensor:
    """[r c] of any finite fp32 numbers: random bits, so every exponent, subnormals included."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 70)))
    rng = np.random.default_rng(draw(st.integers(0, 2**31 - 1)))
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    lowest, highest = draw(st.sampled_from([(0, 254), (0, 2), (0, 30), (120, 134), (250, 254)]))
    exponent = rng.integers(lowest, highest + 1, (shape[0], 1), dtype=np.uint32)
    if draw(st.booleans()):  # rows of one binade
        bits = (bits & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    x = bits.view(np.float32)
    x[~np.isfinite(x)] = np.finfo(np.float32).max
    return torch.from_numpy(x)
