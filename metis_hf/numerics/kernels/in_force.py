"""The quantizers of `kernels`, dispatched to the selected kernels on any device.

The reference computes calls that those kernels do not support. The bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels import reference
from metis_hf.numerics.kernels.choice import backend_for
from metis_hf.numerics.kernels.layout import DTYPES, Packed, covers, packs
from metis_hf.numerics.kernels.request import or_reference


def fake_quantize(
    x: Tensor, quantizer: QuantizerDefinition, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`; every option is required."""
    dim, dtype, minus, plus = (options[name] for name in ("dim", "dtype", "minus", "plus"))
    if covers(x, quantizer, dim, dtype, minus, plus):
        with or_reference:
            return backend_for(x, minus, plus).fake_quantize(x, quantizer, **options)
    return reference.fake_quantize(x, quantizer, **options)


def pack(x: Tensor, quantizer: QuantizerDefinition, **options: Any) -> Packed:
    """See `kernels.pack`; every option is required."""
    dim, minus = options["dim"], options["minus"]
    known = packs(x.shape, quantizer.tile, dim)
    if known and covers(x, quantizer, dim, torch.float32, minus, None):
        with or_reference:
            return backend_for(x, minus).pack(x, quantizer, **options)
    return reference.pack(x, quantizer, **options)


def unpack(packed: Packed, quantizer: QuantizerDefinition, **options: Any) -> Tensor:
    """See `kernels.unpack`; every option is required."""
    dim, shape, dtype, plus = (options[name] for name in ("dim", "shape", "dtype", "plus"))
    known = quantizer.fmt == NVFP4 and packs(shape, quantizer.tile, dim) and dtype in DTYPES
    if known and (plus is None or plus.dtype is torch.float32):
        with or_reference:
            return backend_for(packed.codes, plus).unpack(packed, quantizer, **options)
    return reference.unpack(packed, quantizer, **options)
