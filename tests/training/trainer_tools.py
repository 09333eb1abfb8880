"""Small converted models and their training, for the tests of callbacks, trainers and schedules."""

from __future__ import annotations

import json

import torch
import transformers
from conftest import VOCAB, llama
from layers.layer_tools import of_each_kind

from metis_hf import MetisConfig, get_metis_model, scheme_names

KINDS = of_each_kind(scheme_names())


def one_block():
    return llama(num_hidden_layers=1)


def converted(scheme="metis", **changes):
    torch.manual_seed(0)
    return get_metis_model(one_block(), MetisConfig(scheme=scheme, **changes))


def up_proj(model):
    return model.model.layers[0].mlp.up_proj


def rows(count=32, length=24):
    ids = torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(directory, **changes):
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(str(directory), **options | changes)


def trainer(
    directory, model, callbacks=(), cls=transformers.Trainer, optimizer=None, data=None, **changes
):
    """A trainer of a model, or of a function that makes one, on `rows` unless data are given."""
    is_made = isinstance(model, torch.nn.Module)
    made = cls(
        model if is_made else None,
        arguments(directory, **changes),
        train_dataset=rows() if data is None else data,
        eval_dataset=rows(4),
        callbacks=list(callbacks),
        model_init=None if is_made else model,
        optimizers=(optimizer, None),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


class EachStep(transformers.TrainerCallback):
    """Notes what a function of a model gives at the end of each step."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(self.look(model))


def records(made):
    return [entry for entry in made.state.log_history if "loss" in entry]


def losses(made):
    return [entry["loss"] for entry in records(made)]


def metis_values(entry):
    return {key: value for key, value in entry.items() if key.startswith("metis/")}


def lines(directory, name):
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]
