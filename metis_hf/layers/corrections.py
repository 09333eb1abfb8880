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
    """Return the factors of one operand's rounding error times the other operand of a GEMM.

    Args:
        x: what was quantized [m n], as the GEMM takes it: on the left, or the transpose if
            `on_right`.
        x_hat: the operand that was made of it, transposed likewise.
        other: the low-rank part of the other operand [n p]; of its transpose if `on_right`.
        quantizer: of the coordinates.
        on_right: whether the operand is on the right: the term is [p m] then, else [m p].
        key: noise key of the coordinates.
        dtype: of the GEMM.

    Returns:
        [m k] and [k p]; [p k] and [k m].
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
    """Return the same of the transpose of a [p n]."""
    assert a.low is not None
    return LowRank(a.low.right.T, a.low.lengths, a.low.left.T)
