"""The quantizers on any device: entry points, and the choice among three implementations.

- `reference`: torch operations, for every format, on every device.
- `compiled`: C++ for NVFP4 on CPUs, compiled once, in seconds, by the system's compiler.
- `triton`: Triton kernels for NVFP4 on CUDA devices.

All give the same bits, stochastic rounding included. The reference also computes every call that
the other two do not support. In a graph of torch.compile, `operators` compute the same when the
graph runs.

The choice is automatic: Triton kernels on CUDA devices, C++ on CPUs if there is a compiler. The
environment variable METIS_KERNELS and `use_kernels` override it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.kernels import in_force, operators
from metis_hf.numerics.kernels.choice import backend_for
from metis_hf.numerics.kernels.layout import Packed, covers, packs
from metis_hf.numerics.kernels.request import (
    KERNELS,
    or_reference,
    use_kernels,
)

__all__ = [
    "KERNELS",
    "Packed",
    "fake_quantize",
    "pack",
    "pack_with_values",
    "unpack",
    "use_kernels",
]


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int = -1,
    key: noise.Key | int | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    amax: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize and dequantize with the selected kernels: plus + Q(x - minus).

    Args:
        x: any shape and float dtype, not empty.
        quantizer: the quantizer's options.
        dim: the dimension that row blocks run along.
        key: noise key, if the quantizer needs one.
        dtype: dtype of the result, which is computed in fp32 and rounded once.
        scaled: whether to multiply by the tensor scale; must be True with a `plus`.
        minus: fp32 or fp64, in the shape of `x`.
        plus: the same.
        amax: 0-dim, sets the tensor scale; None takes the largest magnitude of x - minus.
        out: memory in the shape of `x` that the values may take if it is contiguous and of their
            dtype; it may be `minus` or `plus`.

    Returns:
        (values in the shape of `x`, the tensor scale if it was not applied, else None).
    """
    same = minus is not None and minus is plus
    x, minus, amax = x.detach(), _detached(minus), _given(amax, quantizer, x)
    plus = minus if same else _detached(plus)
    options: dict[str, Any] = {
        "dim": dim,
        "key": key,
        "dtype": dtype,
        "scaled": scaled,
        "minus": minus,
        "plus": plus,
        "amax": amax,
    }
    return _module(quantizer).fake_quantize(x, quantizer, **options, out=out)


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int = -1,
    key: noise.Key | int | None = None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
) -> Packed:
    """Quantize a matrix to codes and scales: Q(x - minus), for `unpack`.

    Args:
        x: [t c], not empty.
        quantizer, dim, key, minus, amax: as in `fake_quantize`.
    """
    x, minus, amax = x.detach(), _detached(minus), _given(amax, quantizer, x)
    options: dict[str, Any] = {"dim": dim, "key": key, "minus": minus, "amax": amax}
    return _module(quantizer).pack(x, quantizer, **options)


def pack_with_values(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
    scaled: bool,
    amax: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Packed, Tensor | None]:
    """Quantize a matrix to codes and scales, and also to values if one kernel can write both.

    Args:
        x, quantizer, dim, key, amax, minus: as in `pack`.
        dtype, scaled, plus: as in `unpack`, whose result the values equal bit for bit.
        out: as in `fake_quantize`; untouched if no values are returned.
    """
    matrix, minus, plus = x.detach(), _detached(minus), _detached(plus)
    known = packs(x.shape, quantizer.tile, dim) and _module(quantizer) is in_force
    if known and covers(matrix, quantizer, dim, dtype, minus, plus):
        options: dict[str, Any] = {"dim": dim, "key": key, "minus": minus, "plus": plus}
        options |= {"dtype": dtype, "scaled": scaled or not quantizer.two_level}
        options |= {"amax": _given(amax, quantizer, matrix), "out": out}
        with or_reference:
            return backend_for(matrix, minus, plus).pack_with_values(matrix, quantizer, **options)
    return pack(x, quantizer, dim=dim, key=key, amax=amax, minus=minus), None


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int = -1,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantize a packed matrix; the values equal `fake_quantize`'s bit for bit.

    Args:
        packed: from `pack`, with the same quantizer and `dim`.
        shape: shape of the matrix that was packed.
        quantizer, dim, dtype, scaled, plus, out: as in `fake_quantize`.
    """
    plus = _detached(plus)
    options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype, "plus": plus}
    options["scaled"] = scaled or packed.global_scale is None
    return _module(quantizer).unpack(packed, quantizer, **options, out=out)


def _module(quantizer: QuantizerDefinition) -> ModuleType:
    """Return `operators` while torch.compile traces (registered formats only), else `in_force`."""
    return operators if operators.in_graph(quantizer) else in_force


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _given(amax: Tensor | None, quantizer: QuantizerDefinition, x: Tensor) -> Tensor | None:
    """Return `amax` in fp32 on the device of x, or None if there is no tensor scale to set."""
    if amax is None or not quantizer.two_level:
        return None
    return amax.detach().to(x.device, torch.float32)
