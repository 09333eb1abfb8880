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
from metis_hf.numerics.kernels.layout import Packed, form_of, in_row_blocks, packed_form
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import (
    TRIED_SCALES,
    ScaleRounding,
    ScaleRule,
    largest_code,
    largest_value,
)

__all__ = ["RULES", "fake_quantize", "missing", "pack", "store", "unpack"]

RULES = (ScaleRule.ABSMAX, ScaleRule.UNBIASED, *TRIED_SCALES)  # of block scales

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # read and written
# Elements of a program's tile, as squares of 16 x 16.
_TILE_BLOCKS, _AMAX_TILE_BLOCKS = 8, 32
_WARPS = 4
_OLDEST = 3, 6  # before, `div_rn` flushes subnormal numbers to zero


def missing(device: torch.device) -> str | None:
    """Return what these kernels lack to run on a device; None if nothing."""
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
    rule: str = ""  # by which several scales are tried
    to_code: float = 1.0  # over the code that amax gets
    largest: float = 1.0  # that code times the scale of the tensor's largest block


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
    """See `kernels.fake_quantize`; `quantizer` is NVFP4 with one of `RULES`.

    Args:
        x: not empty, with `layout.has_form`; strides are free.
        quantizer, dim, key, dtype, scaled, amax: as there.
        minus, plus: fp32; one tensor for both is read once.
    """
    same = minus is not None and minus is plus
    # One variant fewer where it makes no difference.
    scaled = scaled or not quantizer.two_level
    choices = _choices(quantizer, x, dim)._replace(scaled=scaled, same=same)
    matrix = _matrix(x, choices)
    values = torch.empty(matrix.shape, dtype=dtype, device=x.device)
    decode = _write(
        matrix, choices, key, values, minus=minus, plus=None if same else plus, given=amax
    )
    return values.view(x.shape), None if scaled else decode


def store(
    x: Tensor, quantizer: QuantizerDefinition, *, dim: int, key: noise.Key | int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `kernels.store`; arguments are those of `fake_quantize`. Codes of NaN are arbitrary."""
    choices = _choices(quantizer, x, dim)
    matrix = _matrix(x, choices)
    rows, columns = matrix.shape
    lines, length = (rows, columns) if choices.lanes else (columns, rows)
    blocks = _blocks_in(length)
    codes = torch.empty(lines, blocks * BLOCK // 2, dtype=torch.uint8, device=x.device)
    square = choices.lanes and choices.rows
    scale = codes.new_empty(_blocks_in(rows) if square else lines, blocks)
    decode = _write(matrix, choices, key, codes, scale)

    lead, across = x.shape[:-1], _blocks_in(x.shape[-1])
    if choices.lanes:
        scale_lead = (*lead[:-1], _blocks_in(lead[-1])) if square else lead
        codes = codes.view(*lead, across * BLOCK // 2)
        scale = scale.view(*scale_lead, across)
    else:
        # Written with all rows of the matrix along one line; several matrices are to lie apart.
        split = (x.shape[-1], *lead[:-1], -1)
        codes, scale = (part.view(split).movedim(0, -2).contiguous() for part in (codes, scale))
    return codes, scale.view(SCALE_E4M3.dtype), decode


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
    choices = _choices(quantizer, x, dim)._replace(packed=True)
    x = x if x.dtype in DTYPES else x.float()
    matrix, lower = (None if t is None else _work_form(t, tile, dim) for t in (x, minus))
    assert matrix is not None
    rows, columns = matrix.shape
    run = BLOCK // 2 * columns if choices.rows else BLOCK
    codes = torch.empty(rows * columns // (2 * run), run, dtype=torch.uint8, device=x.device)
    blocks = rows if not choices.rows else rows // BLOCK * columns
    scale = codes.new_empty(blocks // BLOCK if choices.lanes and choices.rows else blocks)
    decode = _write(matrix, choices, key, codes, scale, minus=lower, given=amax)
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
    """See `kernels.unpack`; the tensor scale is one number, or there is none."""
    tile, codes = quantizer.tile, packed.codes
    form, _ = packed_form(codes, packed.scale, shape, tile, dim)
    along_rows = in_row_blocks(tile, dim)
    columns = BLOCK if along_rows else form.padded[1]
    values = torch.empty(2 * codes.numel() // columns, columns, dtype=dtype, device=codes.device)
    added = None if plus is None else _work_form(plus, tile, dim)
    with torch.cuda.device_of(values):
        _launch(
            triton_kernels.unpack,
            _TILE_BLOCKS,
            values,
            first=(codes, packed.scale.view(torch.uint8)),
            decode_ptr=packed.global_scale if scaled else None,
            plus_ptr=added,
            out_ptr=values,
            LANES=along_rows or tile is Tile.SQUARE,
            ROWS=not along_rows,
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
        rule=rule.value if rule in TRIED_SCALES else "",
        to_code=1 / largest_code(quantizer.fmt, rule),
        largest=largest_value(quantizer.fmt, rule),
    )


def _matrix(x: Tensor, choices: _Choices) -> Tensor:
    """Give the tensor two dimensions, with the same blocks and noise."""
    x = x if x.dtype in DTYPES else x.float()
    if not choices.rows and x.is_contiguous() and x.shape[-1] % BLOCK == 0:
        return x.view(-1, BLOCK)  # so that no tile is half empty because rows are few or short
    return x.reshape(-1, x.shape[-1])


def _write(
    matrix: Tensor,
    choices: _Choices,
    key: noise.Key | int | None,
    out: Tensor,
    scale: Tensor | None = None,
    *,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor | None:
    """Write values to `out`, or codes there and scales to `scale`; return the tensor scale."""
    minus, plus = (None if t is None else t.contiguous() for t in (minus, plus))
    amax = decode = data = None
    words = 0, 0
    if choices.stochastic:
        noise_key = noise.as_key(key)
        data, words = noise_key.data, noise.static_words(noise_key)
    with torch.cuda.device_of(matrix):
        if choices.two_level:
            decode = torch.empty((), dtype=torch.float32, device=matrix.device)
            if given is None:
                amax = torch.zeros((), dtype=torch.int32, device=matrix.device)
                find_amax = triton_kernels.find_amax
                _launch(find_amax, _AMAX_TILE_BLOCKS, matrix, minus_ptr=minus, amax_ptr=amax)
            else:
                amax = given.view(torch.int32)
        _launch(
            triton_kernels.quantize,
            _TILE_BLOCKS,
            matrix,
            minus_ptr=minus,
            plus_ptr=plus,
            amax_ptr=amax,
            decode_ptr=decode,
            out_ptr=out,
            scale_ptr=scale,
            data_ptr=data,
            word0=words[0],
            word1=words[1],
            **{name.upper(): choice for name, choice in choices._asdict().items()},
        )
    return decode


def _blocks_in(length: int) -> int:
    return -(-length // BLOCK)


def _launch(
    kernel: triton.JITFunction,
    tile_blocks: int,
    matrix: Tensor,
    first: tuple[Tensor, ...] | None = None,
    **arguments: object,
) -> None:
    """Run a kernel over all tiles of a matrix, which it reads unless something else comes first."""
    rows, columns = matrix.shape
    if first is None:
        first = (matrix,)
        arguments |= {"row_stride": matrix.stride(0), "column_stride": matrix.stride(1)}
    down, across = _blocks_in(rows), _blocks_in(columns)
    wide = min(tile_blocks, triton.next_power_of_2(across))
    high = tile_blocks // wide
    kernel[(-(-down // high) * -(-across // wide),)](
        *first,
        rows=rows,
        columns=columns,
        GR=high,
        GC=wide,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **arguments,
    )
