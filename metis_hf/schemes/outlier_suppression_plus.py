"""Outlier Suppression+: channels shifted to their center, and scaled where they are wide."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import MetisConfig, Scheme, Shifting, register_scheme
from metis_hf.schemes.smoothquant import smoothquant


@register_scheme(
    "outlier-suppression-plus",
    summary="(x - z) / s and w * s per channel (designed for inference, here used in training)",
    source="arXiv 2304.09145",
)
def outlier_suppression_plus(config: MetisConfig, rank: int) -> Scheme:
    """Use x_hat = s Q((x - z) / s) + z and w_hat = Q(w s) / s, from running minima and maxima.

    The term z @ w_hat^T of the product is the bias that the paper adds to the layer; here it has
    the quantized weight. The authors quantize trained models for inference and search the threshold
    of s; `Shifting` computes one instead. Roundings are as in "smoothquant".
    """
    return replace(smoothquant(config, rank), state=Shifting())
