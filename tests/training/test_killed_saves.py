"""Processes killed while they save: the previous checkpoint survives."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import forked
import pytest
import torch
import transformers
from conversion.run_tools import LAYER, converted, metis_callbacks, trainer
from safetensors.torch import load_file
from tensors import assert_same
from transformers import modeling_utils
from transformers.trainer_utils import get_last_checkpoint

from metis_hf.training.resume import last_checkpoint


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


class KillAtSecondSave(transformers.TrainerCallback):
    """Ends the process in the middle of the save after step 4."""

    def __init__(self, during):
        self.during = during

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 4:
            return
        if self.during == "weights":
            whole = modeling_utils.safe_save_file

            def half(state, filename, **kwargs):
                whole(state, filename, **kwargs)
                os.truncate(filename, os.path.getsize(filename) // 2)
                die()

            modeling_utils.safe_save_file = half
        elif self.during == "optimizer":
            torch.save = die
        else:
            transformers.TrainerState.save_to_json = die


def train_and_die(out, during):
    callbacks = (*metis_callbacks(), KillAtSecondSave(during))
    trainer(out, converted(), callbacks, max_steps=6).train()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("whole"), converted(), max_steps=6)
    made.train()
    return made.model


@pytest.mark.slow
@pytest.mark.parametrize("during", ["weights", "optimizer", "state"])
def test_killed_while_saving(during, uninterrupted, tmp_path):
    """SIGKILL inside the second save: the first checkpoint survives and gives the same run."""
    assert forked.exit_code(train_and_die, tmp_path / "run", during) == -signal.SIGKILL
    assert Path(get_last_checkpoint(str(tmp_path / "run"))).name == "checkpoint-4"
    last = last_checkpoint(tmp_path / "run")
    assert last is not None
    assert Path(last).name == "checkpoint-2"
    resumed = trainer(tmp_path / "run", converted(), max_steps=6)
    resumed.train(resume_from_checkpoint=last)
    assert_same(uninterrupted, resumed.model)
    assert Path(last_checkpoint(tmp_path / "run")).name == "checkpoint-6"


def overwrite(out, ready):
    model = converted()
    ready.set()
    for value in itertools.cycle((2.0, 3.0)):
        torch.nn.init.constant_(model.lm_head.weight, value)
        torch.nn.init.constant_(model.get_parameter(f"{LAYER}.u"), value)
        model.save_pretrained(out)


@pytest.mark.slow
def test_killed_while_overwriting(tmp_path):
    """SIGKILL while a directory is written again and again: the weights are of one of two models.

    The JSON files beside them are rewritten in place, and a kill may cut one short.
    """
    converted().save_pretrained(tmp_path)
    ready = forked.CONTEXT.Event()
    process = forked.start(overwrite, tmp_path, ready)
    assert ready.wait(timeout=120)
    time.sleep(1)
    process.kill()
    process.join()
    weights = load_file(tmp_path / "model.safetensors")
    factor, head = weights[f"{LAYER}.u"], weights["lm_head.weight"]
    assert factor[0, 0].item() in (2.0, 3.0)
    assert torch.equal(factor, factor[0, 0].expand_as(factor))
    assert torch.equal(head, factor[0, 0].expand_as(head))
