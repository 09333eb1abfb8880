"""QuIP's random orthogonal preprocessing as a training-time conditioner."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MetisConfig,
    RandomKronecker,
    Scheme,
    key_of,
    nearest_forward,
    register_scheme,
    rotated_scheme,
)


@register_scheme(
    "quip",
    summary="random orthogonal Kronecker rotation of both operands (designed for inference)",
    source="arXiv 2307.13304 (QuIP)",
)
def quip(config: MetisConfig, rank: int) -> Scheme:
    """Multiply both operands by (P_1 x P_2) and a permutation along the contraction dimension.

    QuIP is meant for inference, and rotates weights alone, from both sides. Here only the side that
    the GEMM contracts is rotated, since the other side does not meet the second operand. Inputs and
    gradients get the same rotation, so that it cancels. LDLQ rounding and the rescaling of channels
    need the Hessian of calibration data and are left out; rounding is as in `quarot`.
    """
    rotation = RandomKronecker(seed=key_of("kronecker", config.seed).static)
    return rotated_scheme(config, nearest_forward(config), rotation)
