"""TetraJet-v2: unbiased backward operands, and what it needs against oscillating weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.noise import key_of
from metis_hf.operands import Hadamard, Operand
from metis_hf.operands.conditioners.requantized import Requantized
from metis_hf.schemes.base import Scheme, register_scheme
from metis_hf.schemes.parts import quantizer


@dataclass(frozen=True)
class Oscillation:
    """What OsciReset keeps: each weight before the last step, and two path lengths.

    12 bytes for each weight, on every process. `training.oscillation` fills and reads them.

    Args:
        period: optimizer steps from the start of one window to that of the next.
        window: steps over which paths are measured; the reset comes at its end.
        threshold: ratio of the paths from which a weight counts as oscillating.
        start: share of all steps before the first window.
    """

    period: int = 200
    window: int = 50
    threshold: float = 8.0
    start: float = 0.6

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        names = ("previous_weight", "weight_path", "quantized_path")
        shape, kind = (out_features, in_features), torch.float32
        return {name: torch.zeros(shape, dtype=kind) for name in names}

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        """Nothing: it changes between steps, not in calls."""

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> None:
        """Nothing: operands do not depend on it."""


@register_scheme(
    "tetrajet2",
    summary="backward operands requantized from the forward copies, rotated; oscillation reset",
    source="arXiv 2510.27527; github.com/thu-ml/TetraJet-v2-NVFP4Training",
)
def tetrajet2(config: MetisConfig, rank: int) -> Scheme:
    """Per-GEMM operands; blocks of 16, scales to nearest E4M3.

    | GEMM  | operand     | of   | blocks       | Hadamard | rounding   |
    | fprop | input       | x    | along in     | no       | nearest    |
    | fprop | weight      | w    | along in     | no       | nearest    |
    | dgrad | grad_output | dy   | along out    | yes      | stochastic |
    | dgrad | weight      | Q(w) | along out    | yes      | stochastic |
    | wgrad | grad_output | dy   | along tokens | yes      | stochastic |
    | wgrad | input       | Q(x) | along tokens | yes      | stochastic |

    Q is the nearest copy of fprop, whatever `forward_rounding` says. The outer scale is one per
    tensor, where the authors have one per 128 elements; signs of the rotation are fixed by the
    config's seed, where they draw them anew. OsciReset runs from MetisCallback, or by
    `oscillation.suppress_oscillation`, with the settings of the authors' 150M run. OutControl (a
    tenth of the input channels in MXFP8) is left out: it would not keep operands in FP4.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    if config.operand_mode == "shared":
        raise ValueError(
            'scheme "tetrajet2" quantizes a copy per GEMM; operand_mode="shared" would be another '
            'scheme. Leave operand_mode unset, or use scheme "nvfp4"'
        )
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
