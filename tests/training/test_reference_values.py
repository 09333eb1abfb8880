"""The yardstick of health's figures against its source: the definition of the format."""

from __future__ import annotations

import pytest
from numerics.theory import FORMATS, NORMAL, Elements, block_scales, expected, maxima

from metis_hf.training import reference_values

BLOCK = [Elements(NORMAL, 1.0, 16)]
AMAX = 5.0  # of a tensor of some million normal values


def test_direct_nvfp4_of_normal_values():
    nearest = expected(BLOCK, "nvfp4", amax=AMAX)
    stochastic = expected(BLOCK, "nvfp4", amax=AMAX, rounding="stochastic")
    assert nearest.sqnr_db == pytest.approx(reference_values.SQNR_NEAREST, abs=0.05)
    assert stochastic.sqnr_db == pytest.approx(reference_values.SQNR_STOCHASTIC, abs=0.05)
    error = (nearest.error / nearest.energy) ** 0.5
    assert error == pytest.approx(reference_values.RELATIVE_ERROR, abs=5e-4)
    assert nearest.clipped_share == pytest.approx(reference_values.SATURATED, abs=1.5e-3)


def test_share_that_becomes_zero():
    """What lies below a quarter of the scale, half of the least code; never the block's largest."""
    top = maxima(BLOCK, AMAX)
    scale = block_scales(top.m, FORMATS["nvfp4"], tensor_amax=AMAX)
    below = NORMAL.moments(scale / 4)[0] / NORMAL.moments(top.m)[0]
    share = 15 / 16 * float(top.weights.sum(axis=0) @ below)
    assert share == pytest.approx(reference_values.ZEROED, abs=5e-4)
