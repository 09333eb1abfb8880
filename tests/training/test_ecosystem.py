"""What users of Trainer switch on beside a converted model."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.utils import is_torchao_available

from metis_hf import MetisCallback, calibrate, metis_layers
from training.trainer_tools import converted, losses, rows, trainer

CHOICES = {
    "8-bit optimizer": ("w4a4", {"optim": "adamw_torch_8bit"}),
    "4-bit optimizer": ("metis", {"optim": "adamw_torch_4bit"}),
    "adafactor": ("w4a4", {"optim": "adafactor"}),
    "neftune": ("metis", {"neftune_noise_alpha": 5.0}),
    "gradient checkpointing": ("w4a4", {"gradient_checkpointing": True}),
    "accumulation": ("w4a4", {"gradient_accumulation_steps": 2}),
    "bf16": ("w4a4", {"bf16": True}),
}
NEED_TORCHAO = ("8-bit optimizer", "4-bit optimizer")


def train(tmp_path, scheme, **options):
    model = converted(scheme)
    if scheme == "w4a4":
        calibrate(model, [torch.stack([row["input_ids"] for row in rows(8)])])
    before = {name: layer.weight.detach().clone() for name, layer in metis_layers(model)}
    made = trainer(tmp_path, model, [MetisCallback(health_interval=0)], max_steps=2, **options)
    made.train()
    assert not any(torch.equal(before[name], layer.weight) for name, layer in metis_layers(model))
    return losses(made), model


@pytest.mark.parametrize("choice", CHOICES)
def test_trains(choice, tmp_path):
    if choice in NEED_TORCHAO and not is_torchao_available():  # what Trainer goes by
        pytest.skip("torchao is not installed")
    scheme, options = CHOICES[choice]
    plain, reference = train(tmp_path, scheme)
    found, model = train(tmp_path, scheme, **options)
    assert len(found) == 2
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
