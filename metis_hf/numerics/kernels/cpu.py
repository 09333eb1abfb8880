"""The NVFP4 quantizers and noise on CPUs: calls of `cpu.cpp` through ctypes.

The results equal `reference` and `noise` bit for bit. Calls must satisfy `layout.covers`, and for
`pack` and `unpack` also `layout.packs`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels import cpu_library, workspace
from metis_hf.numerics.kernels.layout import BLOCK, Packed, packed_shapes, readable
from metis_hf.numerics.layout import Tile
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
_ROWS, _COLUMNS, _SQUARES = range(3)


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tile", "rule", "two_level", "up", "stochastic")),
        *((name, ctypes.c_int32) for name in ("scaled", "by_row", "in_dtype", "out_dtype")),
        ("tried", ctypes.c_int32),
        ("factors", ctypes.c_float * 8),
        *((name, ctypes.c_float) for name in ("largest_value", "to_code", "clip")),
        *((name, ctypes.c_float) for name in ("smallest_base", "largest_error", "error_root")),
        *((name, ctypes.c_float) for name in ("largest_product", "product_units")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "minus", "plus", "given")),
        *((name, ctypes.c_void_p) for name in ("y", "codes", "scale", "decode")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_uint32) for name in ("first", "second")),
    ]


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
    scaled: bool,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`."""
    values = _memory(x.shape, dtype, out)
    decode = _quantize(x, quantizer, dim, key, y=values, scaled=scaled, **options)
    return values, None if scaled else decode


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    **options: Any,
) -> Packed:
    """See `kernels.pack`; with a `y` also write the values, as `_quantize` does."""
    rows, columns = x.shape
    shape, blocks = packed_shapes((rows, columns), quantizer.tile, NVFP4, dim)
    codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
    scale = torch.empty(blocks, dtype=torch.float8_e4m3fn, device="cpu")
    options |= {"codes": codes, "scale": scale}
    return Packed(codes, scale, _quantize(x, quantizer, dim, key, **options))


def pack_with_values(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Packed, Tensor]:
    """See `kernels.pack_with_values`."""
    values = _memory(x.shape, dtype, out)
    return pack(x, quantizer, y=values, **options), values


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scaled: bool,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.unpack`."""
    values = _memory(shape, dtype, out)
    decode = packed.global_scale if scaled else None
    by_row = decode is not None and decode.dim() > 0
    options = _options(quantizer, _tile_of(quantizer, 2, dim), torch.float32, dtype, by_row, True)
    tensors = {"plus": plus, "given": decode, "y": values, "scale": packed.scale}
    run("unpack", options, shape, (0, 0), x=packed.codes, **tensors)
    return values


def _quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    dim: int,
    key: noise.Key | int | None,
    *,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    amax: Tensor | None = None,
    scaled: bool = True,
    y: Tensor | None = None,
    **packed: Tensor,
) -> Tensor | None:
    """Quantize into `y` and `packed`; return the outer scale, None if there is none."""
    by_row = amax is None and quantizer.has_row_scales(x, dim)
    given = amax
    if by_row:
        given = (x if minus is None else x - minus).abs().amax(-1, keepdim=True).float()
    decode = None
    if quantizer.two_level:
        outer = (*x.shape[:-1], 1) if by_row else ()
        decode = torch.empty(outer, dtype=torch.float32, device="cpu")
    x, seeds = readable(x), (0, 0)
    eden = quantizer.scale_rule is ScaleRule.EDEN
    if eden or quantizer.rounding is Rounding.STOCHASTIC:
        known = noise.as_key(key)
        seeds = noise.seeds(known.fold(SCALE_NOISE) if eden else known)
    tile = _tile_of(quantizer, x.dim(), dim)
    out = torch.float32 if y is None else y.dtype
    options = _options(quantizer, tile, x.dtype, out, by_row, scaled)
    tensors = {"minus": minus, "plus": plus, "given": given, "y": y, "decode": decode}
    run("quantize", options, x.shape, seeds, x=x, **tensors, **packed)
    return decode


def run(
    task: str,
    options: Any,
    shape: Sequence[int],
    seeds: tuple[int, int],
    **tensors: Tensor | None,
) -> None:
    """Call a function of the library.

    Args:
        task: name of the function.
        options: from `_options`.
        shape: shape of the unpacked tensor.
        seeds: seeds of the noise.
        tensors: tensors by their names in `struct Call`; inputs need not be contiguous.

    Raises:
        CompilationError: the library cannot be compiled or loaded.
    """
    whole = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    places = {name: t.data_ptr() for name, t in whole.items()}
    sizes = {"rows": math.prod(shape[:-1]), "columns": shape[-1]}
    call = _Call(**places, **sizes, first=seeds[0], second=seeds[1])
    function = getattr(cpu_library.load(), task)
    function(options, ctypes.byref(call), torch.get_num_threads())


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


def _memory(shape: Sequence[int], dtype: torch.dtype, given: Tensor | None) -> Tensor:
    """Return the given memory if the values can take it, or other memory."""
    if given is not None and given.dtype is dtype and given.is_contiguous():
        return given
    memory = workspace.take(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu") if memory is None else memory


def _tile_of(quantizer: QuantizerDefinition, ndim: int, dim: int) -> int:
    if quantizer.tile is Tile.SQUARE:
        return _SQUARES
    return _ROWS if dim % ndim == ndim - 1 else _COLUMNS


@functools.lru_cache(maxsize=1024)
def _options(
    quantizer: QuantizerDefinition,
    tile: int,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    by_row: bool,
    scaled: bool,
) -> Any:
    rule = quantizer.scale_rule
    tried = TRIED_SCALES.get(rule, ())
    count = BLOCK * BLOCK if tile == _SQUARES else BLOCK
    return ctypes.byref(
        _Options(
            tile=tile,
            rule=1 if tried else 2 if rule is ScaleRule.EDEN else 0,
            two_level=bool(quantizer.two_level),
            up=quantizer.scale_rounding is ScaleRounding.UP,
            stochastic=quantizer.rounding is Rounding.STOCHASTIC,
            scaled=scaled,
            by_row=by_row,
            in_dtype=_DTYPES[in_dtype],
            out_dtype=_DTYPES[out_dtype],
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
