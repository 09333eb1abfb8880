"""TetraJet-v2: unbiased backward operands, and a reset of oscillating weights."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    Hadamard,
    MetisConfig,
    Operand,
    Oscillation,
    Requantized,
    Scheme,
    key_of,
    quantizer,
    refuse_shared,
    register_scheme,
)


@register_scheme(
    "tetrajet2",
    summary="rotated backward operands, requantized from forward copies; oscillation reset",
    source="arXiv 2510.27527; github.com/thu-ml/TetraJet-v2-NVFP4Training",
    formats=("nvfp4",),
)
def tetrajet2(config: MetisConfig, rank: int) -> Scheme:
    """Quantize the operands of each GEMM, in blocks of 16, scales to nearest E4M3.

    | GEMM  | operand     | of   | blocks       | Hadamard | rounding   |
    | fprop | input       | x    | along in     | no       | nearest    |
    | fprop | weight      | w    | along in     | no       | nearest    |
    | dgrad | grad_output | dy   | along out    | yes      | stochastic |
    | dgrad | weight      | Q(w) | along out    | yes      | stochastic |
    | wgrad | grad_output | dy   | along tokens | yes      | stochastic |
    | wgrad | input       | Q(x) | along tokens | yes      | stochastic |

    Q rounds to nearest as in fprop, whatever `forward_rounding` says. There is one outer scale per
    tensor, where the authors have one per 128 elements. The config's seed fixes the signs of the
    rotation, where the authors draw new ones. MetisCallback, or `layer_states.after_step`, runs
    OsciReset, with the settings of the authors' 150M run. OutControl (a tenth of the input channels
    in MXFP8) is left out: it would not keep operands in FP4.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    forward = quantizer(config, rounding="nearest", scale_rounding="nearest")
    backward = quantizer(config, rounding="stochastic", scale_rounding="nearest", backward=True)
    dgrad, wgrad = (Hadamard(key_of(name, config.seed).static) for name in ("dgrad", "wgrad"))
    return Scheme(
        fprop_input=Operand(forward),
        fprop_weight=Operand(forward),
        dgrad_grad_output=Operand(backward, dgrad),
        dgrad_weight=Operand(backward, Requantized(dgrad)),
        wgrad_grad_output=Operand(backward, wgrad),
        wgrad_input=Operand(backward, Requantized(wgrad)),
        state=Oscillation(),
    )
