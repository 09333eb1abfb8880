"""Scale and shift per channel, moved between activation and weight.

SmoothQuant (arXiv 2211.10438) quantizes x / s and w * s, Outlier Suppression+ (arXiv 2304.09145)
(x - z) / s and w * s. Here both transforms are undone right after quantization: the operands are
s Q((x - z) / s) + z and Q(w s) / s. Their product is the papers', including their bias z @ w_hat^T.

The layer's state (`schemes.states.LayerState`) provides s and z for each call: a scheme holds a
`PerChannel`, and the plan of a call binds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from metis_hf.operands.conditioner import AroundQuantizer


class Channels(NamedTuple):
    """Scales and shifts that one call moves from x [t i] to w [o i]; fp32, frozen for backward."""

    scale: Tensor  # s [i], positive and finite
    shift: Tensor | None = None  # z [i], finite


@dataclass(frozen=True)
class PerChannel(AroundQuantizer):
    """Placeholder for a `ChannelAffine` in a scheme; unbound, it quantizes the matrix directly.

    Args:
        weight: whether the matrix is the weight, rather than the input.
    """

    weight: bool = False

    needs_state: ClassVar[bool] = True
    transformed: ClassVar[str] = "tensor"

    def bind(self, state: Channels) -> ChannelAffine:
        if self.weight:
            return ChannelAffine(state.scale.reciprocal())
        return ChannelAffine(state.scale, state.shift)


@dataclass(frozen=True, eq=False)
class ChannelAffine(AroundQuantizer):
    """x_hat = scale * Q((x - shift) / scale) + shift, per column; compared by identity.

    Args:
        scale: [c]
        shift: [c], None for zeros.
    """

    scale: Tensor
    shift: Tensor | None = None

    transformed: ClassVar[str] = "normalized"

    def forward(self, x: Tensor, *, dim: int) -> Tensor:
        return (x if self.shift is None else x - self.shift) / self.scale

    def inverse(self, x: Tensor, *, dim: int) -> Tensor:
        x = x * self.scale
        return x if self.shift is None else x + self.shift
