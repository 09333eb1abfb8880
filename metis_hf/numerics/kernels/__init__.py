"""One quantizer, several implementations of it.

`reference` computes `definition.QuantizerDefinition.blocks`, operation by operation. `compiled` is
C++ for CPUs, which the system's compiler compiles once, in seconds. `triton` is for CUDA devices.
Results are equal to the bit, stochastic rounding included. The reference computes everything else
(formats other than NVFP4, other devices). A graph of torch.compile has `operators`, which
compute the same when the graph runs.

The choice is automatic: Triton's kernels on CUDA devices, C++ on CPUs where there is a compiler.
The environment variable METIS_KERNELS and `use_kernels` override it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.kernels import in_force, operators
from metis_hf.numerics.kernels.choice import backend_for, kernels_for
from metis_hf.numerics.kernels.layout import Packed, covers, packs
from metis_hf.numerics.kernels.request import (
    KERNELS,
    or_reference,
    use_kernels,
)
from metis_hf.numerics.scaling import ScaleRule

__all__ = [
    "KERNELS",
    "Packed",
    "fake_quantize",
    "pack",
    "pack_with_values",
    "store",
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
) -> tuple[Tensor, Tensor | None]:
    """Quantize and back with the kernels in force: plus + Q(x - minus).

    Args:
        x: any shape and float dtype, not empty.
        quantizer: what to do.
        dim: the dimension that row blocks run along.
        key: noise key, where the quantizer needs one.
        dtype: of the result, which is computed in fp32 and rounded once.
        scaled: whether the tensor scale is multiplied in; it must be where there is a `plus`.
        minus: of the shape of `x`, in fp32 or more.
        plus: the same.
        amax: 0-dim, what the tensor scale is made of; None: the largest magnitude of x - minus.

    Returns:
        (values of the shape of `x`, the tensor scale that they still lack or None).
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
    return _module(quantizer).fake_quantize(x, quantizer, **options)


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
) -> tuple[Packed, Tensor | None]:
    """Quantize a matrix to codes and scales, and where one kernel writes them too, to values.

    Args:
        x, quantizer, dim, key, amax: as in `pack`.
        dtype, scaled: what `unpack` is to give, which the values are equal to, bit for bit.
    """
    matrix, known = x.detach(), packs(x.shape, quantizer.tile, dim)
    known = known and covers(matrix, quantizer, dim, dtype, None, None)
    if known and kernels_for(matrix) == "triton":
        amax = _given(amax, quantizer, matrix)
        scaled = scaled or not quantizer.two_level
        options: dict[str, Any] = {"dtype": dtype, "scaled": scaled, "amax": amax}
        with or_reference:
            return backend_for(matrix).pack_with_values(
                matrix, quantizer, dim=dim, key=key, **options
            )
    return pack(x, quantizer, dim=dim, key=key, amax=amax), None


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int = -1,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
    plus: Tensor | None = None,
) -> Tensor:
    """Unpack the values of a matrix: bit for bit what `fake_quantize` gives.

    Args:
        packed: from `pack`, with the same quantizer and `dim`.
        shape: of the matrix that was packed.
        quantizer, dim, dtype, scaled, plus: as in `fake_quantize`.
    """
    plus = _detached(plus)
    options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype, "plus": plus}
    options["scaled"] = scaled or packed.global_scale is None
    return _module(quantizer).unpack(packed, quantizer, **options)


def store(
    x: Tensor, quantizer: QuantizerDefinition, *, dim: int = -1, key: noise.Key | int | None = None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Quantize to what files hold, with the Triton kernels.

    Args:
        x, quantizer, dim, key: as in `fake_quantize`.

    Returns:
        (codes, block scales, tensor scale) as `storage.QuantizedTensor` has them, or None where
        those kernels are not in force or do not cover the call.
    """
    x = x.detach()
    if (
        quantizer.scale_rule is ScaleRule.ABSMAX
        and not quantizer.has_row_scales(x, dim)
        and covers(x, quantizer, dim, torch.float32, None, None)
        and kernels_for(x) == "triton"
    ):
        with or_reference:
            return backend_for(x).store(x, quantizer, dim=dim, key=key)
    return None


def _module(quantizer: QuantizerDefinition) -> ModuleType:
    """Return the module that quantizes now, or notes in torch.compile's graph what to do later."""
    return operators if operators.in_graph(quantizer) else in_force


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _given(amax: Tensor | None, quantizer: QuantizerDefinition, x: Tensor) -> Tensor | None:
    """Return the given largest magnitude, fp32 beside x, where a tensor scale is made of it."""
    if amax is None or not quantizer.two_level:
        return None
    return amax.detach().to(x.device, torch.float32)
