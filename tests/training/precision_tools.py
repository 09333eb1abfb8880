"""A small converted model, and its training, for tests of precision."""

from __future__ import annotations

import torch
import transformers
from conftest import VOCAB, llama
from layers.layer_tools import of_each_kind

from metis_hf import MetisConfig, get_metis_model, scheme_names

KINDS = of_each_kind(scheme_names())
PASSES = [("forward",), ("backward",), ("forward", "backward")]


def converted(scheme="metis", **changes):
    torch.manual_seed(0)
    return get_metis_model(llama(num_hidden_layers=1), MetisConfig(scheme=scheme, **changes))


def trainer(directory, model, schedule=None, *, held_out=0, cls=transformers.Trainer, **changes):
    ids = torch.randint(0, VOCAB, (64, 24), generator=torch.Generator().manual_seed(5))
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    } | changes
    made = cls(
        model,
        transformers.TrainingArguments(str(directory), **options),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        eval_dataset=[{"input_ids": row, "labels": row} for row in ids[:held_out]] or None,
        callbacks=[] if schedule is None else [schedule],
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
