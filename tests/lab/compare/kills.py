"""Hooks that kill a process at one point of its work, or keep it there.

`python kills.py HOOK ARGUMENT -m MODULE ...` runs a module with a hook: the command that
`metis-hf compare --launcher` puts before its workers.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import modeling_utils

import metis_hf.lab.evaluate
from metis_hf.shared.quiet import quiet


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def half_then_die(*args, **kwargs):
    """Save weights, cut the file in half, and die."""
    WHOLE_SAVE(*args, **kwargs)
    path = next(Path(str(a)) for a in args if isinstance(a, str | Path))
    os.truncate(path, os.path.getsize(path) // 2)
    die()


WHOLE_SAVE = modeling_utils.safe_save_file


def kill_in_save(stage: str, step: int = 4) -> None:
    """Kill this process while it saves the checkpoint of that step: weights, optimizer or state."""
    whole = transformers.Trainer._save_checkpoint

    def save(self, *args, **kwargs):
        if self.state.global_step == step:
            if stage == "weights":
                modeling_utils.safe_save_file = half_then_die
            elif stage == "optimizer":
                transformers.Trainer._save_optimizer_and_scheduler = die
            else:
                transformers.TrainerState.save_to_json = die
        return whole(self, *args, **kwargs)

    transformers.Trainer._save_checkpoint = save


def kill_in_evaluation(_: str = "") -> None:
    """Kill this process when it begins to evaluate, in Trainer or in lm-eval."""
    transformers.Trainer.evaluate = die
    metis_hf.lab.evaluate.evaluate_model = die


def _stay(file: str, *args, **kwargs) -> None:
    """Write this process's id to a file, and be busy forever without a word."""
    Path(f"{file}.part").write_text(str(os.getpid()))
    Path(f"{file}.part").rename(file)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        torch.randn(64, 64) @ torch.randn(64, 64)


def stay_in_evaluation(file: str) -> None:
    """Keep this process busy where it begins to evaluate."""
    transformers.Trainer.evaluate = partial(_stay, file)


def stay_in_save(file: str, step: int = 4) -> None:
    """Keep this process busy where it begins to save the optimizer of that step."""
    whole = transformers.Trainer._save_optimizer_and_scheduler

    def save(self, *args, **kwargs):
        return (partial(_stay, file) if self.state.global_step == step else whole)(
            self, *args, **kwargs
        )

    transformers.Trainer._save_optimizer_and_scheduler = save


def recipe(out: str, hook: str, argument: str) -> None:
    """Run a recipe's smoke run with a hook."""
    globals()[hook](argument)
    small_recipe(out)


def small_recipe(out: str, *options: str) -> None:
    """Run the smoke run of a recipe."""
    path = str(Path(__file__).parents[3] / "recipes" / "llama3_8b.py")
    command = [path, "--smoke", "--output_dir", out, *options]
    with mock.patch.object(sys, "argv", command), quiet():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    _, name, value, option, module, *rest = sys.argv
    assert option == "-m"
    globals()[name](value)
    sys.argv[1:] = rest
    runpy.run_module(module, run_name="__main__", alter_sys=True)
