"""Settings of an experiment that TrainingArguments and a model's config cannot express."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import PreTrainedModel

from metis_hf.lab.compare.variants import Experiment
from metis_hf.training.trainer import MetisTrainer

_RESIDUAL_WRITERS = ("o_proj", "down_proj")  # in Llama and similar models


class ExperimentTrainer(MetisTrainer):
    """MetisTrainer with an experiment's `one_cycle` and `decay_embeddings`."""

    def __init__(self, experiment: Experiment, **options: Any) -> None:
        self._one_cycle = experiment.one_cycle
        self._decays_embeddings = experiment.decay_embeddings
        super().__init__(**options)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        """Return torch's OneCycleLR without its change of AdamW's betas, or Trainer's own schedule.

        A warm-up of less than one step, as in a run of a few steps, is left out.
        """
        stepped = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None and self._one_cycle is not None:
            assert stepped is not None  # Trainer creates it before the schedule
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
        """Return the names that get weight decay, without embeddings and head if so configured."""
        names = super().get_decay_parameter_names(model)
        if self._decays_embeddings:
            return names
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        left_out = {id(p) for end in ends if end is not None for p in end.parameters()}
        return [name for name in names if id(model.get_parameter(name)) not in left_out]


def _divisible(one_cycle: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments with a warm-up that does not make OneCycleLR divide by zero.

    OneCycleLR divides by the number of steps from the first step to the end of the warm-up, which
    is zero for a warm-up of one step. Raising the share by a billionth avoids that, and the step
    runs at the initial rate.
    """
    share = one_cycle.get("pct_start", 0.3)  # OneCycleLR's default
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
            "the layers that write to its residual stream cannot be identified; choose a "
            "model_type such as llama"
        )
    with torch.no_grad():
        for module in found:
            module.weight /= math.sqrt(2 * model.config.num_hidden_layers)  # type: ignore[operator]
