"""Layers of deployed models, whose tensor scales are fixed: what they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from layers.layer_tools import layer_of
from torch.utils.checkpoint import checkpoint

from metis_hf.noise import Key
from metis_hf.numerics import fake_quantize
from metis_hf.training.health import operand_health

IN, OUT, TOKENS = 70, 48, 40
FP32 = {"rtol": 1e-5, "atol": 1e-6}


class TestLayer:
    """The forward pass of a deployed layer, and its straight-through gradient."""

    def fixed(self, scheme, amax=2.0):
        layer = layer_of(scheme, i=IN, o=OUT)[1]
        layer.input_amax.fill_(amax)
        layer.weight_amax.fill_(layer.weight.abs().max() * 1.5)
        layer.scales_frozen.fill_(1)
        return layer

    @pytest.mark.parametrize(
        ("scheme", "training"), [("w4a4", True), ("w4a4", False), ("w4a16", True)]
    )
    def test_by_definition(self, scheme, training):
        layer = self.fixed(scheme).train(training)
        x = (3 * torch.randn(TOKENS, IN)).requires_grad_()
        w = layer.weight.detach().clone().requires_grad_()
        x_hat = x if scheme == "w4a16" else fake_quantize(x, amax=torch.tensor(2.0))
        w_hat = fake_quantize(w, scale_rule="search", amax=layer.weight_amax)
        expected = F.linear(x_hat, w_hat, layer.bias)
        dy = torch.randn(TOKENS, OUT)
        gradients = torch.autograd.grad(expected, (x, w), dy)
        found = layer(x)
        torch.testing.assert_close(found, expected, **FP32)
        for a, b in zip(torch.autograd.grad(found, (x, layer.weight), dy), gradients):
            torch.testing.assert_close(a, b, **FP32)

    def test_bf16_keeps_the_tensor_scales_apart(self):
        """As the hardware does: codes times block scales, and one fp32 factor at the end."""
        layer = self.fixed("w4a4").to(torch.bfloat16)
        x = torch.randn(TOKENS, IN).bfloat16()
        x_hat = fake_quantize(x.float(), amax=layer.input_amax)
        w_hat = fake_quantize(layer.weight.detach().float(), scale_rule="search",
                              amax=layer.weight_amax)  # fmt: skip
        exact = F.linear(x_hat, w_hat, layer.bias.float())
        rounding = (layer(x).float() - exact).norm() / exact.norm()
        assert rounding < 2.0**-8  # of the output to bf16

    def test_until_they_are_frozen_nothing_is_clipped(self):
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        first, second = torch.randn(TOKENS, IN), 5 * torch.randn(TOKENS, IN)
        for x in (first, second, first):
            layer(x)
        assert layer.input_amax == second.abs().max()
        with torch.no_grad():
            found = layer(first)
        x_hat = fake_quantize(first)  # under its own scale
        w_hat = fake_quantize(layer.weight.detach(), scale_rule="search")
        torch.testing.assert_close(found, F.linear(x_hat, w_hat, layer.bias), **FP32)

    def test_what_is_not_finite_is_not_remembered(self):
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        x = torch.randn(TOKENS, IN)
        x[0, 0] = torch.inf
        layer(x)
        assert layer.input_amax == 0

    def test_frozen_scales_stay(self):
        layer = self.fixed("w4a4")
        before = {name: value.clone() for name, value in layer.state_buffers().items()}
        layer(100 * torch.randn(TOKENS, IN)).sum().backward()
        after = layer.state_buffers()
        assert all(torch.equal(before[name], value) for name, value in after.items())

    @pytest.mark.parametrize(("frozen", "scans"), [(False, 2), (True, 0)])
    def test_scans_of_a_call(self, frozen, scans, monkeypatch):
        """The input and the weight once each in training, and nothing once scales are fixed."""
        from metis_hf.schemes import states

        layer = self.fixed("w4a4") if frozen else layer_of("w4a4", i=IN, o=OUT)[1]
        scanned = []
        original = states.largest_magnitude
        monkeypatch.setattr(
            states, "largest_magnitude", lambda x: scanned.append(x.shape) or original(x)
        )
        layer(torch.randn(TOKENS, IN)).sum().backward()
        assert len(scanned) == scans
        assert len(set(scanned)) == scans

    @pytest.mark.parametrize("recomputed", [False, True])
    def test_a_call_keeps_its_scale(self, recomputed):
        """Another raises the buffer before the backward pass, which may recompute the first."""
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        first = torch.randn(TOKENS, IN).requires_grad_()
        expected = torch.autograd.grad(layer(first).square().sum(), (first, layer.weight))
        y = checkpoint(layer, first, use_reentrant=False) if recomputed else layer(first)
        layer(50 * torch.randn(TOKENS, IN))
        found = torch.autograd.grad(y.square().sum(), (first, layer.weight))
        assert all(map(torch.equal, found, expected))

    def test_a_move_that_fails_leaves_the_state_as_it_was(self):
        """A device without memory; casts see the state as integers meanwhile."""
        layer = self.fixed("w4a4")

        def full(tensor):
            raise torch.OutOfMemoryError("a test")

        with pytest.raises(torch.OutOfMemoryError):
            layer._apply(full)
        assert layer.input_amax.dtype is torch.float32
        assert layer.input_amax == 2

    def test_health_measures_under_the_fixed_scale(self):
        layer = self.fixed("w4a4", amax=0.25)
        x = torch.randn(TOKENS, IN)
        operand = layer.active_scheme().fprop_input.bind(layer.call_state(x, layer.call_keys(x)))
        found = operand_health(x, operand, rank=4, key=Key(0))
        beyond = (x.abs() > 0.25 * (1 + 1e-5)).float().mean().item()  # up to 448 * 6 * 0.25 / 2688
        assert found["saturated"] == pytest.approx(beyond, abs=0.02)
