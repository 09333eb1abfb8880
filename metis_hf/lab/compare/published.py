"""Published losses of Quartet II's public grid, next to a comparison at the same settings.

`quartet2_grid.json` has the numbers and their source. For the same model and number of tokens, the
published losses are shown; for another model, only the published gaps at the same number of tokens
per parameter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from rich.console import Console
from transformers import AutoConfig, PreTrainedConfig

from metis_hf.lab.compare.plan import ComparisonPlan
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.statistics import Summary
from metis_hf.lab.cost import meta_model
from metis_hf.lab.show.table import markdown_table, terminal_table

SIZE, MODEL = "quartet2-30m", "30m"  # our size, and the grid's name for it
# Scheme -> the grid's name of the run. Our Quartet II has 4/6 in its forward pass.
NAMES = {
    "bf16": "bf16",
    "nvidia": "nvidia",
    "nvidia-unbiased": "nvidia",
    "four-over-six": "nvidia 4/6",
    "four-over-six-unbiased": "nvidia 4/6",
    "tetrajet2": "tetrajetv2",
    "quartet2": "quartet2 4/6",
}
_NEAR = 1.1  # largest ratio between numbers of tokens per parameter that count as the same
# TrainingArguments that do not affect the loss.
_FREE = {"max_steps", "logging_steps", "save_steps", "save_total_limit", "dataloader_num_workers"}


@cache
def grid() -> dict[str, Any]:
    """Return `quartet2_grid.json`: source, units, schemes, and tokens and losses of each model.

    Also the known differences from our runs, in general and by scheme.
    """
    name = "quartet2_grid.json"
    text = (files("metis_hf.lab.compare") / name).read_text(encoding="utf-8")
    return json.loads(text)


@dataclass(frozen=True)
class Beside:
    """The published runs to show next to a comparison."""

    exact: bool  # model and tokens are the same as in the grid; else only gaps can be compared
    parameters: int  # of our model, in blocks and norms
    tokens: int  # of our runs
    published_tokens: int | None  # None if no run has about as many tokens per parameter
    losses: dict[str, float]  # published name -> loss, nats per token; empty without published runs
    names: dict[str, str]  # variant -> published name
    differences: tuple[str, ...]  # known ones between our runs and theirs, a sentence each

    def gap(self, name: str) -> float:
        """Return the published gap to BF16, percent of its loss."""
        return 100 * (self.losses[name] / self.losses["bf16"] - 1)

    def cells(self, name: str | None) -> tuple[str, list[str], str]:
        """Return the cells of a published run: label, loss where it is comparable, gap."""
        if name is None:
            return "", [""] * self.exact, ""
        gap = "" if name == "bf16" else f"{self.gap(name):+.2f}"
        return grid()["schemes"][name], [f"{self.losses[name]:.4f}"] * self.exact, gap


def match(plan: ComparisonPlan) -> Beside | None:
    """Return the published runs for a plan; None unless the plan's size is SIZE."""
    if plan.size != SIZE:
        return None
    size, model = SIZES[SIZE], grid()["models"][MODEL]
    experiment = plan.experiment
    parameters = body_parameters(AutoConfig.for_model(**experiment.model))
    place = _nearest(plan.tokens / parameters, [t / model["parameters"] for t in model["tokens"]])
    tokens = None if place is None else model["tokens"][place]
    same = (
        experiment.model == {"model_type": size.model_type, **size.config}
        and experiment.sequence_length == size.sequence_length
        and plan.global_batch == size.global_batch
    )
    names = {
        variant.name: NAMES[variant.config["scheme"]]
        for variant in plan.variants
        if variant.config == {"scheme": variant.config["scheme"]}
        and variant.precision_schedule is None
        and variant.config["scheme"] in NAMES
    }
    return Beside(
        exact=same and tokens is not None and math.isclose(plan.tokens, tokens, rel_tol=1e-3),
        parameters=parameters,
        tokens=plan.tokens,
        published_tokens=tokens,
        losses={n: v[place] for n, v in model["losses"].items()} if place is not None else {},
        names=names if place is not None else {},
        differences=_differences(plan),
    )


def body_parameters(config: PreTrainedConfig) -> int:
    """Count a model's parameters without embeddings and output head, as the grid does."""
    model = meta_model(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {id(p) for end in ends if end is not None for p in end.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in outside)


def describe(beside: Beside) -> str:
    """Describe the published runs in a sentence or two."""
    source = f"published: {grid()['source']}"
    model = grid()["models"][MODEL]
    each = beside.tokens / beside.parameters
    if beside.published_tokens is None:
        known = ", ".join(f"{t / model['parameters']:.0f}" for t in model["tokens"])
        return (
            f"Nothing is published at {each:.3g} tokens per parameter; there are published runs "
            f"at {known} ({source})."
        )
    tokens = f"{beside.published_tokens / 1e9:.3g}B tokens"
    if beside.exact:
        return f"The same model and {tokens} ({source})."
    return (
        f"Ours is scaled: {beside.parameters:,} parameters without embeddings, {beside.tokens:,} "
        f"tokens, {each:.1f} a parameter. Beside it the gaps of {model['parameters']:,} parameters "
        f"and {tokens}, {beside.published_tokens / model['parameters']:.1f} a parameter; losses "
        f"are not comparable ({source})."
    )


def header(beside: Beside) -> list[str]:
    """Return the titles of the columns of `rows`."""
    losses = ["Loss", "Published loss"] if beside.exact else ["Loss"]
    return ["Variant", "Published as", *losses, "Gap, %", "Published gap, %", "Difference, points"]


def rows(beside: Beside, summaries: Sequence[Summary]) -> list[list[str]]:
    """Return the cells of each variant, then of each published scheme without a variant."""
    cells = []
    for summary in summaries:
        name = beside.names.get(summary.name)
        label, loss, gap = beside.cells(name)
        mean = math.nan if summary.gap is None else summary.gap.mean
        ours = "" if summary.gap is None else f"{mean:+.2f}"
        difference = ""
        if name is not None and gap and not math.isnan(mean):
            difference = f"{mean - beside.gap(name):+.2f}"
        cells.append([summary.name, label, f"{summary.mean:.4f}", *loss, ours, gap, difference])
    for name in beside.losses:
        if name not in beside.names.values():
            label, loss, gap = beside.cells(name)
            cells.append(["", label, "", *loss, "", gap, ""])
    return cells


def markdown(beside: Beside, summaries: Sequence[Summary]) -> str:
    """Return our and the published numbers: a sentence, the table, and every known difference."""
    text = f"{describe(beside)}\n\n"
    if beside.losses:
        text += markdown_table(header(beside), rows(beside, summaries)) + "\n"
    return text + "".join(f"- {sentence}\n" for sentence in beside.differences)


def show(beside: Beside, summaries: Sequence[Summary], console: Console) -> None:
    """Print the content of `markdown` to a terminal."""
    console.print(describe(beside))
    if beside.losses:
        cells = rows(beside, summaries)
        console.print(terminal_table(header(beside), cells, title="Beside published numbers"))
    for sentence in beside.differences:
        console.print(f"- {sentence}")


def _nearest(value: float, values: Sequence[float]) -> int | None:
    """Return the index of the value nearest as a ratio; None if none is within _NEAR."""
    apart = [abs(math.log(value / other)) for other in values]
    place = apart.index(min(apart))
    return place if apart[place] <= math.log(_NEAR) else None


def _differences(plan: ComparisonPlan) -> tuple[str, ...]:
    size, found = SIZES[SIZE], list(grid()["differences"])
    given = plan.experiment.training
    changed = {
        key: value
        for key, value in given.items()
        if key not in _FREE and value != size.training.get(key)
    }
    beyond = {key: getattr(plan.experiment, key) for key in size.beyond}
    changed |= {key: value for key, value in beyond.items() if value != size.beyond[key]}
    if changed:
        shown = ", ".join(f"{key}={value}" for key, value in changed.items())
        found.insert(0, f"Trained otherwise than there: {shown}.")
    schemes = {variant.config["scheme"] for variant in plan.variants}
    own = grid()["differences of schemes"].items()
    return (*found, *(f"{name}: {text}" for name, text in own if name in schemes))
