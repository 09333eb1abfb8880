"""What scheme files share: quantizers from a config, spectral operands, the two operand modes."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.config import MetisConfig
from metis_hf.numerics import NVFP4, BlockFormat, Quantizer, Rounding, ScaleRounding, Tile
from metis_hf.operands import Conditioner, Operand
from metis_hf.operands.conditioners.spectral import Spectral
from metis_hf.schemes.base import Scheme


def quantizer(
    config: MetisConfig,
    *,
    rounding: str,
    scale_rounding: str,
    backward: bool = False,
    fmt: BlockFormat = NVFP4,
) -> Quantizer:
    """NVFP4 or another format with the scheme's roundings, unless the config overrides them."""
    override = config.backward_rounding if backward else config.forward_rounding
    return Quantizer(
        fmt,
        rounding=Rounding(override or rounding),
        scale_rounding=ScaleRounding(config.scale_rounding or scale_rounding),
        two_level=config.two_level and fmt.scale.tensor_scale,
    )


def nearest_forward(config: MetisConfig) -> tuple[Quantizer, Quantizer]:
    """(forward, backward): nearest elements and scales, then unbiased gradients.

    What the schemes have whose papers leave FP4's roundings open. Gradients are rounded
    stochastically with scales rounded up, so that nothing clips and no bias is left.
    """
    forward = quantizer(config, rounding="nearest", scale_rounding="nearest")
    return forward, quantizer(config, rounding="stochastic", scale_rounding="up", backward=True)


def stochastic_everywhere(config: MetisConfig) -> tuple[Quantizer, Quantizer]:
    """(forward, backward): stochastic elements, scales rounded up, as in arXiv 2509.00404."""
    forward = quantizer(config, rounding="stochastic", scale_rounding="up")
    return forward, quantizer(config, rounding="stochastic", scale_rounding="up", backward=True)


def spectral(config: MetisConfig, rank: int, *, compensated: bool) -> Spectral:
    """The dynamic split of activations and gradients."""
    return Spectral(
        rank=rank,
        sample_frac=config.sample_frac,
        oversample=config.oversample,
        n_iter=config.n_iter,
        compensated=compensated,
    )


def in_mode(scheme: Scheme, mode: str) -> Scheme:
    """A scheme with three operands, in one of the operand modes.

    "shared" leaves it as it is: one copy of each tensor for all its GEMMs. "contraction" gives
    each GEMM its own copy, blocked along its contraction dimension, and square tiles to the
    weight, whose blocks are then the same for fprop and dgrad.
    """
    if mode == "shared":
        return scheme
    weight = scheme.fprop_weight
    if weight.quantizer is not None:
        weight = replace(weight, quantizer=replace(weight.quantizer, tile=Tile.SQUARE))
    return replace(
        scheme,
        fprop_weight=weight,
        wgrad_grad_output=scheme.dgrad_grad_output,
        wgrad_input=scheme.fprop_input,
    )


def with_own_copies(scheme: Scheme, mode: str) -> Scheme:
    """`in_mode` for weights too: in contraction mode dgrad quantizes a copy of its own."""
    if mode == "shared":
        return scheme
    return replace(
        scheme,
        dgrad_weight=scheme.fprop_weight,
        wgrad_grad_output=scheme.dgrad_grad_output,
        wgrad_input=scheme.fprop_input,
    )


def rotated_scheme(
    config: MetisConfig, quantizers: tuple[Quantizer, Quantizer], rotation: Conditioner
) -> Scheme:
    """Both operands of a GEMM rotated along the dimension that it contracts.

    "shared" rotates the features of all three tensors. "contraction" gives every GEMM its own
    copies, rotated and blocked along its contraction dimension, of the weight too: there the
    rotations cancel, and the product is one of FP4 matrices.
    """
    forward, backward = quantizers
    scheme = Scheme(
        fprop_input=Operand(forward, rotation),
        fprop_weight=Operand(forward, rotation),
        dgrad_grad_output=Operand(backward, rotation),
    )
    return with_own_copies(scheme, config.operand_mode or "shared")
