"""MetisTrainer: Trainer with a MetisCallback, correct weight decay and CUDA graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from metis_hf.conversion.card import add_to_trainers_card
from metis_hf.conversion.convert import metis_layers
from metis_hf.training.block_graphs import BlockGraphs, units
from metis_hf.training.callback import MetisCallback
from metis_hf.training.cuda_graph import StepGraphs, average, check
from metis_hf.training.resume import guard_loading


class MetisTrainerMixin:
    """Mixin for Trainer and its subclasses: `class MySFTTrainer(MetisTrainerMixin, SFTTrainer)`.

    - It adds a `MetisCallback` if none is given, and keeps its records with the checkpoints of each
      trial in a search.
    - The model card describes precision, loading, cost and serving.
    - A run that is resumed from its final checkpoint takes no further step.
    - Weight decay applies to s and the residual, which decays the represented weight. u and vh are
      left out: their decay would shrink the low-rank part three times as fast.

    Args:
        cuda_graphs: record the forward and backward pass of a step in a CUDA graph and replay it,
            to avoid launch overhead on a GPU; see `cuda_graph`. Works on one device, and on several
            under DDP or FSDP2.

    Raises:
        ValueError: `cuda_graphs` is set and steps cannot be recorded.
    """

    def __init__(self, *args: Any, cuda_graphs: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if cuda_graphs:
            check(self.args)  # type: ignore[attr-defined]
        self.cuda_graphs = cuda_graphs
        self.graphs: StepGraphs | BlockGraphs | None = None
        handler = self.callback_handler  # type: ignore[attr-defined]
        if not any(isinstance(callback, MetisCallback) for callback in handler.callbacks):
            added = MetisCallback()
            handler.add_callback(added)
            added.on_init_end(None, None, None, model=getattr(self, "model", None))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Create the model of a run; it refuses checkpoints with weights in another form."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        guard_loading(model)
        return model

    def _bind_callbacks(self) -> None:
        for callback in list(self.callback_handler.callbacks):  # type: ignore[attr-defined]
            if isinstance(callback, MetisCallback):
                callback.bind(self)

    def _load_callback_state(self) -> None:
        """Restore callbacks, which may replace them with new instances, and bind those."""
        super()._load_callback_state()  # type: ignore[misc]
        self._bind_callbacks()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train with fresh recordings: `auto_find_batch_size` may call this several times."""
        self.graphs = None
        self._bind_callbacks()  # to the trial, if there is one
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.graphs is not None:
                self.graphs.forget()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, unless the last step is done already."""
        # Trainer checks only after a step, so a run resumed at its end would take one more.
        state, control = self.state, self.control  # type: ignore[attr-defined]
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute loss and gradients of a batch; with `cuda_graphs`, replay a recording."""
        parallel = model if isinstance(model, DistributedDataParallel) else None
        own = parallel.module if parallel is not None and self.cuda_graphs else model
        step = partial(super().training_step, own)  # type: ignore[misc]
        if self.cuda_graphs and self.graphs is None:
            blocks = units(model)
            self.graphs = StepGraphs(own) if blocks is None else BlockGraphs(blocks)
        if self.graphs is None or isinstance(self.graphs, BlockGraphs):
            return step(inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        extra = self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        # Trainer's step sets these modes, but a replay does not, and evaluation unsets them.
        if not model.training:
            model.train()
        if callable(getattr(self.optimizer, "train", None)):  # type: ignore[attr-defined]
            self.optimizer.train()  # type: ignore[attr-defined]
        loss = self.graphs.run(step, inputs, num_items_in_batch, extra=extra)
        if parallel is not None and self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            average(parallel)
        return loss

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's model card, with sections on precision, loading, cost and serving."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            out = Path(self.args.output_dir)  # type: ignore[attr-defined]
            name = getattr(self, "hub_model_id", None) or out.name
            model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
            add_to_trainers_card(out / "README.md", model, name)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)  # type: ignore[misc]
        layers = metis_layers(model)
        factors = {f"{name}.{key}" for name, one in layers for key in one.weight_form.undecayed}
        return [name for name in names if name not in factors]


class MetisTrainer(MetisTrainerMixin, Trainer):
    """transformers' Trainer for converted models; see `MetisTrainerMixin`."""
