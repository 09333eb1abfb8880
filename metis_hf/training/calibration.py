"""Calibration of static tensor scales for deployed NVFP4 models.

For layers whose scheme has `StaticScales`, such as "w4a4". `calibrate` finds the scales on data and
fixes them; `freeze_scales` fixes the scales observed in training so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.deployed import deployed_groups, input_groups
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.parallelism import is_sharded
from metis_hf.layers.sharding import whole_params
from metis_hf.numerics import Quantizer
from metis_hf.schemes.noise_keys import several_processes
from metis_hf.schemes.states import StaticScales, largest_magnitude
from metis_hf.shared.messages import some
from metis_hf.training.copies import by_place
from metis_hf.training.precision import high_precision
from metis_hf.training.scale_error import BlockSample
from metis_hf.training.uncalled import warn_of_unpacked

METHODS = ("mse", "amax", "percentile")
# Shares of the largest magnitude that "mse" tries; the largest comes first, so it wins ties.
TRIED_SHARES = tuple(2.0 ** (-step / 4) for step in range(9))


@dataclass(frozen=True)
class CalibratedScale:
    """The scales of one layer.

    Attributes:
        largest: largest magnitude of its inputs in calibration; 0 for an expert that saw no token.
        input_amax: sets the input's tensor scale; 0 if inputs are not quantized.
        weight_amax: sets the weight's tensor scale.
        group: names of the layers that share `weight_amax`, and `input_amax` if inputs are
            quantized. `input_amax` is also shared by all experts of a block, including experts that
            saw no token.
    """

    largest: float
    input_amax: float
    weight_amax: float
    group: tuple[str, ...]


class UnseenLayers(ValueError):
    """Layers have seen no finite input, so their scales cannot be computed."""


class _Layers(dict[str, MetisLayer]):
    """The active layers with static scales, by name."""

    def __init__(self, model: nn.Module) -> None:
        layers = {
            n: one for n, one in metis_layers(model) if isinstance(one.scheme.state, StaticScales)
        }
        running, waiting = by_place(model, layers)
        super().__init__({name: layers[name] for name in running.values()})
        # Inactive copies by PEFT (`modules_to_save`) share the scales, which cover their weights.
        self.waiting = {name: waiting.get(place, []) for place, name in running.items()}
        self.groups, self.input_groups = (  # layers that share a scale
            {
                running[place]: tuple(running[member] for member in group)
                for place, group in groups.items()
            }
            for groups in (deployed_groups(running), input_groups(running))
        )

    def group_of(self, name: str, of: Mapping[str, Any]) -> list[str]:
        """Return the layers in `of` that share the input scale of the named layer."""
        return [member for member in self.input_groups[name] if member in of]


@dataclass
class _Seen:
    """Statistics of a layer's inputs in calibration."""

    tokens: int = 0
    largest: float = 0.0
    percentile: float = 0.0
    errors: list[float] = field(default_factory=list)  # of the group, one per tried share


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | Tensor],
    *,
    method: str = "mse",
    percentile: float = 99.99,
) -> dict[str, CalibratedScale]:
    """Find the static tensor scales of a converted model on data, and fix them.

    The model runs in evaluation mode with quantizers on, each input scaled by its own amax, so that
    layers see inputs as in deployment. Padding rows are left out. Layers that are deployed as one
    (`deployed_groups`) get the same scales; the experts of a block share the input scale. With
    several processes each process passes its share of the batches; all processes must call this
    function together and get the same scales.

    Args:
        model: converted with a scheme of static scales, such as "w4a4" or "w4a16".
        batches: keyword arguments of the model, or token ids [b n], in any order. If only weights
            are quantized, batches are optional: the first one serves to warn about layers that the
            model does not call.
        method: how the amax of inputs is chosen. "amax": the largest magnitude. "percentile": the
            maximum over batches of the magnitude at this percentile. "mse": of nine shares of the
            largest magnitude, the one with the smallest squared error on a sample (`BlockSample`),
            chosen per layer.
        percentile: for "percentile", above 50 and at most 100.

    Returns:
        The chosen scales, by layer.

    Raises:
        ValueError: an unknown method, a percentile out of range, no layer with static scales, no
            batch, or a layer that saw no token or only batches with NaN or inf. The scales are then
            unchanged.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}; choose one of {', '.join(METHODS)}")
    if not 50 < percentile <= 100:
        raise ValueError(f"percentile={percentile}; expected a number above 50 and at most 100")
    layers = _static_layers(model)
    seen = {name: _Seen() for name, layer in layers.items() if _state(layer).input}
    groups = {name: [seen[member] for member in layers.group_of(name, seen)] for name in seen}
    samples: dict[str, BlockSample] = {}  # by the first layer of its group
    share = percentile / 100 if method == "percentile" else None
    called: set[str] = set()

    def note(name: str, x: Tensor, rows: Tensor) -> None:
        called.add(name)
        if name not in seen or not _note(seen[name], rows, share) or method != "mse":
            return
        first = layers.group_of(name, seen)[0]
        if first not in samples:
            # A layer in high precision has no quantizer; assume the default one.
            quantizer = layers[name].eval_scheme.fprop_input.quantizer or Quantizer()
            samples[first] = BlockSample(quantizer)
        samples[first].add(rows, x)

    with _following_inputs(layers):
        if not seen and (batch := list(itertools.islice(batches, 1))):
            with high_precision(model):
                _observe(model, batch, layers, note)
        if seen:
            with _together(model, seen):
                _observe(model, batches, layers, note)
            _refuse_unseen(groups)
            with _together(model, seen):
                for first, sample in samples.items():
                    largest = max(one.largest for one in groups[first])
                    errors = sample.errors([largest * tried for tried in TRIED_SHARES])
                    seen[first].errors = errors
    if called:
        warn_of_unpacked(layers, called)
    chosen = {name: _choose(method, group) for name, group in groups.items()}
    return _fix(layers, chosen, seen)


@torch.no_grad()
def freeze_scales(model: nn.Module) -> dict[str, CalibratedScale]:
    """Fix the static tensor scales at the values observed in training so far.

    The input's amax is the largest magnitude seen in training; the weight's amax is its current
    one. Both are the maximum over the layers that are deployed as one. With several processes, all
    must call this function together.

    Raises:
        ValueError: no layer has static scales, or a layer has not seen an input yet
            (`UnseenLayers`). The scales are then unchanged.
    """
    layers = _static_layers(model)
    seen = {
        name: _Seen(tokens=1, largest=layer.get_buffer("input_amax").item())
        for name, layer in layers.items()
        if _state(layer).input
    }
    _gather(seen)
    groups = {name: [seen[member] for member in layers.group_of(name, seen)] for name in seen}
    chosen = {name: _choose("amax", group) for name, group in groups.items()}
    _refuse_unseen({name: groups[name] if amax else [] for name, amax in chosen.items()})
    return _fix(layers, chosen, seen)


def has_static_scales(model: nn.Module) -> bool:
    """Return whether any layer of the model has static scales."""
    return any(isinstance(layer.scheme.state, StaticScales) for _, layer in metis_layers(model))


def scales_are_fixed(model: nn.Module) -> bool:
    """Return whether the static scales of all layers are fixed."""
    return all(layer.get_buffer("scales_frozen").item() for layer in _static_layers(model).values())


def scales_are_begun(model: nn.Module) -> bool:
    """Return whether any layer with static scales has recorded the amax of an input or weight."""
    buffers = ("input_amax", "weight_amax")
    layers = _static_layers(model).values()
    return any(layer.get_buffer(name).item() > 0 for layer in layers for name in buffers)


def _static_layers(model: nn.Module) -> _Layers:
    layers = _Layers(model)
    if not layers:
        raise ValueError(
            "the model has no layer with static tensor scales; convert it with "
            'get_metis_model(model, MetisConfig(scheme="w4a4")) or with scheme="w4a16"'
        )
    return layers


def _state(layer: MetisLayer) -> StaticScales:
    state = layer.scheme.state
    assert isinstance(state, StaticScales)
    return state


@contextmanager
def _following_inputs(layers: dict[str, MetisLayer]) -> Iterator[None]:
    """Fix weight scales in the block, and set input scales at each call; undo both on error.

    With fixed scales, evaluation caches the weights' codes and does not search for them per call.
    """
    before = [(b, b.clone()) for layer in layers.values() for b in layer.state_buffers().values()]

    def follow(layer: MetisLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        layer.get_buffer("input_amax").copy_(largest_magnitude(x.detach()))

    try:
        with ExitStack() as stack:
            for layer in layers.values():
                own = largest_magnitude(whole_params(layer)[-1])
                layer.get_buffer("weight_amax").copy_(own)
                layer.get_buffer("scales_frozen").fill_(1)
                if _state(layer).input:
                    hook = layer.register_forward_pre_hook(follow, with_kwargs=True)
                    stack.enter_context(hook)
            yield
    except BaseException:
        for buffer, value in before:
            buffer.copy_(value)
        raise


def _observe(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | Tensor],
    layers: dict[str, MetisLayer],
    note: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Run the model over batches; call note(name, x, token rows of x [t i]) for each layer call."""

    def hook(name: str) -> Callable[..., None]:
        def before(layer: MetisLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            mask = args[1] if len(args) > 1 else kwargs.get("row_mask")  # passed to experts
            mask = layer.row_mask(x) if mask is None else mask
            rows = x.detach().reshape(-1, layer.in_features)
            note(name, x, rows if mask is None else rows[mask])

        return before

    device = next(model.parameters()).device
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(hook(name), with_kwargs=True))
        model.eval()
        batch = None
        for batch in batches:
            values = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})

        if batch is None and not (several_processes() and _is_whole(model)):
            raise ValueError("calibration received no batch; pass token ids of some text")


def _is_whole(model: nn.Module) -> bool:
    """Return whether each process holds the whole model and runs it on its own."""
    return not any(map(is_sharded, model.parameters()))


def _note(seen: _Seen, x: Tensor, share: float | None) -> bool:
    """Record tokens, amax and percentile of rows x [t i]; return False if x has NaN or inf."""
    largest = largest_magnitude(x).item()
    if not x.isfinite().all():
        return False
    seen.tokens += x.shape[0]
    seen.largest = max(seen.largest, largest)
    if share is not None and x.numel():
        kth = max(1, round(share * x.numel()))
        seen.percentile = max(seen.percentile, x.abs().flatten().kthvalue(kth).values.item())
    return True


@contextmanager
def _together(model: nn.Module, seen: dict[str, _Seen]) -> Iterator[None]:
    """Merge the statistics over processes after the block; an error in one is raised in all."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        if not _is_whole(model):
            raise  # the other processes are inside a forward pass and cannot be told
        failed = error
    others = _gather(seen, failed)
    if failed is not None:
        raise failed
    if others:
        raise RuntimeError(f"calibration failed in another process: {others[0]}")


def _gather(seen: dict[str, _Seen], failed: Exception | None = None) -> list[str]:
    """Merge the statistics over processes in place; return the errors of all processes."""
    if not (seen and several_processes()):
        return []
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (seen, failed and f"{type(failed).__name__}: {failed}"))
    if errors := [error for _, error in gathered if error]:
        return errors
    gathered = [noted for noted, _ in gathered]
    for name, mine in seen.items():
        of_all = [other[name] for other in gathered]
        mine.tokens = sum(one.tokens for one in of_all)
        mine.largest = max(one.largest for one in of_all)
        mine.percentile = max(one.percentile for one in of_all)
        mine.errors = [math.fsum(each) for each in zip(*(o.errors for o in of_all if o.errors))]
    return []


def _refuse_unseen(groups: dict[str, list[_Seen]]) -> None:
    """Refuse layers whose whole group saw no token; all experts of a block are one group."""
    unseen = [name for name, group in groups.items() if not any(one.tokens for one in group)]
    if unseen:
        raise UnseenLayers(
            f"{some(unseen, 3)} saw no token, or NaN or inf in every batch, so no scale can be "
            "computed; run more text through the model, or exclude the layer with exclude_modules "
            "(the model may read its weight without calling it)"
        )


def _choose(method: str, group: list[_Seen]) -> float:
    """Return the input amax of a group of layers."""
    if method == "percentile":
        return max(seen.percentile for seen in group)
    largest = max(seen.largest for seen in group)
    if method == "amax":
        return largest
    errors = next((seen.errors for seen in group if seen.errors), [0.0])
    return largest * TRIED_SHARES[errors.index(min(errors))]


def _fix(
    layers: _Layers, inputs: dict[str, float], seen: dict[str, _Seen]
) -> dict[str, CalibratedScale]:
    """Write scales to the buffers of the layers and their inactive copies."""
    copies = {name: (layer, *layers.waiting[name]) for name, layer in layers.items()}
    weights = {
        name: max(largest_magnitude(whole_params(one)[-1]).item() for one in each)
        for name, each in copies.items()
    }
    fixed = {}
    for name, layer in layers.items():
        of_weight = max(weights[member] for member in layers.groups[name])
        for one in copies[name]:
            buffers = one.state_buffers()
            buffers["input_amax"].fill_(inputs.get(name, 0.0))
            buffers["weight_amax"].fill_(of_weight)
            buffers["scales_frozen"].fill_(1)
            one.evaluation_weight.forget()
        largest = seen[name].largest if name in seen else 0.0
        of_input = layer.get_buffer("input_amax").item()
        fixed[name] = CalibratedScale(largest, of_input, of_weight, layers.groups[name])
    return fixed
