"""SmoothQuant: activation outliers moved into the weight, channel by channel."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MetisConfig,
    Operand,
    PerChannel,
    Scheme,
    Smoothing,
    in_mode,
    nearest_forward,
    register_scheme,
)


@register_scheme(
    "smoothquant",
    summary="x / s and w * s per channel; for inference, here a training-time conditioner",
    source="arXiv 2211.10438",
)
def smoothquant(config: MetisConfig, rank: int) -> Scheme:
    """Return x_hat = s Q(x / s) and w_hat = Q(w s) / s, s from running activation maxima.

    Its authors quantize trained models for inference, to INT8. Run here as a training-time
    conditioner of NVFP4: nearest rounding forward, stochastic backward, gradients quantized
    directly; the maxima come from `RunningRange`, alpha is 1/2.
    """
    forward, backward = nearest_forward(config)
    scheme = Scheme(
        fprop_input=Operand(forward, PerChannel()),
        fprop_weight=Operand(forward, PerChannel(weight=True)),
        dgrad_grad_output=Operand(backward),
        state=Smoothing(),
    )
    return in_mode(scheme, config.operand_mode or "shared")
