"""SVDQuant: smoothing, and a low-rank branch of the weight in high precision."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import RANK_MULTIPLE, MetisConfig, Scheme, SplitWeight, register_scheme
from metis_hf.schemes.smoothquant import smoothquant


@register_scheme(
    "svdquant",
    summary="smoothing, low-rank weight branch not in FP4; for inference, here trained with it",
    source="arXiv 2411.05007",
    rank_multiple=RANK_MULTIPLE,
)
def svdquant(config: MetisConfig, rank: int) -> Scheme:
    """Take w_hat = (u * s) @ vh + Q(residual c) / c with smoothing scales c; x as `smoothquant`.

    The factors stay in high precision and train. Its authors quantize trained models for inference
    and differ in three things: they decompose the smoothed weight, where here c moves during
    training and is taken against the residual's maxima; they search alpha, which is 1/2 here; and
    their low-rank branch multiplies unquantized activations, where here the layer has one GEMM, so
    that both branches read x_hat.
    """
    return replace(
        smoothquant(config, rank),
        weight=SplitWeight(rank, compensated=False, unit_rms=True, exact_factors=True),
    )
