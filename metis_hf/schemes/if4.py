"""IF4 and MixFP4: each block in E2M1 or in integers, whichever has the smaller error."""

from __future__ import annotations

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.nvidia_unbiased import nvidia_unbiased
from metis_hf.schemes.parts import IF4, MIXFP4, MetisConfig, Scheme, register_scheme


@register_scheme(
    "if4",
    summary="`nvidia-unbiased` with each block in E2M1 or scaled INT4, whichever fits better",
    source="arXiv 2603.28765 (IF4); github.com/mit-han-lab/fouroversix",
    formats=(IF4.name,),
)
def if4(config: MetisConfig, rank: int) -> Scheme:
    """Return the recipe that the authors train with: `nvidia-unbiased`, every operand in IF4.

    The format of a block is chosen by errors of nearest rounding, for gradients too, so that
    stochastic rounding stays unbiased; the authors' code compares one draw of each format. Assumed:
    16x16 tiles.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    return nvidia_unbiased(config.replace(format=IF4.name), rank)


@register_scheme(
    "mixfp4",
    summary="`nvidia` with each block in E2M1 or E1M2, whichever fits better",
    source="arXiv 2605.31035 (MixFP4), from its abstract",
    formats=(MIXFP4.name,),
)
def mixfp4(config: MetisConfig, rank: int) -> Scheme:
    """Return the recipe of `nvidia`, every operand in MixFP4: the paper has no training recipe.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    return nvidia(config.replace(format=MIXFP4.name), rank)
