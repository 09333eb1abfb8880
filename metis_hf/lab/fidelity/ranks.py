"""Ranks for a budget of multiply-adds: directions go where they remove the most error."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.lab.cost import TOKENS, Overhead, inputs_of, overhead, tokens_of_layers
from metis_hf.lab.fidelity.gradients import on_calls, run_batches
from metis_hf.lab.fidelity.subject import ModelAndText, converted, running, trainable
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.show.table import terminal_table
from metis_hf.lab.texts import MIN_LENGTH
from metis_hf.layers.experts import converted_names, layers_of
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import build_scheme, most_directions, scheme_info
from metis_hf.shared.layer_names import group_of
from metis_hf.shared.records import write_json

RANKS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # default candidates


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of a model's layers, and what they cost.

    Attributes:
        config: with the ranks as `rank_pattern`; experts by the name of their fused weight.
        ranks: name -> rank, for each layer with a split.
        overhead: the overhead of a training step with these ranks.
        errors: name -> error at each rank tried, from the smallest; see `allocate_ranks`.
        left: estimated error of all layers, as a share of the error at the smallest rank.
    """

    config: MetisConfig
    ranks: Mapping[str, int]
    overhead: Overhead
    errors: Mapping[str, Sequence[float]]
    left: float


def write_ranks(
    measured: ModelAndText,
    budget: float,
    out: Path,
    *,
    scheme: str = "metis",
    tokens: int = TOKENS,
    console: Console | None = None,
) -> LayerRanks:
    """Choose ranks for a model on the start of a text, print them, and write the config.

    For `budget` and `tokens` see `allocate_ranks`.

    Raises:
        FileNotFoundError, ValueError: as `ModelAndText.open` and `allocate_ranks`; or `out` cannot
            be written.
    """
    scheme_info(scheme)
    _check_numbers(budget, tokens)
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out} cannot be written; name a file in an existing, writable directory")
    console = console or Console(quiet=True)
    subject = measured.open()
    batches = torch.cat([subject.held_out, subject.training]).split(measured.batch)
    bars = TaskProgress(console)
    with bars.running({"batches": (len(batches), 1.0)}):
        plan = allocate_ranks(
            subject.model,
            batches,
            budget,
            MetisConfig(scheme=scheme),
            tokens=tokens,
            advance=lambda: bars.advance("batches"),
        )
    kinds: dict[str, list[int]] = {}
    for layer, rank in plan.ranks.items():
        kinds.setdefault(group_of(layer), []).append(rank)
    rows = [
        [kind, str(len(of)), str(min(of)), f"{sum(of) / len(of):.1f}", str(max(of))]
        for kind, of in kinds.items()
    ]
    header = ("Layers", "Number", "Lowest rank", "Mean", "Highest")
    console.print(terminal_table(header, rows, title=f"Ranks of {measured.model}"))
    console.print(
        f"{plan.overhead.share:.1%} more multiply-adds. Estimated error: {plan.left:.0%} of the "
        f"error at rank {RANKS[0]}",
        highlight=False,
    )
    write_json(out, plan.config.to_dict())
    written = f"wrote {out}; load it with MetisConfig.from_json"
    console.print(written, soft_wrap=True, highlight=False, markup=False)
    return plan


@dataclass
class RankGroup:
    """Layers that share one rank, with the cost and the error of each candidate.

    Attributes:
        layers: names of the layers.
        ranks: the candidates that all layers can have, ascending.
        costs: multiply-adds at each rank, as a share of all layers' GEMMs.
        errors: the remaining error at each rank.
    """

    layers: list[str]
    ranks: tuple[int, ...]
    costs: list[float]
    errors: list[float] = field(default_factory=list)

    def steps(self) -> list[tuple[float, int, int]]:
        """Return (gain per cost, from, to) of each step along the lower convex hull."""
        found, place = [], 0
        while place + 1 < len(self.ranks):
            gains = [self._gain(place, k) for k in range(place + 1, len(self.ranks))]
            if max(gains) <= 0:
                break
            best = place + 1 + gains.index(max(gains))  # the nearest of equals
            found.append((max(gains), place, best))
            place = best
        return found

    def _gain(self, low: int, high: int) -> float:
        cost = self.costs[high] - self.costs[low]
        return (self.errors[low] - self.errors[high]) / max(cost, 1e-30)


def allocate_ranks(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    budget: float,
    config: MetisConfig | None = None,
    *,
    tokens: int = TOKENS,
    ranks: Sequence[int] = RANKS,
    advance: Callable[[], None] = lambda: None,
) -> LayerRanks:
    """Choose a rank for each layer of a model from one calibration, within a budget.

    Each layer runs at each rank, with evaluation rounding, on the exact model's inputs. The error e
    of its output y is weighted by the second moment of the gradient of y: the sum over tokens s and
    t of (e_s . dy_t)^2, which is the squared first-order change of the loss if any token may have
    any token's error. Layers that read one tensor (query, key and value) share its split and so
    have one rank. Experts of one fused weight also have one rank, because a config names them by
    that weight. The budget is then spent where the next multiply-add removes the most error.

    Args:
        model: a causal language model with dense weights; it is converted in place for the call.
        batches: token ids [b length] without padding.
        budget: multiply-adds beyond the three GEMMs, as a share of theirs, such as .125.
        config: the config of the conversion; its `rank` and `rank_pattern` are ignored.
        tokens: tokens per training step, for counting the cost.
        ranks: the candidates, ascending; a layer gets at most half its smaller side.
        advance: called after each batch.

    Raises:
        ValueError: the scheme splits nothing; no batch; ranks that are not ascending from 1 or
            more; a budget that is not a number of at least 0, or is below the cost of the smallest
            rank; no tokens.
    """
    _check_numbers(budget, tokens)
    ranks = tuple(ranks)
    if not ranks or min(ranks) < 1 or list(ranks) != sorted(set(ranks)):
        raise ValueError(f"ranks {list(ranks)}; expected ascending whole numbers of at least 1")
    config = (config or MetisConfig()).replace(rank=ranks[0], rank_pattern={})
    with converted(model, config) as layers:
        split = {name: layer for name, layer in layers.items() if layer.scheme.splits}
        if not split:
            raise ValueError(
                f"scheme {config.scheme!r} does not split any operand of this model, so it has "
                'no ranks; choose "metis"'
            )
        few = torch.zeros(1, MIN_LENGTH, dtype=torch.int64, device=model.device)
        with running(layers):
            reads = inputs_of(model, layers, few)
        seen = tokens_of_layers(model, tokens)
        called = _called(model, layers)
        whole, groups = _groups(layers, split, reads, called, ranks, seen)
        left = budget - whole - sum(group.costs[0] for group in groups)
        if left < 0:  # before anything is measured
            raise ValueError(
                f"a budget of {budget:.1%} is too small: rank {ranks[0]} in all layers already "
                f"costs {budget - left:.1%}; choose a larger budget, or smaller ranks"
            )
        errors = _errors(model, split, batches, ranks, advance)
        for group in groups:
            group.errors = [sum(column) for column in zip(*(errors[n] for n in group.layers))]
        at = spend(groups, left)
        chosen = {n: g.ranks[place] for g, place in zip(groups, at) for n in g.layers}
        pattern = {called[name]: rank for name, rank in chosen.items()}
        config = config.replace(rank=None, rank_pattern=pattern)
        shapes = [_shape(layer, config.for_layer(called[name])) for name, layer in layers.items()]
        found = overhead(shapes, [seen[name] for name in layers], [reads[name] for name in layers])
    first = sum(group.errors[0] for group in groups)
    last = sum(group.errors[place] for group, place in zip(groups, at))
    return LayerRanks(config, chosen, found, errors, last / first if first else 1.0)


def _called(model: PreTrainedModel, layers: Mapping[str, MetisLayer]) -> dict[str, str]:
    """Return name -> name in a config, where an expert has the name of its fused weight."""
    fused = {
        id(layer): f"{owner}.{key}"
        for owner, module in model.named_modules()
        for key in converted_names(module)
        for layer in layers_of(module, key)
    }
    return {name: fused.get(id(layer), name) for name, layer in layers.items()}


def _check_numbers(budget: float, tokens: int) -> None:
    if not budget >= 0:  # also rejects NaN
        raise ValueError(f"a budget of {budget:.1%}; expected a number of at least 0 %")
    if tokens < 1:
        raise ValueError(f"tokens={tokens} per step; choose at least 1")


def _errors(
    model: PreTrainedModel,
    layers: dict[str, MetisLayer],
    batches: Iterable[Tensor],
    ranks: Sequence[int],
    advance: Callable[[], None],
) -> dict[str, list[float]]:
    """Return the weighted error of each layer at each rank; zeros for layers that do not run."""
    schemes = {
        name: [
            build_scheme(layer.config.replace(rank=rank), layer.in_features, layer.out_features)
            for rank in _possible(layer, ranks)
        ]
        for name, layer in layers.items()
    }
    found = {name: [0.0] * len(tried) for name, tried in schemes.items()}

    @torch.no_grad()
    def measure(name: str, x: Tensor, dy: Tensor, mask: Tensor | None) -> None:
        layer = layers[name].eval()
        with running({name: layer}):
            exact = layer(x, row_mask=mask)
        rows = dy.flatten(0, -2).float()
        for place, scheme in enumerate(schemes[name]):
            with running({name: layer}, {name: scheme}):
                error = (layer(x, row_mask=mask) - exact).flatten(0, -2).float()
            found[name][place] += float(_squared_norm(error, rows))
        layer.train()

    count = 0
    weights = list(trainable(layers).values())
    with on_calls(layers, measure), running(layers):
        for rows in batches:
            run_batches(model, weights, [rows], lambda _: None)
            count += 1
            advance()
    if not count:
        raise ValueError("choosing ranks needs at least one batch of text, but there is none")
    return found


def _squared_norm(error: Tensor, rows: Tensor) -> Tensor:
    """Return |error rows^T|^2 of two matrices [t o], without a [t t] matrix if t > o."""
    if len(rows) <= rows.shape[1]:
        return (error @ rows.mT).square_().sum()
    return ((error.mT @ error) * (rows.mT @ rows)).sum()


def _groups(
    layers: dict[str, MetisLayer],
    split: dict[str, MetisLayer],
    reads: Mapping[str, Hashable],
    called: Mapping[str, str],
    ranks: Sequence[int],
    tokens: Mapping[str, int],
) -> tuple[float, list[RankGroup]]:
    """Return the cost of layers without a split, and the groups of the others, without errors."""

    def gemms(names: Iterable[str]) -> int:
        return sum(tokens[n] * layers[n].in_features * layers[n].out_features for n in names)

    whole = gemms(layers)

    def cost(names: Sequence[str], rank: int) -> float:
        shapes = [_shape(layers[n], layers[n].config.replace(rank=rank)) for n in names]
        found = overhead(shapes, [tokens[n] for n in names], [reads[n] for n in names])
        return found.share * gemms(names) / whole

    rest = [name for name in layers if name not in split]
    together: dict[Hashable, list[str]] = {}
    for name in split:  # layers that read one tensor, or that have one name in the config
        of = reads[name] if called[name] == name else called[name]
        together.setdefault(of, []).append(name)
    known: dict[Hashable, list[float]] = {}  # costs of groups of equal shapes and configs
    groups = []
    for names in together.values():
        own = min((_possible(layers[n], ranks) for n in names), key=len)
        shapes = [f"{_shape(layers[n], layers[n].config)} {tokens[n]}" for n in names]
        key = (*shapes, len({reads[n] for n in names}))  # each expert reads its own tensor
        if key not in known:
            known[key] = [cost(names, rank) for rank in own]
        groups.append(RankGroup(names, own, known[key]))
    return cost(rest, ranks[0]) if rest else 0.0, groups


def _possible(layer: MetisLayer, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that the layer can be converted with."""
    most = most_directions(layer.in_features, layer.out_features)
    return tuple(rank for rank in ranks if rank <= most)


def _shape(layer: MetisLayer, config: Any) -> tuple[tuple[int, int], Any]:
    return (layer.in_features, layer.out_features), config


def spend(groups: Sequence[RankGroup], left: float) -> list[int]:
    """Return the index of each group's rank; steps with the largest gain are taken if they fit."""
    at = [0] * len(groups)
    steps = [
        (gain, number, low, high)
        for number, group in enumerate(groups)
        for gain, low, high in group.steps()
    ]
    for _, number, low, high in sorted(steps, key=lambda step: -step[0]):
        cost = groups[number].costs[high] - groups[number].costs[low]
        if at[number] == low and cost <= left:
            at[number] = high
            left -= cost
    return at
