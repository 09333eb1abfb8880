"""Processes killed while they save: the previous checkpoint survives."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conversion.test_checkpoints import LAYER, assert_same, converted, trainer
from paths import TESTS
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from metis_hf.training.resume import last_checkpoint

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import transformers
from transformers import modeling_utils
from conversion import test_checkpoints as t

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

class KillAtSecondSave(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            if {during!r} == "weights":
                def half(state, filename, **kwargs):
                    whole(state, filename, **kwargs)
                    os.truncate(filename, os.path.getsize(filename) // 2)
                    die()
                whole, modeling_utils.safe_save_file = modeling_utils.safe_save_file, half
            elif {during!r} == "optimizer":
                t.torch.save = die
            else:
                transformers.TrainerState.save_to_json = die

t.trainer({out!r}, t.converted(), (*t.metis_callbacks(), KillAtSecondSave), max_steps=6).train()
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("whole"), converted(), max_steps=6)
    made.train()
    return made.model


@pytest.mark.slow
@pytest.mark.parametrize("during", ["weights", "optimizer", "state"])
def test_killed_while_saving(during, uninterrupted, tmp_path):
    """SIGKILL inside the second save: the first checkpoint survives and gives the same run."""
    code = KILLED.format(tests=str(TESTS), out=str(tmp_path / "run"), during=during)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert Path(get_last_checkpoint(str(tmp_path / "run"))).name == "checkpoint-4"
    last = last_checkpoint(tmp_path / "run")
    assert last is not None
    assert Path(last).name == "checkpoint-2"
    resumed = trainer(tmp_path / "run", converted(), max_steps=6)
    resumed.train(resume_from_checkpoint=last)
    assert_same(uninterrupted, resumed.model)
    assert Path(last_checkpoint(tmp_path / "run")).name == "checkpoint-6"


OVERWRITE = """
import sys, torch
sys.path.insert(0, {tests!r})
from conversion import test_checkpoints as t

model = t.converted()
print("ready", flush=True)
while True:
    torch.nn.init.constant_(model.lm_head.weight, 2.0)
    torch.nn.init.constant_(model.{layer}.u, 2.0)
    model.save_pretrained({out!r})
    torch.nn.init.constant_(model.lm_head.weight, 3.0)
    torch.nn.init.constant_(model.{layer}.u, 3.0)
    model.save_pretrained({out!r})
"""


@pytest.mark.slow
def test_killed_while_overwriting(tmp_path):
    """SIGKILL while a directory is written again and again: the weights are of one of two models.

    The JSON files beside them are rewritten in place, and a kill may cut one short.
    """
    converted().save_pretrained(tmp_path)
    layer = LAYER.replace("layers.1", "layers[1]")
    code = OVERWRITE.format(tests=str(TESTS), out=str(tmp_path), layer=layer)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1)
        process.kill()
    weights = load_file(tmp_path / "model.safetensors")
    factor, head = weights[f"{LAYER}.u"], weights["lm_head.weight"]
    assert factor[0, 0].item() in (2.0, 3.0)
    assert torch.equal(factor, factor[0, 0].expand_as(factor))
    assert torch.equal(head, factor[0, 0].expand_as(head))
