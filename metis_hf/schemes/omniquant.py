"""OmniQuant's learnable weight clipping."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    ClippedWeight,
    MetisConfig,
    Operand,
    Scheme,
    in_mode,
    nearest_forward,
    register_scheme,
)


@register_scheme(
    "omniquant",
    summary="trained clipping of weights; for inference, here a training-time conditioner",
    source="arXiv 2308.13137, learnable weight clipping",
)
def omniquant(config: MetisConfig, rank: int) -> Scheme:
    """Return weights clipped to a trained share of their block's largest; see `ClippedWeight`.

    Its authors train the strengths alone, block by block, on a finished model for inference. Here
    they are parameters of the model and train with its weights. Of the paper's two parts this is
    the first; the second, trained scales per channel, is what "smoothquant" computes. Nearest
    rounding forward, stochastic backward.
    """
    forward, backward = nearest_forward(config)
    block = forward.fmt.block_size
    if block is None:
        raise ValueError(f"{forward.fmt.name} has one scale per row, and clipping is by blocks")
    scheme = Scheme(
        fprop_input=Operand(forward),
        fprop_weight=Operand(forward),
        dgrad_grad_output=Operand(backward),
        weight=ClippedWeight(block),
    )
    return in_mode(scheme, config.operand_mode or "shared")
