"""A real run of a small model, and copies of its directory."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from conftest import llama
from training.trainer_tools import trainer

from metis_hf import MetisCallback, MetisConfig, PrecisionSchedule, get_metis_model
from metis_hf.numerics.kernels import use_kernels


def _train(folder, scheme="metis", broken=False, resume=None, schedule=True, stop=None, **changes):
    torch.manual_seed(0)
    split = {"split_weight": True, "refresh_interval": 4} if scheme == "metis" else {}
    model = get_metis_model(llama(), MetisConfig(scheme=scheme, **split))
    if broken:
        model.model.layers[1].mlp.up_proj.weight_residual.data[0, 0] = float("inf")
    options = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 6, "save_steps": 6}
    options |= {"save_strategy": "steps", **changes}
    callbacks = [MetisCallback(health_interval=3)]
    callbacks += [PrecisionSchedule(at=10)] if schedule else []
    made = trainer(folder, model, callbacks + ([_Killed(stop)] if stop else []), **options)
    made.train(resume_from_checkpoint=resume)
    return made


class _Killed(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def train():
    """A function that trains: 12 steps, measured at 1, 3, 6, ..., refreshed at 4, 8 and 12."""
    return _train


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(directory, trainer) of a finished run; tests that change files take a copy."""
    folder = tmp_path_factory.mktemp("run")
    with use_kernels(None):
        return folder, _train(folder)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "copy")
