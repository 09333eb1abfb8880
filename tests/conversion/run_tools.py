"""Small models and runs of Trainer over them, for tests of checkpoints."""

from __future__ import annotations

import torch
import transformers
from conftest import VOCAB, llama
from training import trainer_tools

from metis_hf import MetisCallback, MetisConfig, get_metis_model

LAYER = "model.layers.1.mlp.up_proj"


class Rows(torch.utils.data.Dataset):
    """Fixed random sequences."""

    def __init__(self, count=64, length=32):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def metis_callbacks():
    return (MetisCallback(health_interval=0),)


def trainer(path, model, callbacks=None, **changes):
    options = {"save_steps": 2, "save_strategy": "steps", "per_device_train_batch_size": 4}
    callbacks = metis_callbacks() if callbacks is None else callbacks
    return trainer_tools.trainer(path, model, callbacks, data=Rows(), **options | changes)


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


def assert_same(model, other):
    state = other.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
