"""NVIDIA's NVFP4 recipe as TransformerEngine ships it."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    Hadamard,
    MetisConfig,
    Operand,
    Scheme,
    Tile,
    key_of,
    quantizer,
    refuse_shared,
    register_scheme,
)


@register_scheme(
    "nvidia",
    summary="16x16 weight tiles, stochastic gradients, random Hadamard in wgrad",
    source="arXiv 2509.25149; TransformerEngine NVFP4BlockScaling",
)
def nvidia(config: MetisConfig, rank: int) -> Scheme:
    """Quantize the operands of each GEMM from the high-precision tensor.

    | GEMM  | operand     | blocks            | Hadamard | rounding   |
    | fprop | input       | 1x16 along in     | no       | nearest    |
    | fprop | weight      | 16x16             | no       | nearest    |
    | dgrad | grad_output | 1x16 along out    | no       | stochastic |
    | dgrad | weight      | the same values   | no       | nearest    |
    | wgrad | grad_output | 1x16 along tokens | yes      | stochastic |
    | wgrad | input       | 1x16 along tokens | yes      | nearest    |

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    forward = quantizer(config, rounding="nearest", scale_rounding="nearest")
    backward = quantizer(config, rounding="stochastic", scale_rounding="nearest", backward=True)
    hadamard = Hadamard(seed=key_of("hadamard", config.seed).static)
    return Scheme(
        fprop_input=Operand(forward),
        fprop_weight=Operand(replace(forward, tile=Tile.SQUARE)),
        dgrad_grad_output=Operand(backward),
        wgrad_grad_output=Operand(backward, hadamard),
        wgrad_input=Operand(forward, hadamard),
    )
