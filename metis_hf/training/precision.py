"""Changes the precision of a converted model; `precision_schedule` does so during training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from metis_hf.config import PASSES, MetisConfig
from metis_hf.conversion.attention import attention_products, select_attention, set_attention
from metis_hf.conversion.convert import metis_layers, owners
from metis_hf.conversion.report import precision_fields
from metis_hf.layers.attention import AttentionProducts
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes.states import LayerState

logger = logging.get_logger(__name__)

# Fields that affect only computation. The others determine the parameters or key the noise.
CHANGEABLE = (
    "scheme",
    "scheme_pattern",
    "sample_frac",
    "n_iter",
    "subspace_interval",
    "subspace_refinements",
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
    """Change how the layers of a converted model compute, without changing its parameters.

    `attention=...` quantizes the attention products; `attention=None` reverts that.

    The model's config and `metis_report` are updated too, so a checkpoint saved afterwards loads
    with the new precision.

    State that the new scheme does not have, such as calibrated scales, is lost with a warning; a
    switch back then starts with fresh state.

    Args:
        model: converted by `get_metis_model`.
        changes: fields of `MetisConfig`: `high_precision=("forward",)`, `forward_rounding=...`,
            `scheme="nvidia"`; see `CHANGEABLE`.

    Raises:
        ValueError: no converted layer, a field that cannot change, a scheme that stores weights in
            another form, or a scheme that does not apply to attention; nothing changes.
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
        try:
            layer.check_config(configs[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}; nothing was changed") from error
    parts = []
    for owner in owners(model):
        if own := dict(metis_layers(owner)):
            config = next(iter(own.values())).config.replace(**changes)
            parts.append((owner, config, select_attention(owner, config, tuple(own))))
    before = {n: (layer.scheme.state, layer.state_buffers()) for n, layer in layers.items()}
    for name, layer in layers.items():
        layer.set_config(configs[name])
    _warn_of_lost({n: _lost(layer, *before[n]) for n, layer in layers.items()}, layers)
    for owner, config, attending in parts:
        _follow(owner, changes, config, attending)
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if recorded := getattr(adapter, "metis_config", None):  # config of the base
            adapter.metis_config = MetisConfig.from_dict(recorded).replace(**changes).to_dict()


@contextlib.contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Run the converted layers and attention of a model unquantized inside the block.

        with high_precision(model), torch.no_grad():
            exact = model(**batch).logits

    The layers compute bit for bit like the layers that `to_dense` makes. Their configs, buffers and
    noise are unchanged, so training continues as if without the block; a change inside the block by
    `set_precision` persists. With activation checkpointing, run the backward pass inside the block
    too. For a switch that is saved in checkpoints see `set_precision`.

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
    """Return the converted layers by name; raise ValueError if there are none."""
    layers = dict(metis_layers(model))
    if not layers:
        raise ValueError("the model has no Metis layer; call get_metis_model first")
    return layers


def _lost(layer: MetisLayer, state: LayerState | None, buffers: dict[str, Tensor]) -> set[str]:
    """Return the names of buffers that the layer lost and whose values were not initial."""
    gone = buffers.keys() - set(layer.state_names)
    if state is None or not gone:
        return set()
    with torch.device(next(iter(buffers.values())).device):
        initial = state.initial(layer.in_features, layer.out_features)
    return {name for name in gone if not torch.equal(buffers[name], initial[name])}


def _warn_of_lost(lost: dict[str, set[str]], layers: dict[str, MetisLayer]) -> None:
    """Warn about the buffers that layers lost in a change of schemes."""
    names = [name for name, buffers in lost.items() if buffers]
    if not names:
        return
    buffers = set().union(*lost.values())
    again = "; calibrate again if you switch back" if "scales_frozen" in buffers else ""
    logger.warning(
        "scheme %r does not keep %s, so %d layers lost their values (the first is %s)%s",
        layers[names[0]].config.scheme,
        ", ".join(sorted(buffers)),
        len(names),
        names[0],
        again,
    )


def _follow(
    owner: Any, changes: dict[str, Any], attention: MetisConfig, attending: tuple[str, ...]
) -> None:
    """Update attention, config and report of a converted model after its layers changed."""
    set_attention(owner, attention, attending)
    config = getattr(getattr(owner, "config", None), "quantization_config", None)
    if config is not None:
        owner.config.quantization_config = config.replace(**changes)
    if "metis_report" not in vars(owner):
        return
    by_name = {layer.name: layer for _, layer in metis_layers(owner)}  # no PEFT prefix
    report = owner.metis_report
    rows = [
        replace(row, **precision_fields(by_name[row.name])) if row.name in by_name else row
        for row in report.layers
    ]
    report = replace(report, layers=tuple(rows))
    if "scheme" in changes:
        report = replace(report, scheme=changes["scheme"])
    if "attention" in changes:
        report = replace(report, attention=changes["attention"], attention_modules=attending)
    owner.metis_report = report


def _check_patterns(config: MetisConfig, changes: dict[str, Any]) -> None:
    """Refuse new scheme patterns, and a change of `scheme` that keeps existing patterns."""
    if changes.get("scheme_pattern"):
        raise ValueError(
            "after conversion, scheme_pattern can only be emptied (scheme_pattern={}, with a "
            "scheme for all layers), because conversion decides which layer gets which scheme"
        )
    if ("scheme" in changes) != ("scheme_pattern" in changes) and config.scheme_pattern:
        raise ValueError(
            f"the model has scheme_pattern={dict(config.scheme_pattern)}: give both scheme=... and "
            "scheme_pattern={} to set one scheme for all layers, or give neither"
        )
