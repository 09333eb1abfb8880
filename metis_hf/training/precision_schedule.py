"""Changing the scheme of a converted model while it lives, by hand or on a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from metis_hf.config import PASSES, MetisConfig
from metis_hf.conversion.attention import attention_products, select_attention, set_attention
from metis_hf.conversion.convert import metis_layers, owners
from metis_hf.conversion.report import LayerReport
from metis_hf.layers.attention import AttentionProducts
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.native import why_emulated
from metis_hf.schemes.states import LayerState
from metis_hf.shared.checkpoints import STATE_FILE
from metis_hf.shared.records import read_json
from metis_hf.training.resume import trained_config

logger = logging.get_logger(__name__)

# Fields that say how to compute. The others say which parameters there are, or key the noise.
CHANGEABLE = (
    "scheme",
    "scheme_pattern",
    "sample_frac",
    "oversample",
    "n_iter",
    "operand_mode",
    "format",
    "forward_rounding",
    "backward_rounding",
    "scale_rounding",
    "high_precision",
    "attention",
    "two_level",
    "outer_scale",
    "refresh_interval",
)


def set_precision(model: nn.Module, **changes: Any) -> None:
    """Change how the layers of a converted model compute; its parameters stay as they are.

    So do the products of its attention, which `attention=...` quantizes, and None gives back.

    The model's config and its `metis_report` change with it, so a checkpoint saved afterwards loads
    as the model is now.

    What a scheme has noted of a layer's inputs and weight, such as calibrated scales, goes where
    the new scheme keeps no such; a warning names it. The scheme before then starts afresh when it
    comes back.

    Args:
        model: converted by `get_metis_model`.
        changes: fields of `MetisConfig`: `high_precision=("forward",)`, `forward_rounding=...`,
            `scheme="nvidia"`; see `CHANGEABLE`.

    Raises:
        ValueError: no converted layer, a field that cannot change, a scheme that stores weights in
            another form, or one that attention does not take; nothing changes.
    """
    layers = _converted(model)
    fixed = [name for name in changes if name not in CHANGEABLE]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} cannot change after conversion; these can: {', '.join(CHANGEABLE)}"
        )
    configs = {name: layer.config.replace(**changes) for name, layer in layers.items()}
    _check_patterns(next(iter(layers.values())).config, changes)
    for name, layer in layers.items():
        _check_form(name, layer, configs[name])
    parts = [_Part.of(owner, changes) for owner in owners(model) if any(metis_layers(owner))]
    before = {n: (layer.scheme.state, layer.state_buffers()) for n, layer in layers.items()}
    for name, layer in layers.items():
        layer.set_config(configs[name])
    _warn_of_lost({n: _lost(layer, *before[n]) for n, layer in layers.items()}, layers)
    for part in parts:
        part.change(changes)
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if recorded := getattr(adapter, "metis_config", None):  # what it is trained over
            adapter.metis_config = MetisConfig.from_dict(recorded).replace(**changes).to_dict()


@contextlib.contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Run all converted layers of a model, and its attention, unquantized inside the block.

        with high_precision(model), torch.no_grad():
            exact = model(**batch).logits

    The layers compute as those that `to_dense` makes do, bit for bit. Their configs, buffers and
    noise stay as they are, so that training goes on as if the block had not been; a layer whose
    precision is changed inside by `set_precision` keeps that change. Backward passes through
    activations that are recomputed belong inside too. For a switch that checkpoints carry see
    `set_precision`.

    Raises:
        ValueError: no converted layer.
    """
    layers: list[MetisLayer | AttentionProducts] = list(_converted(model).values())
    layers += [products for _, products in attention_products(model)]
    before = [(layer, layer.scheme, layer.eval_scheme) for layer in layers]
    exact = [layer.scheme.in_high_precision(PASSES) for layer in layers]
    for layer, scheme in zip(layers, exact):
        layer.scheme = layer.eval_scheme = scheme
    try:
        yield
    finally:
        for (layer, *schemes), scheme in zip(before, exact):
            if layer.scheme is scheme:
                layer.scheme, layer.eval_scheme = schemes


def _converted(model: nn.Module) -> dict[str, MetisLayer]:
    """Return the converted layers by name; a model without any is refused."""
    layers = dict(metis_layers(model))
    if not layers:
        raise ValueError("the model has no Metis layer; call get_metis_model first")
    return layers


def _lost(layer: MetisLayer, state: LayerState | None, buffers: dict[str, Tensor]) -> set[str]:
    """Return the names of buffers that a layer has no more, and that were not as at first."""
    gone = buffers.keys() - set(layer.state_names)
    if state is None or not gone:
        return set()
    with torch.device(next(iter(buffers.values())).device):
        initial = state.initial(layer.in_features, layer.out_features)
    return {name for name in gone if not torch.equal(buffers[name], initial[name])}


def _warn_of_lost(lost: dict[str, set[str]], layers: dict[str, MetisLayer]) -> None:
    """Name what a change of schemes has taken from layers."""
    names = [name for name, buffers in lost.items() if buffers]
    if not names:
        return
    buffers = set().union(*lost.values())
    again = "; calibrate again if you go back" if "scales_frozen" in buffers else ""
    logger.warning(
        "scheme %r keeps no %s, so what %d layers had of that is lost (%s first)%s",
        layers[names[0]].config.scheme,
        ", ".join(sorted(buffers)),
        len(names),
        names[0],
        again,
    )


class _Part(NamedTuple):
    """A converted model, which may be a part of another, and what its attention is to take."""

    owner: Any
    layers: dict[str, MetisLayer]
    attention: MetisConfig
    attending: tuple[str, ...]

    @classmethod
    def of(cls, owner: nn.Module, changes: dict[str, Any]) -> _Part:
        """Return a part before the change; see `select_attention` for what it raises."""
        layers = dict(metis_layers(owner))
        config = next(iter(layers.values())).config.replace(**changes)
        return cls(owner, layers, config, select_attention(owner, config, tuple(layers)))

    def change(self, changes: dict[str, Any]) -> None:
        """Let attention, config and report be as the layers are now."""
        set_attention(self.owner, self.attention, self.attending)
        config = getattr(getattr(self.owner, "config", None), "quantization_config", None)
        if config is not None:
            self.owner.config.quantization_config = config.replace(**changes)
        if "metis_report" in vars(self.owner):
            _update_report(self.owner, self.layers, changes, self.attending)


def _update_report(
    owner: Any, layers: dict[str, MetisLayer], changes: dict[str, Any], attending: tuple[str, ...]
) -> None:
    """Let a model's report say how its layers compute now."""
    by_name = {layer.name: layer for layer in layers.values()}  # without what PEFT puts around
    report = owner.metis_report
    rows = [
        _as_it_is(row, by_name[row.name]) if row.name in by_name else row for row in report.layers
    ]
    report = replace(report, layers=tuple(rows))
    if "scheme" in changes:
        report = replace(report, scheme=changes["scheme"])
    if "attention" in changes:
        report = replace(report, attention=changes["attention"], attention_modules=attending)
    owner.metis_report = report


def _as_it_is(row: LayerReport, layer: MetisLayer) -> LayerReport:
    """Return what the report says of a layer, as it computes now."""
    scheme, config = layer.scheme, layer.config
    emulated = why_emulated(config, scheme, layer.weight_params()[-1].device)
    asks = config.backend != "emulated" and not scheme.is_high_precision
    return replace(
        row,
        scheme=config.scheme,
        rank=scheme.rank if scheme.splits else None,
        bits_per_weight=scheme.weight_bits(layer.out_features, layer.in_features),
        native=asks and emulated is None,
        emulated=emulated,
    )


def _check_patterns(config: MetisConfig, changes: dict[str, Any]) -> None:
    """Refuse new patterns; one scheme for all layers, or the schemes that there are."""
    if changes.get("scheme_pattern"):
        raise ValueError(
            "scheme_pattern can only be emptied (scheme_pattern={}, with a scheme for all layers): "
            "which layer had which scheme is decided by the conversion"
        )
    if ("scheme" in changes) != ("scheme_pattern" in changes) and config.scheme_pattern:
        raise ValueError(
            f"the model has scheme_pattern={dict(config.scheme_pattern)}: give both scheme=... and "
            "scheme_pattern={} to set one scheme for all layers, or neither"
        )


def _check_form(name: str, layer: MetisLayer, config: MetisConfig) -> None:
    """Refuse a scheme for which a checkpoint of the stored parameters could not be loaded."""
    try:
        layer.check_config(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; nothing was changed") from error


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
