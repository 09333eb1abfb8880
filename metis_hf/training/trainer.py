"""MetisTrainer: the stock Trainer with one-record logging and the right weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer

from metis_hf.conversion.convert import metis_layers
from metis_hf.training.callback import MetisCallback


class MetisTrainerMixin:
    """For Trainer and its subclasses: `class MySFTTrainer(MetisTrainerMixin, SFTTrainer)`.

    - Spectral health reaches every reporter (TensorBoard, W&B, ...) in the record of its step.
    - A run that is resumed from its last checkpoint is at its end, and makes no further step.
    - Weight decay applies to s and the residual, which is decay of the represented weight; u and vh
      are left out, since their decay would shrink the low-rank part three times as fast.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handler = self.callback_handler  # type: ignore[attr-defined]
        if not any(isinstance(callback, MetisCallback) for callback in handler.callbacks):
            added = MetisCallback()
            handler.add_callback(added)
            added.on_init_end(None, None, None, model=getattr(self, "model", None))
        for callback in list(handler.callbacks):
            if isinstance(callback, MetisCallback):
                callback.bind(self)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch; none where the last step is done already.

        Trainer asks whether that step is done only after a step: a run that is resumed from its
        last checkpoint would make one more.
        """
        state, control = self.state, self.control  # type: ignore[attr-defined]
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)  # type: ignore[misc]
        factors = factor_names(model)
        return [name for name in names if name not in factors]


def factor_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: u and vh of split weights."""
    return {
        f"{name}.{key}"
        for name, layer in metis_layers(model)
        for key in layer.weight_form.undecayed
    }


class MetisTrainer(MetisTrainerMixin, Trainer):
    """transformers' Trainer for converted models; see `MetisTrainerMixin`."""
