"""Quartet II: unbiased backward operands by MS-EDEN, Four Over Six forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from metis_hf.schemes.parts import (
    CallKeys,
    Contents,
    LayerState,
    MetisConfig,
    Operand,
    RandomHadamard,
    Requantized,
    Role,
    ScaleRule,
    Scheme,
    key_of,
    quantizer,
    refuse_shared,
    register_scheme,
)


@dataclass(frozen=True)
class SharedSigns(LayerState):
    """Tells a call's gradients the signs of their partners in dgrad and wgrad; has no buffers."""

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Contents:
        own = keys[Role.DGRAD_WEIGHT].data, keys[Role.WGRAD_INPUT].data
        assert own[0] is not None
        assert own[1] is not None
        return Contents(weight=own[0], input=own[1])


@register_scheme(
    "quartet2",
    summary="4/6 scales forward; MS-EDEN backward: random rotation, nearest, corrected scales",
    source="arXiv 2601.22813 (Quartet II); github.com/IST-DASLab/Quartet-II",
    formats=("nvfp4",),
)
def quartet2(config: MetisConfig, rank: int) -> Scheme:
    """Quantize each GEMM's operands, in blocks of 16 everywhere (native scales, no square tiles).

    | GEMM  | operand     | of   | blocks       | basis  | elements | scales      |
    | fprop | input       | x    | along in     | its own| nearest  | 4/6         |
    | fprop | weight      | w    | along in     | its own| nearest  | 4/6         |
    | dgrad | grad_output | dy   | along out    | random | nearest  | MS-EDEN     |
    | dgrad | weight      | Q(w) | along out    | random | nearest  | MS-EDEN     |
    | wgrad | grad_output | dy   | along tokens | random | nearest  | MS-EDEN     |
    | wgrad | input       | Q(x) | along tokens | random | nearest  | MS-EDEN     |

    Q rounds to nearest, as in fprop, so that the gradient is the gradient of the quantized network.
    MS-EDEN is algorithm 1 of the paper: groups of 128 rotated by Hadamard's matrix with fresh
    signs, amax scaled to 6.07, nearest elements, one correction factor for each block of 16 in its
    scale, which is rounded stochastically (the released code has one for each group of 128). Both
    operands of a GEMM have the same signs, which depend on the weight in dgrad and on the input in
    wgrad. The signs of dgrad are therefore the same in all micro-batches of a step, except for a
    frozen weight, whose signs also depend on the input. Each process has its own signs.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    nearest = quantizer(config, rounding="nearest", scale_rounding="nearest")
    forward = replace(nearest, scale_rule=ScaleRule.FOUR_OVER_SIX)
    nearest = quantizer(config, rounding="nearest", scale_rounding="nearest", backward=True)
    backward = replace(nearest, scale_rule=ScaleRule.EDEN)
    dgrad, wgrad = (
        RandomHadamard(key_of("signs", name, config.seed).static) for name in ("dgrad", "wgrad")
    )
    return Scheme(
        fprop_input=Operand(forward),
        fprop_weight=Operand(forward),
        dgrad_grad_output=Operand(backward, replace(dgrad, partner="weight")),
        dgrad_weight=Operand(backward, Requantized(dgrad)),
        wgrad_grad_output=Operand(backward, replace(wgrad, partner="input")),
        wgrad_input=Operand(backward, Requantized(wgrad)),
        state=SharedSigns(),
    )
