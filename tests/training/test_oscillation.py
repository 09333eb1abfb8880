"""Weights that jitter between two codes are put into the middle of their bin."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from layers.layer_tools import layer_of
from torch import nn

from metis_hf.layers.linear import QuantLinear
from metis_hf.numerics import fake_quantize
from metis_hf.schemes import tetrajet2
from metis_hf.schemes.states import Oscillation
from metis_hf.training.layer_states import after_step


def watched_layer(monkeypatch, **settings):
    settings = {"period": 8, "window": 6, "threshold": 8.0, "start": 0.0} | settings
    monkeypatch.setattr(tetrajet2, "Oscillation", functools.partial(Oscillation, **settings))
    _, layer = layer_of("tetrajet2", i=32, o=4, bias=False)
    # The largest of every block is 6, so that a block's scale is 1 (448 / 448) throughout.
    layer.weight.data.copy_(torch.arange(128.0).view(4, 32) % 5 - 2)
    layer.weight.data[:, ::16] = 6
    return layer


def suppress(model, step, max_steps):
    """Layer name -> share of its weights that was reset."""
    return after_step(model, step, max_steps).get("oscillation_reset", {})


def ratio_of(layer):
    return layer.scheme.state.ratio(layer.state_buffers())


class TestOscillation:
    BORDER = 2.5  # between the codes 2 and 3

    def run(self, layer, steps, first=0, max_steps=100):
        """Weight [0, 1] jitters around a border of bins, [1, 1] drifts across one, others rest."""
        model, shares = nn.Sequential(layer), []
        for step in range(first, first + steps):
            with torch.no_grad():
                layer.weight[0, 1] = self.BORDER + (1e-2 if step % 2 else -1e-2)
                layer.weight[1, 1] = self.BORDER - 0.2 + 0.08 * (step % 8)
            shares.append(suppress(model, step, max_steps))
        return shares

    def test_the_jittering_weight_is_put_in_its_bin(self, monkeypatch):
        layer = watched_layer(monkeypatch)
        assert not any(self.run(layer, 8))  # the first window begins after a step
        shares = self.run(layer, 7, first=8)
        assert shares[:-1] == [{}] * 6
        assert shares[-1] == {"0": pytest.approx(1 / 128)}
        assert layer.weight[0, 1] == 2  # of the two codes the nearer one at that moment
        assert layer.weight[1, 1].item() == pytest.approx(self.BORDER - 0.2 + 0.08 * 6)
        # Six jumps by 1, six steps of 0.02; one jump, and six steps of 0.08.
        ratio = ratio_of(layer)
        assert ratio[0, 1].item() == pytest.approx(6 / (6 * 0.02), rel=1e-4)
        assert ratio[1, 1].item() == pytest.approx(1 / (6 * 0.08), rel=1e-4)
        assert ratio.count_nonzero() == 2

    def test_paths_against_a_plain_sum(self, monkeypatch):
        layer = watched_layer(monkeypatch, threshold=float("inf"))
        model = nn.Sequential(layer)
        weights = []
        for step in range(8, 15):
            with torch.no_grad():
                layer.weight.add_(0.1 * torch.randn(4, 32))
            suppress(model, step, 100)
            weights.append(layer.weight.detach().clone())
        quantized = [fake_quantize(w) for w in weights]
        path = sum((b - a).abs() for a, b in itertools.pairwise(weights))
        quantized_path = sum((b - a).abs() for a, b in itertools.pairwise(quantized))
        torch.testing.assert_close(ratio_of(layer), quantized_path / path)

    def test_the_first_part_of_a_training_is_left_alone(self, monkeypatch):
        layer = watched_layer(monkeypatch, start=0.5)
        assert not any(self.run(layer, 24, max_steps=40))
        # A window that begins before the start is not measured in parts.
        assert not any(self.run(layer, 8, first=16, max_steps=40))
        assert any(self.run(layer, 8, first=24, max_steps=40))

    def test_a_split_weight_is_left_alone(self, monkeypatch):
        """No element of w_hat is the quantized residual's: there is no bin to be put into."""
        watched_layer(monkeypatch, window=1, threshold=0.0)
        _, layer = layer_of("tetrajet2", i=32, o=4, split_weight=True)
        before = [param.detach().clone() for param in layer.weight_params()]
        assert [suppress(nn.Sequential(layer), step, 100) for step in (8, 9)] == [{}, {}]
        assert all(map(torch.equal, before, layer.weight_params()))

    def test_a_window_survives_a_state_dict(self, monkeypatch):
        layer, other = (watched_layer(monkeypatch) for _ in range(2))
        self.run(layer, 4, first=8)
        other.load_state_dict(layer.state_dict())
        shares = self.run(layer, 3, first=12)
        assert shares == self.run(other, 3, first=12)
        assert shares[-1]
        assert torch.equal(layer.weight, other.weight)

    def test_conv1d(self, monkeypatch):
        layer = watched_layer(monkeypatch)
        transposed = QuantLinear(
            layer.weight.T.contiguous(), None, layer.config, name="layer", conv1d=True
        )
        model = nn.Sequential(transposed)
        for step in range(8, 15):
            with torch.no_grad():
                transposed.weight[1, 0] = self.BORDER + (1e-2 if step % 2 else -1e-2)
            suppress(model, step, 100)
        assert transposed.weight[1, 0] == 2


def test_settings_are_those_of_the_authors():
    """arXiv 2510.27527, the 150M run; the tests above choose shorter windows."""
    _, layer = layer_of("tetrajet2")
    assert layer.scheme.state == Oscillation(period=200, window=50, threshold=8.0, start=0.6)
