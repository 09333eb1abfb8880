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
    summary="token mean of inputs and gradients quantized apart, stochastic rounding everywhere",
    source="arXiv 2603.10444 (Averis)",
)
def mean(config: MetisConfig, rank: int) -> Scheme:
    """Return x = 1 mu^T + rest, both quantized, of inputs and output gradients; weights directly.

    The rest is taken against the exact mean. Stochastic rounding everywhere with scales rounded up
    is what the same group's arXiv 2509.00404 has; this paper leaves the scales open.
    """
    quantizers = stochastic_everywhere(config)
    return three_operands(config, quantizers, input=MeanRemoved(), grad_output=MeanRemoved())
