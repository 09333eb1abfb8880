"""Settings of an experiment that TrainingArguments and a model's config cannot say."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import PreTrainedModel

from metis_hf.lab.compare.variants import Experiment
from metis_hf.training.trainer import MetisTrainer

_RESIDUAL_WRITERS = ("o_proj", "down_proj")  # of Llama and the models that are built like it


class ExperimentTrainer(MetisTrainer):
    """MetisTrainer with the schedule and the weight decay of an experiment.

    Args:
        experiment: its `one_cycle` and `decay_embeddings` are followed.
        **options: of transformers' Trainer.
    """

    def __init__(self, experiment: Experiment, **options: Any) -> None:
        self._one_cycle = experiment.one_cycle
        self._decays_embeddings = experiment.decay_embeddings
        super().__init__(**options)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        """Return torch's OneCycleLR with AdamW's betas left alone, or Trainer's own schedule.

        A warm-up of less than one step, as of a run of a few steps, is left out.
        """
        stepped = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None and self._one_cycle is not None:
            assert stepped is not None  # Trainer makes it before the schedule
            self.lr_scheduler = OneCycleLR(  # type: ignore[assignment]
                stepped,
                max_lr=self.args.learning_rate,
                total_steps=num_training_steps,
                cycle_momentum=False,
                **_divisible(self._one_cycle, num_training_steps),
            )
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names that decay, without embeddings and head if the experiment says so."""
        names = super().get_decay_parameter_names(model)
        if self._decays_embeddings:
            return names
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        left_out = {id(p) for end in ends if end is not None for p in end.parameters()}
        return [name for name in names if id(model.get_parameter(name)) not in left_out]


def _divisible(one_cycle: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments with a warm-up that OneCycleLR can divide by.

    It divides by the steps from the first one to the end of the warm-up. Of a warm-up that is one
    step these are zero, so the share is raised by a billionth: that step has the first rate.
    """
    share = one_cycle.get("pct_start", 0.3)  # as OneCycleLR's own
    return {**one_cycle, "pct_start": share * (1 + 1e-9)} if share * steps == 1 else one_cycle


def scale_residuals(model: PreTrainedModel) -> None:
    """Divide the weights that write into the residual stream of l layers by sqrt(2 l), in place.

    Raises:
        ValueError: the model's projections have other names than Llama's.
    """
    found = [m for n, m in model.named_modules() if n.rpartition(".")[2] in _RESIDUAL_WRITERS]
    if not found:
        raise ValueError(
            f"no module of {type(model).__name__} is named {' or '.join(_RESIDUAL_WRITERS)}, so "
            "what writes into its residual stream is not known; choose a model_type like llama"
        )
    with torch.no_grad():
        for module in found:
            module.weight /= math.sqrt(2 * model.config.num_hidden_layers)  # type: ignore[operator]
