"""Quantized weights, kept as long as the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metis_hf.noise import Key
from metis_hf.operands.conditioner import Encoded
from metis_hf.operands.kept import Kept, Mark, mark_of
from metis_hf.operands.operand import Operand, Quantized
from metis_hf.operands.weight_forms import WeightForm

T = TypeVar("T")


class KeptWeight(Kept):
    """Codes and scales of one layer's w_hat: 4.5 bits an element for each operand.

    The dense w_hat is made of the codes at each use, except where FP4 units take codes as they are.

    **For the micro-batches of a step** (`training.weight_reuse`), in which no parameter changes: a
    layer says by `called_with` which parameters it has. Nothing is kept of other tensors, such as
    copies that saved-tensor hooks unpack in backward (`save_on_cpu`).

    **In evaluation** the weight is kept from the second call with it, since what is called once
    needs no memory. The layer asks in eval mode and without gradients, and any other call makes it
    forget. Fused optimizers and writes through `param.data` count no version, so the mark has the
    weight's fingerprint of 256 elements, too. Only a write through `param.data` to a few elements
    between two calls in evaluation goes unnoticed; call `layer.train()` or write under
    `torch.no_grad()`. The thin factors of a split weight are kept unpacked.

    Args:
        in_evaluation: which of the two.
    """

    def __init__(self, in_evaluation: bool = False) -> None:
        super().__init__()
        self.in_evaluation = in_evaluation

    def __reduce__(self) -> tuple[Any, ...]:
        if self.in_evaluation:
            return KeptWeight, (True,)
        return type(None), ()  # nobody would tell a copy that the step is over

    def called_with(self, params: Sequence[Tensor]) -> None:
        """Keep what is made of these parameters from now on."""
        if not params[-1].is_inference() and self.at(mark := mark_of(*params)) is None:
            self.start(mark)

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
        """Return `form.quantize(..)`, made of kept codes where there are some."""
        values = self._values(params, key)
        if values is None or not form.encodes(params, operand):
            return form.quantize(params, operand, dim=dim, key=key, dtype=dtype)
        name = (operand, dim, key.static)
        encoded: Encoded | None = values.get(name)
        if encoded is None:
            encoded = form.encode(params, operand, dim=dim, key=key)
            encoded = encoded._replace(dense=None) if self.in_evaluation else encoded.stored()
            values[name] = encoded
        return form.decode(params, encoded, operand, dim=dim, dtype=dtype)

    def keep(
        self, params: Sequence[Tensor], name: Hashable, make: Callable[[], T], *, key: Key
    ) -> T:
        """Return `make()`, called once for each name while the parameters stay as they are."""
        values = self._values(params, key)
        if values is None:
            return make()
        if name not in values:
            values[name] = make()
        value: T = values[name]
        return value

    def _values(self, params: Sequence[Tensor], key: Key) -> dict[Hashable, Any] | None:
        if params[-1].is_inference():
            return None
        mark: Mark = mark_of(*params)
        if self.in_evaluation and key.data is not None:
            mark = (int(key.data), *mark)
        values = self.at(mark)
        if values is None and self.in_evaluation:
            self.start(mark)
        return values


def can_keep_in_evaluation(layer: nn.Module) -> bool:
    """Return whether changes of a layer's parameters are noticed and w_hat may outlive a call.

    False for parameters that are sharded, whose whole copy would stay when they are given back;
    that DeepSpeed writes to through buffers of its own; that belong to a replica of
    nn.DataParallel, which lives for one call; that have no version counter, from inference mode;
    and under a mode that traces.
    """
    params = [param for param in layer._parameters.values() if param is not None]
    return (
        bool(params)
        and not hasattr(layer, "_is_fsdp_managed_module")
        and all(
            type(param) is nn.Parameter
            and not param.is_inference()
            and not hasattr(param, "ds_id")
            and not hasattr(param, "_hp_mapping")
            for param in params
        )
        and not torch._C._len_torch_dispatch_stack()
    )
