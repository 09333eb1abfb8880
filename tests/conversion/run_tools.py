"""Small models and runs of Trainer over them, for tests of checkpoints."""

from __future__ import annotations

import torch
import transformers
from conftest import llama
from training import trainer_tools

from metis_hf import MetisCallback, MetisConfig, get_metis_model

LAYER = "model.layers.1.mlp.up_proj"


def metis_callbacks():
    return (MetisCallback(health_interval=0),)


def trainer(path, model, callbacks=None, **changes):
    options = {"save_steps": 2, "save_strategy": "steps", "per_device_train_batch_size": 4}
    callbacks = metis_callbacks() if callbacks is None else callbacks
    data = trainer_tools.rows(64, 32)
    return trainer_tools.trainer(path, model, callbacks, data=data, **options | changes)


def converted(scheme="metis", **config):
    """Metis with stored factors, which a checkpoint has more to lose of."""
    torch.manual_seed(0)
    if scheme == "metis":
        config = {"split_weight": True, **config}
    return get_metis_model(llama(), MetisConfig(scheme=scheme, **config))


def dense():
    torch.manual_seed(0)
    return llama()


def load(path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
