"""What tests of attention products share: operands of each scheme, and their reference."""

from __future__ import annotations

import numpy as np
import torch
from reference import fake_quantize

from layers.layer_reference import UNIT, array, rotation
from metis_hf import MetisConfig
from metis_hf.layers.attention import (
    AttentionProducts,
    ProductOperands,
)
from metis_hf.noise import key_of
from metis_hf.schemes import Role
from metis_hf.schemes.noise_keys import CallKeys

# What the accepted schemes have for [a, b, dy of dgrad, b of dgrad, dy of wgrad, a of wgrad]:
# format, scale rounding, scale rule.
FORWARD, UP = ("nvfp4", "nearest", "absmax"), ("nvfp4", "up", "absmax")
SIX = ("nvfp4", "nearest", "four-over-six")
UNBIASED = ("nvfp4", "nearest", "unbiased")
MX, MX_UP = ("mxfp4", "floor", "absmax"), ("mxfp4", "up", "absmax")
TABLE = {
    "nvfp4": [UP] * 6,
    "nvfp4-rne": [FORWARD, FORWARD, UP, FORWARD, UP, FORWARD],
    "nvidia": [FORWARD] * 6,
    "four-over-six": [SIX, SIX, FORWARD, SIX, FORWARD, SIX],
    "nvidia-unbiased": [FORWARD, FORWARD, UNBIASED, FORWARD, UNBIASED, FORWARD],
    "four-over-six-unbiased": [SIX, SIX, UNBIASED, SIX, UNBIASED, FORWARD],
    "mxfp4": [MX, MX, MX_UP, MX, MX_UP, MX],
}
ROTATED = {"nvidia", "four-over-six", "nvidia-unbiased", "four-over-six-unbiased"}  # in wgrad
BY_ROWS = (Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)

ACCEPTED = {*TABLE, "quartet2", "if4", "mixfp4", "bf16"}


def products_of(scheme: str, **changes) -> AttentionProducts:
    return AttentionProducts(MetisConfig(attention=scheme, **changes), "model.attention")


def plan_of(products: AttentionProducts, a, b, dtype=torch.float32) -> ProductOperands:
    scheme = products.scheme
    keys = CallKeys(key_of("a test"), a, b)
    state = None if scheme.state is None else scheme.state.freeze({}, a, b, keys)
    return ProductOperands(scheme, dtype, keys, state)


def reference(x: np.ndarray, role: Role, scheme: str, signs: np.ndarray | None) -> np.ndarray:
    """What stands for x [.. r c] in a GEMM: blocks along what it contracts, one tensor scale.

    In wgrad of the schemes that rotate there: every head's matrix rotated by a block-diagonal
    matrix, quantized, and rotated back, with the rows of its padding.
    """
    fmt, scale_rounding, scale_rule = TABLE[scheme][role]
    options = {"scale_rounding": scale_rounding, "scale_rule": scale_rule}
    dim = -2 if role in BY_ROWS else -1
    rotated = signs is not None and role in (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)
    if not rotated:
        return fake_quantize(x, fmt, dim=dim, **options).values.astype(np.float64)
    h = rotation(x.shape[-2], signs)
    # As the layer rounds it to fp32.
    inside = (h @ x.astype(np.float64)).astype(np.float32)
    back = rotation(h.shape[0], signs).T
    return back @ fake_quantize(inside, fmt, dim=dim, **options).values.astype(np.float64)


def assert_close(found: torch.Tensor, expected: np.ndarray, size: np.ndarray, terms: int) -> None:
    """Hold an fp32 sum of products to float64: `terms` roundings of the sum of magnitudes."""
    error = np.abs(array(found).astype(np.float64) - expected)
    assert found.shape == expected.shape
    assert np.all(error <= (terms + 4) * UNIT * size + 1e-30), error.max()
