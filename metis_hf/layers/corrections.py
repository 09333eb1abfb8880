"""The second terms of a GEMM: what rounding took off one operand.

A scheme may add to a GEMM what rounding took off one operand in the dominant directions of the
other, quantized in its turn (`Scheme.corrected`). With x_hat = (a_x lam_x) v_x + .., and so on:

    fprop   + Q((x - x_hat) @ v_w.T lam_w) @ a_w.T  + a_x @ Q((w - w_hat) @ v_x.T lam_x).T
    dgrad   + Q((dy - dy_hat) @ a_w lam_w) @ v_w    + a_dy @ Q((w - w_hat).T @ v_dy.T lam_dy).T
    wgrad   + Q((dy - dy_hat).T @ a_x lam_x) @ v_x

Each is k more channels of the same GEMM, all in FP4 and in blocks along k. What then is left of the
error is the rounding of one operand times the rest of the other. Backward does not have x, only
x_hat: what rounding took off x is not added to wgrad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels.epilogue import multiply_columns
from metis_hf.operands import Quantized


def correct(
    out: Tensor,
    quantizer: Quantizer,
    error: Tensor,
    other: tuple[Tensor, Tensor, Tensor],
    *,
    on_right: bool = False,
    key: Key,
    dtype: torch.dtype,
) -> None:
    """Add to a GEMM's output [m p], in place, what rounding took off one of its operands.

    Args:
        out: [m p]
        quantizer: the operand's.
        error: what rounding took off it [m n].
        other: the low-rank part of the other operand [n p]: [n k], lengths [k], [k p].
        on_right: whether it is the operand on the right; out is [p m] then.
        key: noise key of the coordinates.
        dtype: of the GEMM.
    """
    near, lengths, far = other
    # [m n] @ [n k] -> [m k]
    coordinates = multiply_columns(error.to(dtype) @ near.to(dtype), lengths, key.scratch)
    left = quantizer(coordinates, dim=-1, key=key, dtype=dtype)
    factors = left, far.to(dtype)  # [m k] @ [k p] -> [m p]
    # Not in place in out.T: a compiler would write it, and all that is made of it, transposed.
    out.addmm_(*((factors[1].T, factors[0].T) if on_right else factors))


def by_rows(a: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Return the low-rank part of a [n p]: [n k], lengths [k], [k p]."""
    assert a.low is not None
    return a.low


def by_columns(a: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same of the transpose of a [p n]."""
    assert a.low is not None
    return a.low.right.T, a.low.lengths, a.low.left.T
