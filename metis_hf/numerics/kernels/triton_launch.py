"""Launches of the Triton kernels, and what they read and write.

One launch reads a matrix once and writes its quantized values, or its codes and block scales. A
tensor scale takes one launch more before it, for the amax of the whole; the host waits for neither.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import SCALE_E4M3
from metis_hf.numerics.kernels import triton_kernels, triton_numbers
from metis_hf.numerics.kernels.formulation import BLOCK
from metis_hf.numerics.kernels.layout import Packed, form_of, in_row_blocks, packed_form, readable
from metis_hf.numerics.kernels.scratch import Scratch
from metis_hf.numerics.kernels.triton_direct import launch
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

__all__ = ["fake_quantize", "missing", "pack", "store", "unpack"]

# Elements of a program's tile, as squares of 16 x 16.
_TILE_BLOCKS, _AMAX_TILE_BLOCKS = 8, 32
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_OLDEST = 3, 6  # before, `div_rn` flushes subnormal numbers to zero


def missing(device: torch.device) -> str | None:
    """Name the part that these kernels lack to run on a device; None if nothing."""
    version = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return f"triton 3.6 or later: this is {version}, whose division loses the smallest numbers"
    if device.type == "cuda" or (device.type == "cpu" and triton_numbers.INTERPRETED.value):
        return None
    return "CUDA device under the tensor (for tests on CPU, set TRITON_INTERPRET=1)"


class _Choices(NamedTuple):
    """The choices that a kernel is specialized for."""

    lanes: bool  # whether blocks extend over columns of the matrix
    rows: bool  # and over rows
    two_level: bool
    up: bool  # block scales are rounded up
    stochastic: bool
    scaled: bool = True
    same: bool = False  # minus is plus
    packed: bool = False  # codes lie as `Packed` has them
    rule: str = ""  # by which several scales are tried, or scales are corrected
    to_code: float = 1.0  # over the code that amax gets
    largest: float = 1.0  # that code times the scale of the tensor's largest block
    by_row: bool = False  # rows have an outer scale each


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
    """See `kernels.fake_quantize`; `quantizer` is NVFP4.

    Args:
        x: not empty, with `layout.has_form`; strides are free.
        quantizer, dim, key, dtype, scaled, amax: as there.
        minus, plus: fp32; one tensor for both is read once.
    """
    same = minus is not None and minus is plus
    # One variant fewer where it makes no difference.
    scaled = scaled or not quantizer.two_level
    choices = _choices(quantizer, x, dim)._replace(scaled=scaled, same=same)
    choices = choices._replace(by_row=amax is None and quantizer.has_row_scales(x, dim))
    minus, plus = (None if t is None else t.contiguous() for t in (minus, plus))
    matrix = _matrix(x, choices)
    values = torch.empty(matrix.shape, dtype=dtype, device=x.device)
    outer = _outer_of(x, choices, minus, amax, scratch=_scratch_of(key))
    _write(matrix, choices, key, outer, values, minus=minus, plus=None if same else plus)
    apart = None if scaled else outer.decode
    if apart is not None and choices.by_row:
        apart = apart.view(*x.shape[:-1], 1)
    return values.view(x.shape), apart


def store(
    x: Tensor, quantizer: QuantizerDefinition, *, dim: int, key: noise.Key | int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `kernels.store`; arguments as in `fake_quantize`. Codes of NaN are arbitrary."""
    choices = _choices(quantizer, x, dim)
    matrix = _matrix(x, choices)
    rows, columns = matrix.shape
    lines, length = (rows, columns) if choices.lanes else (columns, rows)
    blocks = _blocks_in(length)
    codes = torch.empty(lines, blocks * BLOCK // 2, dtype=torch.uint8, device=x.device)
    square = choices.lanes and choices.rows
    scale = codes.new_empty(_blocks_in(rows) if square else lines, blocks)
    outer = _outer_of(x, choices)
    _write(matrix, choices, key, outer, codes, scale)

    lead, across = x.shape[:-1], _blocks_in(x.shape[-1])
    if choices.lanes:
        scale_lead = (*lead[:-1], _blocks_in(lead[-1])) if square else lead
        codes = codes.view(*lead, across * BLOCK // 2)
        scale = scale.view(*scale_lead, across)
    else:
        # Written with all rows of the matrix along one line; several matrices are to lie apart.
        split = (x.shape[-1], *lead[:-1], -1)
        codes, scale = (part.view(split).movedim(0, -2).contiguous() for part in (codes, scale))
    return codes, scale.view(SCALE_E4M3.dtype), outer.decode


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
) -> Packed:
    """See `kernels.pack`; the quantizer as in `fake_quantize`. Codes of NaN are arbitrary."""
    tile = quantizer.tile
    by_row = amax is None and quantizer.has_row_scales(x, dim)
    choices = _choices(quantizer, x, dim)._replace(packed=True, by_row=by_row)
    x = readable(x)
    matrix, lower = (None if t is None else _work_form(t, tile, dim) for t in (x, minus))
    assert matrix is not None
    rows, columns = matrix.shape
    run = BLOCK // 2 * columns if choices.rows else BLOCK
    codes = torch.empty(rows * columns // (2 * run), run, dtype=torch.uint8, device=x.device)
    blocks = rows if not choices.rows else rows // BLOCK * columns
    scale = codes.new_empty(blocks // BLOCK if choices.lanes and choices.rows else blocks)
    whole = None if minus is None else minus.contiguous()
    outer = _outer_of(x, choices, whole, amax, scratch=_scratch_of(key))
    _write(matrix, choices, key, outer, codes, scale, minus=lower)
    decode = outer.decode.view(-1, 1) if outer.decode is not None and by_row else outer.decode
    return Packed(codes, scale.view(SCALE_E4M3.dtype), decode)


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
    tile, codes = quantizer.tile, packed.codes
    form, _ = packed_form(codes, packed.scale, shape, tile, dim)
    along_rows = in_row_blocks(tile, dim)
    columns = BLOCK if along_rows else form.padded[1]
    values = torch.empty(2 * codes.numel() // columns, columns, dtype=dtype, device=codes.device)
    added = None if plus is None else _work_form(plus, tile, dim)
    decode, per_row = packed.global_scale if scaled else None, _blocks_in(shape[1])
    with torch.cuda.device_of(values):
        _launch(
            triton_kernels.unpack,
            _TILE_BLOCKS,
            values,
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
    whole = values.view(-1)[: form.padded.numel()].view(form.padded)
    return whole if form.padded == form.shape else whole[: shape[0], : shape[1]].contiguous()


def _work_form(x: Tensor, tile: Tile, dim: int) -> Tensor:
    """Return a matrix in whole blocks, contiguous; row blocks as rows of their own, in pairs."""
    form = form_of(x, tile, dim, paired=True).x
    return form.view(-1, BLOCK if form.dim() == 3 else form.shape[2] * BLOCK)


def _choices(quantizer: QuantizerDefinition, x: Tensor, dim: int) -> _Choices:
    square = quantizer.tile is Tile.SQUARE
    last = dim % x.dim() == x.dim() - 1
    rule = quantizer.scale_rule
    return _Choices(
        square or last,
        square or not last,
        bool(quantizer.two_level),
        quantizer.scale_rounding is ScaleRounding.UP,
        quantizer.rounding is Rounding.STOCHASTIC,
        rule=rule.value if rule in (ScaleRule.EDEN, *TRIED_SCALES) else "",
        to_code=1 / largest_code(quantizer.fmt, rule),
        largest=largest_value(quantizer.fmt, rule),
    )


def _matrix(x: Tensor, choices: _Choices) -> Tensor:
    """Give the tensor two dimensions, with the same blocks and noise."""
    x = readable(x)
    if not choices.rows and x.is_contiguous() and x.shape[-1] % BLOCK == 0:
        return x.view(-1, BLOCK)  # so that no tile is half empty because rows are few or short
    return x.reshape(-1, x.shape[-1])


class _Outer(NamedTuple):
    """The scales above block scales: of a tensor, or of its rows."""

    amax: Tensor | None = None  # int32, bits of the largest magnitudes
    decode: Tensor | None = None  # fp32, yet to be written
    blocks: int = 1  # of the tensor, where its rows have scales
    per_row: int = 1


def _scratch_of(key: noise.Key | int | None) -> Scratch | None:
    return key.scratch if isinstance(key, noise.Key) else None


def _outer_of(
    x: Tensor,
    choices: _Choices,
    minus: Tensor | None = None,
    given: Tensor | None = None,
    *,
    scratch: Scratch | None = None,
) -> _Outer:
    """Find the largest magnitudes of x - minus that outer scales are made of, if there are any.

    Args:
        x: before it is cut into blocks.
        choices: what scales there are.
        minus: contiguous, of the shape of `x`.
        given: the largest magnitude, where it is known.
        scratch: of the call, which remembers magnitudes of whole tensors.
    """
    if not choices.two_level:
        return _Outer()
    matrix = x.reshape(-1, x.shape[-1]) if choices.by_row else _matrix(x, choices)
    shape = matrix.shape[:1] if choices.by_row else ()
    decode = torch.empty(shape, dtype=torch.float32, device=x.device)
    if given is not None:
        return _Outer(given.view(torch.int32), decode)
    of_call = None if choices.by_row or minus is not None else scratch
    known = None if of_call is None else of_call.amax(x)
    if known is not None:
        return _Outer(known, decode)
    matrix = readable(matrix)
    amax = None if choices.by_row or scratch is None else scratch.zero()
    if amax is None:
        amax = torch.zeros(shape, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(matrix):
        _launch(
            triton_kernels.find_amax,
            _AMAX_TILE_BLOCKS,
            matrix,
            minus_ptr=minus,
            amax_ptr=amax,
            BY_ROW=choices.by_row,
        )
    if of_call is not None:
        of_call.keep(x, amax)
    per_row = _blocks_in(x.shape[-1])
    return _Outer(amax, decode, amax.numel() * per_row, per_row)


def _write(
    matrix: Tensor,
    choices: _Choices,
    key: noise.Key | int | None,
    outer: _Outer,
    out: Tensor,
    scale: Tensor | None = None,
    *,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
) -> None:
    """Write values to `out`, or codes there and scales to `scale`, and outer scales."""
    data, words = None, (0, 0)
    eden = choices.rule == ScaleRule.EDEN.value
    if choices.stochastic or eden:
        noise_key = noise.as_key(key)
        noise_key = noise_key.fold(SCALE_NOISE) if eden else noise_key
        data, words = noise_key.data, noise.static_words(noise_key)
    with torch.cuda.device_of(matrix):
        _launch(
            triton_kernels.quantize,
            _TILE_BLOCKS,
            matrix,
            minus_ptr=minus,
            plus_ptr=plus,
            amax_ptr=outer.amax,
            decode_ptr=outer.decode,
            out_ptr=out,
            scale_ptr=scale,
            data_ptr=data,
            word0=words[0],
            word1=words[1],
            blocks=outer.blocks,
            per_row=outer.per_row,
            **{name.upper(): choice for name, choice in choices._asdict().items()},
        )


def _blocks_in(length: int) -> int:
    return -(-length // BLOCK)


def _launch(
    kernel: triton.JITFunction,
    tile_blocks: int,
    matrix: Tensor,
    first: dict[str, Tensor] | None = None,
    **arguments: object,
) -> None:
    """Run a kernel over all tiles of a matrix, which it reads unless something else comes first."""
    rows, columns = matrix.shape
    if first is None:
        first = {"x_ptr": matrix}
        arguments |= {"row_stride": matrix.stride(0), "column_stride": matrix.stride(1)}
    down, across = _blocks_in(rows), _blocks_in(columns)
    wide = min(tile_blocks, triton.next_power_of_2(across))
    high = tile_blocks // wide
    launch(
        kernel,
        (-(-down // high) * -(-across // wide),),
        _OPTIONS,
        **first,
        rows=rows,
        columns=columns,
        GR=high,
        GC=wide,
        **arguments,
    )
