"""Correction terms of a GEMM: the rounding error of one operand along the other's directions.

A scheme may add to a GEMM the rounding error of one operand, projected on the dominant directions
of the other and quantized (`Scheme.corrected`). With x_hat = (a_x lam_x) v_x + .., and so on:

    fprop   + Q((x - x_hat) @ v_w.T lam_w) @ a_w.T  + a_x @ Q((w - w_hat) @ v_x.T lam_x).T
    dgrad   + Q((dy - dy_hat) @ a_w lam_w) @ v_w    + a_dy @ Q((w - w_hat).T @ v_dy.T lam_dy).T
    wgrad   + Q((dy - dy_hat).T @ a_x lam_x) @ v_x

Each term is k more channels of the same GEMM, in FP4 and in blocks along k. The error that remains
is the rounding error of one operand times the residual of the other. Backward has x_hat but not x,
so wgrad has no correction for x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands import LowRank, Quantized


def term_of(
    x: Tensor,
    x_hat: Quantized,
    other: LowRank,
    quantizer: Quantizer,
    *,
    on_right: bool = False,
    key: Key,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return two factors of the term: rounding error of x times the other operand's low-rank part.

    Args:
        x: [m n] before quantization, the GEMM's left operand; the transpose of its right operand
            if `on_right`.
        x_hat: the quantized operand, transposed likewise.
        other: the low-rank part of the other operand [n p]; of its transpose if `on_right`.
        quantizer: of the coordinates.
        on_right: x is the right operand, so that the term is [p m] rather than [m p].
        key: noise key of the coordinates.
        dtype: of the GEMM.

    Returns:
        [m k] and [k p]; [p k] and [k m] if `on_right`.
    """
    near, lengths, far = other
    # [m n] @ [n k] -> [m k]
    coordinates = x_hat.error_along(x, near, lengths, key.scratch)
    left, right = quantizer(coordinates, dim=-1, key=key, dtype=dtype), far.to(dtype)
    return (right.T, left.T) if on_right else (left, right)


def by_rows(a: Quantized) -> LowRank:
    """Return the low-rank part of a [n p]."""
    assert a.low is not None
    return a.low


def by_columns(a: Quantized) -> LowRank:
    """Return the low-rank part of the transpose of a [p n]."""
    assert a.low is not None
    return LowRank(a.low.right.T, a.low.lengths, a.low.left.T)
