"""SmoothQuant: activation outliers moved into the weight, channel by channel."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    MetisConfig,
    PerChannel,
    Scheme,
    Smoothing,
    nearest_forward,
    register_scheme,
    three_operands,
)


@register_scheme(
    "smoothquant",
    summary="x / s and w * s per channel (designed for inference, here used in training)",
    source="arXiv 2211.10438",
)
def smoothquant(config: MetisConfig, rank: int) -> Scheme:
    """Compute x_hat = s Q(x / s) and w_hat = Q(w s) / s, with s from running activation maxima.

    The authors quantize trained models to INT8 for inference. Here it is a training-time
    conditioner of NVFP4: nearest rounding forward, stochastic backward, gradients quantized
    directly; the maxima come from `RunningRange`, alpha is 1/2.
    """
    quantizers, weight = nearest_forward(config), PerChannel(weight=True)
    scheme = three_operands(config, quantizers, input=PerChannel(), weight=weight)
    return replace(scheme, state=Smoothing())
