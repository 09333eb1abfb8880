"""Hot-Channel Patch on NVIDIA's recipe."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import HotChannels, MetisConfig, Scheme, register_scheme


@register_scheme(
    "hot-channel",
    summary="`nvidia` with rounding errors of the worst input channels added back in fprop",
    source="arXiv 2602.02047 (Hot-Channel Patch, CHON)",
)
def hot_channel(config: MetisConfig, rank: int) -> Scheme:
    """Quantize fprop's operands with `conditioners.hot_channels.HotChannels`, the rest as `nvidia`.

    The paper's variant is S-O2-B: one GEMM with appended channels, both operands compensated. Open
    choices of the paper, and differences from it:
    - Every operand ranks its own channels by its own error; the paper adds the errors of both.
    - Every call ranks its channels, so no ranking is kept; the paper ranks periodically.
    - 1/16 of the channels are patched, at least one block of 16.
    - Residuals are NVFP4 too, since a single FP4 GEMM takes nothing else.
    - If both operands patch a channel, the GEMM includes the product of their residuals; the paper
      omits this second-order term.
    - dgrad takes the patched weight of fprop; the other backward operands are not patched.
    CHON also keeps a few layers in BF16; `exclude_modules` does that for every scheme.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    scheme = nvidia(config, rank)
    patch = HotChannels()
    return replace(
        scheme,
        fprop_input=replace(scheme.fprop_input, conditioner=patch),
        fprop_weight=replace(scheme.fprop_weight, conditioner=patch),
    )
