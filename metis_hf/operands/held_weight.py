"""Quantized weights, kept as long as the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from metis_hf.noise import Key
from metis_hf.operands.conditioner import Encoded
from metis_hf.operands.operand import Operand, Quantized
from metis_hf.operands.weight_forms import WeightForm

T = TypeVar("T")


class HeldWeight:
    """Codes and scales of one layer's w_hat, for as long as the parameters do not change.

    A layer says by `see` which parameters its calls have. What is made of others is not kept, as
    of copies that saved-tensor hooks unpack in backward (`save_on_cpu`).

    4.5 bits an element for each operand; the dense w_hat is made of them at each use, except where
    FP4 units take them as they are.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[Any, ...], Any] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copied or pickled layer holds None: nobody would release it

    def see(self, params: Sequence[Tensor]) -> None:
        """Take note that a layer is called with these parameters."""
        if not params[-1].is_inference():
            self._seen.add(_mark_of(params))

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
        if not form.encodes(params, operand) or params[-1].is_inference():
            return form.quantize(params, operand, dim=dim, key=key, dtype=dtype)

        def encode() -> Encoded:
            return form.encode(params, operand, dim=dim, key=key).stored()

        encoded = self.keep(params, (operand, dim, key.static), encode, key=key)
        return form.decode(params, encoded, operand, dim=dim, dtype=dtype)

    def keep(
        self, params: Sequence[Tensor], name: tuple[Any, ...], make: Callable[[], T], *, key: Key
    ) -> T:
        """Return what `make` makes of these parameters, made once for each name.

        Args:
            params: of the layer.
            name: of what is made.
            make: what makes it of the parameters as they are.
            key: noise key of the weight.
        """
        if params[-1].is_inference() or (mark := _mark_of(params)) not in self._seen:
            return make()
        name = (*name, mark)
        if name not in self._encoded:
            self._encoded[name] = make()
        return self._encoded[name]


def _mark_of(params: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what differs between parameters that were written to or moved, and what they were.

    A weak reference to a storage keeps its address from being given to another.
    """
    return tuple(
        (StorageWeakRef(param.untyped_storage()), param.data_ptr(), param._version)
        for param in params
    )
