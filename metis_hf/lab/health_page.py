"""The page of `metis-hf report`: findings and heat maps of a run, or a table of several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis_hf.config import MetisConfig
from metis_hf.lab.health_maps import PANELS, heat_map_of
from metis_hf.lab.run_curves import HELD_OUT, Gaps, curves_figure, gaps_to_control
from metis_hf.lab.run_records import RunRecord, read_runs
from metis_hf.lab.show.figure import short_models
from metis_hf.lab.show.page import Cell, Page, number
from metis_hf.schemes import CONTROL
from metis_hf.shared.messages import some
from metis_hf.training.reference_values import (
    ORTHOGONAL,
    RELATIVE_ERROR,
    SQNR_NEAREST,
    SQNR_STOCHASTIC,
)

_WORST = 3  # layers that a finding names
_ALWAYS_SHOWN = ("scheme", "rank_frac", "seed")  # settings listed even at their defaults
_CURVES_TEXT = (
    f"Training loss above the loss of the {CONTROL} run at the same step (with the same seed, if "
    "there is such a run), as a moving average (in the table: the mean of the last tenth), and "
    "held-out loss. A gap is meaningful only if both runs have the same model, data and batch. "
    "Good: a gap that stays flat. Bad: a gap that grows."
)


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Read one or more runs and write their page.

    Args:
        paths: directories of runs; duplicates count once.
        out: the file; None writes `report.html` into the directory of the first run that has a
            record.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: no directory has a record of a run. If at least one has, the page names
            the others.
        ValueError: no directory is given, or `out` is a directory.
    """
    if not paths:
        raise ValueError("no run to report on; give the directory of a run")
    if out is not None and out.is_dir():
        raise ValueError(
            f"{out} is a directory; give a file name for the page, for example "
            f"{out / 'report.html'}"
        )
    runs, left_out = read_runs(paths)
    alone = len(runs) == 1 and not left_out
    page = run_page(runs[0]) if alone else table_page(runs, left_out)
    target = runs[0].path / "report.html" if out is None else out
    target.parent.mkdir(parents=True, exist_ok=True)
    page.save(target)
    return target


def run_page(run: RunRecord) -> Page:
    """Return the page of one run: findings, heat maps of its layers, and its setup."""
    planned = f" of {run.max_steps:,}" if run.max_steps else ""
    what = f"{run.model} · " if run.model else ""
    page = Page(
        f"Training run: {run.name}",
        f"{what}{run.last_step:,}{planned} steps · {run.path.resolve()}",
    )
    for note in run.notes:
        page.notice(note)
    page.section("Findings", *findings(run))
    if run.layers:
        page.section(
            "Layers over time",
            "Each row is a layer, grouped by kind and in model order; each column is a measured "
            "step. Gray: not measured. Red cross: the tensor contains NaN or infinity. A tensor "
            "that was never measured, or whose share was always zero, has no map. Lines on a "
            "color scale mark reference values, mostly for independent normal values quantized "
            "directly to NVFP4. Where the colors diverge at a line, blue is better and red is "
            "worse.",
        )
        for panel in PANELS:
            picture = heat_map_of(run, panel)
            if picture is not None:
                caption = f"{panel.title}. {panel.explanation}"
                page.figure(picture, caption, wide=len(panel.tensors) > 1)
    _add_setup(page, run)
    return page


def table_page(runs: Sequence[RunRecord], left_out: Sequence[str]) -> Page:
    """Return the page of several runs: a table, the findings of each, and the runs left out."""
    names, ends = [run.name for run in runs], short_models([str(run.path) for run in runs])
    for run in runs:
        if names.count(run.name) > 1:  # several runs of one scheme
            run.name = f"{run.name} ({ends[str(run.path)]})"
    page = Page("Training runs", ", ".join(run.name for run in runs))
    for sentence in left_out:
        page.notice(sentence)
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        page.notice(f"{some([run.name for run in runs if note in run.notes], 6)}: {note}")
    header = ["run", "last held-out loss", f"held-out loss above {CONTROL} (%)",
              "last training loss", f"training loss above {CONTROL} (%)", "steps",
              "lowest SQNR (dB)", "steps not finite", "FP4", "refreshes", "noise crosses at",
              "directory"]  # fmt: skip
    page.section("Runs", "Click a column header to sort by it.")
    page.table(header, [_row(run, gaps_to_control(run, runs)) for run in runs])
    picture = curves_figure(runs)
    if picture is not None:
        page.figure(picture, _CURVES_TEXT)
    for run in runs:
        page.section(run.name, *findings(run))
    return page


def _row(run: RunRecord, gaps: Gaps | None) -> list[Cell]:
    losses, held_out = run.series("loss")[1], run.series(HELD_OUT)[1]
    worst = _by_sqnr(run)
    crossing, bad = run.crossing(), len(run.not_finite())
    place = _cell(None if crossing is None else crossing.step, ",.0f")
    if crossing is not None and crossing.step is None:
        place = Cell("never", math.inf)
    return [
        Cell(run.name),
        _cell(held_out[-1] if held_out else None, ".4f"),
        _cell(None if gaps is None or math.isnan(gaps.held_out) else gaps.held_out, "+.2f"),
        _cell(losses[-1] if losses else None, ".4f"),
        _cell(None if gaps is None or not gaps.steps else gaps.at_end, "+.2f"),
        number(float(run.last_step), ",.0f"),
        _cell(worst[0][0] if worst else None, ".1f"),
        number(float(bad), ".0f", shade=float(bad > 0)),
        _cell(run.fp4_share, ".1%"),
        number(float(len(run.refreshes)), ".0f"),
        place,
        Cell(str(run.path)),
    ]


def _cell(value: float | None, spec: str = ".3g") -> Cell:
    return Cell("n/a", math.nan, 0.0, "not measured") if value is None else number(value, spec)


def findings(run: RunRecord) -> list[str]:
    """Return the findings of a run, a sentence or two each."""
    found = [_about_losses(run), _about_nan(run), _about_noise(run)]
    worst = _by_sqnr(run)[:_WORST]
    if worst:
        shown = ", ".join(f"{name} ({value:.1f} dB)" for value, name in worst)
        found.append(
            f"At step {max(run.layers):,}, the last measurement, the SQNR is lowest in {shown}. "
            f"Good: {SQNR_NEAREST} dB with rounding to nearest, {SQNR_STOCHASTIC} dB with "
            "stochastic rounding. Bad: 10 dB, where the error is a third of the tensor."
        )
    return [text for text in (*found, _about_refreshes(run), _about_switches(run)) if text]


def _about_losses(run: RunRecord) -> str:
    steps, losses = run.series("loss")
    if not losses:
        return ""
    text = f"The last logged loss is {losses[-1]:.4g} at step {steps[-1]:,}"
    finite = [(loss, step) for step, loss in zip(steps, losses) if math.isfinite(loss)]
    if not finite:
        return f"{text}; no logged loss is finite."
    best, step = min(finite)
    return f"{text}; the lowest is {best:.4g} at step {step:,}."


def _about_nan(run: RunRecord) -> str:
    bad = run.not_finite()
    if not bad:
        return "All logged losses and all measured tensors are finite."
    first = next(iter(bad))
    return (
        f"NaN or infinity at {len(bad)} of the logged and measured steps, first at step "
        f"{first:,}: {some(bad[first], 6)}. Layers are listed in order of computation, the likely "
        "origin first."
    )


def _about_noise(run: RunRecord) -> str:
    """Return a sentence that says where gradient / (√3 noise) crosses 1."""
    crossing = run.crossing()
    if crossing is None:
        why = "the records contain no gradient and noise norms"
        if not run.quantized:
            why = "nothing is quantized in this run"
        return f"The gradient was not measured against quantization noise: {why}."
    if crossing.step is None:
        return "The gradient over all layers never falls below √3 times its quantization noise."
    if crossing.from_start:
        return (
            "The gradient over all layers is below √3 times its quantization noise from the first "
            "measurement on, where quantized training is less effective (arXiv 2505.19115)."
        )
    return (
        "The gradient over all layers falls below √3 times its quantization noise at step "
        f"{crossing.step:,} and stays there (median of three measurements). From that step on, "
        "quantized training is less effective (arXiv 2505.19115)."
    )


def _by_sqnr(run: RunRecord) -> list[tuple[float, str]]:
    """Return (SQNR, "layer (tensor)") of the last measurement, the lowest first."""
    last = run.layers[max(run.layers)] if run.layers else {}
    return sorted(
        (stats["sqnr_db"], f"{name} ({tensor})")
        for name, tensors in last.items()
        for tensor, stats in tensors.items()
        if math.isfinite(stats.get("sqnr_db", math.nan))
    )


def _about_refreshes(run: RunRecord) -> str:
    if not run.refreshes:
        return ""
    step, layers = max(run.refreshes.items())
    text = (
        f"The split of the weights was refreshed {len(run.refreshes)} times, most recently at "
        f"step {step:,}"
    )
    moments = [layer for layer in layers.values() if layer]
    text += f", when {len(layers)} weights were decomposed again."
    if moments:
        before, after = (
            max(moment[name]["orthogonality"] for moment in moments) for name in ("before", "after")
        )
        text += (
            f" The largest drift from orthonormal factors was {before:.2g} before that refresh "
            f"and {after:.2g} after it. Good: {ORTHOGONAL:g} after a refresh. Bad: near "
            f"{RELATIVE_ERROR} before one, as large as the error of NVFP4; refresh more often."
        )
    return text


def _about_switches(run: RunRecord) -> str:
    texts = []
    for step, switch in run.switches.items():
        scheme, passes = switch.get("scheme"), switch.get("high_precision")
        how = "all passes in FP4"
        if scheme == CONTROL:
            how = "nothing is quantized"
        elif passes:
            how = f"high precision in the {' and '.join(passes)} pass"
        texts.append(f"to scheme {scheme}, {how}, at step {step:,}")
    return f"The precision was switched {'; '.join(texts)}." if texts else ""


def _add_setup(page: Page, run: RunRecord) -> None:
    page.section("Setup", *(line.strip() for line in run.summary.splitlines()))
    defaults = MetisConfig().to_dict()
    facts = {
        name: value
        for name, value in run.config.items()
        if name in _ALWAYS_SHOWN or _text(value) != _text(defaults.get(name, value))
    }
    if run.fp4_share is not None:
        facts["share of the model's GEMM FLOPs in FP4"] = f"{run.fp4_share:.1%}"
    versions = run.environment.get("versions")
    facts |= versions if isinstance(versions, dict) else {}
    facts |= {name: v for name, v in run.environment.items() if name != "versions" and v}
    if facts:
        rows = [[Cell(str(name)), Cell(_text(value))] for name, value in facts.items()]
        page.table(
            ["setting", "value"],
            rows,
            "Settings that differ from the defaults, and software versions.",
        )


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
