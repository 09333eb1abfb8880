"""High precision in a part of a training, switched on a schedule."""

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
    BF16 towards the end closes most of the gap to BF16. Saved checkpoints carry the switch; a
    resumed run makes it again at the right step.

    Args:
        at: the step, or the share of all steps if below 1, from which on the passes run
            unquantized; None: they are quantized to the end. 0.9 if nothing else is given.
        high_precision: the passes that are switched: any of "forward", "backward". A pass that is
            not named stays as the model's config has it.
        until: the step, or the share of all steps if below 1, before which they run unquantized
            too; None: they are quantized from the start.
        between: two of these, from which on and before which they run unquantized too.

    Raises:
        ValueError: no positive share or whole step, `between` is no two of them, or no such pass.
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
            raise ValueError(f"between={between!r}; expected the earlier of the two first")
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
        """Return whether the optimizer step after `step` others runs in higher precision.

        Raises:
            ValueError: two of the parts leave no step of this run quantized between them.
        """
        parts = self._parts(max_steps)
        covered = 0
        for first, last in sorted(parts.values()):
            covered = max(covered, last) if first <= covered else covered
        # A first part that alone is longer than the run is warned of: shorter trials have it.
        alone = "until" in parts and parts["until"][1] >= max_steps
        alone = alone and ("at" not in parts or parts["until"][1] < parts["at"][0])
        if len(parts) > 1 and covered >= max_steps and not alone:
            said = " and ".join(f"{name}={getattr(self, name)}" for name in parts)
            raise ValueError(
                f"{said} of {max_steps} steps leave no step "
                "quantized; switch to four bits before switching back"
            )
        return any(first <= step < last for first, last in parts.values())

    def _parts(self, max_steps: int) -> dict[str, tuple[int, int]]:
        """Return the first step of each part, and the first behind it."""
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
        """Take up the precision of the last step, and warn of a switch that is never made.

        A run that is resumed at its end makes no step more, and one with `eval_on_start` evaluates
        before the first: both are to evaluate and save in the precision of the step before.
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
                effect = "so that no step is quantized"
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
        """Give the weights of the best checkpoint, where Trainer has loaded it, its precision."""
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
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None
        self._take_up(model, state, state.global_step)

    def _take_up(self, model: nn.Module, state: Any, step: int) -> None:
        """Compute in the precision of the optimizer step after `step` others."""
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
    """Return the config of the layers of a checkpoint, which is one of a model or of adapters."""
    for name, key in ((CONFIG_NAME, "quantization_config"), (ADAPTER_CONFIG_NAME, "metis_config")):
        if (checkpoint / name).is_file():
            return read_json(checkpoint / name).get(key)
    if (checkpoint / STATE_FILE).is_file():  # alone beside the shards of FSDP2
        return trained_config(read_json(checkpoint / STATE_FILE).get("stateful_callbacks", {}))
    return None


def _switch(model: nn.Module, wanted: Sequence[str], state: Any, when: str) -> None:
    """Compute these passes, and no others, in high precision from now on, and log it once."""
    set_precision(model, high_precision=wanted)
    if state.is_world_process_zero:
        logger.info("%s: high precision in %s", when, wanted or "no pass")


def _steps(place: float, max_steps: int) -> int:
    """Return the number of optimizer steps before a step or a share of all steps."""
    return round(place * max_steps) if place < 1 else int(place)
