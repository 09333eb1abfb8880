"""One quantizer, several implementations of it.

`reference` computes `definition.QuantizerDefinition.blocks`, operation by operation. `compiled` is
C++ for CPUs, which the system's compiler compiles once, in seconds. `triton` is for CUDA devices.
Results are equal to the bit, stochastic rounding included. The reference computes everything else
(formats other than NVFP4, other devices). Inside torch.compile a `formulation` in few tensor
operations is compiled with all around it.

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
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels import cpu, formulation, reference
from metis_hf.numerics.kernels.choice import (
    fall_back,
    kernels_for,
    triton_backend,
)
from metis_hf.numerics.kernels.formulation import Specialization
from metis_hf.numerics.kernels.layout import (
    DTYPES,
    Form,
    Packed,
    amax_of_rows,
    form_of,
    has_kernel,
    packed_form,
    packs,
    readable,
    scale_of_pairs,
    scale_of_rows,
)
from metis_hf.numerics.kernels.request import (
    KERNELS,
    CompilationError,
    or_reference,
    use_kernels,
)
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import SCALE_NOISE, ScaleRounding, ScaleRule

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
    kernels = "reference"
    if covers(x, quantizer, dim, dtype, minus, plus):
        kernels = kernels_for(x, *(t for t in (minus, plus) if t is not None))
    if kernels == "triton":
        with or_reference:
            return _triton().fake_quantize(x, quantizer, **options)
    elif kernels != "reference":
        rows = amax is None and quantizer.has_row_scales(x, dim)
        form = form_of(x, quantizer.tile, dim)
        variant = _variant(
            "quantize",
            quantizer,
            form,
            scaled=scaled or not quantizer.two_level,
            dtype=dtype,
            minus=minus is not None,
            plus=plus is not None,
            same=same,
            given=rows or amax is not None,
            rows=rows,
        )
        largest = amax_of_rows(x, minus) if rows else amax
        others = [None if t is None else form_of(t, quantizer.tile, dim).x for t in (minus, plus)]
        taken = others[: 1 if variant.same else 2]
        out = _run(kernels, variant, key, readable(form.x), largest, *taken)
        if out is not None:
            values, *decode = out
            apart = decode[0] if decode else None
            if rows and apart is not None:
                apart = scale_of_rows(apart, x.shape)
            return form.restore(values), apart
    return reference.fake_quantize(x, quantizer, **options)


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
    tile = quantizer.tile
    if covers(x, quantizer, dim, torch.float32, minus, None) and packs(x.shape, tile, dim):
        kernels = kernels_for(*(t for t in (x, minus) if t is not None))
        if kernels == "triton":
            with or_reference:
                return _triton().pack(x, quantizer, dim=dim, key=key, minus=minus, amax=amax)
        elif kernels != "reference":
            rows = amax is None and quantizer.has_row_scales(x, dim)
            form = form_of(x, tile, dim, paired=True)
            taken = None if minus is None else form_of(minus, tile, dim, paired=True).x
            given = rows or amax is not None
            variant = _variant(
                "pack", quantizer, form, minus=minus is not None, given=given, rows=rows
            )
            largest = amax_of_rows(x, minus, paired=True) if rows else amax
            out = _run(kernels, variant, key, readable(form.x), largest, taken)
            if out is not None:
                codes, scale, *decode = out
                outer = decode[0] if decode else None
                if rows and outer is not None:
                    outer = scale_of_rows(outer, x.shape)
                return Packed(codes, scale.view(-1), outer)
    return reference.pack(x, quantizer, dim=dim, key=key, minus=minus, amax=amax)


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
            return _triton().pack_with_values(matrix, quantizer, dim=dim, key=key, **options)
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
    codes, tile = packed.codes, quantizer.tile
    plus = _detached(plus)
    two_level = packed.global_scale is not None
    scaled = scaled or not two_level
    if (
        quantizer.fmt == NVFP4
        and dtype in DTYPES
        and packs(shape, tile, dim)
        and (plus is None or plus.dtype is torch.float32)
    ):
        kernels = kernels_for(*(t for t in (codes, plus) if t is not None))
        if kernels == "triton":
            with or_reference:
                return _triton().unpack(
                    packed, quantizer, dim=dim, shape=shape, dtype=dtype, scaled=scaled, plus=plus
                )
        elif kernels != "reference":
            form, scale = packed_form(codes, packed.scale, shape, tile, dim)
            decode = packed.global_scale if scaled else None
            rows = decode is not None and decode.dim() > 0
            variant = Specialization(
                "unpack",
                form.dims,
                two_level,
                scaled=scaled,
                dtype=dtype,
                plus=plus is not None,
                rows=rows,
            )
            added = None if plus is None else form_of(plus, tile, dim, paired=True).x
            if decode is not None and rows:
                decode = scale_of_pairs(decode, shape)
            out = _run(kernels, variant, None, form.x, scale, decode, added)
            if out is not None:
                return form.restore(out[0])
    return reference.unpack(
        packed, quantizer, dim=dim, shape=shape, dtype=dtype, scaled=scaled, plus=plus
    )


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
            return _triton().store(x, quantizer, dim=dim, key=key)
    return None


def _triton() -> ModuleType:
    backend = triton_backend()
    assert backend is not None  # or `kernels_for` would have said so
    return backend


def covers(
    x: Tensor,
    quantizer: QuantizerDefinition,
    dim: int,
    dtype: torch.dtype,
    minus: Tensor | None,
    plus: Tensor | None,
) -> bool:
    """Return whether kernels have a form for this call of `fake_quantize`."""
    return (
        has_kernel(x, quantizer, dim)
        and dtype in DTYPES
        and all(t is None or t.dtype is torch.float32 for t in (minus, plus))
        # The difference from an fp64 tensor is one in fp64.
        and (minus is None or x.dtype in DTYPES)
    )


def _variant(
    task: str, quantizer: QuantizerDefinition, form: Form, **options: Any
) -> Specialization:
    return Specialization(
        task,
        form.dims,
        bool(quantizer.two_level),
        quantizer.scale_rounding is ScaleRounding.UP,
        quantizer.rounding is Rounding.STOCHASTIC,
        rule=quantizer.scale_rule,
        **options,
    )


def _run(
    kernels: str,
    variant: Specialization,
    key: noise.Key | int | None,
    x: Tensor,
    *others: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """Return a compiled function, or None where the reference is to run after all."""
    noise_key = noise.as_key(key) if variant.needs_noise else None
    if noise_key is not None and variant.rule is ScaleRule.EDEN:
        noise_key = noise_key.fold(SCALE_NOISE)
    if kernels == "traced":
        return formulation.run(variant, noise_key, x, *others)
    try:
        return cpu.run(variant, noise_key, x, *others)
    except CompilationError as error:
        fall_back(error)
    return None


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _given(amax: Tensor | None, quantizer: QuantizerDefinition, x: Tensor) -> Tensor | None:
    """Return the given largest magnitude, fp32 beside x, where a tensor scale is made of it."""
    if amax is None or not quantizer.two_level:
        return None
    return amax.detach().to(x.device, torch.float32)
