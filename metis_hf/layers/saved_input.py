"""What a layer's forward pass saves of its input, and the input that was encoded last."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.operands import Encoded, Operand


class SavedInput(NamedTuple):
    """What is saved of x [t c] for wgrad, by the operand that wgrad takes.

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


class LastInput(threading.local):
    """What was last encoded, and of what: layers that read one tensor encode it once.

    Kept as long as that tensor lives, or until another is encoded; never its dense parts.
    """

    source: weakref.ref[Tensor] | None = None
    version: int
    wanted: tuple[Any, ...]
    row_mask: Tensor | None
    encoded: Encoded

    def find(self, x: Tensor, wanted: tuple[Any, ...], row_mask: Tensor | None) -> Encoded | None:
        """What was encoded of this very tensor in this very way."""
        if self.source is None or self.source() is not x or x._version != self.version:
            return None
        return self.encoded if wanted == self.wanted and row_mask is self.row_mask else None

    def keep(
        self, x: Tensor, wanted: tuple[Any, ...], row_mask: Tensor | None, encoded: Encoded
    ) -> None:
        def forget(source: weakref.ref[Tensor]) -> None:
            if self.source is source:
                self.__dict__.clear()

        self.source, self.version = weakref.ref(x, forget), x._version
        self.wanted, self.row_mask = wanted, row_mask
        self.encoded = encoded.stored()


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
    encoded = last_input.find(tensor, wanted, row_mask)
    if encoded is None:
        encoded = operand.encode(x, dim=dim, key=key, row_mask=row_mask)
        last_input.keep(tensor, wanted, row_mask, encoded)
    return encoded
