"""A cache of quantized weights, valid until the weight changes."""

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
    """Cache of the codes and scales of one layer's w_hat: 4.5 bits per element and operand.

    Each use decodes the dense w_hat, except on FP4 units, which take codes directly.

    **For the micro-batches of a step** (`training.weight_reuse`), in which no parameter changes:
    the layer passes its parameters to `called_with`. Results from other tensors, such as copies
    that saved-tensor hooks unpack in backward (`save_on_cpu`), are not cached.

    **In evaluation** caching starts with the second call, since a layer that is called once needs
    no cache. The layer uses the cache in eval mode without gradients; any other call clears it.
    Fused optimizers and writes through `param.data` do not increase the version counter, so the
    mark also contains the weight's fingerprint of 256 elements. A write through `param.data` to a
    few elements between two evaluation calls may go unnoticed: call `layer.train()`, or write under
    `torch.no_grad()` instead. The thin factors of a split weight are cached unpacked.

    Args:
        in_evaluation: which of the two uses: True for evaluation.
    """

    def __init__(self, in_evaluation: bool = False) -> None:
        super().__init__()
        self.in_evaluation = in_evaluation

    def __reduce__(self) -> tuple[Any, ...]:
        if self.in_evaluation:
            return KeptWeight, (True,)
        return type(None), ()  # a copy would not learn that the step is over

    def called_with(self, params: Sequence[Tensor]) -> None:
        """Cache results from these parameters from now on."""
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
        """Return `form.quantize(..)`, decoded from cached codes if there are any."""
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
        """Return `make()`, cached by `name` until the parameters change."""
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
    """Return whether a layer's w_hat may outlive a call, with changes of its parameters detected.

    False for sharded parameters (the cache would outlive the gathered copy), parameters that
    DeepSpeed writes through its own buffers, replicas of nn.DataParallel (which live for one call),
    parameters from inference mode (which have no version counter), and under a tracing mode.
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
