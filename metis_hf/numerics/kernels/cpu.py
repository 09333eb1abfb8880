"""The NVFP4 quantizers and noise on CPUs: calls of `cpu.cpp` through ctypes.

The results equal `reference` and `noise` bit for bit. Calls must satisfy `layout.covers`, and for
`pack` and `unpack` also `layout.packs`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels import cpu_library
from metis_hf.numerics.kernels.layout import (
    BLOCK,
    Form,
    Packed,
    amax_of_rows,
    form_of,
    packed_form,
    readable,
    scale_of_pairs,
    scale_of_rows,
)
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import (
    EDEN_CLIP,
    LARGEST_ERROR,
    LARGEST_PRODUCT,
    SCALE_NOISE,
    SMALLEST_BASE,
    TRIED_SCALES,
    ScaleRounding,
    ScaleRule,
    largest_code,
    largest_value,
)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tile", "rule", "two_level", "up", "stochastic")),
        *((name, ctypes.c_int32) for name in ("scaled", "rows", "in_dtype", "out_dtype", "tried")),
        ("factors", ctypes.c_float * 8),
        *((name, ctypes.c_float) for name in ("largest_value", "to_code", "clip")),
        *((name, ctypes.c_float) for name in ("smallest_base", "largest_error", "error_root")),
        *((name, ctypes.c_float) for name in ("largest_product", "product_units")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "minus", "plus", "given")),
        *((name, ctypes.c_void_p) for name in ("y", "scale", "decode")),
        *((name, ctypes.c_int64) for name in ("groups", "columns")),
        *((name, ctypes.c_uint32) for name in ("first", "second")),
    ]


class Specialization(NamedTuple):
    """The choices of one call: the key under which its C options are cached."""

    task: str  # the library's function
    dims: tuple[int, ...]  # dimensions inside a block, of the tensor's form
    two_level: bool
    scale_up: bool = False
    stochastic: bool = False
    scaled: bool = True  # whether the outer scale is multiplied in
    dtype: torch.dtype = torch.float32  # of the result
    rule: ScaleRule = ScaleRule.ABSMAX
    rows: bool = False  # whether each row block has an outer scale


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


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
    scaled: bool,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`."""
    rows = amax is None and quantizer.has_row_scales(x, dim)
    form = form_of(x, quantizer.tile, dim)
    scaled = scaled or not quantizer.two_level
    variant = _variant("quantize", quantizer, form, scaled=scaled, dtype=dtype, rows=rows)
    given = amax_of_rows(x, minus) if rows else amax
    taken = None if minus is None else form_of(minus, quantizer.tile, dim).x
    added = taken
    if plus is not minus:
        added = None if plus is None else form_of(plus, quantizer.tile, dim).x
    values, *outer = run(variant, key, readable(form.x), given, taken, added)
    apart = outer[0] if outer else None
    if rows and apart is not None:
        apart = scale_of_rows(apart, x.shape)
    return form.restore(values), apart


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
) -> Packed:
    """See `kernels.pack`."""
    rows = amax is None and quantizer.has_row_scales(x, dim)
    form = form_of(x, quantizer.tile, dim, paired=True)
    taken = None if minus is None else form_of(minus, quantizer.tile, dim, paired=True).x
    given = amax_of_rows(x, minus, paired=True) if rows else amax
    variant = _variant("pack", quantizer, form, rows=rows)
    codes, scale, *outer = run(variant, key, readable(form.x), given, taken)
    apart = outer[0] if outer else None
    if rows and apart is not None:
        apart = scale_of_rows(apart, x.shape)
    return Packed(codes, scale.view(-1), apart)


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scaled: bool,
    plus: Tensor | None = None,
) -> Tensor:
    """See `kernels.unpack`."""
    tile, outer = quantizer.tile, packed.global_scale
    form, scale = packed_form(packed.codes, packed.scale, shape, tile, dim)
    decode = outer if scaled else None
    rows = decode is not None and decode.dim() > 0
    if decode is not None and rows:
        decode = scale_of_pairs(decode, shape)
    added = None if plus is None else form_of(plus, tile, dim, paired=True).x
    options: dict[str, Any] = {"scaled": scaled, "dtype": dtype, "rows": rows}
    variant = Specialization("unpack", form.dims, outer is not None, **options)
    return form.restore(run(variant, None, form.x, scale, decode, added)[0])


def run(
    variant: Specialization, key: noise.Key | int | None, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Call the library.

    Args:
        variant: choices of the call.
        key: noise key, if elements or scales are rounded stochastically.
        x: elements or codes, in a `layout.Form`.
        others: outer scale's amax, minus, plus; for `unpack` block scales, outer scale, plus.

    Raises:
        CompilationError: the library cannot be compiled or loaded.
    """
    library = cpu_library.load()
    call = _Call(x=x.data_ptr())
    eden = variant.rule is ScaleRule.EDEN
    if variant.stochastic or eden:
        known = noise.as_key(key)
        call.first, call.second = noise.seeds(known.fold(SCALE_NOISE) if eden else known)
    if variant.task == "unpack":
        out = _unpack(call, variant, x, *others)
    else:
        out = _quantize(call, variant, x, *others)
    options = _options(variant, x.dtype, x.dim() == 4)
    getattr(library, variant.task)(options, ctypes.byref(call), torch.get_num_threads())
    whole = variant.task == "quantize" and variant.scaled
    return tuple(out[:1] if whole else out)


def uniform(shape: torch.Size, key: noise.Key, device: torch.device) -> Tensor:
    """Compute `noise.uniform` for a shape that is not empty.

    Raises:
        CompilationError: the library cannot be compiled or loaded.
    """
    out = torch.empty(shape, dtype=torch.float32, device=device)
    width = shape[-1] if shape else 1
    rows = out.numel() // width
    cpu_library.load().draw(out.data_ptr(), rows, width, *noise.seeds(key), torch.get_num_threads())
    return out


def _quantize(
    call: _Call,
    variant: Specialization,
    x: Tensor,
    given: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
) -> list[Tensor]:
    _set_shape(call, x)
    call.minus, call.plus, call.given = _place(minus), _place(plus), _place(given)
    packs = variant.task == "pack"
    if packs:
        halved = (x.shape[0], BLOCK) if x.dim() == 3 else (x.shape[0], BLOCK // 2, *x.shape[2:])
        shape = [1 if dim in variant.dims else size for dim, size in enumerate(x.shape)]
        scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cpu")
        out = [torch.empty(halved, dtype=torch.uint8, device="cpu"), scale]
        call.scale = scale.data_ptr()
    else:
        out = [torch.empty(x.shape, dtype=variant.dtype, device="cpu")]
    call.y = out[0].data_ptr()
    if variant.two_level:
        like = given.shape if given is not None else ()
        decode = torch.empty(like, dtype=torch.float32, device="cpu")
        call.decode = decode.data_ptr()
        out.append(decode)
    return out


def _unpack(
    call: _Call,
    variant: Specialization,
    codes: Tensor,
    scale: Tensor | None = None,
    decode: Tensor | None = None,
    plus: Tensor | None = None,
) -> list[Tensor]:
    apart = (2, BLOCK) if codes.dim() == 2 else (BLOCK, *codes.shape[2:])
    shape = (codes.shape[0], *apart)
    out = torch.empty(shape, dtype=variant.dtype, device="cpu")
    _set_shape(call, out)
    call.y, call.scale = out.data_ptr(), _place(scale)
    call.given, call.plus = _place(decode), _place(plus)
    return [out]


def _place(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _set_shape(call: _Call, x: Tensor) -> None:
    if x.dim() == 4:
        call.groups, call.columns = x.shape[0], x.shape[2]
    else:
        call.groups, call.columns = x.numel() // BLOCK, 1


@functools.lru_cache(maxsize=1024)
def _options(variant: Specialization, dtype: torch.dtype, across_rows: bool) -> Any:
    rule = variant.rule
    tried = TRIED_SCALES.get(rule, ())
    square = len(variant.dims) > 1
    count = BLOCK * BLOCK if square else BLOCK
    return ctypes.byref(
        _Options(
            tile=2 if square else int(across_rows),
            rule=1 if tried else 2 if rule is ScaleRule.EDEN else 0,
            two_level=variant.two_level,
            up=variant.scale_up,
            stochastic=variant.stochastic,
            scaled=variant.scaled,
            rows=variant.rows,
            in_dtype=_DTYPES.get(dtype, 0),
            out_dtype=_DTYPES[variant.dtype],
            tried=len(tried),
            factors=tried,
            largest_value=largest_value(NVFP4, rule),
            to_code=1 / largest_code(NVFP4, rule),
            clip=EDEN_CLIP,
            smallest_base=SMALLEST_BASE,
            largest_error=2.0**24 / count,
            error_root=math.sqrt(2.0**24 / LARGEST_ERROR / count),
            largest_product=LARGEST_PRODUCT,
            product_units=2.0**30 / LARGEST_PRODUCT / count,
        )
    )
