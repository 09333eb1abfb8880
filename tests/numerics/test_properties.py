"""Properties of NVFP4 that need no reference: rows, and quantizing a second time."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metis_hf.numerics import fake_quantize

# Bounded: the file has to stay under 20 s on one core. Derandomized: the same examples each run.
bounded = settings(max_examples=40, deadline=None, derandomize=True)

TWO_LEVEL = st.booleans()


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


def assert_equal(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@bounded
@given(matrices(), TWO_LEVEL)
def test_rows_of_one_level_are_independent(x, two_level) -> None:
    """One level knows nothing of other rows; two levels know their amax and nothing else."""
    whole = fake_quantize(x, two_level=two_level)
    top = x.abs().amax()
    for row, wanted in zip(x, whole):
        alone = torch.cat([row[None], torch.full_like(row[None], top)]) if two_level else row[None]
        assert_equal(fake_quantize(alone, two_level=two_level)[0], wanted)


# --- idempotence ---------------------------------------------------------------------------------
#
# With nearest rounding, quantizing a second time changes nothing under two conditions:
# 1. Each nonzero block's largest code is 6. That holds for every block scale from 3 * 2^-9 up: the
#    scale is then off by less than 1/5, the largest element lands above 5, and the second pass
#    sees amax = 6 * scale and finds the same scale. A scale of 1 or 2 * 2^-9 may be off by 1/2 or
#    1/4, the largest code may be 3 or 4, and then the second pass picks a smaller scale.
# 2. 1 / S_enc is exact (S_enc a power of two). Otherwise the largest value, 2688 * (1 / S_enc),
#    may miss amax by an ulp, and S_enc with it: codes and scales stay, values move by ulps.

SMALLEST_SAFE_SCALE = 3 * 2.0**-9
FEW_ULPS = 2.0**-21


def keep_safe_blocks(x: Tensor, two_level: bool) -> Tensor:
    """x with the blocks that break condition 1 set to zero (never the one that holds amax)."""
    scales = ref.fake_quantize(x.numpy(), two_level=two_level).scales
    return torch.where(torch.from_numpy(scales) < SMALLEST_SAFE_SCALE, torch.zeros_like(x), x)


@bounded
@given(matrices(), st.integers(-30, 30))
def test_idempotent_when_the_global_scale_is_a_power_of_two(x, exponent) -> None:
    amax_row = torch.full((1, x.shape[1]), 2688.0)
    x = torch.cat([x / x.abs().amax().clamp(min=1) * 2000, amax_row])
    x = keep_safe_blocks(x, two_level=True) * 2.0**exponent
    once = fake_quantize(x)
    assert_equal(fake_quantize(once), once)


@bounded
@given(matrices())
def test_idempotent_up_to_ulps_for_any_global_scale(x) -> None:
    x = keep_safe_blocks(x, two_level=True)
    once = fake_quantize(x)
    torch.testing.assert_close(fake_quantize(once), once, rtol=FEW_ULPS, atol=0)


@bounded
@given(matrices())
def test_idempotent_with_one_level(x) -> None:
    x = keep_safe_blocks(x, two_level=False)
    once = fake_quantize(x, two_level=False)
    assert_equal(fake_quantize(once, two_level=False), once)


@pytest.mark.parametrize(
    ("wanted_scale", "chosen", "first", "second"),
    [
        # 0.55 rounds up to 1; 3.3 rounds to 3; a second pass wants 0.5, ties to 0, loses the block.
        (0.55, 1, 3.0, 0.0),
        # 1.6 rounds up to 2; 4.8 rounds to 4; a second pass wants 8/6, takes 1, and clips 8 to 6.
        (1.6, 2, 8.0, 6.0),
    ],
)
def test_subnormal_scales_are_not_idempotent(wanted_scale, chosen, first, second) -> None:
    """Condition 1 is needed: in units of 2^-9, the smallest E4M3 value, with S_enc = 1."""
    unit = 2.0**-9
    x = torch.zeros(2, 16)
    x[0] = 2688.0
    x[1, 0] = wanted_scale * 6 * unit
    assert ref.fake_quantize(x.numpy()).scales[1, 0] == chosen * unit
    once = fake_quantize(x)
    assert once[1, 0] == first * unit
    assert fake_quantize(once)[1, 0] == second * unit
