"""Values of health statistics for plain data: the scale on which a figure is good or bad.

Independent normal values are the yardstick, quantized directly to NVFP4 in blocks of 16 of a row,
with scales rounded to nearest and a tensor scale. tests/numerics/theory.py computes these figures
from the definition of the format, and a test compares them.
"""

from __future__ import annotations

SQNR_NEAREST = 20.4  # dB, values rounded to nearest
SQNR_STOCHASTIC = 17.2  # dB, values rounded stochastically
ZEROED = 0.068  # share of the elements
SATURATED = 0.035  # share of the elements
RELATIVE_ERROR = 0.095  # |x_hat - x| / |x| at SQNR_NEAREST: 10^(-20.4 / 20)
# max |u^T u - I| right after a refresh: the rounding of fp32 over a column, with room.
ORTHOGONAL = 1e-5
