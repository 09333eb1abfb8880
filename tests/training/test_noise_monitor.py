"""The noise monitor: against the gradients that layers really have, and crossings of its line."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import VOCAB
from conversion.architectures import ARCHITECTURES, causal_batch
from design import cases

from metis_hf import MetisCallback, MetisConfig, get_metis_model, metis_layers
from metis_hf.training.gradient_noise import Crossing, find_crossing, noise_ratios
from metis_hf.training.health import LayerProbe
from metis_hf.training.run_record import HEALTH_FILE
from training.trainer_tools import converted, lines, one_block, trainer, up_proj

# fp32 products of 64 terms, summed in another order; the noise is a tenth of what is subtracted.
FP32 = 1e-4
# The layer's own gradient is rounded to bf16, 2^-9 of it; noise is a tenth of the gradient.
BF16 = 0.05
SCHEMES = [
    {"scheme": "nvfp4"},
    {"scheme": "nvfp4", "operand_mode": "contraction"},
    {"scheme": "nvidia"},
    {"scheme": "metis"},
    {"scheme": "metis-paper"},
    {"scheme": "metis", "high_precision": ("forward",)},
]


def ids(rows=2, columns=21):  # 42 tokens: no multiple of a block
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (rows, columns), generator=generator)


class Tap:
    """Inputs and output gradients of layers, by hooks of the test's own."""

    def __init__(self, layers):
        self.x, self.dy = {}, {}
        for name, layer in layers.items():
            layer.register_forward_hook(lambda m, args, y, name=name: self.keep(name, args[0], y))

    def keep(self, name, x, y):
        self.x[name] = x.detach().clone()
        y.register_hook(lambda grad: self.dy.__setitem__(name, grad.clone()))

    def gradient(self, name):
        x, dy = (t[name].flatten(0, -2).double() for t in (self.x, self.dy))
        return dy.T @ x


def measured(model, batches=1, autocast=False):
    """(statistics, noise) of the probe after passes on one batch after another."""
    layers = dict(metis_layers(model.train()))
    probe = LayerProbe()
    probe.attach(layers)
    for index in range(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids() + index, labels=ids() + index).loss
        loss.backward()
    probe.detach()
    return probe.stats, probe.noise


@cases({"changes": SCHEMES}, rotated={"autocast": [False, True]})
def test_is_the_noise_in_the_gradient_that_the_layer_has(changes, autocast):
    """The stored weight's gradient minus dy^T x: stochastic rounding repeats by its noise key."""
    model = get_metis_model(one_block(), MetisConfig(**changes))
    layers = dict(metis_layers(model))
    tap = Tap(layers)
    _, noise = measured(model, autocast=autocast)
    assert noise.keys() == layers.keys()
    for name, layer in layers.items():
        exact = tap.gradient(name)
        quantized = layer.weight_params()[-1].grad.double()
        tolerance = BF16 if autocast else FP32
        expected = torch.linalg.vector_norm(quantized - exact).item()
        assert noise[name].gradient_norm == pytest.approx(exact.norm().item(), rel=tolerance)
        assert noise[name].noise_norm == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_measures_the_same(reentrant):
    plain, model = converted(), converted()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert measured(model) == measured(plain)


def test_first_micro_batch_counts():
    assert measured(converted(), batches=2) == measured(converted())


@pytest.mark.parametrize(
    "changes", [{"scheme": "bf16"}, {"scheme": "metis", "high_precision": ("backward", "forward")}]
)
def test_without_quantizers_there_is_nothing_to_measure(changes):
    _, noise = measured(get_metis_model(one_block(), MetisConfig(**changes)))
    assert noise == {}


def test_frozen_layers_have_no_gradient():
    model = get_metis_model(one_block(), MetisConfig())
    for name, layer in metis_layers(model):
        layer.requires_grad_("q_proj" not in name)
    model.enable_input_require_grads()
    _, noise = measured(model)
    assert {name.split(".")[-1] for name, _ in metis_layers(model)} - {
        name.split(".")[-1] for name in noise
    } == {"q_proj"}


def test_experts_are_measured_on_their_own_tokens():
    model = get_metis_model(ARCHITECTURES["mixtral"].build(), MetisConfig(scheme="nvfp4"))
    layers = {name: layer for name, layer in metis_layers(model.train()) if "experts" in name}
    tap = Tap(layers)
    probe = LayerProbe()
    probe.attach(layers)
    model(**causal_batch()).loss.backward()
    assert probe.noise
    assert probe.noise.keys() == tap.dy.keys()  # those that saw a token
    for name, norms in probe.noise.items():
        difference = layers[name].weight.grad.double() - tap.gradient(name)
        assert norms.noise_norm == pytest.approx(difference.norm().item(), rel=FP32)


def test_ratios_sum_norms_in_squares():
    per_layer = {
        "layers.0.q_proj": (3.0, 1.0),
        "layers.1.q_proj": (4.0, 0.0),
        "layers.0.down_proj": (12.0, 1.0),
    }
    assert noise_ratios(per_layer) == pytest.approx(
        {
            "noise/q_proj/ratio": 5 / math.sqrt(3),
            "noise/down_proj/ratio": 12 / math.sqrt(3),
            "noise/ratio": 13 / math.sqrt(3) / math.sqrt(2),
        }
    )
    assert noise_ratios({}) == {}


class TestInTrainer:
    def run(self, tmp_path, scheme, broken=False):
        model = converted(scheme)
        if broken:
            up_proj(model).weight.data[0, 0] = float("inf")
        callback = MetisCallback(health_interval=2, health_details="kinds")
        made = trainer(tmp_path, model, [callback], max_steps=2)
        made.train()
        return made.state.log_history, lines(tmp_path, HEALTH_FILE)

    def test_logs_are_those_of_the_file(self, tmp_path):
        history, records = self.run(tmp_path, "nvfp4")
        measured = [entry for entry in history if "metis/noise/ratio" in entry]
        assert len(records) == len(measured) > 0
        for entry, record in zip(measured, records, strict=True):
            logged = {k: v for k, v in entry.items() if k.startswith("metis/noise/")}
            ratios = noise_ratios(record["noise"])
            assert logged == {f"metis/{name}": ratio for name, ratio in ratios.items()}
            assert set(ratios) >= {"noise/ratio", "noise/q_proj/ratio", "noise/down_proj/ratio"}

    def test_bf16_logs_none(self, tmp_path):
        history, records = self.run(tmp_path, "bf16")
        assert not [key for entry in history for key in entry if "noise" in key]
        assert not [record for record in records if "noise" in record]

    def test_nan_is_not_averaged_away(self, tmp_path):
        history, _ = self.run(tmp_path, "nvfp4", broken=True)
        assert math.isnan(history[0]["metis/noise/ratio"])


STEPS = tuple(range(0, 1000, 100))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        # 2^(1.9 - i/2) is first below 1 at i = 4; the median of three is the middle one.
        ([2 ** (1.9 - i / 2) for i in range(10)], Crossing(400)),
        ([1.01] * 10, Crossing(None)),
        ([0.9, 0.8, 5.0], Crossing(None)),  # few measurements count as they are
        ([0.4, 1.5], Crossing(None)),
        ([0.9, 0.8], Crossing(0, from_start=True)),
        ([2.0, 0.8, 0.5], Crossing(100)),
        ([3.0] * 5 + [0.5] + [3.0] * 4, Crossing(None)),  # one measurement decides nothing
        ([3.0] * 9 + [0.1], Crossing(None)),
        ([3.0] * 3 + [0.2] * 4 + [1.5] + [0.2] * 2, Crossing(300)),
        ([2.0] * 2 + [0.5] * 4 + [2.0] * 4, Crossing(None)),  # it does not stay below
        ([0.5] * 10, Crossing(0, from_start=True)),
        ([5.0] + [0.5] * 9, Crossing(100)),  # though the first whole window has two below
        ([2.0, math.nan, 2.0, 2.0, 0.2, math.nan, 0.2, 0.2, 0.2, 0.2], Crossing(400)),
        ([math.nan] * 10, Crossing(None)),
        ([], Crossing(None)),
    ],
)
def test_crossing(ratios, expected):
    assert find_crossing(STEPS[: len(ratios)], ratios) == expected
