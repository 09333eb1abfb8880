"""The page of one run, and the shorter one that compares several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis_hf.config import MetisConfig
from metis_hf.lab.run_report import figures
from metis_hf.lab.run_report.heatmaps import PANELS, heatmap, layer_names
from metis_hf.lab.run_report.read import read_runs
from metis_hf.lab.run_report.run import RunRecord, events
from metis_hf.lab.show.figure import CROWDED
from metis_hf.lab.show.page import Cell, Page, number
from metis_hf.training.gradient_noise import Crossing, find_crossing, signal_to_noise
from metis_hf.training.health import TENSORS
from metis_hf.training.reference_values import (
    ORTHOGONAL,
    RELATIVE_ERROR,
    SQNR_NEAREST,
    SQNR_STOCHASTIC,
)

_ALWAYS_SHOWN = ("scheme", "rank_frac", "seed")  # settings
_FULL_COLOR = 10.0  # dB: the error is a third of the tensor, 10^(-10 / 20)
Row = Sequence[Cell | str]


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Read one or more runs and write their page.

    Args:
        paths: directories of runs; one that is named twice counts once.
        out: the file; None writes `report.html` into the directory of the first run that has a
            record.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: no directory has a record of a run. Of several, those without one are
            left out, and the page says so.
        ValueError: no directory is given, or `out` is one.
    """
    if not paths:
        raise ValueError("no run to report on; give the directory of one")
    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a directory; give the page's file, as in {out / 'report.html'}")
    runs, left_out = read_runs(paths)
    alone = len(runs) == 1 and not left_out
    page = run_page(runs[0]) if alone else comparison_page(runs, left_out)
    target = runs[0].path / "report.html" if out is None else out
    target.parent.mkdir(parents=True, exist_ok=True)
    page.save(target)
    return target


def run_page(run: RunRecord) -> Page:
    """Return the page of one run."""
    planned = f" of {run.max_steps:,}" if run.max_steps else ""
    tokens = f" · {run.tokens:,} tokens" if run.tokens else ""
    what = f"{run.model} · " if run.model else ""
    page = Page(
        f"Training run: {run.name}",
        f"{what}{run.last_step:,}{planned} steps{tokens} · {run.path.resolve()}",
    )
    for note in run.notes:
        page.notice(note)
    page.cards(*_cards(run))
    _add_curves(page, run)
    _add_noise(page, run)
    _add_layers(page, run)
    _add_heatmaps(page, run)
    _add_refreshes(page, run)
    _add_events(page, run)
    _add_setup(page, run)
    return page


def _format(value: float | None, spec: str = ".4g") -> str:
    return "unknown" if value is None else format(value, spec)


def _losses(run: RunRecord) -> tuple[float | None, float | None, int | None]:
    """Return (last, best finite loss, its step)."""
    steps, losses = run.series("loss")
    finite = [(loss, step) for step, loss in zip(steps, losses) if math.isfinite(loss)]
    best, step = min(finite) if finite else (None, None)
    return (losses[-1] if losses else None), best, step


def _nonfinite(run: RunRecord) -> int:
    return len({step for step, what, _ in events(run) if what == "not finite"})


def _cards(run: RunRecord) -> list[tuple[str, str, str]]:
    last, best, best_step = _losses(run)
    steps, _ = run.series("loss")
    share = run.fp4_share
    seconds = run.seconds_per_step
    how = "median" if run.series("step_seconds")[0] else "mean of the last call"
    bad = _nonfinite(run)
    flag = "" if last is None or math.isfinite(last) else ", not finite"
    cards = [
        ("last loss", _format(last), f"step {steps[-1]:,}{flag}" if steps else "not logged"),
        ("best loss", _format(best), f"step {best_step:,}" if best_step else "no finite loss"),
    ]
    for name, (evaluated, values) in run.evaluation_series().items():
        title = f"last evaluation, {name}" if name else "last evaluation"
        cards.append((title, _format(values[-1]), f"step {evaluated[-1]:,}"))
    cards += [
        ("time", "unknown" if seconds is None else f"{seconds:.3g} s", f"per step, {how}"),
        ("not finite", str(bad), "steps with NaN or inf" if bad else "no NaN, no inf"),
        (
            "FP4",
            "unknown" if share is None else f"{share:.1%}",
            "of the model's GEMM FLOPs" if share != 0 else "nothing is quantized",
        ),
        ("refreshes", str(len(run.refreshes)), "of the weights' split"),
    ]
    return cards


def _add_curves(page: Page, run: RunRecord) -> None:
    page.section("Loss")
    if not run.history and not run.evaluations:
        page.text("No losses were recorded.")
        return
    caption = (
        "Thin: every logged entry; thick: its centred moving average. Good: the loss falls, and "
        "evaluation follows training. Bad: a gradient norm that rises or has spikes at a learning "
        "rate that does not change; the loss follows it."
    )
    bad = [step for step, loss in zip(*run.series("loss")) if not math.isfinite(loss)]
    if bad:
        caption += (
            f" The loss was not finite at {len(bad)} steps, first at step {bad[0]:,}: marked with "
            "a cross, and left a gap in the average."
        )
    page.figure(figures.curves(run), caption)


def _add_noise(page: Page, run: RunRecord) -> None:
    page.section(
        "Gradient against quantization noise",
        "The gradient of each weight as its layer computes it from quantized operands, against the "
        "same product of unquantized ones: |G| / (√3 |G_quantized - G|). By arXiv 2505.19115 "
        "quantized training becomes less effective once this falls below 1. Noise that reaches a "
        "layer from other layers is not in it.",
    )
    if not run.noise:
        why = "Not measured: " + (
            "no quantized GEMM makes a weight's gradient in this run."
            if not run.quantized
            else "the records have no norms of gradient and noise."
        )
        page.text(why)
        return
    picture, crossing = figures.noise(run)
    page.text(crossing_text(crossing))
    broken = [step for step, ratio in zip(*run.noise_series()["all"]) if math.isnan(ratio)]
    if broken:
        page.notice(f"NaN at {len(broken)} measured steps, first at step {broken[0]:,}: not drawn.")
    page.figure(
        picture,
        "All layers together (norms summed in squares) and by kind of layer, in the first "
        "micro-batch of each measured step on the first process. Good: well above the line at 1. "
        "Bad: the shaded part below it (arXiv 2505.19115).",
    )


def crossing_text(crossing: Crossing) -> str:
    """Return a sentence that says where the ratio crosses 1, or that it does not."""
    if crossing.step is None:
        return "All layers together, the ratio does not fall below 1 and stay there in this run."
    if crossing.from_start:
        return "All layers together, the ratio is below 1 from the first measurement on."
    return (
        f"All layers together, the ratio falls below 1 at step {crossing.step:,} and stays there "
        "(median of three measurements): from there on, by that criterion, FP4 is less effective."
    )


def _add_layers(page: Page, run: RunRecord) -> None:
    if not run.layers:
        return
    step = max(run.layers)
    header = ["layer", *(f"{tensor} SQNR (dB)" for tensor in TENSORS), "worst SQNR",
              *(f"{tensor} stable rank" for tensor in TENSORS),
              "gradient zeroed", "|G| / (√3 noise)"]  # fmt: skip
    page.section(
        "Layers by risk",
        f"At step {step:,}, the last measurement; the layer with the worst SQNR comes first. A "
        "click on a column's head sorts by it.",
        f"Good: an SQNR of {SQNR_NEAREST} dB and more, which is what direct NVFP4 rounding to "
        f"nearest gives for normal values ({SQNR_STOCHASTIC} dB if it is stochastic); such cells "
        f"have no colour. Bad: {_FULL_COLOR:.0f} dB and less, where the error is a third of the "
        "tensor; such cells have all of it.",
    )
    page.table(header, [row for _, row in sorted(_layer_rows(run, step), key=lambda r: r[0])])


def _layer_rows(run: RunRecord, step: int) -> list[tuple[tuple[float, float], Row]]:
    """Return ((risk order), cells) of each layer."""
    names = layer_names(run)
    measured = run.layers[step]
    stats = {n: {t: measured.get(n, {}).get(t, {}) for t in TENSORS} for n in names}

    def decibels(value: float | None) -> Cell:
        if value is None or not math.isfinite(value):
            return _maybe(value)
        share = (SQNR_NEAREST - value) / (SQNR_NEAREST - _FULL_COLOR)
        return number(value, ".1f", shade=min(max(share, 0.0), 1.0))

    rows: list[tuple[tuple[float, float], Row]] = []
    for name, tensors in stats.items():
        nonfinite = any(s.get("nonfinite", 0) > 0 for s in tensors.values())
        found = [s["sqnr_db"] for s in tensors.values() if "sqnr_db" in s]
        ranks = [s["stable_rank"] for s in tensors.values() if "stable_rank" in s]
        worst = math.nan if nonfinite else min(found, default=None)
        order = -math.inf if nonfinite else (min(found) if found else math.inf)
        pair = run.noise.get(step, {}).get(name)
        cells = [
            Cell(name),
            *(decibels(_stat(tensors[t], "sqnr_db")) for t in TENSORS),
            decibels(worst),
            *(_maybe(_stat(tensors[t], "stable_rank"), ".1f") for t in TENSORS),
            _maybe(_stat(tensors["gradient"], "zeroed"), ".1%"),
            _maybe(signal_to_noise([pair]) if pair else None, ".2f"),
        ]
        rows.append(((order, min(ranks, default=0.0)), cells))
    return rows


def _stat(stats: dict[str, float], name: str) -> float | None:
    """Return NaN where the tensor has NaN or inf, of which nothing else is measured."""
    return math.nan if stats.get("nonfinite", 0) > 0 else stats.get(name)


def _maybe(value: float | None, spec: str = ".3g") -> Cell:
    return Cell("n/a", math.nan, 0.0, "not measured") if value is None else number(value, spec)


def _add_heatmaps(page: Page, run: RunRecord) -> None:
    if not run.layers:
        return
    page.section(
        "Layers over time",
        "A row for each layer, by kind and in model order; a column for each measured step. Gray: "
        "not measured. A red cross: the tensor has NaN or inf. A share that was zero throughout "
        "has no picture. Lines across a scale of colours mark what plain data have: independent "
        "normal values, rounded directly to NVFP4.",
    )
    for panel in PANELS:
        picture = heatmap(run, panel)
        if picture is not None:
            wide = len(panel.tensors) > 1
            page.figure(picture, f"{panel.title}. {panel.explanation}", wide=wide)


def _add_refreshes(page: Page, run: RunRecord) -> None:
    if not any(all(layers.values()) for layers in run.refreshes.values()):
        return
    page.section(
        "Refreshes",
        "A refresh decomposes every split weight again; the weight itself stays. It changes "
        "how orthonormal the factors are, and how much of the weight and of its range the low-rank "
        "part holds.",
    )
    page.figure(
        figures.refreshes(run),
        "Before and after each refresh: median over the layers, bars from least to largest. Good: "
        f"orthogonality below {ORTHOGONAL:g} after a refresh, which is the rounding of fp32, and "
        "narrowing above 1, where the split takes range away. Bad: orthogonality near "
        f"{RELATIVE_ERROR} before one, as large as the error that NVFP4 makes, and narrowing at 1: "
        "refresh more often.",
    )


def _add_events(page: Page, run: RunRecord) -> None:
    found = events(run)
    page.section("Events")
    if not found:
        page.text("None: every figure was finite, no refresh, no switch of precision.")
        return
    rows = [
        [Cell(what, shade=float(what == "not finite")), number(float(step), ",.0f"), Cell(details)]
        for step, what, details in found
    ]
    page.table(["event", "step", "details"], rows)


def _add_setup(page: Page, run: RunRecord) -> None:
    page.section("Setup", *(line.strip() for line in run.summary.splitlines()))
    defaults = MetisConfig().to_dict()
    settings = {
        name: value
        for name, value in run.config.items()
        if name in _ALWAYS_SHOWN or value != _as_json(defaults.get(name, value))
    }
    versions = run.environment.get("versions") or {}
    rest = {name: value for name, value in run.environment.items() if name != "versions"}
    facts = settings | versions | {name: value for name, value in rest.items() if value}
    if facts:
        rows = [[Cell(name), Cell(_text(value))] for name, value in facts.items()]
        page.table(["setting", "value"], rows, "What differs from the defaults, and the software.")


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def comparison_page(runs: Sequence[RunRecord], left_out: Sequence[str] = ()) -> Page:
    """Return losses and gradient norms of several runs in one picture, and a table of them.

    Args:
        runs: what is compared.
        left_out: sentences about runs that could not be read.
    """
    _make_names_unique(runs)
    page = Page("Training runs", ", ".join(run.name for run in runs))
    for sentence in left_out:
        page.notice(sentence)
    for run in runs:
        for note in run.notes:
            page.notice(f"{run.name}: {note}")
    caption = "Thick: centred moving average over a twentieth of the run."
    if len(runs) <= CROWDED:
        caption += " Thin: every logged entry."
    caption += (
        " Good: a run stays as close to the control (black, bf16) as two controls with different "
        "seeds do to each other. Bad: its distance grows, its gradient norm rises, or it ends "
        "early."
    )
    page.section("Loss").figure(figures.overlay(runs), caption)
    header = ["run", "last loss", "best loss", "steps", "s / step", "steps not finite", "FP4",
              "refreshes", "noise crosses at", "directory"]  # fmt: skip
    page.section("Runs").table(header, [_comparison_row(run) for run in runs])
    return page


def _comparison_row(run: RunRecord) -> Row:
    last, best, _ = _losses(run)
    series = run.noise_series()
    crossing = find_crossing(*series["all"]) if series else Crossing(None)
    place = Cell("n/a", math.nan, note="not measured") if not series else Cell("never", math.inf)
    if crossing.step is not None:
        place = number(float(crossing.step), ",.0f")
    bad = _nonfinite(run)
    return [
        Cell(run.name),
        _maybe(last, ".4f"),
        _maybe(best, ".4f"),
        number(float(run.last_step), ",.0f"),
        _maybe(run.seconds_per_step),
        number(float(bad), ".0f", shade=float(bad > 0)),
        _maybe(run.fp4_share, ".1%"),
        number(float(len(run.refreshes)), ".0f"),
        place,
        Cell(str(run.path)),
    ]


def _make_names_unique(runs: Sequence[RunRecord]) -> None:
    """Tell two runs of one scheme apart by their directories."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({run.path})"
