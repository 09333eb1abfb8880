"""How a layer stores its weight, and how the stored parameters become the GEMM operand w_hat.

Dense: one matrix. Split: u [o k], s [k], vh [k i], residual [o i], all trainable, with
w = (u * s) @ vh + residual. The gradients are the chain rule through w_hat with straight-through
quantizers; written out they are the paper's five equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.operands import Operand


class WeightForm(Protocol):
    """A way to store a weight."""

    def dense(self, params: Sequence[Tensor]) -> Tensor:
        """The represented weight [o i], in the parameters' dtype."""

    def quantize(
        self, params: Sequence[Tensor], operand: Operand, *, dim: int, key: Key, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """(w_hat [o i] in `dtype`, tensor scale or None), as `Operand.__call__`."""

    def gradients(
        self, params: Sequence[Tensor], dw: Tensor, operand: Operand, *, key: Key
    ) -> list[Tensor]:
        """dw = dL/dw_hat [o i] carried to each parameter."""


@dataclass(frozen=True)
class DenseWeight:
    """One matrix."""

    def dense(self, params):
        return params[0]

    def quantize(self, params, operand, *, dim, key, dtype):
        return operand(params[0].detach(), dim=dim, key=key, dtype=dtype)

    def gradients(self, params, dw, operand, *, key):
        return [dw.to(params[0].dtype)]


@dataclass(frozen=True)
class SplitWeight:
    """u, s, vh and residual.

    Args:
        compensated: w_hat = low + Q(residual + (u * s) @ vh - low) with low = Q(u) * s @ Q(vh);
            the correction is a constant to autograd. The paper has w_hat = low + Q(residual).
    """

    compensated: bool = True

    def dense(self, params):
        u, s, vh, residual = params
        return torch.addmm(residual, u * s, vh)

    def quantize(self, params, operand, *, dim, key, dtype):
        u, s, vh, residual = (p.detach() for p in params)
        if operand.quantizer is None:
            return self.dense((u, s, vh, residual)).to(dtype), None
        u_hat, vh_hat = self._factors(u, vh, operand, dim=dim, key=key)
        low = (u_hat * s) @ vh_hat  # [o k] @ [k i] -> [o i]
        if self.compensated:
            residual = torch.addmm(residual, u * s, vh).sub_(low)
        w_hat = operand.quantizer(residual, dim=dim, key=key.fold(3)).to(low.dtype) + low
        return w_hat.to(dtype), None

    def gradients(self, params, dw, operand, *, key):
        # low = u_hat diag(s) vh_hat and dL/dlow = dw:
        #   du = dw vh_hat^T diag(s),  ds = diag(u_hat^T dw vh_hat^T),  dvh = diag(s) u_hat^T dw
        u, s, vh, residual = (p.detach() for p in params)
        dw = dw.to(residual.dtype)
        u_hat, vh_hat = self._factors(u, vh, operand, dim=-1, key=key)
        dw_v = dw @ vh_hat.T  # [o i] @ [i k] -> [o k]
        return [dw_v * s, (u_hat * dw_v).sum(0), s[:, None] * (u_hat.T @ dw), dw]

    def _factors(self, u, vh, operand, *, dim, key):
        if operand.quantizer is None:
            return u, vh
        u_hat = operand.quantizer(u, dim=dim, key=key.fold(1)).to(u.dtype)
        vh_hat = operand.quantizer(vh, dim=dim, key=key.fold(2)).to(vh.dtype)
        return u_hat, vh_hat
