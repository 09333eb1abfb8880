"""Scale and shift per channel, moved between activation and weight.

SmoothQuant (arXiv 2211.10438) quantizes x / s and w * s, Outlier Suppression+ (arXiv 2304.09145)
(x - z) / s and w * s. Here both are turned back right after quantization: the operands are
s Q((x - z) / s) + z and Q(w s) / s, whose product is the papers', with z's part (their bias
z @ w_hat^T) in it.

Which s and z a call takes is its layer's state (`schemes.base.LayerState`): a scheme holds a
`PerChannel`, and the plan of a call binds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands import IDENTITY, Encoded, Part, Work


class Channels(NamedTuple):
    """What one call moves from x [t i] to w [o i]; fp32, frozen for its backward pass."""

    scale: Tensor  # s [i], positive and finite
    shift: Tensor | None = None  # z [i], finite


@dataclass(frozen=True)
class PerChannel:
    """The place of a `ChannelAffine` in a scheme; by itself it quantizes the matrix as it is.

    Args:
        weight: whether the matrix is the weight, rather than the input.
    """

    weight: bool = False

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        return IDENTITY(x, quantizer, dim=dim, key=key, dtype=dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        return IDENTITY.parts(x, quantizer, dim=dim, key=key)

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        return IDENTITY.encode(x, quantizer, dim=dim, key=key)

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        return IDENTITY.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype)

    def work(self, shape, *, dim) -> Work:
        """Extremes of the columns, a division and a multiplication; a shift adds two more."""
        t, c = shape
        call, encode, decode = ({"elementwise": passes * t * c} for passes in (4.0, 3.0, 1.0))
        return Work(call, encode, decode, (shape,))

    def bind(self, channels: Channels) -> ChannelAffine:
        """The conditioner of one call."""
        if self.weight:
            return ChannelAffine(channels.scale.reciprocal())
        return ChannelAffine(channels.scale, channels.shift)


@dataclass(frozen=True, eq=False)
class ChannelAffine:
    """scale * Q((x - shift) / scale) + shift, both of them per column. Equal to itself alone.

    Args:
        scale: [c]
        shift: [c], None for zeros.
    """

    scale: Tensor
    shift: Tensor | None = None

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        return self._restore(quantizer(self._normalize(x), dim=dim, key=key), dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        normal = self._normalize(x)
        return [Part("normalized", normal, quantizer(normal, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        return Encoded(pack(self._normalize(x), quantizer, dim=dim, key=key))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        return self._restore(
            unpack(Packed(*encoded.tensors), quantizer, dim=dim, shape=shape), dtype
        )

    def _normalize(self, x: Tensor) -> Tensor:
        x = x if x.dtype is torch.float64 else x.float()
        return (x if self.shift is None else x - self.shift) / self.scale

    def _restore(self, quantized: Tensor, dtype: torch.dtype) -> Tensor:
        x_hat = quantized * self.scale
        return (x_hat if self.shift is None else x_hat + self.shift).to(dtype)
