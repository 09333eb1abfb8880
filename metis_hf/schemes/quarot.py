"""QuaRot's rotations as a training-time conditioner."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    FullHadamard,
    MetisConfig,
    Scheme,
    key_of,
    nearest_forward,
    register_scheme,
    rotated_scheme,
)


@register_scheme(
    "quarot",
    summary="full-width random Hadamard on both operands, nearest forward (designed for inference)",
    source="arXiv 2404.00456 (QuaRot)",
)
def quarot(config: MetisConfig, rank: int) -> Scheme:
    """Rotate both operands along the contraction dimension, then quantize to NVFP4.

    QuaRot is meant for inference, and folds rotations into a trained model's weights where that is
    exact. In training, weights stay unrotated and each use rotates them, which gives the same
    quantized products. QuaRot has no gradients; here they are rotated too, and rounded
    stochastically. Its clipping ratios and GPTQ need calibration and are left out.
    """
    rotation = FullHadamard(seed=key_of("hadamard", config.seed).static)
    return rotated_scheme(config, nearest_forward(config), rotation)
