"""NVFP4 as it is deployed: W4A4, and W4A16; for quantization-aware training and calibration."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    NVFP4,
    MetisConfig,
    Operand,
    ScaleRule,
    Scheme,
    StaticScale,
    StaticScales,
    nearest_forward,
    register_scheme,
)


@register_scheme(
    "w4a4",
    summary="NVFP4 as deployed: static tensor scales, backward pass in high precision",
    source="compressed-tensors' preset NVFP4, as vLLM runs it",
    formats=(NVFP4.name,),
)
def w4a4(config: MetisConfig, rank: int) -> Scheme:
    """Return the forward pass of a deployed layer, with a straight-through gradient.

    - Input: dynamic block scales, rounded to nearest, under a tensor scale that `calibrate` fixed.
    - Weight: row blocks, each with the best of six scales; a checkpoint holds codes and scales, so
      kernels need not know how they were chosen. The tensor scale is fixed too, and shared by
      layers that are deployed as one (query, key and value; gate and up).
    - Backward pass: in high precision, with the quantized copies of the forward pass.

    Raises:
        ValueError: `two_level=False`, which has no tensor scale to fix; `split_weight` of True or
            "side-branch", since no deployed layer has factors; or block scales that are not rounded
            to nearest, as kernels round the scales of inputs.
    """
    if config.split_weight:
        raise ValueError(
            f'scheme "{config.scheme}" trains the layer that is deployed, but '
            f"split_weight={config.split_weight!r} stores "
            "factors, which no deployed layer has; leave split_weight unset"
        )
    if config.scale_rounding not in (None, "nearest"):
        raise ValueError(
            f'scheme "{config.scheme}" rounds block scales to nearest, as the kernels of '
            f"deployed layers do; scale_rounding={config.scale_rounding!r} would train a different "
            "model. Leave scale_rounding unset"
        )
    if not config.two_level:
        raise ValueError(
            f'scheme "{config.scheme}" fixes tensor scales, but two_level=False has none; leave '
            "two_level unset"
        )
    forward, _ = nearest_forward(config)
    return Scheme(
        fprop_input=Operand(forward, StaticScale()),
        fprop_weight=Operand(
            replace(forward, scale_rule=ScaleRule.SEARCH), StaticScale(weight=True)
        ),
        state=StaticScales(),
    )


@register_scheme(
    "w4a16",
    summary="NVFP4 weights as deployed, everything else in high precision",
    source="compressed-tensors' preset NVFP4A16",
    formats=(NVFP4.name,),
)
def w4a16(config: MetisConfig, rank: int) -> Scheme:
    """Return `w4a4` with unquantized inputs; raises as `w4a4`."""
    scheme = w4a4(config, rank)
    return replace(scheme, fprop_input=Operand(), state=StaticScales(input=False))
