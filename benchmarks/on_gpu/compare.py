"""The part `compare`: the 130M model from scratch in several schemes, as many steps as fit.

The first item measures a few steps of each scheme, finds a batch that fits, and chooses the number
of steps for all schemes: as many as the training minutes allow, and at most one pass over the data.
Then each scheme is one item. A scheme that runs out of time leaves a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import Row
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback

from metis_hf.data.chunked import META, load_tokens
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.training import Trained, train
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.shared.checkpoints import last_checkpoint
from metis_hf.shared.records import bf16_units
from on_gpu.context import Context
from on_gpu.record import Clock, CutOff, Item, OutOfTime, free_memory

SIZE = "130m"
PLAN = "plan"
BATCH = 16  # sequences of an optimizer step
HELD_OUT = 64  # sequences for the held-out loss
QUICK_STEPS = 6
TRIED_STEPS = 12  # of each scheme, before the number of steps is chosen
SAVES = 3  # checkpoints of an uninterrupted run
_CURVE = 100  # points of a training curve in the record
_SLACK = 1.1  # factor for evaluation and checkpoints
# nanoGPT's settings for a model of this size; decay and beta2 are the recipes'.
_TRAINING = {
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
}


class Sequences(Dataset):
    """Dataset of rows of tokens [n length] for Trainer."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index].long()}


class StopInTime(TrainerCallback):
    """Stops training with a checkpoint when the time is up."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.clock.left() <= 0 and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


@dataclass(frozen=True)
class Comparison:
    """Settings that all schemes share.

    Attributes:
        model: keyword arguments of the model's config.
        training: sequences to train on.
        held_out: sequences for the held-out loss.
        batch: sequences of an optimizer step.
        context: of the call.
    """

    model: dict[str, Any]
    training: Sequences
    held_out: Sequences
    batch: int
    context: Context

    def train(self, scheme: str, steps: int, device_batch: int, run: Path) -> Trained:
        """Train a scheme until its last step, or until the time is up."""
        training = {
            **_TRAINING,
            "max_steps": steps,
            "per_device_train_batch_size": device_batch,
            "per_device_eval_batch_size": device_batch,
            "gradient_accumulation_steps": self.batch // device_batch,
            "save_steps": max(1, steps // SAVES),
            "use_cpu": self.context.device.type == "cpu",
        }
        length = self.training.tokens.shape[1]
        experiment = Experiment(
            model=self.model, training=training, sequence_length=length, health_interval=0, seed=0
        )
        return train(
            experiment,
            Variant.of_scheme(scheme),
            self.training,
            None,
            run,
            lambda step, loss: None,
            callbacks=[StopInTime(self.context.clock)],
        )


def compare(context: Context) -> Iterator[Item]:
    assert context.data is not None  # gpu.py asks
    comparison = open_data(context.data, context)
    entry = context.entry("compare")
    before = entry.items.get(PLAN)
    yield Item(PLAN, partial(plan, comparison))
    found = entry.items.get(PLAN)
    if not found or "steps" not in found:
        return  # its error is recorded
    if before is None or before.get("steps") != found["steps"]:
        entry.drop(entry.outdated)  # results with another number of steps
    for scheme in context.schemes:
        seconds = _SLACK * found["steps"] * found["seconds_per_step"][scheme]
        # A scheme that needs longer than a whole call starts anyway: it leaves a checkpoint.
        fits = seconds < 0.9 * context.clock.seconds
        yield Item(scheme, partial(run_scheme, comparison, scheme, found), seconds if fits else 0.0)


def open_data(data: Path, context: Context) -> Comparison:
    """Load the tokens of a directory, and choose a model with their vocabulary.

    Raises:
        FileNotFoundError, ValueError: as `load_tokens`; or the sequences are longer than the
            model's context.
    """
    transformers.utils.logging.disable_progress_bar()
    config = dict(SIZES[SIZE].config)
    if context.quick:
        config |= {"n_embd": 64, "n_layer": 2, "n_head": 2}
    tokens = load_tokens(data, vocab_size=config["vocab_size"])
    if tokens.shape[1] > config["n_positions"]:
        raise ValueError(
            f"{data} has sequences of {tokens.shape[1]} tokens, but the model's context is "
            f"{config['n_positions']} tokens; prepare the data with --sequence-length no larger "
            "than that"
        )
    if (data / "validation" / META).is_file():
        held_out = load_tokens(data / "validation", vocab_size=config["vocab_size"])
    else:  # hold out the last sequences
        count = min(HELD_OUT, max(1, len(tokens) // 20))
        tokens, held_out = tokens[:-count], tokens[-count:]
    batch = min(4 if context.quick else BATCH, len(tokens))
    model = {"model_type": SIZES[SIZE].model_type, **config}
    held_out = held_out[:: max(1, len(held_out) // HELD_OUT)][:HELD_OUT]
    return Comparison(model, Sequences(tokens), Sequences(held_out), batch, context)


def plan(comparison: Comparison) -> Row:
    """Find the batch that fits, the seconds of a step, and the number of steps for all schemes."""
    context = comparison.context
    steps = 3 if context.quick else TRIED_STEPS
    device_batch, seconds, parameters = comparison.batch, {}, 0
    for scheme in context.schemes:
        while scheme not in seconds:
            run = context.work / "tried" / scheme
            shutil.rmtree(run, ignore_errors=True)
            try:
                trained = comparison.train(scheme, steps, device_batch, run)
            except torch.OutOfMemoryError:
                if device_batch == 1:
                    raise
                device_batch = half(device_batch, comparison.batch)
            else:
                if steps_of(trained) < steps:
                    raise CutOff(f"{scheme} was tried for {steps_of(trained)} of {steps} steps")
                seconds[scheme], parameters = trained.seconds_per_step, trained.parameters
                del trained
            free_memory()
            shutil.rmtree(run, ignore_errors=True)
    limits = {
        "the minutes for training": int(
            60 * context.train_minutes / (_SLACK * sum(seconds.values()))
        ),
        "the data, read once": len(comparison.training) // comparison.batch,
    }
    if context.quick:
        limits["the quick run"] = QUICK_STEPS
    bound_by = min(limits, key=limits.__getitem__)
    chosen = max(1, limits[bound_by])
    length = comparison.training.tokens.shape[1]
    shutil.rmtree(_runs(context), ignore_errors=True)  # checkpoints of another plan
    return {
        "steps": chosen,
        "bound_by": bound_by,
        "sequences_per_step": comparison.batch,
        "device_batch": device_batch,
        "tokens_per_step": comparison.batch * length,
        "tokens": chosen * comparison.batch * length,
        "sequence_length": length,
        "seconds_per_step": seconds,
        "parameters": parameters,
        "precision": "bf16" if bf16_units() else "fp32",
        "training": _TRAINING,
    }


def half(device_batch: int, batch: int) -> int:
    """Return the next smaller number of sequences that divides the batch."""
    return max(n for n in range(1, device_batch) if batch % n == 0)


def run_scheme(comparison: Comparison, scheme: str, planned: Row) -> Row:
    """Train one scheme; return its held-out loss, training curve, speed and memory."""
    run = _runs(comparison.context) / scheme
    steps, resumed = planned["steps"], last_checkpoint(run) is not None
    trained = comparison.train(scheme, steps, planned["device_batch"], run)
    if steps_of(trained) < steps:
        done = f"{steps_of(trained)} of {steps} steps are done"
        raise OutOfTime(f"{done}; the next call continues from its checkpoint")
    loss = trained.trainer.evaluate(comparison.held_out)["eval_loss"]
    every = max(1, len(trained.history) // _CURVE)
    shutil.rmtree(run, ignore_errors=True)
    return {
        "scheme": scheme,
        "loss": loss,
        "steps": steps,
        "seconds_per_step": trained.seconds_per_step,
        "peak_bytes": trained.peak_memory,
        "resumed": resumed,
        "curve": [[e["step"], round(e["loss"], 4)] for e in trained.history[::every]],
    }


def _runs(context: Context) -> Path:
    """Return the folder of the schemes' checkpoints."""
    return context.work / "compare"


def steps_of(trained: Trained) -> int:
    """Return the number of steps that a run has done."""
    return trained.trainer.state.global_step
