"""The GEMMs of attention products, link by link against the scalar reference."""

from __future__ import annotations

import numpy as np
import torch
from design import cases
from reference import fake_quantize

from layers.attention_tools import (
    ROTATED,
    TABLE,
    assert_close,
    plan_of,
    products_of,
    reference,
)
from layers.layer_reference import array
from layers.layer_tools import NEAREST
from metis_hf import MetisConfig
from metis_hf.layers.attention import (
    ProductOperands,
    QuantizedProduct,
    build_attention_scheme,
)
from metis_hf.noise import key_of
from metis_hf.operands import Hadamard
from metis_hf.schemes import Role
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.transforms.hadamard import hadamard_matrix

SHAPES = [  # heads in a group, rows of a, rows of b, contracted: ragged, and of whole blocks
    (1, 9, 11, 20),
    (3, 5, 18, 16),
    (2, 1, 33, 8),
]


@cases({"scheme": list(TABLE)}, rotated={"shape": SHAPES})
def test_product_is_that_of_the_reference(scheme, shape):
    """y, da and db of given a, b and dy, each from operands that the scalar reference quantizes."""
    g, m, n, c = shape
    products = products_of(scheme, **NEAREST)
    a = (torch.randn(2, g, m, c) * torch.logspace(-1, 1, c)).requires_grad_()
    b = torch.randn(2, n, c, requires_grad=True)
    dy = torch.randn(2, g, m, n) * 1e-3
    y = QuantizedProduct.apply(a, b, plan_of(products, a, b))
    y.backward(dy)

    signs = None
    if scheme in ROTATED:
        conditioner = products.scheme.wgrad_input.conditioner
        assert isinstance(conditioner, Hadamard)
        signs = np.sign(array(hadamard_matrix(conditioner.seed))[0])
    given = (a, b, dy, b, dy, a)
    hats = [reference(array(x), role, scheme, signs) for role, x in zip(Role, given)]
    a_hat, b_hat, d_hat, b_again, d_rows, a_rows = hats
    for found, left, right, terms in (
        (y, a_hat, np.swapaxes(b_hat, -1, -2)[:, None], c),
        (a.grad, d_hat, b_again[:, None], n),
    ):
        assert_close(found, left @ right, np.abs(left) @ np.abs(right), terms + 16)
    # One GEMM for the heads of a group: their queries after each other.
    db = (np.swapaxes(d_rows, -1, -2) @ a_rows).sum(1)
    size = (np.swapaxes(np.abs(d_rows), -1, -2) @ np.abs(a_rows)).sum(1)
    # Rotated operands come back through two fp32 products, whose terms may cancel.
    assert_close(b.grad, db, size * (32 if signs is not None else 1), g * m + 16)


def test_quartet2_has_its_two_bases():
    """Forward 4/6; each backward GEMM rotates both operands by signs of one of them."""
    products = products_of("quartet2")
    a, b = torch.randn(2, 1, 32, 16, requires_grad=True), torch.randn(2, 32, 16, requires_grad=True)
    y = QuantizedProduct.apply(a, b, plan_of(products, a, b))
    hats = [fake_quantize(array(x), dim=-1, scale_rule="four-over-six").values for x in (a, b)]
    assert_close(y, hats[0] @ np.swapaxes(hats[1], -1, -2)[:, None].astype(np.float64),
                 np.abs(hats[0]) @ np.abs(np.swapaxes(hats[1], -1, -2)[:, None]), 32)  # fmt: skip
    plan = plan_of(products, a, b)
    for left, right in (
        (Role.DGRAD_GRAD_OUTPUT, Role.DGRAD_WEIGHT),
        (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT),
    ):
        first, second = (plan.scheme.resolve(role)[1].bind(plan.state) for role in (left, right))
        key = plan.keys[right]
        other = second.conditioner.second.for_matrix(b, key)
        assert torch.equal(first.conditioner.content, other.content)
        assert first.conditioner.seed == other.seed


def test_quartet2_gradient_is_that_of_the_forward_copies():
    """On average over seeds: dQ -> dS K_hat, with K_hat the 4/6 copy of the forward pass."""
    a, b, dy = torch.randn(1, 1, 128, 16), torch.randn(1, 128, 16), torch.randn(1, 1, 128, 128)
    found = []
    for seed in range(50):
        products = products_of("quartet2", seed=seed)
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        keys = CallKeys(key_of("seed", seed), x, y)
        state = products.scheme.state.freeze({}, x, y, keys)
        plan = ProductOperands(products.scheme, torch.float32, keys, state)
        QuantizedProduct.apply(x, y, plan).backward(dy)
        found.append((x.grad, y.grad))
    nearest = MetisConfig(attention="quartet2")
    q = build_attention_scheme(nearest).dgrad_weight.quantizer.deterministic()
    a_hat, b_hat = q(a, dim=-1), q(b, dim=-1)
    for grads, exact in zip(zip(*found), (dy @ b_hat, (dy.mT @ a_hat)[:, 0])):
        grads = torch.stack(grads)
        error = (grads.mean(0) - exact).norm() / exact.norm()
        one = (grads[0] - exact).norm() / exact.norm()
        assert error < 1.5 * one / len(grads) ** 0.5, (error, one)
