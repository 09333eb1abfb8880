"""MetisCallback: what a quantized run needs from Trainer besides the training itself.

At the start it checks that the optimizer owns the model's split weights. Every `refresh_interval`
steps it decomposes split weights again. After each step it does what schemes with a state need.
Every `health_interval` steps it measures spectral health and quantization noise: the means go to
Trainer's own logs (a summary to the console), the figures of each layer to `metis_health.jsonl`.
Trainer's log entries go to `metis_log.jsonl`, whatever is saved. `metis-hf report` makes a page of
these files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.parallelism import check_accelerate
from metis_hf.monitoring.gradient_noise import noise_ratios
from metis_hf.monitoring.health import (
    LayerProbe,
    group_means,
    nonfinite_layers,
    split_health,
    weight_health,
)
from metis_hf.monitoring.run_record import (
    HEALTH_FILE,
    append_log,
    append_record,
    describe_run,
    drop_after,
    precision_of,
    write_run,
)
from metis_hf.training.calibration import (
    UnseenLayers,
    freeze_scales,
    has_static_scales,
    scales_are_fixed,
)
from metis_hf.training.console import summarize, summary
from metis_hf.training.layer_states import after_step, check_states
from metis_hf.training.refresh import check_engine, check_split, refresh
from metis_hf.training.resume import ResumeGuard
from metis_hf.training.weight_reuse import hold, release

logger = logging.get_logger(__name__)


class MetisCallback(ResumeGuard):
    """Refreshes weight decompositions and logs spectral health; pass the class or an instance.

    A checkpoint that another scheme wrote is refused, see `resume.ResumeGuard`.

    Args:
        health_interval: optimizer steps between measurements; 0 never measures, and the log and
            what was run are written all the same. A measured step takes a few times as long as a
            normal one.
        refresh_interval: optimizer steps between re-decompositions of split weights; None takes
            the model config's `refresh_interval`, 0 never refreshes.
        freeze_scales: optimizer steps after which static tensor scales are fixed at what training
            has seen ("w4a4" that was not calibrated); None leaves them as they are. As long as a
            layer has seen no input, such as an expert without tokens, it waits for the next step.
    """

    def __init__(
        self,
        health_interval: int = 100,
        refresh_interval: int | None = None,
        freeze_scales: int | None = None,
    ) -> None:
        for name, value in (
            ("health_interval", health_interval),
            ("refresh_interval", refresh_interval),
            ("freeze_scales", freeze_scales),
        ):
            least = 1 if name == "freeze_scales" else 0
            if value is not None and not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name}={value}; expected a whole number of steps >= {least}")
        self.health_interval = health_interval
        self.refresh_interval = refresh_interval
        self.freeze_scales = freeze_scales
        self._bound = False
        self._model: nn.Module = nn.Identity()
        self._layers: dict[str, MetisLayer] = {}
        self._probe = LayerProbe()
        self._refresh_every: int | None = 0
        self._freeze_at: int | None = None  # the step from which on scales are to be fixed
        self._unseen: str | None = None  # what keeps them from that
        self._measuring = False
        self._reuses_weights = False
        self._alarm = False  # a logged loss or gradient norm was not finite
        self._pending: dict[str, float] = {}
        self._record: dict[str, Any] = {}  # of the running step, for the health file
        self._precision: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return what Trainer writes into trainer_state.json."""
        names = ("health_interval", "refresh_interval", "freeze_scales")
        return {**super().state(), "args": {name: getattr(self, name) for name in names}}

    def bind(self, trainer: Any) -> MetisCallback:
        """Move this callback before the reporters of `trainer`, so that they see health too.

        MetisTrainer does it by itself. Trainer calls its reporters before any callback of a user's,
        and gives callbacks no way to reach it.
        """
        callbacks = trainer.callback_handler.callbacks
        if callbacks[:1] != [self]:
            if self in callbacks:
                callbacks.remove(self)
            summarize(callbacks)
            callbacks.insert(0, self)
        self._bound = True
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the model and the optimizer, and reads the schedule.

        Raises:
            ValueError: no converted layer, an optimizer that does not own their parameters,
                parameters of several dtypes in one FSDP2 unit, a checkpoint of another scheme, or
                a refresh interval where no weight is stored split.
            NotImplementedError: refresh under an engine that keeps its own copy of the weights,
                accelerate's FP8, context or sequence parallelism, or measurements under tensor
                parallelism.
        """
        assert model is not None
        self._model = model
        self._layers = dict(metis_layers(model))
        if not self._layers:
            raise ValueError(
                "MetisCallback found no converted layer in the model. Call "
                "get_metis_model(model, MetisConfig(...)) before you build the Trainer"
            )
        super().on_train_begin(args, state, control, model=model)
        release(model)  # of a run that was interrupted in the middle of a step
        self._probe.detach()
        # With one micro-batch a weight is used twice, and putting it together twice saves nothing.
        self._reuses_weights = args.gradient_accumulation_steps > 1 or any(
            getattr(module, "gradient_checkpointing", False) for module in model.modules()
        )
        if optimizer is not None:
            _check_optimizer(self._layers, optimizer)
        _check_dtypes(model)
        if args.logging_nan_inf_filter:
            logger.info("logging_nan_inf_filter switched off: a NaN loss must show in the logs")
            args.logging_nan_inf_filter = False
        self._refresh_every = self.refresh_interval
        if self._refresh_every is None:
            self._refresh_every = next(iter(self._layers.values())).config.refresh_interval
        if self._refresh_every:
            check_split(model, f"refresh_interval={self._refresh_every}")
            check_engine(model, f"refresh_interval={self._refresh_every}")
        check_states(model)
        _check_precision()
        check_accelerate()
        if self.health_interval and any(m.shards and m.shards.cut for m in self._layers.values()):
            raise NotImplementedError(
                f"health_interval={self.health_interval} under tensor parallelism, where each "
                "process sees a part of a layer's tensors. Pass MetisCallback(health_interval=0)"
            )
        if self.freeze_scales is not None and not has_static_scales(model):
            raise ValueError(
                f"freeze_scales={self.freeze_scales}, and no layer of the model has static tensor "
                'scales; convert it with scheme "w4a4" or "w4a16", or leave freeze_scales out'
            )
        self._freeze_at, self._unseen = self._first_step_to_freeze(model, state), None
        self._warn_of_reporters(args)
        if args.torch_compile:
            logger.warning(
                "torch_compile: the first steps take minutes and show nothing, since torch.compile "
                "traces all operations of %d quantized layers into one graph. Without it their "
                "quantizers are compiled too, once for all layers",
                len(self._layers),
            )
        self._precision = precision_of(next(iter(self._layers.values())))
        if state.is_world_process_zero:
            drop_after(_directory(args), state.global_step)
            config = None if self.trained_config is None else dict(self.trained_config)
            write_run(_directory(args), describe_run(model, config, args, state.max_steps))

    def _first_step_to_freeze(self, model: nn.Module, state: TrainerState) -> int | None:
        """Return the step after which scales are fixed; None where nothing is left to do."""
        wanted = self.freeze_scales
        if wanted is None:
            return None
        if wanted > state.max_steps:
            raise ValueError(
                f"freeze_scales={wanted} of {state.max_steps} steps: scales would never be fixed; "
                "choose a step of the run"
            )
        if wanted > state.global_step:
            return wanted
        return None if scales_are_fixed(model) else state.global_step + 1  # a resumed run

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        if self._reuses_weights:
            hold(self._model)
        step = state.global_step + 1
        due = self.health_interval and (step == 1 or step % self.health_interval == 0)
        if due or self._alarm:
            self._alarm = False
            self._measuring = True
            self._probe.attach(self._layers)

    def on_pre_optimizer_step(self, args, state, control, **kwargs: Any) -> None:
        release(self._model)

    def on_step_end(
        self, args, state, control, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        # Here the gradients are gone, and logging, evaluation and saving come after: what they
        # see is consistent. Nothing accumulated refers to the old factors.
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
        precision = precision_of(next(iter(self._layers.values())))
        if precision != self._precision:
            self._precision = self._record["switch"] = precision
        if self._record and state.is_world_process_zero:
            append_record(_directory(args), state.global_step, self._record)
        self._record = {}

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self._probe.detach()
        asked = self.freeze_scales is not None and state.global_step >= self.freeze_scales
        if asked and not scales_are_fixed(self._model) and state.is_world_process_zero:
            logger.warning(
                "freeze_scales=%s, and the run ends with a model whose scales are not fixed: %s. "
                "Call metis_hf.calibrate or freeze_scales before it is exported",
                self.freeze_scales,
                self._unseen or "it is a checkpoint of before",
            )

    def on_log(
        self, args, state, control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add what was measured to the log entry of the running step, and records the entry."""
        if logs and "loss" in logs:
            self._complete(state, logs)
        if logs and state.log_history and state.is_world_process_zero:
            append_log(_directory(args), state.log_history[-1])

    def _freeze(self, state: TrainerState) -> None:
        """Fix the scales; where a layer has seen no input yet, say so once and wait."""
        try:
            freeze_scales(self._model)
        except UnseenLayers as error:
            if self._unseen is None and state.is_world_process_zero:
                logger.warning(
                    "freeze_scales=%s waits, and tries again after each step: %s",
                    self.freeze_scales,
                    error,
                )
            self._unseen = str(error)
        else:
            self._freeze_at = self._unseen = None

    def _complete(self, state: TrainerState, logs: dict[str, float]) -> None:
        """Add what was measured to a log entry; after a loss of NaN, ask for a measurement."""
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "grad_norm")):
            self._alarm = bool(self.health_interval)
            logger.warning(
                "step %d: loss %s, grad_norm %s; %s",
                state.global_step,
                logs.get("loss"),
                logs.get("grad_norm"),
                "the next step is measured to name the layer"
                if self._alarm
                else "health_interval=0 measures no step that would name the layer",
            )
        if self._pending:
            logs.update(self._pending if self._bound else summary(self._pending))
            state.log_history[-1].update(self._pending)
            self._pending = {}

    def _warn_of_reporters(self, args: TrainingArguments) -> None:
        reporters = [name for name in args.report_to or () if name != "none"]
        if reporters and self.health_interval and not self._bound:
            logger.warning(
                "%s: Trainer calls its reporters before this callback, so spectral health reaches "
                "the console, log_history and %s only. Use MetisTrainer, or callback.bind(trainer)",
                ", ".join(reporters),
                HEALTH_FILE,
            )

    def _refresh(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refresh, and note what changed where health is recorded at all."""
        layers = {name: m for name, m in self._layers.items() if m.weight_form.is_split}
        measured = layers if self.health_interval else {}
        before = {name: split_health(layer) for name, layer in measured.items()}
        drifts = refresh(self._model, optimizer)
        if drifts:
            self._pending["metis/refresh_drift"] = max(drifts.values())
        if measured:
            self._record["refresh"] = {
                name: {"before": before[name], "after": split_health(layer)}
                for name, layer in measured.items()
            }

    def _collect(self, state: TrainerState) -> None:
        per_layer = self._probe.stats
        for name, layer in self._layers.items():
            per_layer[name]["weight"] = weight_health(layer, self._probe.states.get(name))
        bad = nonfinite_layers(per_layer)
        if bad:
            shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            logger.warning("step %d: NaN or inf in %s", state.global_step, shown)
        means = group_means(per_layer) | noise_ratios(self._probe.noise)
        self._pending.update({f"metis/{name}": value for name, value in means.items()})
        self._pending["metis/nonfinite_tensors"] = float(len(bad))
        self._record["layers"] = per_layer
        if self._probe.noise:
            self._record["noise"] = self._probe.noise


def _directory(args: TrainingArguments) -> Path:
    assert args.output_dir is not None  # Trainer fills it in
    return Path(args.output_dir)


def _check_optimizer(layers: dict[str, MetisLayer], optimizer: torch.optim.Optimizer) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    # DeepSpeed's optimizers step flat copies, and keep the model's parameters in these lists.
    inner = getattr(optimizer, "optimizer", optimizer)
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(inner, name, groups)
    owned = {id(param) for group in groups for param in group}
    for name, layer in layers.items():
        for key, param in layer.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in owned:
                raise ValueError(
                    f"the optimizer does not own {name}.{key}, which has requires_grad=True. If "
                    "the model was converted after the optimizer was built, call get_metis_model "
                    "first (or let Trainer build the optimizer). If the optimizer is to train a "
                    "part of the model, freeze the rest: parameter.requires_grad_(False)"
                )


def _check_precision() -> None:
    """Refuse accelerate's FP8, which puts other layers and other scales under the same model."""
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision == "fp8":
        raise NotImplementedError(
            "accelerate runs with mixed_precision=fp8, which quantizes linear layers itself, and "
            "the model's are converted: they quantize as their scheme says. Choose bf16 or no "
            "(accelerate config, or --mixed_precision bf16), or train the plain model"
        )


def _check_dtypes(model: nn.Module) -> None:
    """FSDP2 gathers the parameters of a unit together, and only of one dtype."""
    units: dict[int, tuple[str, str, torch.dtype]] = {}  # parameter -> unit, name, dtype
    for unit, module in model.named_modules():
        params = module.named_parameters(unit)
        if isinstance(module, FSDPModule):  # inner units come later, and own their parameters
            for name, param in params:
                if param.requires_grad:
                    units[id(param)] = unit or type(model).__name__, name, param.dtype
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    for unit, name, dtype in units.values():
        dtypes.setdefault(unit, {}).setdefault(dtype, name)
    for unit, found in dtypes.items():
        if len(found) > 1:
            shown = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
            raise ValueError(
                f"FSDP2 needs one dtype for all trainable parameters of {unit}, and {shown}. Load "
                "the model with dtype=torch.float32 (or call model.float()) before the Trainer is "
                "built, and train with bf16=True if the GEMMs are to run in BF16"
            )
