"""Four Over Six on NVIDIA's recipe."""

from __future__ import annotations

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import MetisConfig, ScaleRule, Scheme, register_scheme, with_rule


@register_scheme(
    "four-over-six",
    summary="the recipe of `nvidia` with 4/6 block scales for inputs and weights",
    source="arXiv 2512.02010 (Four Over Six)",
    formats=("nvfp4",),
)
def four_over_six(config: MetisConfig, rank: int) -> Scheme:
    """Return the recipe in which a block's maximum lies on code 6 or 4, as fits better.

    The paper trains with NVIDIA's recipe otherwise: 16x16 tiles of weights, random Hadamard in
    wgrad, stochastic gradients. Gradients keep the plain rule here: the choice between 4 and 6
    compares errors of nearest rounding. The authors' library lets it be applied to them too.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    forward = "fprop_input", "fprop_weight", "wgrad_input"
    return with_rule(nvidia(config, rank), ScaleRule.FOUR_OVER_SIX, *forward)
