"""DGE: a differentiable estimator of the weight's gradient, instead of straight-through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.numerics import CodebookFormat, MixedFormat, Quantizer
from metis_hf.numerics.elements import on_device
from metis_hf.operands.conditioners.identity import Identity


@dataclass(frozen=True)
class DifferentiableEstimator(Identity):
    """Quantizes the weight directly; its gradient is the derivative of a smooth step function.

    Differentiable gradient estimator, arXiv 2501.17116, equations 6 to 8. Between the neighboring
    codes g and g + delta, rounding is approximated by
        f(y) = g + delta / 2 (1 + sign(z) |z|^(1/k)),  z = 2 (y - g) / delta - 1,
    with y the weight in units of its scale, so that dL/dw = dL/dw_hat f'(y) with
        f'(y) = min(|z|^(1/k - 1) / k, cap).
    The mean of f' over an interval is 1 without the cap, and 0.59 with it: near a threshold the
    gradient is multiplied by up to `cap`, near a code by 1/k.

    Args:
        steepness: k; the paper's 5.
        cap: of f', which is infinite midway between two codes; the paper's 3.
    """

    steepness: float = 5.0
    cap: float = 3.0

    def weight_gradient(self, dw: Tensor, w: Tensor, quantizer: Quantizer | None) -> Tensor:
        """Return dL/dw [o i] from dw = dL/dw_hat [o i], for a weight quantized along its rows."""
        if not isinstance(quantizer, Quantizer) or w.numel() == 0:
            return dw  # nothing is rounded to codes
        return dw * self.derivative(quantizer.in_code_units(w), quantizer).to(dw.dtype)

    def derivative(self, y: Tensor, quantizer: Quantizer) -> Tensor:
        """Return f'(y), fp32, with y clamped to the largest code."""
        element = quantizer.fmt.element
        assert not isinstance(element, CodebookFormat | MixedFormat)  # `occ` refuses them
        codes = on_device(element.grid, torch.float32, y.device)
        magnitude = y.abs().clamp(max=element.max)
        above = torch.searchsorted(codes, magnitude.contiguous()).clamp(1, len(codes) - 1)
        low, high = codes[above - 1], codes[above]
        z = 2 * (magnitude - low) / (high - low) - 1
        slope = z.abs().pow(1 / self.steepness - 1) / self.steepness
        return slope.clamp(max=self.cap)
