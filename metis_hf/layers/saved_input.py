"""Saved inputs: what a layer keeps of x for backward, and the input that was encoded last."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metis_hf.noise import Key, data_on_host
from metis_hf.operands import Encoded, Operand


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

    A packed NVFP4 matrix takes 4.5 bits an element, and 32 more; elements of six bits take a byte.
    Layers that read one tensor share one packed copy. Weights are saved as parameters, never
    densely beside them.
    """

    kind: str  # "encoded": `Operand.encode`; "dense": x_hat as `Quantized`; "input": (x,)
    tensors: tuple[Tensor | None, ...]


class _Kept(NamedTuple):
    source: weakref.ref[Tensor]
    version: tuple[Any, ...]  # of the contents
    wanted: tuple[Any, ...]
    row_mask: Tensor | None
    encoded: Encoded


class LastInput(threading.local):
    """The tensor that this thread encoded last: layers that read one tensor encode it once.

    Kept as long as that tensor lives, or until another is encoded; never its dense parts. Other
    contents are known by the tensor's storage and version counter, and on the host, where writes
    that count no version are most common (`x.data`, numpy, collectives), by its fingerprint, too.
    """

    kept: _Kept | None = None

    def find(
        self, x: Tensor, wanted: tuple[Any, ...], row_mask: Tensor | None, key: Key
    ) -> Encoded | None:
        """Return what was encoded of this very tensor in this very way."""
        kept = self.kept
        if kept is None or kept.source() is not x or kept.version != _version(x, key):
            return None
        return kept.encoded if wanted == kept.wanted and row_mask is kept.row_mask else None

    def keep(
        self,
        x: Tensor,
        wanted: tuple[Any, ...],
        row_mask: Tensor | None,
        key: Key,
        encoded: Encoded,
    ) -> None:
        """Take what was encoded of x in place of what was kept before."""
        mine = self.__dict__  # this thread's; the tensor may end in another, as in backward's

        def forget(source: weakref.ref[Tensor]) -> None:
            kept = mine.get("kept")
            if kept is not None and kept.source is source:
                mine.pop("kept", None)

        version, source = _version(x, key), weakref.ref(x, forget)
        self.kept = _Kept(source, version, wanted, row_mask, encoded.stored())


def _version(x: Tensor, key: Key) -> tuple[Any, ...]:
    """Return what differs between two states of a tensor; `key` has its fingerprint."""
    place = x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0  # others may have none
    return place, x._version, data_on_host(key)


last_input = LastInput()


def encode_once(
    operand: Operand,
    x: Tensor,
    source: weakref.ref[Tensor] | None,
    *,
    dim: int,
    key: Key,
    row_mask: Tensor | None,
) -> Encoded:
    """Return `operand.encode(x)`, or what that gave for another layer that reads the same tensor.

    Args:
        operand, x, dim, key, row_mask: as in `Operand.encode`; x [t c].
        source: the layer's input, of which x is a view; None shares nothing.
    """
    tensor = None if source is None else source()
    if tensor is None or tensor.is_inference() or torch.compiler.is_compiling():
        return operand.encode(x, dim=dim, key=key, row_mask=row_mask)
    wanted = (operand, dim, key.static)
    encoded = last_input.find(tensor, wanted, row_mask, key)
    if encoded is None:
        encoded = operand.encode(x, dim=dim, key=key, row_mask=row_mask)
        last_input.keep(tensor, wanted, row_mask, key, encoded)
    return encoded
