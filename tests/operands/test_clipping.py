"""Weights that are clipped by trained strengths before they are quantized."""

from __future__ import annotations

import math

import pytest
import torch
from layers.layer_tools import layer_of, with_exact_quantizers


class TestClipping:
    @staticmethod
    def layer(clip):
        torch.manual_seed(0)
        _, layer = layer_of("omniquant", dtype=torch.float64, i=40, o=6)
        layer.weight_clip.data.copy_(clip)
        layer.scheme = with_exact_quantizers(layer.scheme)
        return layer

    def test_gradients_by_finite_differences(self):
        """Of the clip parameter and of the weight, where nothing is rounded."""
        layer = self.layer(torch.linspace(-5, -1, 6))
        x, target = torch.randn(11, 40).double(), torch.randn(11, 6).double()

        def loss():
            return ((layer(x) - target) ** 2).sum()

        loss().backward()
        step = 1e-6
        for parameter in (layer.weight_clip, layer.weight):
            flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
            for index in range(0, flat.numel(), max(1, flat.numel() // 24)):
                value = flat[index].item()
                sides = []
                for moved in (value + step, value - step):
                    flat[index] = moved
                    sides.append(loss().item())
                flat[index] = value
                numeric = (sides[0] - sides[1]) / (2 * step)
                assert gradient[index].item() == pytest.approx(numeric, rel=1e-6, abs=1e-6)
        assert layer.weight_clip.grad.abs().min() > 0

    def test_strengths_train(self):
        """A row with one huge weight among small ones in each block learns to clip it."""
        torch.manual_seed(0)
        _, layer = layer_of("omniquant", i=64, o=2, bias=False)
        target = torch.randn(2, 64) * 0.1
        layer.weight.data.copy_(target)
        layer.weight.data[0, ::16] = 4.0
        layer.weight.requires_grad_(False)
        optimizer = torch.optim.Adam([layer.weight_clip], lr=0.2)
        for _ in range(60):
            x = torch.randn(128, 64)
            loss = (layer(x) - x @ target.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        strengths = layer.weight_form.strength(layer.weight_clip)
        assert strengths[0] < 0.3
        assert strengths[1] > 0.6

    def test_weight_decay_pulls_strengths_to_their_start(self):
        start = 1 / (1 + math.exp(-4))
        layer = self.layer(torch.full((6,), -3.0))
        _, fresh = layer_of("omniquant", dtype=torch.float64, i=40, o=6)
        assert fresh.weight_form.strength(fresh.weight_clip).tolist() == pytest.approx([start] * 6)
        optimizer = torch.optim.AdamW([layer.weight_clip], lr=0.1, weight_decay=1.0)
        layer.weight_clip.grad = torch.zeros(6).double()
        for _ in range(100):
            optimizer.step()
        assert layer.weight_clip.abs().max() < 1e-3
        strengths = layer.weight_form.strength(layer.weight_clip)
        assert strengths.tolist() == pytest.approx([start] * 6, abs=1e-4)
