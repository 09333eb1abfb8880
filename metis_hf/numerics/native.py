"""GEMMs on hardware FP4 units: the layout of their operands, and the call.

The GEMM is torch 2.13's `torch.nn.functional.scaled_mm`, wrapped in a custom operator, which is
opaque to torch.compile: Inductor's lowering of `scaled_mm` rejects swizzled scales. `layers.native`
decides which operands use this GEMM.

Requirements of torch 2.13, from its source: codes are uint8 [M, K/2] viewed as
`float4_e2m1fn_x2`, the even element in the low nibble; the second matrix is [N, K/2], transposed;
K % 32 and N % 16 are 0; block scales are swizzled and padded to [128 R, 4 C]; tensor scales are
decode scales.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import MXFP4, NVFP4
from metis_hf.numerics.kernels.layout import Packed
from metis_hf.numerics.kernels.reference import blocks_of, decode_e2m1
from metis_hf.numerics.layout import Tile, from_blocks

Gemm = Callable[..., Tensor]  # with the arguments of torch.nn.functional.scaled_mm

_ROWS, _CONTRACTED = 16, 32  # rows and length are padded to multiples of these
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4  # of a tile of swizzled scales
# Compute capabilities on which torch supports each FP4 GEMM: B200, B300 and RTX 50. The library
# for MXFP4 supports only the first two.
CAPABILITIES = {NVFP4.name: ((10, 0), (10, 3), (12, 0)), MXFP4.name: ((10, 0), (10, 3))}
# Dtypes that the result of a GEMM may have.
DTYPES = {
    NVFP4.name: (torch.bfloat16, torch.float16, torch.float32),
    MXFP4.name: (torch.bfloat16,),
}

_stand_in: Gemm | None = None


class NativeMatrix(NamedTuple):
    """A quantized matrix [rows n] for a GEMM that contracts n.

    Attributes:
        codes: uint8 [rows' n'/2], the even element in the low nibble; rows' and n' are rows and n
            padded with zeros to multiples of 16 and 32.
        scale: block scales in their stored dtype, flat, in the order of `swizzle`.
        global_scale: fp32 [1], or None for a format without a tensor scale.
        rows, length: rows and n.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    rows: int
    length: int

    def values(self) -> Tensor:
        """Return code * block scale, fp32 [rows n], without the factor `global_scale`."""
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        size = _block_size(self.scale)
        bits = unswizzle(self.scale.view(torch.uint8), codes.shape[0], codes.shape[1] // size)
        scale = bits.view(self.scale.dtype).float().repeat_interleave(size, 1)
        return decode_e2m1(codes).mul_(scale)[: self.rows, : self.length]


def native_matrix(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    shape: tuple[int, int],
    contracted: int,
) -> NativeMatrix:
    """Rearrange codes and scales of a matrix [t c] for a GEMM; no value changes.

    Args:
        packed: result of `kernels.pack`, in NVFP4 or MXFP4.
        quantizer, dim, shape: as for `kernels.unpack`.
        contracted: the dimension that the GEMM contracts: `dim`, or either one for square tiles.

    Returns:
        The matrix [t c] if `contracted` is its last dimension, else the transpose.
    """
    fmt, square = quantizer.fmt, quantizer.tile is Tile.SQUARE
    assert square or (dim - contracted) % 2 == 0, "blocks must run along the contracted dimension"
    blocks, scale = blocks_of(packed, quantizer, dim=dim, shape=shape)
    codes, bits = from_blocks(blocks, shape, quantizer.tile, dim), scale.view(torch.uint8)
    bits = bits.squeeze(-1).squeeze(-2) if square else bits.squeeze(dim % 2 + 1)
    if contracted % 2 == 0:
        codes, bits = codes.T, bits.T
    rows, length = codes.shape
    if square:  # repeat a tile's scale for each of its rows
        assert fmt.block_size is not None
        bits = bits.repeat_interleave(fmt.block_size, 0)[:rows]
    codes = F.pad(codes, (0, -length % _CONTRACTED, 0, -rows % _ROWS))
    two = codes.unflatten(-1, (-1, 2))
    packed_codes = two[..., 0] | two[..., 1] << 4
    largest = packed.global_scale
    if largest is None and fmt.scale.tensor_scale:
        largest = torch.ones((), dtype=torch.float32, device=codes.device)
    return NativeMatrix(
        packed_codes.contiguous(),
        swizzle(bits).view(packed.scale.dtype),
        None if largest is None else largest.reshape(1),
        rows,
        length,
    )


def swizzle(scale: Tensor) -> Tensor:
    """Rearrange block scales [rows blocks] into cuBLAS's tiles of 128 x 4, zero-padded.

    A tile is contiguous; its row 32 a + b, column c is at 16 b + 4 a + c ("32 x 4 x 4", cuBLAS: 1D
    block scaling factors layout).

    Returns:
        Flat tensor in the dtype of `scale`, an 8-bit dtype that torch can pad.
    """
    rows, blocks = scale.shape
    scale = F.pad(scale, (0, -blocks % _SCALE_COLUMNS, 0, -rows % _SCALE_ROWS))
    tiles = scale.view(scale.shape[0] // _SCALE_ROWS, 4, 32, -1, _SCALE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Invert `swizzle`: [rows blocks]."""
    down, across = -(-rows // _SCALE_ROWS), -(-blocks // _SCALE_COLUMNS)
    tiles = scale.view(down, across, 32, 4, _SCALE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * _SCALE_ROWS, across * _SCALE_COLUMNS)[:rows, :blocks]


def multiply(a: NativeMatrix, b: NativeMatrix, dtype: torch.dtype) -> Tensor:
    """Return a [m n] @ b [p n]^T -> [m p], contiguous, in `dtype`, one of the format's `DTYPES`."""
    out = torch.ops.metis_hf.fp4_gemm(
        a.codes, a.scale, a.global_scale, b.codes, b.scale, b.global_scale, dtype
    )
    return out[: a.rows, : b.rows].contiguous()


@torch.library.custom_op("metis_hf::fp4_gemm", mutates_args=())
def _fp4_gemm(
    a: Tensor,
    scale_a: Tensor,
    global_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor,
    global_b: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply padded codes [m k/2] by padded codes [n k/2], giving [m n]."""
    gemm = _stand_in or F.scaled_mm  # type: ignore[attr-defined]
    return call_gemm(gemm, a, scale_a, global_a, b, scale_b, global_b, dtype)


@_fp4_gemm.register_fake
def _(
    a: Tensor,
    scale_a: Tensor,
    global_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor,
    global_b: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def call_gemm(
    gemm: Gemm,
    a: Tensor,
    scale_a: Tensor,
    global_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor,
    global_b: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Call torch's `scaled_mm` or its stand-in; the arguments are fields of `NativeMatrix`.

    The GEMM applies the tensor scales before it rounds the result to `dtype`.
    """
    scaling, swizzles = F.ScalingType, F.SwizzleType  # type: ignore[attr-defined]
    scales_a, scales_b = [scale_a], [scale_b]
    recipe = [scaling.BlockWise1x16 if _block_size(scale_a) == 16 else scaling.BlockWise1x32]
    swizzled = [swizzles.SWIZZLE_32_4_4]
    if global_a is not None and global_b is not None:
        scales_a, scales_b = [scale_a, global_a], [scale_b, global_b]
        recipe, swizzled = [*recipe, scaling.TensorWise], [*swizzled, swizzles.NO_SWIZZLE]
    return gemm(
        a.view(torch.float4_e2m1fn_x2),
        b.view(torch.float4_e2m1fn_x2).t(),
        scales_a,
        recipe,
        scales_b,
        recipe,
        swizzled,
        swizzled,
        output_dtype=dtype,
    )


@contextlib.contextmanager
def use_gemm(gemm: Gemm) -> Iterator[None]:
    """Replace `scaled_mm` by another function inside a `with` block, on every device.

    For tests without FP4 units. The function gets the arguments that `scaled_mm` would get.
    """
    global _stand_in
    before, _stand_in = _stand_in, gemm
    try:
        yield
    finally:
        _stand_in = before


@torch.compiler.assume_constant_result
def obstacle_of_device(device: torch.device, fmt: str) -> str | None:
    """Return the reason, as a clause, that FP4 GEMMs cannot run on a device; None if they can.

    Args:
        device: device of the operands.
        fmt: name of the format, one of `CAPABILITIES`.
    """
    if not hasattr(F, "scaled_mm"):
        return (
            f"torch {torch.__version__} has no torch.nn.functional.scaled_mm, which needs "
            "torch 2.13 or later"
        )
    if _stand_in is not None:
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type!r}, not on an NVIDIA GPU"
    return _obstacle_of_gpu(device.index or 0, fmt)


def device_to_be(device: torch.device) -> torch.device:
    """Return the device on which a model converted on `device` is expected to run.

    A model on the CPU or the meta device is expected to move to the GPU, if there is one.
    """
    if device.type in ("cpu", "meta") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "meta" else device


@functools.cache
def _obstacle_of_gpu(index: int, fmt: str) -> str | None:
    has, wanted = torch.cuda.get_device_capability(index), CAPABILITIES[fmt]
    if has in wanted:
        return None
    listed = ", ".join(f"{major}.{minor}" for major, minor in wanted)
    return (
        f"{torch.cuda.get_device_name(index)} has compute capability {has[0]}.{has[1]}, but torch "
        f"multiplies {fmt} only on {listed}"
    )


def _block_size(scale: Tensor) -> int:
    fmt = NVFP4 if scale.dtype is NVFP4.scale.dtype else MXFP4
    assert fmt.block_size is not None
    return fmt.block_size
