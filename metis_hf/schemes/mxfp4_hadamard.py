"""MXFP4 with a Hadamard rotation without random signs in all three GEMMs."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MXFP4,
    Hadamard,
    MetisConfig,
    Scheme,
    quantizer,
    refuse_shared,
    register_scheme,
    rotated_scheme,
)


@register_scheme(
    "mxfp4-hadamard",
    summary="MXFP4, nearest everywhere, Hadamard without random signs in all three GEMMs",
    source="arXiv 2605.09825; ROCm TransformerEngine MXFP4BlockScaling with its Hadamard",
)
def mxfp4_hadamard(config: MetisConfig, rank: int) -> Scheme:
    """Quantize the operands of each GEMM from the high-precision tensor.

    | GEMM  | operand     | blocks            | Hadamard | rounding |
    | fprop | input       | 1x32 along in     | yes      | nearest  |
    | fprop | weight      | 1x32 along in     | yes      | nearest  |
    | dgrad | grad_output | 1x32 along out    | yes      | nearest  |
    | dgrad | weight      | 1x32 along out    | yes      | nearest  |
    | wgrad | grad_output | 1x32 along tokens | yes      | nearest  |
    | wgrad | input       | 1x32 along tokens | yes      | nearest  |

    The rotation is Sylvester's matrix of 16 over 4, two of them in a block. Scales are powers of
    two by the rule "even" of the vendor's kernel: amax comes to between 3.5 and 7 of them.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    forward = quantizer(config, rounding="nearest", scale_rounding="even", fmt=MXFP4)
    backward = quantizer(
        config, rounding="nearest", scale_rounding="even", backward=True, fmt=MXFP4
    )
    rotation = Hadamard(seed=None)
    own_copies = config.replace(operand_mode="contraction")
    return rotated_scheme(own_copies, (forward, backward), rotation)
