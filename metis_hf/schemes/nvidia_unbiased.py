"""NVIDIA's recipe as a baseline of Quartet II's code: gradients without clipping."""

from __future__ import annotations

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import MetisConfig, ScaleRule, Scheme, register_scheme, with_rule

_SOURCE = "github.com/IST-DASLab/Quartet-II, scheme Nvidia"


@register_scheme(
    "nvidia-unbiased",
    summary="`nvidia` with gradients scaled to 16/17 of the largest code",
    source=_SOURCE,
    formats=("nvfp4",),
)
def nvidia_unbiased(config: MetisConfig, rank: int) -> Scheme:
    """Return `nvidia` with output gradients that stochastic rounding leaves unbiased.

    A block's amax is scaled to 6 * 16/17 before its scale is rounded to the nearest E4M3 number.
    Rounding reduces a normal scale by at most 1/17, so no element exceeds 6. The input of wgrad is
    quantized from the rotated high-precision input, as in `nvidia`.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    gradients = "dgrad_grad_output", "wgrad_grad_output"
    return with_rule(nvidia(config, rank), ScaleRule.UNBIASED, *gradients)


@register_scheme(
    "four-over-six-unbiased",
    summary="`nvidia-unbiased` with 4/6 block scales for inputs and weights in fprop",
    source=f"{_SOURCE} with four_over_six",
    formats=("nvfp4",),
)
def four_over_six_unbiased(config: MetisConfig, rank: int) -> Scheme:
    """Return `nvidia-unbiased` with Four Over Six in fprop alone: wgrad's input has plain scales.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    scheme = nvidia_unbiased(config, rank)
    return with_rule(scheme, ScaleRule.FOUR_OVER_SIX, "fprop_input", "fprop_weight")
