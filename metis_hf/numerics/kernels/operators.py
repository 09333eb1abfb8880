"""Quantizers as custom operators: one node each in a graph of torch.compile or torch.export.

When the graph runs, an operator dispatches to the selected kernels for its tensors' device, as an
eager call does. A compiled model therefore gives the same bits as an eager one, and torch.compile
does not trace into quantizers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import FORMATS, get_format
from metis_hf.numerics.kernels import in_force
from metis_hf.numerics.kernels.layout import Packed, packed_shapes


def in_graph(quantizer: QuantizerDefinition) -> bool:
    """Return whether a call becomes an operator: a graph is traced and the format is registered."""
    fmt = quantizer.fmt
    return torch.compiler.is_compiling() and FORMATS.get(fmt.name) == fmt


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    key: noise.Key | int | None,
    out: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`; every option is required, and `out` is not used."""
    values, *missing = _quantize(x, _choices(quantizer), **_parts(key), **options)
    return values, missing[0] if missing else None


def pack(
    x: Tensor, quantizer: QuantizerDefinition, *, key: noise.Key | int | None, **options: Any
) -> Packed:
    """See `kernels.pack`; every option is required."""
    codes, scale, *outer = _pack(x, _choices(quantizer), **_parts(key), **options)
    return Packed(codes, scale, outer[0] if outer else None)


def unpack(
    packed: Packed, quantizer: QuantizerDefinition, *, out: Tensor | None, **options: Any
) -> Tensor:
    """See `kernels.unpack`; every option is required, and `out` is not used."""
    values: Tensor = _unpack(*packed, _choices(quantizer), **options)
    return values


def _parts(key: noise.Key | int | None) -> dict[str, Any]:
    if key is None:
        return {"static": None, "data": None}
    known = noise.as_key(key)
    return {"static": known.static, "data": known.data}


def _key(static: int | None, data: Tensor | None) -> noise.Key | None:
    return None if static is None else noise.Key(static, data)


def _choices(quantizer: QuantizerDefinition) -> str:
    """Serialize a quantizer, since operators take no objects; format names may have spaces."""
    q = quantizer
    assert q.scale_rounding is not None
    words = q.rounding.value, q.scale_rounding.value, q.tile.value, q.scale_rule.value
    return " ".join((*words, q.outer_scale.value, "2" if q.two_level else "1", q.fmt.name))


@functools.cache
def _quantizer(choices: str) -> QuantizerDefinition:
    *words, levels, fmt = choices.split(" ", 6)
    names = "rounding", "scale_rounding", "tile", "scale_rule", "outer_scale"
    options: dict[str, Any] = dict(zip(names, words))
    return QuantizerDefinition(get_format(fmt), two_level=levels == "2", **options)


def _new(*tensors: Tensor | None) -> list[Tensor]:
    return [t.contiguous() for t in tensors if t is not None]


def _outer_scale(
    x: Tensor, quantizer: QuantizerDefinition, dim: int, amax: Tensor | None
) -> list[Tensor]:
    if not quantizer.two_level:
        return []
    by_row = amax is None and quantizer.has_row_scales(x, dim)
    return [x.new_empty((*x.shape[:-1], 1) if by_row else (), dtype=torch.float32)]


# Schemas with lists are spelled out: torch 2.8 may fail to read lists from annotations.
_KEY = "int? static, Tensor? data"


@torch.library.custom_op(
    "metis_hf::quantize",
    mutates_args=(),
    schema=f"(Tensor x, str choices, int dim, {_KEY}, ScalarType dtype, bool scaled, "
    "Tensor? minus, Tensor? plus, Tensor? amax) -> Tensor[]",
)
def _quantize(
    x: Tensor,
    choices: str,
    dim: int,
    static: int | None,
    data: Tensor | None,
    dtype: torch.dtype,
    scaled: bool,
    minus: Tensor | None,
    plus: Tensor | None,
    amax: Tensor | None,
) -> list[Tensor]:
    options: dict[str, Any] = {"minus": minus, "plus": plus, "amax": amax, "scaled": scaled}
    key = _key(static, data)
    quantized = in_force.fake_quantize(
        x, _quantizer(choices), dim=dim, key=key, dtype=dtype, **options
    )
    return _new(*quantized)


@_quantize.register_fake
def _(x, choices, dim, static, data, dtype, scaled, minus, plus, amax):  # type: ignore[no-untyped-def]
    quantizer = _quantizer(choices)
    values = x.new_empty(x.shape, dtype=dtype)
    return [values, *([] if scaled else _outer_scale(x, quantizer, dim, amax))]


def _shapes(x: Tensor, quantizer: QuantizerDefinition, dim: int) -> tuple[tuple[int, ...], int]:
    rows, columns = x.shape
    return packed_shapes((rows, columns), quantizer.tile, quantizer.fmt, dim)


@torch.library.custom_op(
    "metis_hf::pack",
    mutates_args=(),
    schema=f"(Tensor x, str choices, int dim, {_KEY}, Tensor? minus, Tensor? amax) -> Tensor[]",
)
def _pack(
    x: Tensor,
    choices: str,
    dim: int,
    static: int | None,
    data: Tensor | None,
    minus: Tensor | None,
    amax: Tensor | None,
) -> list[Tensor]:
    options: dict[str, Any] = {"key": _key(static, data), "minus": minus, "amax": amax}
    return _new(*in_force.pack(x, _quantizer(choices), dim=dim, **options))


@_pack.register_fake
def _(x, choices, dim, static, data, minus, amax):  # type: ignore[no-untyped-def]
    quantizer = _quantizer(choices)
    codes, scales = _shapes(x, quantizer, dim)
    packed = x.new_empty(codes, dtype=torch.uint8)
    scale = x.new_empty(scales, dtype=quantizer.fmt.scale.dtype)
    return [packed, scale, *_outer_scale(x, quantizer, dim, amax)]


@torch.library.custom_op(
    "metis_hf::unpack",
    mutates_args=(),
    schema="(Tensor codes, Tensor scale, Tensor? outer, str choices, int dim, SymInt[] shape, "
    "ScalarType dtype, bool scaled, Tensor? plus) -> Tensor",
)
def _unpack(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    choices: str,
    dim: int,
    shape: list[int],
    dtype: torch.dtype,
    scaled: bool,
    plus: Tensor | None,
) -> Tensor:
    packed = Packed(codes, scale, outer)
    options: dict[str, Any] = {"dtype": dtype, "scaled": scaled, "plus": plus}
    rows, columns = shape
    return in_force.unpack(
        packed, _quantizer(choices), dim=dim, shape=(rows, columns), **options
    ).contiguous()


@_unpack.register_fake
def _(codes, scale, outer, choices, dim, shape, dtype, scaled, plus):  # type: ignore[no-untyped-def]
    return codes.new_empty(shape, dtype=dtype)
