"""The form in which a layer saves x for backward, and a cache of the last encoded input."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metis_hf.noise import Key, data_on_host
from metis_hf.operands import Encoded, Operand
from metis_hf.operands.kept import Kept, mark_of


class SavedInput(NamedTuple):
    """The saved form of x [t c] for wgrad, by the operand that wgrad takes.

    | operand                       | saved                                                    |
    | direct, shared with fprop     | packed x, blocks along features                          |
    | direct, of its own            | packed x, blocks along tokens, quantized in forward      |
    | rotated (Hadamard)            | packed rotated x, padded to 16 tokens; rotated back in   |
    |                               | backward                                                 |
    | scaled per channel            | packed (x - shift) / scale; both are the plan's          |
    | quantized twice               | packed second quantization, as of its conditioner        |
    | rotated over its whole length | packed rotated x, not padded                             |
    | mean apart                    | packed rest, packed mean [1 c]                           |
    | spectral, shared or of its    | packed residual [t c], packed factors [t k] and [k c], k |
    | own                           | lengths; put together again in backward                  |
    | high precision                | x in the dtype of the GEMM, as nn.Linear does            |
    | another kind of conditioner   | shared: the dense operand; of its own: x, quantized in   |
    | or quantizer; no rows         | backward                                                 |
    | none: no weight is trained    | nothing                                                  |

    A packed NVFP4 matrix takes 4.5 bits per element plus 32 bits; six-bit elements take a byte.
    Layers that read the same tensor share one packed copy. Weights are saved as parameters, never
    as dense copies.
    """

    kind: str  # "encoded": `Operand.encode`; "dense": x_hat as `Quantized`; "input": (x,)
    tensors: tuple[Tensor | None, ...]


class LastInput(threading.local):
    """Thread-local cache of the last encoding, for layers that read the same tensor.

    An entry lives as long as its tensor, or until another tensor is encoded; it has no dense parts.
    The mark includes the tensor's fingerprint where the host knows it (on a CPU): there, writes
    that do not increase the version counter are most common (`x.data`, numpy, collectives).
    """

    def __init__(self) -> None:
        self.kept = Kept()


last_input = LastInput()


def encode_once(
    operand: Operand,
    x: Tensor,
    source: weakref.ref[Tensor] | None,
    *,
    dim: int,
    key: Key,
    row_mask: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Encoded:
    """Return `operand.encode(x)`, cached if a layer that reads the same tensor just computed it.

    Args:
        operand, x, dim, key, row_mask, dtype: as in `Operand.encode`; x [t c].
        source: the layer's input, of which x is a view; None bypasses the cache.
    """
    tensor = None if source is None else source()
    if tensor is None or tensor.is_inference() or torch.compiler.is_compiling():
        return operand.encode(x, dim=dim, key=key, row_mask=row_mask, dtype=dtype)
    kept, wanted = last_input.kept, (operand, dim, key.static)
    has_memory = type(tensor) in (Tensor, nn.Parameter)  # subclasses may have no storage
    contents = mark_of(tensor) if has_memory else (tensor._version,)
    mark = (id(tensor), id(row_mask), data_on_host(key), *contents, wanted)
    values = kept.at(mark)
    if values is not None:
        found: Encoded = values["encoded"]
        if found.found is not None:
            operand.conditioner.take_over(found.found)
        return found
    encoded = operand.encode(x, dim=dim, key=key, row_mask=row_mask, dtype=dtype)
    values = kept.start(mark)
    values["encoded"] = encoded.stored()
    values["row_mask"] = row_mask  # alive, so that no other mask gets its id
    # Another thread may free the tensor, as in backward: bind this thread's `kept` here.
    values["tensor"] = weakref.ref(tensor, lambda _: kept.forget(values))
    return encoded
