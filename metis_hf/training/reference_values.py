"""Reference values of health statistics, to judge measured figures by.

They are for independent normal values quantized directly to NVFP4 in blocks of 16 along a row, with
scales rounded to nearest and a tensor scale. tests/numerics/theory.py computes them from the
definition of the format, and a test compares the two.
"""

from __future__ import annotations

SQNR_NEAREST = 20.4  # dB, values rounded to nearest
SQNR_STOCHASTIC = 17.2  # dB, values rounded stochastically
ZEROED = 0.068  # share of the elements
SATURATED = 0.035  # share of the elements
RELATIVE_ERROR = 0.095  # |x_hat - x| / |x| at SQNR_NEAREST: 10^(-20.4 / 20)
# max |u^T u - I| right after a refresh: fp32 rounding over a column, with a margin.
ORTHOGONAL = 1e-5
