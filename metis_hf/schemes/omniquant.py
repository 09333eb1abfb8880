"""OmniQuant's learnable weight clipping."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    ClippedWeight,
    MetisConfig,
    Scheme,
    nearest_forward,
    register_scheme,
    three_operands,
)


@register_scheme(
    "omniquant",
    summary="trained weight clipping (designed for inference, here used in training)",
    source="arXiv 2308.13137, learnable weight clipping",
)
def omniquant(config: MetisConfig, rank: int) -> Scheme:
    """Clip weights to a trained share of their block's amax; see `ClippedWeight`.

    The authors train the clipping strengths alone, block by block, on a finished model for
    inference. Here the strengths are parameters of the model and train with its weights. This is
    the first of the paper's two parts; the second trains scales per channel, which "smoothquant"
    computes. Nearest rounding forward, stochastic backward.
    """
    quantizers = nearest_forward(config)
    fmt = quantizers[0].fmt
    if fmt.block_size is None:
        raise ValueError(
            f"{fmt.name} has one scale per row, but clipping needs blocks; choose a block format"
        )
    return replace(three_operands(config, quantizers), weight=ClippedWeight(fmt.block_size))
