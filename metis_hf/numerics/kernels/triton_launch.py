"""The NVFP4 quantizers on CUDA devices: allocation of outputs, and launches of `triton_kernels`.

Results equal `reference` bit for bit, except with rotations and low-rank parts; see `fused`. One
launch reads a matrix once and writes its quantized values, or its codes and block scales. A tensor
scale needs one more launch before it, for amax. The host waits for neither.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import SCALE_E4M3
from metis_hf.numerics.kernels import triton_kernels, triton_numbers
from metis_hf.numerics.kernels.layout import (
    BLOCK,
    Groups,
    Low,
    Packed,
    form_of,
    in_row_blocks,
    padded_shape,
    readable,
)
from metis_hf.numerics.kernels.triton_amax import Outer, outer_of
from metis_hf.numerics.kernels.triton_tiles import blocks_in, launch_tiles, matrix_of
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import (
    SCALE_NOISE,
    TRIED_SCALES,
    ScaleRounding,
    ScaleRule,
    largest_code,
    largest_value,
)

__all__ = ["fake_quantize", "missing", "pack", "pack_with_values", "unpack"]

_TILE_BLOCKS = 8  # squares in a program's tile
_OLDEST = 3, 6  # in earlier releases `div_rn` flushes subnormal numbers to zero


def missing(device: torch.device) -> str | None:
    """Name the unmet requirement of these kernels on a device; None if there is none."""
    version = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return f"triton 3.6 or later (division in {version} flushes subnormal numbers to zero)"
    if device.type == "cuda" or (device.type == "cpu" and triton_numbers.INTERPRETED.value):
        return None
    return "CUDA device that holds the tensor (for tests on CPU, set TRITON_INTERPRET=1)"


class _Choices(NamedTuple):
    """The choices for which a kernel is specialized."""

    lanes: bool  # whether blocks extend over columns of the matrix
    rows: bool  # whether blocks extend over rows
    two_level: bool
    up: bool  # block scales are rounded up
    stochastic: bool
    scaled: bool
    same: bool  # minus is plus
    rule: str  # a scale rule that tries several scales or corrects them, else ""
    to_code: float  # 1 / (the code to which amax is scaled)
    largest: float  # this code times the scale of the tensor's largest block
    by_row: bool  # each row has an outer scale


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
    out: Tensor | None = None,
    groups: Groups | None = None,
    low: Low | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`, and `fused`; `quantizer` is NVFP4, and `out` is not used.

    Args:
        x: not empty, with `layout.has_form`; any strides.
        quantizer, dim, key, dtype, scaled, amax: as in `kernels.fake_quantize`.
        minus, plus: fp32; if both are the same tensor, it is read once.
        low: a low-rank matrix in place of both minus and plus.
        groups: the rotation.
    """
    same = low is not None or (minus is not None and minus is plus)
    # Without a tensor scale `scaled` makes no difference: one variant fewer to compile.
    scaled = scaled or not quantizer.two_level
    by_row = amax is None and quantizer.has_row_scales(x, dim)
    choices = _choices(quantizer, _is_last(x, dim), scaled, same, by_row=by_row)
    minus, plus = (None if t is None else t.contiguous() for t in (minus, plus))
    matrix = readable(x) if low else matrix_of(x, not choices.rows, groups)
    shape = x.shape if groups is None else _padded(x.shape, dim)
    values = torch.empty(shape, dtype=dtype, device=x.device)
    outer = _outer_of(x, dim, choices, key, minus=minus, given=amax, groups=groups, low=low)
    plus = None if same else plus
    written: dict[str, Any] = {"minus": minus, "plus": plus, "groups": groups, "low": low}
    _write(matrix, choices, key, outer, values, **written)
    apart = None if scaled else outer.decode
    if apart is not None and choices.by_row:
        apart = apart.view(*x.shape[:-1], 1)
    return values, apart


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
    groups: Groups | None = None,
) -> Packed:
    """See `kernels.pack`, and `fused`. Codes of NaN are arbitrary."""
    options: dict[str, Any] = {"minus": minus, "amax": amax, "groups": groups}
    return _pack(x, quantizer, None, True, dim=dim, key=key, **options)[0]


def pack_with_values(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype | None,
    scaled: bool,
    amax: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    out: Tensor | None = None,
    low: Low | None = None,
) -> tuple[Packed, Tensor | None]:
    """See `kernels.pack_with_values`, and `fused`; no values with a `minus` or a `plus`.

    `out` is not used.
    """
    if minus is not None or plus is not None:
        return pack(x, quantizer, dim=dim, key=key, minus=minus, amax=amax), None
    packed, values = _pack(x, quantizer, dtype, scaled, dim=dim, key=key, amax=amax, low=low)
    if values is None or values.shape == x.shape:
        return packed, values
    rows, columns = x.shape
    padded = padded_shape((rows, columns), quantizer.tile, dim)
    return packed, _without_padding(values, padded, x.shape)


def _pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    dtype: torch.dtype | None,
    scaled: bool,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
    groups: Groups | None = None,
    low: Low | None = None,
) -> tuple[Packed, Tensor | None]:
    """Return packed codes and, if there is a `dtype`, values in the shape the kernel writes."""
    tile = quantizer.tile
    by_row = amax is None and quantizer.has_row_scales(x, dim)
    choices = _choices(quantizer, _is_last(x, dim), scaled, low is not None, by_row)
    x = readable(x)
    whole_minus = None if minus is None else minus.contiguous()
    # The kernel pads rows that are shorter than a block.
    if low is None and (groups is not None or x.shape[1] >= BLOCK or choices.rows):
        matrix = _work_form(x, tile, dim, groups)
        lower = None if minus is None else _work_form(minus, tile, dim, groups)
    else:
        matrix, lower = x, whole_minus
    whole = choices.lanes or (groups is None and low is None)
    rows, columns = matrix.shape if whole else _padded(x.shape, dim)
    # Rows of row blocks end with whole blocks; the total number of blocks is even.
    count = rows * columns if choices.rows else -(-rows * blocks_in(columns) // 2) * 2 * BLOCK
    run = BLOCK // 2 * columns if choices.rows else BLOCK
    codes = torch.empty(count // (2 * run), run, dtype=torch.uint8, device=x.device)
    square = choices.lanes and choices.rows
    scale = codes.new_empty(count // (BLOCK * BLOCK if square else BLOCK))
    outer = _outer_of(x, dim, choices, key, minus=whole_minus, given=amax, groups=groups, low=low)
    values = None if dtype is None else torch.empty(matrix.shape, dtype=dtype, device=x.device)
    written = {"codes": codes, "scale": scale, "minus": lower}
    _write(matrix, choices, key, outer, values, **written, groups=groups, low=low)
    decode = outer.decode.view(-1, 1) if outer.decode is not None and by_row else outer.decode
    return Packed(codes, scale.view(SCALE_E4M3.dtype), decode), values


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
    groups: Groups | None = None,
    low: Low | None = None,
) -> Tensor:
    """See `kernels.unpack`, and `fused`; `out` is not used."""
    tile, codes = quantizer.tile, packed.codes
    padded = torch.Size(shape)
    if groups is None:
        padded = padded_shape(shape, tile, dim)
    along_rows = in_row_blocks(tile, dim)
    columns = (groups.size if groups else BLOCK) if along_rows and not low else padded[1]
    values = torch.empty(2 * codes.numel() // columns, columns, dtype=dtype, device=codes.device)
    added = None if plus is None else _work_form(plus, tile, dim)
    decode, per_row = packed.global_scale if scaled else None, blocks_in(shape[1])
    launch_tiles(
        triton_kernels.unpack,
        _TILE_BLOCKS,
        values,
        groups,
        low=low,
        first={"codes_ptr": codes, "scale_ptr": packed.scale.view(torch.uint8)},
        decode_ptr=decode,
        plus_ptr=added,
        out_ptr=values,
        blocks=shape[0] * per_row,
        per_row=per_row,
        LANES=along_rows or tile is Tile.SQUARE,
        ROWS=not along_rows,
        BY_ROW=decode is not None and decode.dim() > 0,
    )
    return _without_padding(values, padded, torch.Size(shape))


def _without_padding(values: Tensor, padded: torch.Size, shape: torch.Size) -> Tensor:
    """Return a contiguous matrix of `shape` from padded values, which may have an extra block."""
    whole = values if values.numel() == padded.numel() else values.view(-1)[: padded.numel()]
    whole = whole.view(padded)
    return whole if padded == shape else whole[: shape[0], : shape[1]].contiguous()


def _work_form(x: Tensor, tile: Tile, dim: int, groups: Groups | None = None) -> Tensor:
    """Pad a matrix to whole blocks, contiguous; row blocks become rows, an even number of them.

    Groups along rows become rows instead. With groups along columns the kernel pads the blocks.
    """
    if groups is not None and not in_row_blocks(tile, dim):
        return x
    form = form_of(x, tile, dim, paired=True)
    row_of_blocks = groups.size if groups is not None else BLOCK
    return form.view(-1, row_of_blocks if form.dim() == 3 else form.shape[2] * BLOCK)


def _padded(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Return the shape of a matrix with `dim` padded to whole blocks."""
    rows, columns = shape
    if dim % 2:
        return rows, blocks_in(columns) * BLOCK
    return blocks_in(rows) * BLOCK, columns


def _is_last(x: Tensor, dim: int) -> bool:
    return dim % x.dim() == x.dim() - 1


@functools.cache
def _choices(
    quantizer: QuantizerDefinition,
    last: bool,
    scaled: bool = True,
    same: bool = False,
    by_row: bool = False,
) -> _Choices:
    """Return the choices of a quantizer; `last`: row blocks run along the last dimension."""
    square = quantizer.tile is Tile.SQUARE
    rule = quantizer.scale_rule
    return _Choices(
        square or last,
        square or not last,
        bool(quantizer.two_level),
        quantizer.scale_rounding is ScaleRounding.UP,
        quantizer.rounding is Rounding.STOCHASTIC,
        scaled,
        same,
        rule.value if rule in (ScaleRule.EDEN, *TRIED_SCALES) else "",
        1 / largest_code(quantizer.fmt, rule),
        largest_value(quantizer.fmt, rule),
        by_row,
    )


@functools.cache
def _constants(choices: _Choices) -> dict[str, Any]:
    """Return the choices as a kernel's arguments."""
    # Python finds a keyword by its identity first; names made at run time need interning for that.
    return {sys.intern(name.upper()): choice for name, choice in choices._asdict().items()}


def _outer_of(
    x: Tensor, dim: int, choices: _Choices, key: noise.Key | int | None, **options: Any
) -> Outer:
    """Call `outer_of` with these options if the quantizer has an outer scale."""
    if not choices.two_level:
        return Outer()
    scratch = key.scratch if isinstance(key, noise.Key) else None
    return outer_of(x, dim, by_row=choices.by_row, scratch=scratch, **options)


def _write(
    matrix: Tensor,
    choices: _Choices,
    key: noise.Key | int | None,
    outer: Outer,
    values: Tensor | None = None,
    *,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    groups: Groups | None = None,
    low: Low | None = None,
) -> None:
    """Launch the kernel that writes values, codes with block scales, or both; and outer scales."""
    data, words = None, (0, 0)
    eden = choices.rule == ScaleRule.EDEN.value
    if choices.stochastic or eden:
        noise_key = noise.as_key(key)
        noise_key = noise_key.fold(SCALE_NOISE) if eden else noise_key
        data, words = noise_key.data, noise.static_words(noise_key)
    launch_tiles(
        triton_kernels.quantize,
        _TILE_BLOCKS,
        matrix,
        groups,
        low=low,
        minus_ptr=minus,
        plus_ptr=plus,
        amax_ptr=outer.amax,
        decode_ptr=outer.decode,
        out_ptr=values,
        codes_ptr=codes,
        scale_ptr=scale,
        data_ptr=data,
        word0=words[0],
        word1=words[1],
        blocks=outer.blocks,
        per_row=outer.per_row,
        **_constants(choices),
    )
