"""Output files of a comparison: record, table in three formats, published results, three plots."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig

from metis_hf.config import MetisConfig
from metis_hf.lab.compare import loss_figures, loss_table, published
from metis_hf.lab.compare.plan import ComparisonPlan
from metis_hf.lab.compare.results import SchemeResult, compact
from metis_hf.lab.compare.statistics import Summary, summarize
from metis_hf.lab.compare.step_times import TIMES_FILE, load_times
from metis_hf.lab.cost import meta_model, model_overhead
from metis_hf.layers.experts import has_fused_experts
from metis_hf.shared.numbers import short_number
from metis_hf.shared.records import environment, write_json

RECORD_FILE = "compare.json"
PUBLISHED_FILE = "published.md"
FILES = (
    RECORD_FILE, "table.md", "table.tex", "table.csv", PUBLISHED_FILE,
    "loss.png", "gap.png", "cost.png",
)  # fmt: skip


def write_outputs(
    plan: ComparisonPlan,
    results: Sequence[SchemeResult],
    out: Path,
    *,
    jobs: int | None,
    console: Console,
) -> None:
    """Write FILES into `out`, and print table and findings.

    Step times come from `measure_times`; without those, the runs' own times are shown if one run at
    a time was trained. `jobs` is the number of runs side by side; None if unknown.
    """
    times, about_times = load_times(plan, out / TIMES_FILE, {r.scheme for r in results})
    if times:
        results = [replace(r, seconds_per_step=times[r.scheme]) for r in results]
    timed = bool(times) or jobs == 1
    extra = count_extra(plan.experiment.model, results)
    summaries = loss_table.ordered(summarize(results, plan.reference, extra=extra))
    sentences = [
        describe(plan, results),
        *loss_table.findings(summaries, plan.reference),
        *different_machines(results),
        *different_code(results),
        *about_times,
    ]
    record = {
        "plan": plan.settings(),
        "variants": {variant.name: variant.fields() for variant in plan.variants},
        "seeds": list(plan.seeds),
        "reference": plan.reference,
        "tokens": plan.tokens,
        "jobs": jobs,
        "timed": timed,
        **environment(),
        "findings": sentences,
        "summaries": [asdict(summary) for summary in summaries],
        "runs": [compact(result) for result in results],
    }
    write_json(out / RECORD_FILE, record)
    write_tables(summaries, results, out, sentences, plan.reference, timed=timed)
    table, left_out = loss_table.terminal(
        summaries, plan.reference, timed=timed, width=console.width
    )
    console.print(table)
    if left_out:
        sentences.append(f"Columns shown only in table.md: {', '.join(left_out)}.")
    for sentence in sentences:
        console.print(f"- {sentence}")
    if (beside := published.match(plan)) is not None:
        (out / PUBLISHED_FILE).write_text(published.markdown(beside, summaries))
        published.show(beside, summaries, console)
    names = ", ".join(name for name in FILES if (out / name).exists())
    console.print(f"Written to {out}/: {names}", soft_wrap=True)


def write_tables(
    summaries: Sequence[Summary],
    results: Sequence[SchemeResult],
    out: Path,
    sentences: Sequence[str],
    reference: str | None,
    *,
    timed: bool,
) -> None:
    """Write the table and the figures; without gaps, existing gap and cost figures are removed.

    The sentences are printed below the table; the first describes the comparison. Without `timed`,
    only the CSV file shows step times.
    """
    body = loss_table.markdown(summaries, reference, timed=timed) + "\n"
    body += "".join(f"- {text}\n" for text in sentences)
    (out / "table.md").write_text(body)
    (out / "table.tex").write_text(loss_table.latex(summaries, reference, timed=timed))
    (out / "table.csv").write_text(loss_table.as_csv(summaries))
    loss_figures.plot_all(summaries, results, out, sentences[0], reference)


def count_extra(model: Mapping[str, Any], results: Sequence[SchemeResult]) -> dict[str, float]:
    """Return variant -> multiply-adds beyond the three GEMMs, in % of theirs (`overhead`).

    NaN for models with fused experts, where tokens per expert are unknown beforehand. `model` holds
    AutoConfig's arguments. Precision schedules are not counted.
    """
    config = AutoConfig.for_model(**model)
    configs = {result.scheme: MetisConfig.from_dict(result.config) for result in results}
    if has_fused_experts(meta_model(config)):
        return dict.fromkeys(configs, math.nan)
    return {name: 100 * model_overhead(config, c).share for name, c in configs.items()}


def describe(plan: ComparisonPlan, results: Sequence[SchemeResult]) -> str:
    """Describe the comparison in one line: size, tokens, data, seeds."""
    parameters = results[0].parameters
    data = "Python's standard library" if plan.data is None else Path(plan.data).name
    count = len({result.seed for result in results})
    seeds = f"{count} seed{'s' * (count > 1)}"
    return (
        f"{plan.experiment.model['model_type']} with {short_number(parameters)} parameters, "
        f"{short_number(plan.tokens)} tokens of {data}, {seeds}"
    )


def different_machines(results: Sequence[SchemeResult]) -> list[str]:
    """Return a sentence on devices and precisions if they differ between runs of one seed."""

    def place(result: SchemeResult) -> str | None:
        if result.machine is None:
            return None
        # Runs on one machine may have had different numbers of threads.
        device = re.sub(r", \d+ threads$", "", result.machine["device"])
        return f"{device} in {result.machine['precision']}"

    return _mixed("machines, whose times and gaps are not of schemes alone", results, place)


def different_code(results: Sequence[SchemeResult]) -> list[str]:
    """Return a sentence on the code of each run if it differs between runs of one seed."""

    def code(result: SchemeResult) -> str | None:
        if result.code is None:
            return None
        short = "+".join(each[:6] for each in str(result.code["sha256"]).split("+"))
        return " ".join(filter(None, (result.code.get("commit"), short)))

    return _mixed("code or torch, whose gaps are not of schemes alone", results, code)


def _mixed(
    what: str, results: Sequence[SchemeResult], of: Callable[[SchemeResult], str | None]
) -> list[str]:
    """Return a sentence with the schemes by property `of` if it differs within one seed."""
    by_seed: dict[int, dict[str, set[str]]] = {}
    for result in results:
        if (value := of(result)) is not None:
            by_seed.setdefault(result.seed, {}).setdefault(value, set()).add(result.scheme)
    found: dict[str, set[str]] = {}
    for values in by_seed.values():
        for value, schemes in values.items() if len(values) > 1 else ():
            found.setdefault(value, set()).update(schemes)
    text = "; ".join(f"{value}: {', '.join(sorted(schemes))}" for value, schemes in found.items())
    return [f"Runs of different {what}. {text}."] if text else []
