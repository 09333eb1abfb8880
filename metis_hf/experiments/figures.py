"""Pictures of a comparison: loss curves with the gap to the control, spectral health over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis_hf.experiments.runner import SchemeResult
from metis_hf.monitoring.health import TENSORS
from metis_hf.schemes import CONTROL
from metis_hf.shared.figures import CROWDED, figure_axes, scheme_styles, smooth, spread

HEALTH_PANELS = (
    ("stable_rank", "stable rank"),
    ("energy", "energy in the kept part\n(each at its own rank)"),
    ("narrowing", "max |x| / max |residual|\n(each at its own rank)"),
    ("sqnr_db", "SQNR of the operand (dB)"),
    ("zeroed", "share of elements zeroed"),
)


def plot_loss(results: Sequence[SchemeResult], path: Path, title: str) -> None:
    """Training loss by step, and below it the gap to the control in percent, on equal batches."""
    figure, axes = figure_axes(2, 1, (8, 7), sharex=True, height_ratios=[3, 2])
    (top,), (bottom,) = axes
    styles = scheme_styles([r.scheme for r in results], CONTROL)
    control = next((r for r in results if r.scheme == CONTROL), None)
    span = max(1, len(results[0].history) // 20)
    ends, labels = [], []
    for result in results:
        steps = [entry["step"] for entry in result.history]
        losses = [entry["loss"] for entry in result.history]
        style = styles[result.scheme]
        look = {"color": style.color, "ls": style.line, "lw": 1.5}
        top.plot(steps, smooth(losses, span), label=result.scheme, **look)
        ends += smooth(losses, span)[len(losses) // 10 :]
        if control is not None and result is not control:
            pairs = zip(losses, (entry["loss"] for entry in control.history))
            gaps = smooth([100 * (loss / base - 1) for loss, base in pairs], 2 * span)
            bottom.plot(steps[: len(gaps)], gaps, **look)
            labels.append((gaps[-1], steps[len(gaps) - 1], result.scheme))
    margin = 0.05 * (max(ends) - min(ends))
    top.set_ylim(min(ends) - margin, max(ends) + margin)
    top.set_ylabel("training loss (nats per token)")
    if len(results) > CROWDED:
        labels = []
        figure.legend(*top.get_legend_handles_labels(), loc="outside right center", frameon=False)
    else:
        top.legend(frameon=False)
    top.set_title(title)
    bottom.axhline(0, color="black", lw=1)
    bottom.set_ylabel(f"gap to {CONTROL} (%)")
    bottom.set_xlabel(f"optimizer step (moving averages of {span} and {2 * span} steps)")
    low, high = bottom.get_ylim()
    for (_, step, scheme), place in zip(labels, spread([x[0] for x in labels], (high - low) / 18)):
        bottom.annotate(f" {scheme}", (step, place), color=styles[scheme].color, fontsize=8,
                        va="center", annotation_clip=False)  # fmt: skip
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def health_series(result: SchemeResult, tensor: str, stat: str) -> tuple[list[int], list[float]]:
    """(steps, mean over layer groups) of one statistic."""
    steps: list[int] = []
    means: list[float] = []
    for entry in result.history:
        prefix, suffix = f"metis/{tensor}/", f"/{stat}"
        values = [v for k, v in entry.items() if k.startswith(prefix) and k.endswith(suffix)]
        if values:
            steps.append(int(entry["step"]))
            means.append(sum(values) / len(values))
    return steps, means


def plot_spectra(results: Sequence[SchemeResult], path: Path, title: str) -> None:
    """Spectral health over training: a row per tensor, a column per statistic."""
    figure, axes = figure_axes(len(TENSORS), len(HEALTH_PANELS), (16, 8), sharex=True)
    styles = scheme_styles([r.scheme for r in results], CONTROL)
    for row, tensor in zip(axes, TENSORS):
        for axis, (stat, label) in zip(row, HEALTH_PANELS):
            for result in results:
                steps, means = health_series(result, tensor, stat)
                if steps:
                    style = styles[result.scheme]
                    axis.plot(steps, means, marker=style.marker, ls=style.line, ms=3, lw=1.3,
                              color=style.color, label=result.scheme)  # fmt: skip
            if tensor == TENSORS[0]:
                axis.set_title(label, fontsize=10)
            if tensor == TENSORS[-1]:
                axis.set_xlabel("step")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(tensor)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=8, frameon=False)
    figure.suptitle(title)
    figure.savefig(path)
