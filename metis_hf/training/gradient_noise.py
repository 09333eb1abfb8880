"""Gradient-to-noise ratio: shows when FP4 stops being sufficient for a training run.

arXiv 2505.19115 ("FP4 All the Way") finds that quantized training becomes less effective once the
gradient norm falls below about sqrt(3) times the quantization noise: |g| < sqrt(3) sigma_q sqrt(d)
for d elements whose quantization noise has the standard deviation sigma_q. Here both sides are
measured for one weight's gradient in one wgrad GEMM. Noise in the output gradient from the dgrad
GEMMs of later layers, and noise in the input from earlier layers, is not included.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.layers.gemm import GemmPlan
from metis_hf.operands import Quantized
from metis_hf.schemes import Role
from metis_hf.shared.layer_names import group_of

THRESHOLD = math.sqrt(3)  # of |g| / noise; arXiv 2505.19115, abstract


class GradientNoise(NamedTuple):
    """Frobenius norms of a layer's weight gradient and of the noise that quantization adds."""

    gradient_norm: float
    noise_norm: float


@torch.no_grad()
def weight_gradient_noise(plan: GemmPlan, x: Tensor, dy: Tensor) -> GradientNoise | None:
    """Compare the wgrad GEMM of quantized operands with the GEMM of exact operands.

    G = dy^T x, and G_q = dy_hat^T x_hat with the same operands, to the bit, and the same
    corrections as in the backward pass. Both products are computed in fp32 from operands in the
    GEMM's dtype, so that |G_q - G| comes from the quantizers alone.

    Args:
        plan: of the forward call, with its noise keys.
        x: [t i], the input of the call.
        dy: [t o], the gradient of the call's output.

    Returns:
        The norms, both NaN if a tensor has NaN or inf. None if nothing is quantized (bf16, or a
        backward pass in high precision) or the noise is zero (a zero gradient).
    """
    roles = (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)
    if all(plan.scheme.resolve(role)[1].quantizer is None for role in roles):
        return None
    if not bool(torch.isfinite(x).all() & torch.isfinite(dy).all()):
        return GradientNoise(math.nan, math.nan)
    d_hat, x_hat = (_fp32(plan.matrix_operand(role, m)) for role, m in zip(roles, (dy, x)))
    x, dy = (m.to(plan.dtype).to(d_hat.values.dtype) for m in (x, dy))
    exact = dy.T @ x  # [o t] @ [t i] -> [o i]
    product = replace(plan, dtype=exact.dtype).wgrad(dy, d_hat, x_hat)
    noise = torch.linalg.vector_norm(product - exact).item()
    return GradientNoise(torch.linalg.vector_norm(exact).item(), noise) if noise else None


def _fp32(operand: Quantized) -> Quantized:
    """Return the operand in fp32 (fp64 stays), with its scale multiplied into the values."""
    values = operand.values
    values = values if values.dtype is torch.float64 else values.float()
    scaled = values if operand.scale is None else values * operand.scale
    return Quantized(scaled, low=operand.low)


def signal_to_noise(norms: Sequence[GradientNoise]) -> float | None:
    """Return |G| / (sqrt(3) noise) over several layers: 1 is the paper's threshold.

    Squared norms are summed, as if the layers were one long vector. Return None for no layers, and
    NaN if the norms of any layer are NaN.
    """
    if not norms:
        return None
    gradient = math.hypot(*(n.gradient_norm for n in norms))
    return gradient / (THRESHOLD * math.hypot(*(n.noise_norm for n in norms)))


def noise_ratios(
    per_layer: Mapping[str, Sequence[float]], group: Callable[[str], str] = group_of
) -> dict[str, float]:
    """Return "noise/<group>/ratio" for each group of layers, and "noise/ratio" over all layers.

    Args:
        per_layer: layer name -> (gradient norm, noise norm), as in the health file.
        group: layer name -> name of its group.
    """
    groups: dict[str, list[GradientNoise]] = {}
    for name, norms in per_layer.items():
        groups.setdefault(group(name), []).append(GradientNoise(*norms))
    ratios = {f"noise/{name}/ratio": signal_to_noise(norms) for name, norms in groups.items()}
    ratios["noise/ratio"] = signal_to_noise(list(itertools.chain(*groups.values())))
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


@dataclass(frozen=True)
class Crossing:
    """The step at which the smoothed ratio falls below 1 and stays there.

    Attributes:
        step: the first measured step below 1; None if the ratio does not stay below.
        from_start: the ratio was never above 1.
    """

    step: int | None
    from_start: bool = False


def find_crossing(steps: Sequence[int], ratios: Sequence[float]) -> Crossing:
    """Return the step from which a series of |G| / (sqrt(3) noise) stays below 1.

    A running median of three is compared with 1, so that a single outlier decides nothing; the
    windows at both ends are shifted inward to full length. Series of up to three finite ratios are
    compared without smoothing.

    Args:
        steps: measured steps, ascending.
        ratios: one per step; NaN (a step with NaN in a tensor) is skipped.
    """
    finite = [(step, ratio) for step, ratio in zip(steps, ratios) if math.isfinite(ratio)]
    count = len(finite)
    span = 3 if count > 3 else 1
    starts = [max(0, min(i - span // 2, count - span)) for i in range(count)]
    below = [statistics.median(ratio for _, ratio in finite[i : i + span]) < 1 for i in starts]
    if not below or not below[-1]:
        return Crossing(None)
    start = len(below) - sum(1 for _ in itertools.takewhile(bool, reversed(below)))
    # The windows contain later measurements, so the first single ratios may still be above 1.
    start = next(i for i in range(start, count) if finite[i][1] < 1)
    return Crossing(finite[start][0], from_start=start == 0)
