"""Quantized weights, kept as long as the weight stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.operands.conditioner import Encoded
from metis_hf.operands.operand import Operand, Quantized
from metis_hf.operands.weight_forms import WeightForm


class HeldWeight:
    """Codes and scales of one layer's w_hat, for as long as the parameters do not change.

    4.5 bits an element for each operand; the dense w_hat is made of them at each use.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[Any, ...], Encoded] = {}

    def operand(
        self,
        form: WeightForm,
        params: Sequence[Tensor],
        operand: Operand,
        *,
        dim: int,
        key: Key,
        dtype: torch.dtype,
    ) -> Quantized:
        """Return `WeightForm.quantize`, of which the first half is done once."""
        encoded = self._find(form, params, operand, dim, key)
        if encoded is None:
            return form.quantize(params, operand, dim=dim, key=key, dtype=dtype)
        return form.decode(params, encoded, operand, dim=dim, dtype=dtype)

    def _find(
        self, form: WeightForm, params: Sequence[Tensor], operand: Operand, dim: int, key: Key
    ) -> Encoded | None:
        """Return the codes of these parameters, made if missing; None where there are none."""
        if not form.encodes(params, operand) or params[-1].is_inference():
            return None
        # A parameter that was written to or moved has another storage or version.
        seen = tuple((param.data_ptr(), param._version) for param in params)
        name = (operand, dim, key.static, seen)
        if name not in self._encoded:
            encoded = form.encode(params, operand, dim=dim, key=key)
            self._encoded[name] = encoded.stored()
        return self._encoded[name]
