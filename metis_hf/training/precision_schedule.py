"""Switches parts of a training to higher precision on a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from metis_hf.config import PASSES, MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.shared.checkpoints import STATE_FILE
from metis_hf.shared.records import read_json
from metis_hf.training.precision import set_precision
from metis_hf.training.resume import trained_config

logger = logging.get_logger(__name__)


class PrecisionSchedule(TrainerCallback):
    """Runs the first, the last or a middle part of a training in higher precision.

    NVIDIA's report on NVFP4 pretraining (arXiv 2509.25149) finds that switching the forward pass to
    BF16 towards the end closes most of the gap to BF16. Checkpoints record the precision; a resumed
    run switches at the same step.

    Args:
        at: first step of an unquantized last part, or its share of all steps if below 1; None: no
            such part. 0.9 if neither `until` nor `between` is given.
        high_precision: the passes to switch: any of "forward", "backward". Other passes stay as in
            the model's config.
        until: first step after an unquantized first part, or a share; None: no such part.
        between: two steps or shares: start and end of an unquantized middle part.

    Raises:
        ValueError: a step or share is not positive or a step is not whole, `between` is not a pair
            in order, or a pass is unknown.
    """

    def __init__(
        self,
        at: float | None = None,
        high_precision: Sequence[str] = ("forward",),
        until: float | None = None,
        between: Sequence[float] | None = None,
    ) -> None:
        if between is not None and (not isinstance(between, list | tuple) or len(between) != 2):
            raise ValueError(f"between={between!r}; expected two steps, or shares of the steps")
        for name, places in (("at", (at,)), ("until", (until,)), ("between", between or ())):
            for value in places:
                if value is not None and (value <= 0 or (value >= 1 and value != int(value))):
                    raise ValueError(
                        f"{name}={value}; expected a step >= 1 or a share of the steps below 1"
                    )
        if (
            between is not None
            and between[0] >= between[1]
            and (between[0] < 1) == (between[1] < 1)
        ):
            raise ValueError(f"between={between!r}; expected the earlier step first")
        if at is None and until is None and between is None:
            at = 0.9
        if isinstance(high_precision, str) or not set(high_precision) & set(PASSES):
            raise ValueError(f"high_precision={high_precision!r}; expected a list of {PASSES}")
        MetisConfig(high_precision=tuple(high_precision))  # refuses unknown names
        self.at = at
        self.until = until
        self.between = None if between is None else tuple(between)
        self.high_precision = tuple(high_precision)

    def is_high(self, step: int, max_steps: int) -> bool:
        """Return whether optimizer step `step`, counted from 0, runs in higher precision.

        Raises:
            ValueError: the parts together leave no step of this run quantized.
        """
        parts = self._parts(max_steps)
        covered = 0
        for first, last in sorted(parts.values()):
            covered = max(covered, last) if first <= covered else covered
        # If `until` alone covers the run, only warn: short trial runs do that.
        alone = "until" in parts and parts["until"][1] >= max_steps
        alone = alone and ("at" not in parts or parts["until"][1] < parts["at"][0])
        if len(parts) > 1 and covered >= max_steps and not alone:
            said = " and ".join(f"{name}={getattr(self, name)}" for name in parts)
            raise ValueError(
                f"{said} leave none of {max_steps} steps quantized; switch to four bits before "
                "switching back"
            )
        return any(first <= step < last for first, last in parts.values())

    def _parts(self, max_steps: int) -> dict[str, tuple[int, int]]:
        """Return (first step, first step after the part) for each part."""
        parts = {}
        if self.until is not None:
            parts["until"] = 0, _steps(self.until, max_steps)
        if self.between is not None:
            first, last = (_steps(place, max_steps) for place in self.between)
            parts["between"] = first, last
        if self.at is not None:
            parts["at"] = _steps(self.at, max_steps), max_steps
        return parts

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Set the precision of the last step taken, and warn about switches that never happen.

        A run that is resumed at its end takes no further step, and `eval_on_start` evaluates before
        the first: both must evaluate and save in the precision of the previous step.
        """
        if state.global_step or args.eval_on_start:
            self._take_up(kwargs["model"], state, max(state.global_step - 1, 0))
        if not state.is_world_process_zero:
            return
        steps = state.max_steps
        for name, (first, last) in self._parts(steps).items():
            if first >= min(last, steps):
                effect = "so it never switches to higher precision"
            elif first == 0 and last >= steps:
                effect = "so no step is quantized"
            else:
                continue
            logger.warning(
                "PrecisionSchedule(%s=%s): this run ends after %d steps, %s; choose other steps, "
                "or shares below 1",
                name,
                getattr(self, name),
                steps,
                effect,
            )

    def on_train_end(
        self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Set the precision of the best checkpoint, if Trainer has loaded it."""
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        model = kwargs["model"]
        recorded = _recorded(Path(state.best_model_checkpoint))
        _, layer = next(metis_layers(model), (None, None))
        if layer is None:
            return
        if recorded is None:
            self._take_up(model, state, max(state.best_global_step - 1, 0))
            return
        wanted = tuple(recorded.get("high_precision") or ())
        if wanted != layer.config.high_precision:
            _switch(model, wanted, state, "best checkpoint")

    def on_step_begin(
        self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self._take_up(kwargs["model"], state, state.global_step)

    def _take_up(self, model: nn.Module, state: Any, step: int) -> None:
        """Switch to the precision of optimizer step `step`, counted from 0."""
        _, layer = next(metis_layers(model), (None, None))
        if layer is None:
            raise ValueError(
                "PrecisionSchedule found no converted layer; call get_metis_model first"
            )
        now = layer.config.high_precision
        on = set(now) - set(self.high_precision)
        if self.is_high(step, state.max_steps):
            on |= set(self.high_precision)
        if on != set(now):
            wanted = tuple(name for name in PASSES if name in on)
            _switch(model, wanted, state, f"step {step}")


def _recorded(checkpoint: Path) -> dict[str, Any] | None:
    """Return the MetisConfig in a checkpoint of a model or of adapters, or None."""
    for name, key in ((CONFIG_NAME, "quantization_config"), (ADAPTER_CONFIG_NAME, "metis_config")):
        if (checkpoint / name).is_file():
            return read_json(checkpoint / name).get(key)
    if (checkpoint / STATE_FILE).is_file():  # FSDP2 shards have no config.json
        return trained_config(read_json(checkpoint / STATE_FILE).get("stateful_callbacks", {}))
    return None


def _switch(model: nn.Module, wanted: Sequence[str], state: Any, when: str) -> None:
    """Run exactly these passes in high precision from now on, and log the switch."""
    set_precision(model, high_precision=wanted)
    if state.is_world_process_zero:
        logger.info("%s: high precision in %s", when, wanted or "no pass")


def _steps(place: float, max_steps: int) -> int:
    """Return a step, or a share of all steps, as a step number."""
    return round(place * max_steps) if place < 1 else int(place)
