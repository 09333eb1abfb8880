"""Four Over Six on NVIDIA's recipe."""

from __future__ import annotations

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import MetisConfig, ScaleRule, Scheme, register_scheme, with_rule


@register_scheme(
    "four-over-six",
    summary="`nvidia` with 4/6 block scales for inputs and weights",
    source="arXiv 2512.02010 (Four Over Six)",
    formats=("nvfp4",),
)
def four_over_six(config: MetisConfig, rank: int) -> Scheme:
    """Return `nvidia` with a block's maximum scaled to code 6 or 4, whichever fits better.

    The paper otherwise trains with NVIDIA's recipe: 16x16 tiles of weights, random Hadamard in
    wgrad, stochastic gradients. Gradients keep the plain rule here, because the choice between 4
    and 6 compares errors of nearest rounding. The authors' library can apply it to gradients too.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    forward = "fprop_input", "fprop_weight", "wgrad_input"
    return with_rule(nvidia(config, rank), ScaleRule.FOUR_OVER_SIX, *forward)
