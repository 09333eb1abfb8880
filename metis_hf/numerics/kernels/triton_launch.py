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
from metis_hf.numerics.kernels import triton_kernels
from metis_hf.numerics.kernels.formulation import BLOCK
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import ScaleRounding

__all__ = ["fake_quantize", "missing", "store"]

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
    if device.type == "cuda" or (device.type == "cpu" and triton_kernels.INTERPRETED.value):
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
    """See `kernels.fake_quantize`; `quantizer` is NVFP4 with scale rule "absmax".

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


def _choices(quantizer: QuantizerDefinition, x: Tensor, dim: int) -> _Choices:
    square = quantizer.tile is Tile.SQUARE
    last = dim % x.dim() == x.dim() - 1
    return _Choices(
        square or last,
        square or not last,
        bool(quantizer.two_level),
        quantizer.scale_rounding is ScaleRounding.UP,
        quantizer.rounding is Rounding.STOCHASTIC,
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
    kernel: triton.JITFunction, tile_blocks: int, matrix: Tensor, **arguments: object
) -> None:
    """Run a kernel over all tiles of a matrix."""
    rows, columns = matrix.shape
    down, across = _blocks_in(rows), _blocks_in(columns)
    wide = min(tile_blocks, triton.next_power_of_2(across))
    high = tile_blocks // wide
    kernel[(-(-down // high) * -(-across // wide),)](
        matrix,
        rows=rows,
        columns=columns,
        row_stride=matrix.stride(0),
        column_stride=matrix.stride(1),
        GR=high,
        GC=wide,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **arguments,
    )
