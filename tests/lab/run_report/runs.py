"""A real run of a small model, whose record is read and shown."""

from __future__ import annotations

import torch
import transformers
from conftest import VOCAB, llama

from metis_hf import MetisCallback, MetisConfig, PrecisionSchedule, get_metis_model

STEPS = 12
MEASURED = [1, 3, 6, 9, 12]
REFRESHED = [4, 8, 12]


def train(folder, scheme="metis", broken=False, resume=None, schedule=True, **changes):
    torch.manual_seed(0)
    split = {"split_weight": True, "refresh_interval": 4} if scheme == "metis" else {}
    model = get_metis_model(llama(), MetisConfig(scheme=scheme, **split))
    if broken:
        model.model.layers[1].mlp.up_proj.weight_residual.data[0, 0] = float("inf")
    ids = torch.randint(0, VOCAB, (32, 24), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_steps": 6,
        "save_strategy": "steps",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | changes
    callbacks = [MetisCallback(health_interval=3)]
    if schedule:
        callbacks.append(PrecisionSchedule(at=10))
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **options),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
