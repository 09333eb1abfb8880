"""What users of Trainer switch on beside a converted model, each tried with w4a4 and metis."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import transformers
from transformers.utils import is_torchao_available

from metis_hf import MetisCallback, MetisConfig, calibrate, get_metis_model, metis_layers
from training.test_callback import Rows, losses, one_block, trainer

CHOICES = {
    "8-bit optimizer": {"optim": "adamw_torch_8bit"},
    "4-bit optimizer": {"optim": "adamw_torch_4bit"},
    "adafactor": {"optim": "adafactor"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}
NEED_TORCHAO = ("8-bit optimizer", "4-bit optimizer")


def train(tmp_path, scheme, **options):
    torch.manual_seed(0)
    model = get_metis_model(one_block(), MetisConfig(scheme=scheme))
    if scheme == "w4a4":
        calibrate(model, [Rows().ids[:8]])
    before = {name: layer.weight.detach().clone() for name, layer in metis_layers(model)}
    transformers.set_seed(0)
    made = trainer(tmp_path, model, [MetisCallback(health_interval=0)], max_steps=4, **options)
    made.train()
    moved = [not torch.equal(before[name], layer.weight) for name, layer in metis_layers(model)]
    assert all(moved)
    return losses(made), model


@pytest.fixture(scope="module")
def train_plain(tmp_path_factory):
    """The run of a scheme with nothing switched on, made once."""
    return functools.cache(lambda scheme: train(tmp_path_factory.mktemp(scheme), scheme))


@pytest.mark.parametrize("scheme", ["w4a4", "metis"])
@pytest.mark.parametrize("choice", CHOICES)
def test_trains(choice, scheme, train_plain, tmp_path):
    if choice in NEED_TORCHAO and not is_torchao_available():  # what Trainer goes by
        pytest.skip("torchao is not installed")
    plain, reference = train_plain(scheme)
    found, model = train(tmp_path, scheme, **CHOICES[choice])
    assert len(found) == 4
    if choice == "gradient checkpointing":  # the same computation, to the bit
        assert found == plain
        for (name, a), (_, b) in zip(metis_layers(reference), metis_layers(model), strict=True):
            assert torch.equal(a.weight, b.weight), name
    elif choice == "neftune":  # noise on the embeddings, in training alone
        assert found[0] != plain[0]
        assert found[0] == pytest.approx(plain[0], rel=0.1)
    else:  # the first loss comes before any step
        assert found[0] == pytest.approx(plain[0], rel=0.02)
    assert all(math.isfinite(loss) for loss in found)
