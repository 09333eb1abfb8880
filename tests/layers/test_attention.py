"""Attention of quantized products: exact links, noise, refusals."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from design import cases
from reference import fake_quantize

from layers.attention_tools import (
    ACCEPTED,
    plan_of,
    products_of,
    reference,
)
from layers.layer_reference import array
from layers.layer_tools import NEAREST
from metis_hf import MetisConfig
from metis_hf.layers.attention import (
    AttentionProducts,
    ProductOperands,
    QuantizedProduct,
)
from metis_hf.numerics import Quantizer
from metis_hf.operands import Operand
from metis_hf.schemes import Role, Scheme


class Heads(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def heads(h=4, kv=2, q=13, k=13, d=8, e=8, batch=2, dtype=torch.float32) -> Heads:
    shapes = ((batch, h, q, d), (batch, kv, k, d), (batch, kv, k, e))
    return Heads(*(torch.randn(s, dtype=dtype).requires_grad_() for s in shapes))


def causal(q: int, k: int) -> torch.Tensor:
    return torch.ones(q, k, dtype=torch.bool).triu(1 + k - q)


OPTIONS = {
    "plain": {},
    "causal": {"blocked": causal(13, 13)},
    "softcap": {"blocked": causal(13, 13), "softcap": 0.7},
    "bias": {"bias": torch.linspace(-1, 1, 169).view(1, 1, 13, 13)},
    "padding": {"blocked": torch.arange(13) > torch.tensor([12, 7]).view(2, 1, 1, 1)},
}


def eager(heads: Heads, scaling: float, blocked=None, bias=None, softcap=None, sinks=None):
    """Attention by its definition, in float64; keys and values repeated for their group."""
    q, k, v = (x.double() for x in heads)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scaling
    if softcap is not None:
        s = softcap * (s / softcap).tanh()
    if bias is not None:
        s = s + bias
    if blocked is not None:
        s = s.masked_fill(blocked, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]]
    return p @ v, p


class TestExact:
    """With operands that are not quantized, attention by definition and its gradients."""

    @pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
    def test_is_attention(self, name):
        products, x = products_of("nvfp4-rne"), heads()
        products.scheme = Scheme()
        options = dict(OPTIONS.get(name, {}))
        if name == "sinks":
            options["sinks"] = torch.randn(4, requires_grad=True)
        leaves = [*x, *(o for o in options.values() if o is options.get("sinks"))]
        out, p = products.attend(*x, scaling=0.3, **options)
        expected, expected_p = eager(x, 0.3, **options)
        dy = torch.randn(out.shape)
        found = torch.autograd.grad(out, leaves, dy)
        wanted = torch.autograd.grad(expected, leaves, dy.double())
        for one, other in zip((out, p, *found), (expected, expected_p, *wanted)):
            torch.testing.assert_close(one.double(), other.double(), rtol=2e-5, atol=2e-6)

    def test_values_of_another_width_and_longer_keys(self):
        products, x = products_of("nvfp4-rne"), heads(q=3, k=21, d=8, e=12)
        products.scheme = Scheme()
        out, _ = products.attend(*x, scaling=0.5)
        torch.testing.assert_close(out.double(), eager(x, 0.5)[0], rtol=1e-5, atol=1e-6)

    def test_float64_stays_float64(self):
        products, x = products_of("nvfp4-rne"), heads(dtype=torch.float64)
        products.scheme = Scheme()
        out, p = products.attend(*x, scaling=0.5)
        assert out.dtype is p.dtype is torch.float64
        torch.testing.assert_close(out, eager(x, 0.5)[0], rtol=1e-12, atol=1e-12)


class Seen(NamedTuple):
    """What was handed to an operand: of the product that it belongs to, in order."""

    role: Role
    before: torch.Tensor
    after: torch.Tensor


@pytest.fixture
def seen(monkeypatch):
    """Every operand of every call from now on."""
    calls: list[Seen] = []
    original = ProductOperands.operand

    def operand(self, role, x):
        found = original(self, role, x)
        values = found.values if found.scale is None else found.values * found.scale
        calls.append(Seen(role, x.detach().clone(), values.detach().clone()))
        return found

    monkeypatch.setattr(ProductOperands, "operand", operand)
    return calls


class TestQuantized:
    """The whole of it: what enters each product, and what softmax makes of it."""

    @cases({"name": list(OPTIONS)}, rotated={"scheme": ["nvfp4-rne", "mxfp4"]})
    def test_chain(self, scheme, name, seen):
        """Each link starts from the one before as it was computed; see `layer_reference`."""
        products, x = products_of(scheme, **NEAREST), heads()
        out, p = products.attend(*x, scaling=0.4, **OPTIONS[name])
        dy = torch.randn(out.shape)
        out.backward(dy)
        (q, k, p_in, v), backward = seen[:4], seen[4:]
        assert [call.role for call in seen] == [0, 1, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
        for call, given in ((q, x.q), (k, x.k), (v, x.v.mT), (p_in, p)):
            assert torch.equal(call.before.flatten(), given.detach().flatten())
        for call in seen:
            expected = reference(array(call.before), call.role, scheme, None)
            assert np.array_equal(array(call.after), expected.astype(np.float32))

        def as_heads(call: Seen) -> torch.Tensor:
            """[b h r c], repeated where a group shares it."""
            values = (
                call.after if call.after.dim() == 4 else call.after[:, None].expand(-1, 2, -1, -1)
            )
            return values.reshape(2, 4, *values.shape[2:]).double()

        hats = Heads(as_heads(q), as_heads(k), as_heads(v).mT)
        _, expected_p = eager(hats, 0.4, **OPTIONS[name])
        torch.testing.assert_close(p.double(), expected_p, rtol=1e-4, atol=1e-6)
        expected = as_heads(p_in) @ hats.v
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-6)

        # Backward: the context's two products of dO, then dS by softmax's own rule, then dQ and dK.
        d_cols, v_rows, d_rows, p_rows, ds_cols, k_rows, ds_rows, q_rows = map(as_heads, backward)
        assert torch.equal(backward[0].before.flatten(), dy.flatten())
        dp = d_cols @ v_rows
        dv = (d_rows.mT @ p_rows).mT.view(2, 2, 2, 13, 8).sum(2)
        torch.testing.assert_close(x.v.grad.double(), dv, rtol=1e-4, atol=1e-6)
        exact = p.double()
        ds = exact * (dp - (exact * dp).sum(-1, keepdim=True)) * 0.4
        if name == "softcap":
            raw = hats.q @ hats.k.mT * 0.4
            ds = ds * (1 - (raw / 0.7).tanh() ** 2)
        torch.testing.assert_close(
            backward[4].before.view(2, 4, 13, 13).double(), ds.detach(), rtol=1e-3, atol=1e-6
        )
        torch.testing.assert_close(x.q.grad.double(), ds_cols @ k_rows, rtol=1e-4, atol=1e-6)
        dk = (ds_rows.mT @ q_rows).view(2, 2, 2, 13, 8).sum(2)
        torch.testing.assert_close(x.k.grad.double(), dk, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("scheme", ["nvfp4", "four-over-six"])
    def test_masked_probabilities_stay_zero(self, scheme, seen):
        """Under stochastic rounding too; and so the output does not see them."""
        products, x = products_of(scheme), heads(q=40, k=40)
        blocked = causal(40, 40)
        products.attend(*x, scaling=0.3, blocked=blocked)
        p = seen[2]
        assert p.role is Role.FPROP_INPUT
        assert (p.after[..., :40].view(2, 4, 40, 40)[:, :, blocked] == 0).all()
        assert (p.after[..., :40].view(2, 4, 40, 40)[:, :, ~blocked] > 0).float().mean() > 0.5

    def test_row_that_attends_to_nothing(self):
        products, x = products_of("nvfp4-rne"), heads()
        blocked = causal(13, 13).expand(2, 1, 13, 13).clone()
        blocked[1, :, 4] = True
        out, p = products.attend(*x, scaling=0.3, blocked=blocked)
        assert (out[1, :, 4] == 0).all()
        assert (p[1, :, 4] == 0).all()
        out.square().sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in x)
        assert (x.q.grad[1, :, 4] == 0).all()

    @pytest.mark.parametrize("scheme", ["nvfp4-rne", "quartet2", "mxfp4"])
    def test_bf16_applies_tensor_scales_to_the_product(self, scheme):
        """Codes times block scales are exact in bf16, so only the sum is rounded, once."""
        products = products_of(scheme, **NEAREST)
        a, b = torch.randn(2, 2, 9, 24).bfloat16(), torch.randn(2, 17, 24).bfloat16()
        y = QuantizedProduct.apply(a, b, plan_of(products, a, b, torch.bfloat16))
        wide = plan_of(products, a, b)
        exact = QuantizedProduct.apply(a.float(), b.float(), wide)
        assert y.dtype is torch.bfloat16
        # The sum, and the scale's product with it.
        assert ((y.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-6).all()

    def test_autocast(self):
        """GEMMs in the autocast dtype, gradients in that of the inputs."""
        products, x = products_of("nvfp4-rne"), heads()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, p = products.attend(*x, scaling=0.3)
        assert out.dtype is torch.bfloat16
        assert p.dtype is torch.float32
        out.float().square().sum().backward()
        assert all(leaf.grad.dtype is torch.float32 for leaf in x)

    def test_empty_batch(self):
        products, x = products_of("nvfp4-rne"), heads(batch=0)
        out, _ = products.attend(*x, scaling=0.3)
        out.sum().backward()
        assert out.shape == (0, 4, 13, 8)


class TestNoise:
    def run(self, products, x, dy):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in x]
        out, _ = products.attend(*leaves, scaling=0.3)
        return [out, *torch.autograd.grad(out, leaves, dy)]

    def test_repeats_with_the_content_and_differs_with_everything_else(self, monkeypatch):
        x = heads()
        dy = torch.randn(2, 4, 13, 8)
        first = self.run(products_of("nvfp4"), x, dy)
        torch.rand(5)  # the generator's state is none of it
        again = self.run(products_of("nvfp4"), x, dy)
        assert all(torch.equal(one, other) for one, other in zip(first, again))
        other_name = AttentionProducts(MetisConfig(attention="nvfp4"), "model.other")
        other = self.run(other_name, x, dy)
        seed = self.run(products_of("nvfp4", seed=1), x, dy)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
        rank = self.run(products_of("nvfp4"), x, dy)
        for changed in (other, seed, rank):
            assert not any(torch.equal(one, two) for one, two in zip(first, changed))

    def test_the_two_products_of_a_call_differ(self, seen):
        """Equal matrices in both of them are not rounded alike."""
        products = products_of("nvfp4")
        a, b = torch.randn(1, 1, 16, 16), torch.randn(1, 16, 16)
        products.product(a, b, "scores", torch.float32)
        products.product(a, b, "context", torch.float32)
        assert not torch.equal(seen[0].after, seen[2].after)

    def test_evaluation_has_none(self):
        x = heads()
        for scheme in ACCEPTED:
            products = products_of(scheme).eval()
            for role in Role:
                quantizer = products.active_scheme().resolve(role)[1].quantizer
                assert quantizer is None or not quantizer.needs_noise
            one, other = (AttentionProducts(products.config, name).eval() for name in "ab")
            found = [module.attend(*x, scaling=0.3)[0] for module in (one, other)]
            assert torch.equal(*found)


def test_gradients_of_attn_qat():
    """arXiv 2603.00040: quantized Q, K, V and P in the forward pass, exact dO and dS behind them.

    A scheme that shares the forward copies and leaves gradients alone is theirs, but for where the
    blocks of V run and P is normalized. D is taken with exact P and quantized V.
    """
    products, x = products_of("nvfp4-rne"), heads()
    nearest = Operand(Quantizer())
    products.scheme = Scheme(nearest, nearest)
    blocked = causal(13, 13)
    out, p = products.attend(*x, scaling=0.4, blocked=blocked)
    dy = torch.randn(out.shape)
    out.backward(dy)
    q, k = (torch.from_numpy(fake_quantize(array(t), dim=-1).values).double() for t in x[:2])
    v = torch.from_numpy(fake_quantize(array(x.v), dim=-2).values).double()
    p_hat = torch.from_numpy(fake_quantize(array(p), dim=-1).values).double()
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    p, dy = p.detach().double(), dy.double()
    delta = ((p @ v) * dy).sum(-1, keepdim=True)
    ds = p * (dy @ v.mT - delta)
    for found, expected in (
        (out, p_hat @ v),
        (x.q.grad, 0.4 * ds @ k),
        (x.k.grad, (0.4 * ds.mT @ q).view(2, 2, 2, 13, 8).sum(2)),
        (x.v.grad, (p_hat.mT @ dy).view(2, 2, 2, 13, 8).sum(2)),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_derivatives_that_are_refused():
    products, x = products_of("nvfp4-rne"), heads()
    out, _ = products.attend(*x, scaling=0.3)
    with pytest.raises(NotImplementedError, match="batched gradients"):
        torch.autograd.grad(
            out, x.q, torch.randn(3, *out.shape), is_grads_batched=True, retain_graph=True
        )
    (grad,) = torch.autograd.grad(out.square().sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"^model\.attention inside torch\.func"):
        torch.func.grad(lambda q: products.attend(q, x.k, x.v, scaling=0.3)[0].sum())(x.q)


def test_no_parameters_and_no_state():
    products = products_of("quartet2")
    assert not products.state_dict()
    assert not list(products.parameters())
    assert dataclasses.is_dataclass(products.scheme)
    assert "attention=quartet2" in repr(products)
