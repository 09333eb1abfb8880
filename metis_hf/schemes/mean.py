"""Mean removal (Averis), by the authors of Metis."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MeanRemoved,
    MetisConfig,
    Scheme,
    register_scheme,
    stochastic_everywhere,
    three_operands,
)


@register_scheme(
    "mean",
    summary="token means of inputs and gradients quantized separately; all rounding stochastic",
    source="arXiv 2603.10444 (Averis)",
)
def mean(config: MetisConfig, rank: int) -> Scheme:
    """Split inputs and output gradients as x = 1 mu^T + rest, and quantize both; weights directly.

    The rest is x minus the exact mean. Stochastic rounding everywhere with scales rounded up is as
    in the same group's arXiv 2509.00404; this paper does not say how scales are rounded.
    """
    quantizers = stochastic_everywhere(config)
    return three_operands(config, quantizers, input=MeanRemoved(), grad_output=MeanRemoved())
