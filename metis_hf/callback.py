"""MetisCallback: what a quantized run needs from Trainer besides the training itself.

At the start it checks that the optimizer owns the model's split weights. Every `refresh_interval`
steps it decomposes the weights anew; every `health_interval` steps it measures spectral health and
puts the means into Trainer's own logs and the figures of each layer into `metis_health.jsonl`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from metis_hf.health import LayerProbe, group_means, nonfinite_layers, weight_health
from metis_hf.linear import MetisLayer, MetisLinear
from metis_hf.model import metis_layers

logger = logging.get_logger(__name__)

HEALTH_FILE = "metis_health.jsonl"


class MetisCallback(TrainerCallback):
    """Refreshes weight decompositions and logs spectral health; pass the class or an instance.

    Args:
        health_interval: optimizer steps between measurements; 0 never measures. A measured step
            takes a few times as long as a normal one.
        refresh_interval: optimizer steps between re-decompositions of split weights; None takes
            the model config's `refresh_interval`, 0 never refreshes.
    """

    def __init__(self, health_interval: int = 100, refresh_interval: int | None = None) -> None:
        for name, value in (
            ("health_interval", health_interval),
            ("refresh_interval", refresh_interval),
        ):
            if value is not None and value < 0:
                raise ValueError(f"{name}={value}; expected a number of steps >= 0")
        self.health_interval = health_interval
        self.refresh_interval = refresh_interval
        self._layers: dict[str, MetisLayer] = {}
        self._probe = LayerProbe()
        self._refresh_every: int | None = 0
        self._measuring = False
        self._alarm = False  # a logged loss or gradient norm was not finite
        self._pending: dict[str, float] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks the model and the optimizer, and reads the schedule.

        Raises:
            ValueError: no converted layer, or an optimizer that does not own their parameters.
            NotImplementedError: refresh in several processes.
        """
        assert model is not None
        self._layers = dict(metis_layers(model))
        if not self._layers:
            raise ValueError(
                "MetisCallback found no converted layer in the model. Call "
                "get_metis_model(model, MetisConfig(...)) before you build the Trainer"
            )
        if optimizer is not None:
            _check_optimizer(self._layers, optimizer)
        if args.logging_nan_inf_filter:
            logger.info("logging_nan_inf_filter switched off: a NaN loss must show in the logs")
            args.logging_nan_inf_filter = False
        self._refresh_every = self.refresh_interval
        if self._refresh_every is None:
            self._refresh_every = next(iter(self._layers.values())).config.refresh_interval
        if self._refresh_every and args.world_size > 1:
            raise NotImplementedError(
                f"refresh_interval={self._refresh_every} with {args.world_size} processes: weights "
                "are refreshed in a single process only; set refresh_interval=0"
            )
        if state.is_world_process_zero and self.health_interval:
            _drop_after(_health_path(args), state.global_step)

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        step = state.global_step + 1
        due = self.health_interval and (step == 1 or step % self.health_interval == 0)
        if due or self._alarm:
            self._alarm = False
            self._measuring = True
            self._probe.attach(self._layers)

    def on_step_end(
        self, args, state, control, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        # Here the gradients are gone, and logging, evaluation and saving come after: what they
        # see is consistent. Nothing accumulated refers to the old factors.
        if self._refresh_every and state.global_step % self._refresh_every == 0:
            drifts = self._refresh(optimizer)
            if drifts:
                self._pending["metis/refresh_drift"] = max(drifts)
        if self._measuring:
            self._measuring = False
            self._probe.detach()
            self._collect(args, state)

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self._probe.detach()

    def on_log(
        self, args, state, control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Adds what was measured to the log entry of the running step."""
        if not logs or "loss" not in logs:
            return
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "grad_norm")):
            self._alarm = True
            logger.warning(
                "step %d: loss %s, grad_norm %s; the next step is measured to name the layer",
                state.global_step,
                logs.get("loss"),
                logs.get("grad_norm"),
            )
        if self._pending:
            logs.update(self._pending)
            state.log_history[-1].update(self._pending)
            self._pending = {}

    def _collect(self, args: TrainingArguments, state: TrainerState) -> None:
        per_layer = self._probe.stats
        for name, layer in self._layers.items():
            per_layer[name]["weight"] = weight_health(layer)
        bad = nonfinite_layers(per_layer)
        if bad:
            shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            logger.warning("step %d: NaN or inf in %s", state.global_step, shown)
        means = {f"metis/{name}": value for name, value in group_means(per_layer).items()}
        self._pending.update(means)
        self._pending["metis/nonfinite_tensors"] = float(len(bad))
        if state.is_world_process_zero:
            path = _health_path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, "layers": per_layer}) + "\n")

    def _refresh(self, optimizer: torch.optim.Optimizer | None) -> list[float]:
        """Decomposes every split weight anew; returns the relative drift of each.

        The residual's gradient is dL/dW itself, so its moments stay valid. Those of u, s and vh
        belong to the old factors and are cleared in place, the step count with them, so that the
        optimizer's state keeps its keys and Adam's bias correction starts anew.
        """
        drifts = []
        for layer in self._layers.values():
            if not isinstance(layer, MetisLinear):
                continue
            drifts.append(layer.refresh())
            for param in (layer.u, layer.s, layer.vh):
                for value in (optimizer.state.get(param) or {}).values() if optimizer else ():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        return drifts


def _health_path(args: TrainingArguments) -> Path:
    assert args.output_dir is not None  # Trainer fills it in
    return Path(args.output_dir) / HEALTH_FILE


def _check_optimizer(layers: dict[str, MetisLayer], optimizer: torch.optim.Optimizer) -> None:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, layer in layers.items():
        for key, param in layer.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in owned:
                raise ValueError(
                    f"the optimizer does not own {name}.{key}: the model was converted after the "
                    "optimizer was built. Call get_metis_model first, then build the optimizer "
                    "(or let Trainer build it)"
                )


def _drop_after(path: Path, step: int) -> None:
    """Removes records after `step`, which a resumed run writes again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
    path.write_text("".join(line + "\n" for line in lines))
