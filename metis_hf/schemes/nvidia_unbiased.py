"""NVIDIA's recipe as Quartet II's code compares itself with it: gradients without clipping."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import MetisConfig, Operand, ScaleRule, Scheme, register_scheme

_SOURCE = "github.com/IST-DASLab/Quartet-II, its scheme Nvidia"


def _with_rule(operand: Operand | None, rule: ScaleRule) -> Operand:
    """Return an operand with another rule for its block scales."""
    assert operand is not None
    assert operand.quantizer is not None
    return replace(operand, quantizer=replace(operand.quantizer, scale_rule=rule))


@register_scheme(
    "nvidia-unbiased",
    summary="the recipe of `nvidia` with gradients scaled to 16/17 of the largest code",
    source=_SOURCE,
    formats=("nvfp4",),
)
def nvidia_unbiased(config: MetisConfig, rank: int) -> Scheme:
    """Return `nvidia` with output gradients that stochastic rounding leaves unbiased.

    A block's largest magnitude comes to 6 * 16/17 before its scale is rounded to the nearest E4M3
    number, which takes 1/17 off it at most where that number is normal: no element is beyond 6
    then. The input of wgrad is
    quantized from the input itself, rotated, as in `nvidia`.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    scheme = nvidia(config, rank)
    return replace(
        scheme,
        dgrad_grad_output=_with_rule(scheme.dgrad_grad_output, ScaleRule.UNBIASED),
        wgrad_grad_output=_with_rule(scheme.wgrad_grad_output, ScaleRule.UNBIASED),
    )


@register_scheme(
    "four-over-six-unbiased",
    summary="`nvidia-unbiased` with 4/6 block scales for input and weight of fprop",
    source=f"{_SOURCE} with four_over_six",
    formats=("nvfp4",),
)
def four_over_six_unbiased(config: MetisConfig, rank: int) -> Scheme:
    """Return `nvidia-unbiased` with Four Over Six in fprop alone: wgrad's input has plain scales.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    scheme = nvidia_unbiased(config, rank)
    return replace(
        scheme,
        fprop_input=_with_rule(scheme.fprop_input, ScaleRule.FOUR_OVER_SIX),
        fprop_weight=_with_rule(scheme.fprop_weight, ScaleRule.FOUR_OVER_SIX),
    )
