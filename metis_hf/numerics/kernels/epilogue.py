"""The epilogue of a GEMM (outer scales, added products, a bias), and errors for such products.

Each step is computed in fp32 and rounded once. On CUDA devices one Triton kernel does all steps in
one pass; elsewhere torch makes one pass per step, slowed down by type promotion. Both give the same
bits, except that products may be summed in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from metis_hf.numerics.kernels.choice import kernels_for
from metis_hf.numerics.kernels.layout import DTYPES, MAX_ELEMENTS
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.numerics.kernels.scratch import Scratch

_PIECE = 2**20  # elements of an error that stay in a CPU's cache


def finish_product(
    out: Tensor,
    scales: Sequence[Tensor] = (),
    bias: Tensor | None = None,
    terms: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Multiply the output of a GEMM by outer scales, then add products and a bias, in place.

    Args:
        out: [.. m p]
        scales: at most two, fp32, each 0-dim, per row [.. m 1] or per column [.. 1 p]. They are
            multiplied by each other first.
        bias: [p], rounded to the dtype of `out` first.
        terms: pairs [m k], [k p] in the dtype of `out`, whose products are added.
    """
    if not scales and bias is None and not terms:
        return
    bias = None if bias is None else bias.detach()
    given = [*scales, *itertools.chain(*terms), *([] if bias is None else [bias])]
    if len(terms) < 2 and _has_kernel(out, given) and kernels_for(out, *given) == "triton":
        from metis_hf.numerics.kernels import triton_epilogue

        with or_reference:
            triton_epilogue.finish_product(out, scales, bias, *terms)
            return
    if scales:
        scale = scales[0] if len(scales) == 1 else scales[0] * scales[1]
        # As a matrix, because a GPU, unlike a CPU, first rounds a 0-dim factor to `out`'s dtype.
        out.mul_(scale if scale.dim() or out.device.type == "cpu" else scale.reshape(1, 1))
    for left, right in terms:
        out.addmm_(left, right)
    if bias is not None:
        out += bias.to(out.dtype)


def error_along(
    x: Tensor,
    values: Tensor,
    scale: Tensor | None,
    directions: Tensor,
    lengths: Tensor,
    scratch: Scratch | None,
) -> Tensor:
    """Return the rounding error of x along some directions, times their lengths, fp32 at least.

    It is ((x - values * scale) @ directions) * lengths [m k], with the difference and the product
    rounded to the dtype of `values`.

    Args:
        x: [m n]
        values: [m n]
        scale: 0-dim, per row [m 1] or per column [1 n], fp32; None: 1.
        directions: [n k]
        lengths: [k]
        scratch: memory of the layer's call, in which the kernel caches the largest magnitude.
    """
    given = [x, lengths, *([] if scale is None else [scale])]
    same = x.shape == values.shape and lengths.dtype is torch.float32
    directions = directions.to(values.dtype)
    known = same and _has_kernel(values.T if values.stride(0) == 1 else values, given)
    if known and directions.numel() and kernels_for(values, *given) == "triton":
        from metis_hf.numerics.kernels import triton_epilogue

        with or_reference:
            return triton_epilogue.error_along(x, values, scale, directions, lengths, scratch)
    errors = (e.to(values.dtype) for e in _in_pieces(x, values, scale))
    return torch.cat([e @ directions for e in errors]) * lengths


def _in_pieces(x: Tensor, values: Tensor, scale: Tensor | None) -> Iterator[Tensor]:
    """Yield x - values * scale, on a CPU a few rows at a time: new large memory costs more."""
    whole = x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() <= _PIECE
    size = len(x) if whole else max(_PIECE // x.shape[1], 1)
    by_row = scale is not None and scale.dim() > 0 and len(scale) == len(x)
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        own = scale[rows] if by_row and scale is not None else scale
        yield x[rows] - (values[rows] if own is None else values[rows].float() * own)


def _has_kernel(out: Tensor, given: Sequence[Tensor]) -> bool:
    return (
        out.dim() == 2
        and out.is_contiguous()
        and out.dtype in DTYPES
        and 0 < out.numel() <= MAX_ELEMENTS
        and all(each.dtype in DTYPES and each.device == out.device for each in given)
    )
