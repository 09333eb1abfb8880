"""MetisCallback: checks, refreshes and measures a quantized Trainer run.

It checks model and optimizer at the start, warns about converted layers that the first step does
not call, refreshes the decomposition of split weights, updates the state of schemes after each
step, and measures spectral health and quantization noise. Six means go to Trainer's logs, figures
of each layer to `metis_health.jsonl`, Trainer's log entries to `metis_log.jsonl`. `metis-hf report`
renders these files as a page.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import IntervalStrategy, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.parallelism import check_accelerate
from metis_hf.shared.messages import some
from metis_hf.training.calibration import (
    UnseenLayers,
    freeze_scales,
    has_static_scales,
    scales_are_begun,
    scales_are_fixed,
)
from metis_hf.training.console import calling_handler, put_first
from metis_hf.training.health import (
    DETAILS,
    LayerProbe,
    logged_health,
    nonfinite_layers,
    split_health,
    weight_health,
)
from metis_hf.training.layer_states import after_step, check_states
from metis_hf.training.refresh import check_moments, interval_of, refresh, refreshed
from metis_hf.training.resume import ResumeGuard, trained_config
from metis_hf.training.run_record import (
    append_log,
    append_record,
    describe_run,
    drop_after,
    precision_of,
    write_run,
)
from metis_hf.training.start_checks import (
    check_compilation,
    check_dtypes,
    check_optimizer,
    check_precision,
)
from metis_hf.training.uncalled import warn_of_uncalled
from metis_hf.training.weight_reuse import hold, release

logger = logging.get_logger(__name__)


class MetisCallback(ResumeGuard):
    """Refreshes weight decompositions and logs spectral health; pass the class or an instance.

    It runs before Trainer's reporters, so that they see health figures too. It refuses to resume
    from a checkpoint of another scheme; see `resume.ResumeGuard`.

    Args:
        health_interval: optimizer steps between measurements; 0 never measures, but still writes
            the log and the description of the run. A measured step is logged, and takes a few times
            as long as a normal step.
        refresh_interval: optimizer steps between re-decompositions of split weights that train;
            None takes the model config's `refresh_interval`, 0 never refreshes.
        freeze_scales: optimizer steps after which static tensor scales are fixed at the values seen
            in training ("w4a4" without calibration); None never fixes them. While a layer has seen
            no input, such as an expert without tokens, fixing is retried after each step.
        health_details: extra figures in the log besides the six means over all layers. "kinds":
            each statistic of each tensor as a mean over the layers of a kind, about 150 figures;
            "layers": each statistic of each layer; None: none. The health file always has all.
    """

    def __init__(
        self,
        health_interval: int = 100,
        refresh_interval: int | None = None,
        freeze_scales: int | None = None,
        health_details: str | None = None,
    ) -> None:
        if health_details not in (None, *DETAILS):
            raise ValueError(
                f"health_details={health_details!r}; choose one of {', '.join(DETAILS)}, or None"
            )
        for name, value, least in (
            ("health_interval", health_interval, 0),
            ("refresh_interval", refresh_interval, 0),
            ("freeze_scales", freeze_scales, 1),
        ):
            if value is not None and not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name}={value}; expected a whole number of steps >= {least}")
        self.health_interval = health_interval
        self.refresh_interval = refresh_interval
        self.freeze_scales = freeze_scales
        self.health_details = health_details
        self._model: nn.Module = nn.Identity()
        self._layers: dict[str, MetisLayer] = {}
        self._probe = LayerProbe()
        self._refresh_every = 0
        self._freeze_at: int | None = None  # first step after which scales may be fixed
        self._unseen: str | None = None  # why scales could not be fixed yet
        self._measuring = self._due = False
        self._reuses_weights = False
        self._alarm = False  # a logged loss or gradient norm was not finite
        self._knows_moments = False  # checked: refresh can reset the optimizer state
        self._pending: dict[str, float] = {}
        self._record: dict[str, Any] = {}  # of the current step, for the health file
        self._precision: dict[str, Any] = {}
        self._trial_directory: Path | None = None
        self._begun = self._is_first = False  # `_is_first`: in this process's first step
        self._early: list[dict[str, Any]] = []  # log entries from before training

    def state(self) -> dict[str, Any]:
        """Return this callback's entry in trainer_state.json."""
        names = ("health_interval", "refresh_interval", "freeze_scales", "health_details")
        return {**super().state(), "args": {name: getattr(self, name) for name in names}}

    def bind(self, trainer: Any) -> None:
        """Write records to the trial's directory in a search; MetisTrainer calls this."""
        trial = getattr(trainer, "_trial", None)
        self._trial_directory = None if trial is None else Path(trainer._get_output_dir(trial))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the model and the optimizer, read the schedule, and write the run's description.

        Raises:
            ValueError: no converted layer; an optimizer without the layers' parameters; several
                parameter dtypes in one FSDP2 unit; a checkpoint of another scheme; a refresh
                interval although no weight is stored split or all split weights are frozen;
                `freeze_scales` without static scales or outside the run.
            NotImplementedError: refresh under an engine that keeps its own copy of the weights;
                accelerate's FP8; context or sequence parallelism; measurements under tensor
                parallelism.
        """
        assert model is not None
        if (handler := calling_handler(self)) is not None:
            put_first(self, handler, details=self.health_details is not None)
        self._model = model
        self._layers = dict(metis_layers(model))
        if not self._layers:
            raise ValueError(
                "MetisCallback found no converted layer in the model. Call "
                "get_metis_model(model, MetisConfig(...)) before you build the Trainer"
            )
        saved: Any = state.stateful_callbacks
        resumed = trained_config(saved) if state.global_step else None
        super().on_train_begin(args, state, control, model=model)
        release(model)  # an earlier run may have stopped in the middle of a step
        self._probe.detach()
        self._measuring = self._due = self._alarm = False
        self._pending, self._record = {}, {}
        self._knows_moments = False
        # With one micro-batch a weight is used only twice, so that reuse saves nothing.
        self._reuses_weights = args.gradient_accumulation_steps > 1 or any(
            getattr(module, "gradient_checkpointing", False) for module in model.modules()
        )
        if optimizer is not None:
            check_optimizer(self._layers, optimizer)
        check_dtypes(model)
        if args.logging_nan_inf_filter:
            logger.info(
                "logging_nan_inf_filter was turned off, so that a NaN loss shows in the logs"
            )
            args.logging_nan_inf_filter = False
        self._refresh_every = interval_of(model, self.refresh_interval)
        check_states(model)
        check_precision()
        check_accelerate()
        if self.health_interval and any(m.shards and m.shards.cut for m in self._layers.values()):
            raise NotImplementedError(
                f"health_interval={self.health_interval} does not work under tensor parallelism, "
                "where each process sees only a part of a layer's tensors. Pass "
                "MetisCallback(health_interval=0)"
            )
        if self.freeze_scales is not None and not has_static_scales(model):
            raise ValueError(
                f"freeze_scales={self.freeze_scales}, but no layer of the model has static tensor "
                'scales; convert the model with scheme "w4a4" or "w4a16", or leave freeze_scales '
                "out"
            )
        self._freeze_at, self._unseen = self._first_step_to_freeze(model, state), None
        if args.torch_compile:
            check_compilation(self._layers)
            logger.warning(
                "torch_compile: the first step takes a long time without output, because "
                "torch.compile traces %d quantized layers one by one. The quantizers are just as "
                "fast without it",
                len(self._layers),
            )
        self._precision = precision_of(next(iter(self._layers.values())).config, resumed)
        if state.is_world_process_zero:
            if state.is_hyper_param_search and self._trial_directory is None:
                logger.warning(
                    "each trial overwrites the records of the previous trial in %s. Use "
                    "MetisTrainer, which keeps them with the trial's checkpoints",
                    args.output_dir,
                )
            directory = self._directory(args)
            drop_after(directory, state.global_step or -1)  # a new run drops step 0 too
            write_run(directory, describe_run(model, self.trained_config, args, state))
            for entry in [] if state.global_step else self._early:
                append_log(directory, entry)
        self._begun = self._is_first = True

    def _first_step_to_freeze(self, model: nn.Module, state: TrainerState) -> int | None:
        """Return the step after which scales are fixed; None if nothing is left to fix."""
        wanted = self.freeze_scales
        if wanted is None:
            return None
        if wanted > state.max_steps:
            raise ValueError(
                f"freeze_scales={wanted}, but the run has {state.max_steps} steps: scales would "
                "never be fixed; choose a step of the run"
            )
        begun = scales_are_fixed(model) or scales_are_begun(model)
        if wanted > state.global_step:
            if state.global_step and not begun:
                logger.warning(
                    "the run resumes from step %d, and its checkpoint has no record of earlier "
                    "inputs (adapter checkpoints do not store it): freeze_scales=%d computes "
                    "scales from the remaining steps alone",
                    state.global_step,
                    wanted,
                )
            return wanted
        if not begun:
            raise ValueError(
                f"the run resumes from step {state.global_step}, freeze_scales={wanted} fixed the "
                "scales before that, and the checkpoint does not have them: adapter checkpoints "
                "do not store scales. Calibrate the model before training (calibrate), or restart "
                "the training"
            )
        return None if scales_are_fixed(model) else state.global_step + 1  # a resumed run

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        if self._is_first:
            for layer in self._layers.values():
                layer.calls.forget()
        if self._reuses_weights:
            hold(self._model)
        step = state.global_step + 1
        every = self.health_interval
        self._due = bool(every) and (step == 1 or step % every == 0)
        if self._due or self._alarm:
            self._alarm = False
            self._measuring = True
            self._probe.attach(self._layers)

    def on_pre_optimizer_step(self, args, state, control, **kwargs: Any) -> None:
        release(self._model)

    def on_step_end(
        self, args, state, control, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        if self._is_first and state.is_world_process_zero:
            warn_of_uncalled(self._model, self._layers)
        self._is_first = False
        # Gradients are cleared by now, so none refers to the old factors. Logging, evaluation and
        # saving come later and see the new factors.
        if self._refresh_every and not self._knows_moments and optimizer is not None:
            check_moments(self._model, optimizer)  # fail now, not at the first refresh
            self._knows_moments = True
        if self._refresh_every and state.global_step % self._refresh_every == 0:
            self._refresh(optimizer)
        figures = after_step(self._model, state.global_step, state.max_steps)
        for name, values in figures.items():
            self._pending[f"metis/{name}"] = sum(values.values()) / len(values)
        if self._freeze_at is not None and state.global_step >= self._freeze_at:
            self._freeze(state)
        if self._measuring:
            self._measuring = False
            self._probe.detach()
            self._collect(state)
            # A measurement after an alarm is not logged at once: if losses stay NaN, its log entry
            # would raise the next alarm.
            if self._due and args.logging_strategy != IntervalStrategy.NO:
                control.should_log = True
        precision = precision_of(next(iter(self._layers.values())).config)
        if precision != self._precision:
            self._precision = self._record["switch"] = precision
        if self._record and state.is_world_process_zero:
            append_record(self._directory(args), state.global_step, self._record)
        self._record = {}

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self._probe.detach()
        self._early = []
        asked = self.freeze_scales is not None and state.global_step >= self.freeze_scales
        if asked and not scales_are_fixed(self._model) and state.is_world_process_zero:
            logger.warning(
                "freeze_scales=%s was set, but the run ends with a model whose scales are not "
                "fixed: %s. Call metis_hf.calibrate or freeze_scales before you export it",
                self.freeze_scales,
                self._unseen or "the checkpoint was saved before they were fixed",
            )

    def on_log(
        self, args, state, control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the measurements to the current log entry, and append the entry to the log file."""
        if logs and "loss" in logs:
            self._complete(state, logs)
        if logs and state.log_history and state.is_world_process_zero:
            if self._begun:
                append_log(self._directory(args), state.log_history[-1])
            else:  # an evaluation before training, or of a run that another process finished
                self._early.append(dict(state.log_history[-1]))

    def _freeze(self, state: TrainerState) -> None:
        """Fix the scales; if a layer has seen no input yet, warn once and retry after each step."""
        try:
            freeze_scales(self._model)
        except UnseenLayers as error:
            if self._unseen is None and state.is_world_process_zero:
                logger.warning(
                    "freeze_scales=%s is delayed and will be retried after each step: %s",
                    self.freeze_scales,
                    error,
                )
            self._unseen = str(error)
        else:
            self._freeze_at = self._unseen = None

    def _complete(self, state: TrainerState, logs: dict[str, float]) -> None:
        """Add the measurements to a log entry; after a non-finite loss, measure the next step."""
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "grad_norm")):
            self._alarm = bool(self.health_interval)
            logger.warning(
                "step %d: loss %s, grad_norm %s; %s",
                state.global_step,
                logs.get("loss"),
                logs.get("grad_norm"),
                "the next step will be measured to find the layer"
                if self._alarm
                else "health_interval=0 turns off the measurement that would find the layer",
            )
        if self._pending:
            logs.update(self._pending)
            state.log_history[-1].update(self._pending)
            self._pending = {}

    def _directory(self, args: TrainingArguments) -> Path:
        """Return the directory for records: the trial's in a search, else the output directory."""
        assert args.output_dir is not None  # Trainer fills it in
        return self._trial_directory or Path(args.output_dir)

    def _refresh(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refresh the split weights; record the layers, and health before and after if measured."""
        layers = refreshed(self._model)
        measured = layers if self.health_interval else {}
        before = {name: split_health(layer) for name, layer in measured.items()}
        drifts = refresh(self._model, optimizer)
        if drifts:
            before_it = self._pending.get("metis/refresh_drift", 0.0)
            self._pending["metis/refresh_drift"] = max(before_it, *drifts.values())
        self._record["refresh"] = {
            name: {"before": before[name], "after": split_health(layer)} if measured else {}
            for name, layer in layers.items()
        }

    def _collect(self, state: TrainerState) -> None:
        per_layer = self._probe.stats
        for name, layer in self._layers.items():
            per_layer[name]["weight"] = weight_health(layer, self._probe.states.get(name))
        bad = nonfinite_layers(per_layer)
        if bad:
            logger.warning("step %d: NaN or inf in %s", state.global_step, some(bad, 3))
        found = logged_health(per_layer, self._probe.noise, self.health_details)
        self._pending.update({f"metis/{name}": value for name, value in found.items()})
        self._pending["metis/nonfinite_tensors"] = float(len(bad))
        self._record["layers"] = per_layer
        if self._probe.noise:
            self._record["noise"] = self._probe.noise
