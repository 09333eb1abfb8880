"""w_hat of a layer in evaluation, made once and not for each token that is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from metis_hf.noise import Key
from metis_hf.operands import Operand, Quantized
from metis_hf.operands.weight_forms import WeightForm

T = TypeVar("T")


class _Held(NamedTuple):
    """Knowledge of one state of a layer's weight."""

    mark: tuple[Any, ...]
    encoded: dict[tuple[Any, ...], Any]  # codes, as emulation or FP4 units take them


class EvaluationWeight:
    """Codes and scales of w_hat from the second call with the same weight on.

    A layer asks in eval mode and without gradients; any other call makes it forget. So whatever
    trains the weight is noticed. Every other change is noticed by the weight's storage, its version
    counter and its fingerprint, of 256 elements: fused optimizers and writes through `param.data`
    count no version. Only a write through `param.data` to a few elements, between two calls in
    evaluation, would go unnoticed; call `layer.train()` or write under `torch.no_grad()`.

    Not held are weights whose operand depends on the call: that of scales per channel, and of
    static tensor scales until they are fixed or with several processes (see `is_known_set`).

    Packed, 4.5 bits an element and the thin factors of a split, since a model in evaluation may
    fill the memory: a dense w_hat would double it.
    """

    def __init__(self) -> None:
        self._held: _Held | None = None  # replaced whole: threads may share the layer

    def __reduce__(self) -> tuple[type[EvaluationWeight], tuple[()]]:
        return EvaluationWeight, ()  # a copy, or a pickled one, holds nothing

    def forget(self) -> None:
        """Give back what is held."""
        self._held = None

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
        """Return `form.quantize(..)`, of codes made earlier where there are some."""
        held = self._seen_before(params, key)
        if held is not None and form.encodes(params, operand):
            name = (operand, dim, key.static)
            encoded = held.encoded.get(name)
            if encoded is None:
                encoded = form.encode(params, operand, dim=dim, key=key)._replace(dense=None)
                held.encoded[name] = encoded
            return form.decode(params, encoded, operand, dim=dim, dtype=dtype)
        return form.quantize(params, operand, dim=dim, key=key, dtype=dtype)

    def keep(
        self, params: Sequence[Tensor], name: tuple[Any, ...], make: Callable[[], T], *, key: Key
    ) -> T:
        """Return what `make` makes of these parameters: kept by name from the second call on."""
        held = self._seen_before(params, key)
        if held is None:
            return make()
        if name not in held.encoded:
            held.encoded[name] = make()
        return held.encoded[name]

    def _seen_before(self, params: Sequence[Tensor], key: Key) -> _Held | None:
        """Return what is held of this state of the weight; None at the first call with it."""
        held = self._held
        mark = _mark_of(params, key)
        if held is not None and held.mark == mark:
            return held
        self._held = _Held(mark, {})
        return None


def can_hold(layer: nn.Module) -> bool:
    """Tell whether changes of a layer's parameters can be noticed, and w_hat may outlive a call.

    Not those that are sharded, since a whole copy would stay when they are given back; that
    DeepSpeed writes to through its own buffers; of a replica of nn.DataParallel, which lives for
    one call; without a version counter, from inference mode; or seen by a mode that traces.
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


def _mark_of(params: Sequence[Tensor], key: Key) -> tuple[Any, ...]:
    """Return what differs between two states of a weight.

    A weak reference to a storage keeps its address from being given to another.
    """
    fingerprint = None if key.data is None else int(key.data)
    return fingerprint, *(
        (StorageWeakRef(param.untyped_storage()), param.data_ptr(), param._version, param.dtype)
        for param in params
    )
