"""A small fine-tuning for deployment."""

from __future__ import annotations

from transformers import TrainingArguments

from metis_hf.lab.finetune.arguments import FinetuneArguments
from metis_hf.lab.finetune.run import Finetuning


def finetuning(source, out, bf16=False, **options):
    """Return one of three steps on a model and data."""
    model, data = source
    values = {
        "model": model, "data": data, "sequence_length": 64, "eval_sequences": 4,
        "calibration_sequences": 4, "global_batch": 4, **options,
    }  # fmt: skip
    training = TrainingArguments(
        str(out), max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=1e-3, save_strategy="no", report_to=[], use_cpu=True, bf16=bf16,
    )  # fmt: skip
    return Finetuning(FinetuneArguments(**values), training)
