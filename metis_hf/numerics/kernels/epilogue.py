"""The epilogue of a GEMM: outer scales of its operands, and a bias; and what an operand has lost.

Each is computed in fp32, and rounded once. On CUDA devices one Triton kernel does it in one pass,
where torch takes a pass for each, and slow ones: it promotes each element by itself. Results are
equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metis_hf.numerics.kernels.choice import kernels_for
from metis_hf.numerics.kernels.layout import DTYPES
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.numerics.kernels.scratch import Scratch

_MAX_ELEMENTS = 2**31 - 2**13  # places are counted in 32 bits, to the end of the last program


def finish_product(out: Tensor, scales: Sequence[Tensor] = (), bias: Tensor | None = None) -> None:
    """Multiply the output of a GEMM by outer scales, then add a bias, in place.

    Args:
        out: [.. m p]
        scales: two at most, fp32: 0-dim, one for each row [.. m 1] or one for each column
            [.. 1 p]. They are multiplied with each other first.
        bias: [p], rounded to the dtype of `out` first.
    """
    if not scales and bias is None:
        return
    bias = None if bias is None else bias.detach()
    given = [*scales, *([] if bias is None else [bias])]
    if _has_kernel(out, given) and kernels_for(out, *given) == "triton":
        from metis_hf.numerics.kernels import triton_epilogue

        with or_reference:
            triton_epilogue.finish_product(out, scales, bias)
            return
    if scales:
        scale = scales[0] if len(scales) == 1 else scales[0] * scales[1]
        # As a matrix: a GPU rounds a 0-dim factor to the dtype of the product first, a CPU does not
        out.mul_(scale if scale.dim() or out.device.type == "cpu" else scale.reshape(1, 1))
    if bias is not None:
        out += bias.to(out.dtype)


def rounding_error(x: Tensor, values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x - values * scale in `dtype`, the error of a quantized matrix.

    Args:
        x: [m n]
        values: [m n]
        scale: 0-dim, or one for each row [m 1], fp32; None: 1.
        dtype: of the result, at most as wide as fp32 or `x`.
    """
    given = [x] if scale is None else [x, scale]
    same = x.shape == values.shape and dtype in DTYPES
    if same and _has_kernel(values, given) and kernels_for(values, *given) == "triton":
        from metis_hf.numerics.kernels import triton_epilogue

        with or_reference:
            return triton_epilogue.rounding_error(x, values, scale, dtype)
    return (x - (values if scale is None else values.float() * scale)).to(dtype)


def multiply_columns(x: Tensor, lengths: Tensor, scratch: Scratch | None) -> Tensor:
    """Return x [m k] times the lengths [k] of its columns, in fp32 at least.

    The scratch memory of the call keeps the largest magnitude.
    """
    if (
        lengths.dtype is torch.float32
        and _has_kernel(x, [lengths])
        and kernels_for(x, lengths) == "triton"
    ):
        from metis_hf.numerics.kernels import triton_epilogue

        with or_reference:
            return triton_epilogue.multiply_columns(x, lengths, scratch)
    return x * lengths


def _has_kernel(out: Tensor, given: Sequence[Tensor]) -> bool:
    return (
        out.dim() == 2
        and out.is_contiguous()
        and out.dtype in DTYPES
        and 0 < out.numel() <= _MAX_ELEMENTS
        and all(each.dtype in DTYPES and each.device == out.device for each in given)
    )
