"""Outlier Suppression+: channels shifted to their centre, and scaled where they are wide."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import MetisConfig, Scheme, Shifting, register_scheme
from metis_hf.schemes.smoothquant import smoothquant


@register_scheme(
    "outlier-suppression-plus",
    summary="(x - z) / s and w * s per channel; for inference, here a training-time conditioner",
    source="arXiv 2304.09145",
)
def outlier_suppression_plus(config: MetisConfig, rank: int) -> Scheme:
    """Return x_hat = s Q((x - z) / s) + z and w_hat = Q(w s) / s, from running minima and maxima.

    z's part of the product, z @ w_hat^T, is the bias that the paper adds to the layer; here it
    goes through the quantized weight. Its authors quantize trained models for inference and search
    the threshold of s; see `Shifting` for what stands in for the search. Roundings as in
    "smoothquant".
    """
    return replace(smoothquant(config, rank), state=Shifting())
