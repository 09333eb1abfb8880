"""SVDQuant: smoothing, and a low-rank branch of the weight in high precision."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import RANK_MULTIPLE, MetisConfig, Scheme, SplitWeight, register_scheme
from metis_hf.schemes.smoothquant import smoothquant


@register_scheme(
    "svdquant",
    summary="smoothing and a high-precision low-rank weight branch (designed for inference)",
    source="arXiv 2411.05007",
    rank_multiple=RANK_MULTIPLE,
)
def svdquant(config: MetisConfig, rank: int) -> Scheme:
    """Use w_hat = (u * s) @ vh + Q(residual c) / c, with smoothing scales c; x as `smoothquant`.

    The factors stay in high precision and train. The authors quantize trained models for inference,
    with three differences: they decompose the smoothed weight, while here c changes during training
    and is computed from the residual's maxima; they search alpha, which is 1/2 here; and their
    low-rank branch multiplies unquantized activations, while here the layer has one GEMM, so that
    both branches read x_hat.
    """
    return replace(
        smoothquant(config, rank),
        weight=SplitWeight(rank, compensated=False, unit_rms=True, exact_factors=True),
    )
