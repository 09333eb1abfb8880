"""Small students, teachers and trainers for the tests of distillation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from conftest import VOCAB, llama

from metis_hf import (
    DistillTrainer,
    DistillTrainerMixin,
    MetisCallback,
    MetisConfig,
    get_metis_model,
)
from training import trainer_tools

# Sums over tokens in another order, of numbers that are about 1e-3 at most.
FP32 = {"rtol": 1e-4, "atol": 1e-7}


def dense(seed=0):
    """A model whose distributions differ from token to token."""
    torch.manual_seed(seed)
    return llama(num_hidden_layers=1, initializer_range=0.2)


def student(scheme="nvfp4-rne"):
    """The dense model, converted."""
    return get_metis_model(dense(), MetisConfig(scheme=scheme))


def other():
    """A teacher that no student agrees with."""
    return dense(seed=1)


def rows(count=16, lengths=(24,), prompt=0):
    """Sequences of several lengths, whose first labels are of a prompt."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (lengths[index % len(lengths)],), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(batch):
    """Pads on the right, with an attention mask."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "labels": -100}
    out = {
        key: torch.stack([F.pad(row[key], (0, longest - len(row[key])), value=value)
                          for row in batch])
        for key, value in fill.items()
    }  # fmt: skip
    sizes = torch.tensor([len(row["input_ids"]) for row in batch])
    return out | {"attention_mask": (torch.arange(longest) < sizes[:, None]).long()}


def arguments(directory, **changes):
    options = {
        "per_device_eval_batch_size": 3,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }
    return trainer_tools.arguments(directory, **options | changes)


def trainer(
    directory, model, *, data=None, cls=DistillTrainer, callbacks=(), processing_class=None,
    teacher="other", temperature=None, share=None, **changes,
):  # fmt: skip
    given = {"temperature": temperature, "cross_entropy_share": share}
    given = {key: value for key, value in given.items() if value is not None}
    if issubclass(cls, DistillTrainerMixin):
        given["teacher"] = other() if teacher == "other" else teacher
    made = cls(
        model,
        arguments(directory, **changes),
        data_collator=collate,
        train_dataset=data or rows(),
        eval_dataset=rows(4, lengths=(24, 10)),
        callbacks=[MetisCallback(health_interval=0), *callbacks],
        processing_class=processing_class,
        **given,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def check(self, model):
        """Compare the first step's with the gradients of a model."""
        for name, param in model.named_parameters():
            torch.testing.assert_close(self.steps[0][name], param.grad, **FP32, msg=name)


def divergence(model, teacher, data, temperature=1.0):
    """Mean KL per token, row by row without padding, by torch's kl_div; with a graph."""
    total, tokens = 0.0, 0
    for row in data:
        ids = row["input_ids"][None]
        with torch.no_grad():
            log_p = F.log_softmax(teacher(input_ids=ids).logits / temperature, -1)
        log_q = F.log_softmax(model(input_ids=ids).logits / temperature, -1)
        total = total + F.kl_div(log_q, log_p, reduction="sum", log_target=True) * temperature**2
        tokens += ids.numel()
    return total / tokens


def cross_entropy(model, data):
    """Mean over all labels but each row's first."""
    total, labels = 0.0, 0
    for row in data:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, row["labels"][1:], reduction="sum")
        labels += (row["labels"][1:] != -100).sum()
    return total / labels
