"""Heat maps of a run's health: a row for each layer, a column for each measured step."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator, PercentFormatter

from metis_hf.lab.run_records import RunRecord
from metis_hf.lab.show.figure import as_png, figure_axes, heat_map, plain_text
from metis_hf.shared.layer_names import group_of
from metis_hf.training.gradient_noise import signal_to_noise
from metis_hf.training.health import TENSORS
from metis_hf.training.reference_values import (
    ORTHOGONAL,
    RELATIVE_ERROR,
    SATURATED,
    SQNR_NEAREST,
    SQNR_STOCHASTIC,
    ZEROED,
)

_ROW_LABELS = 48  # with more rows, only groups are labeled
_COLUMN_LABELS = 8
_FAR = 30.0  # logarithmic color scales end at this multiple and this fraction of the mark
_PRODUCT = "gradient of the weight"  # the wgrad GEMM's result; TENSORS are operands
_RATIO = "noise_ratio"


@dataclass(frozen=True)
class Panel:
    """A statistic and how it is shown."""

    stat: str  # its name in the health file
    title: str
    unit: str  # or the definition of the number
    explanation: str  # for the caption: good and bad values
    marks: tuple[tuple[float, str], ...]  # (value, meaning): lines across the color bar
    log: bool = False  # logarithmic color scale
    share: bool = False  # from 0 up, in percent
    tensors: tuple[str, ...] = TENSORS  # tensors that can have the statistic
    # matplotlib's colormap. Bad is red, or bright where no value can be better than the first mark.
    colors: str = "RdBu"

    @property
    def centred(self) -> bool:
        """Return True if the color scale is centered on the first mark."""
        return self.colors.startswith("RdBu")


PANELS = (
    Panel("stable_rank", "Stable rank", r"$\|x\|_F^2 / \sigma_1^2$",
          "Good: tens or hundreds, up to about a quarter of the shorter side, the value for a "
          "square matrix of independent normal values. Bad (bright): close to 1, where a single "
          "direction dominates the tensor and sets the scale of every block that it touches.",
          ((1.0, "1: a single direction"),), log=True, colors="viridis_r"),
    Panel("energy", "Energy of the low-rank part", "of the squared norm",
          "The share that the spectral split separates from the residual; for a tensor that the "
          "scheme does not split, the share that a split of the same rank would separate. Good "
          "(blue): half or more. A few percent means that no direction stands out: harmless for a "
          "tensor of high stable rank, bad for one of low stable rank.",
          ((0.5, "half of it"),), share=True),
    Panel("narrowing", "Narrowing of the residual", "max |x| / max |residual|",
          "How much the spectral split narrows the range; for a tensor that the scheme does not "
          "split, how much a split of the same rank would. Good (blue): 2 or more, where the "
          "split saves at least one bit of range. At 1 the split saves nothing: harmless for a "
          "tensor of high stable rank, bad for one of low stable rank.",
          ((1.0, "1: nothing saved"),), log=True),
    Panel("sqnr_db", "SQNR", "signal to quantization noise, dB",
          f"Measured on the operand as the GEMM reads it. Good: {SQNR_NEAREST} dB or more, the "
          "value of direct NVFP4 for normal values rounded to nearest; with stochastic rounding, "
          f"usual for gradients, it is {SQNR_STOCHASTIC} dB. Bad (red): below both. Every 6 dB "
          "lost doubles the error.",
          ((SQNR_NEAREST, f"{SQNR_NEAREST} dB: normal values, nearest"),
           (SQNR_STOCHASTIC, f"{SQNR_STOCHASTIC} dB: stochastic"))),
    Panel("zeroed", "Zeroed share", "of the non-zero elements",
          f"Nonzero elements that quantization rounds to zero. Good: about {ZEROED:.1%}, as for "
          "normal values in direct NVFP4. Bad (red): several times as much, because outliers set "
          "the scales and small values underflow.",
          ((ZEROED, f"{ZEROED:.1%}: normal values"),), share=True, colors="RdBu_r"),
    Panel("saturated", "Saturated share", "of the elements",
          "Elements beyond the largest value that their block can represent. Good: "
          f"{SATURATED:.1%} or less, as for normal values when scales are rounded to nearest; "
          "zero when scales are rounded up. Bad (red): clearly more, because the largest values "
          "are clipped.",
          ((SATURATED, f"{SATURATED:.1%}: normal values"),), share=True, colors="RdBu_r"),
    Panel("orthogonality", "Orthogonality drift", "max |uᵀu - I|, |vh vhᵀ - I|",
          "How far training has moved the stored factors from orthonormality; a refresh restores "
          f"it. Good: below {ORTHOGONAL:g}, the rounding error of fp32. Bad (bright): near "
          f"{RELATIVE_ERROR}, as large as the error of NVFP4; refresh more often.",
          ((ORTHOGONAL, "fp32 rounding"), (RELATIVE_ERROR, "error of NVFP4")), log=True,
          tensors=("weight",), colors="magma"),
    Panel(_RATIO, "Gradient against quantization noise", r"$|G| / (\sqrt{3}\ |G_q - G|)$",
          "The gradient of each weight relative to its quantization noise: the difference between "
          "the layer's product of quantized operands and the same product of unquantized ones, in "
          "the first micro-batch of the step on the first process. Noise from other layers is not "
          "included. Good: well above 1. Bad (red): below 1, where quantized training becomes "
          "less effective (arXiv 2505.19115).", ((1.0, "1: gradient = √3 noise"),), log=True,
          tensors=(_PRODUCT,)),
)  # fmt: skip


def _order_layers(run: RunRecord) -> list[str]:
    """Return the layers sorted by kind; kinds, and the layers of a kind, are in model order."""
    names = dict.fromkeys(name for measured in run.layers.values() for name in measured)
    kinds = list(dict.fromkeys(map(group_of, names)))
    return sorted(names, key=lambda name: kinds.index(group_of(name)))  # stable


def _short_names(names: list[str]) -> list[str]:
    """Shorten model.layers.3.self_attn.q_proj to "q_proj 3", with a prefix if that is ambiguous."""
    indices = [re.findall(r"(?<=\.)\d+", name) for name in names]
    short = [f"{group_of(n)} {'.'.join(i)}".strip() for n, i in zip(names, indices)]
    counts = Counter(short)
    return [
        plain_text(f"{name.split('.')[0]} {s}" if counts[s] > 1 else s)
        for name, s in zip(names, short)
    ]


def grid(run: RunRecord, tensor: str, stat: str) -> tuple[np.ndarray, np.ndarray]:
    """Return values [layer step], NaN if not measured, and the mask [layer step] of non-finite."""
    layers = _order_layers(run)
    values = np.full((len(layers), len(run.layers)), np.nan)
    bad = np.zeros_like(values, dtype=bool)
    for column, step in enumerate(run.layers):
        for row, layer in enumerate(layers):
            stats = run.layers[step].get(layer, {}).get(tensor, {})
            norms = run.noise.get(step, {}).get(layer)
            if tensor == _PRODUCT and norms is not None:
                stats = {_RATIO: signal_to_noise([norms]) or 0.0}
            value = stats.get(stat)
            if value is not None and math.isfinite(value):
                values[row, column] = value
            else:
                bad[row, column] = value is not None or stats.get("nonfinite", 0) > 0
    return values, bad


def heat_map_of(run: RunRecord, panel: Panel) -> bytes | None:
    """Draw the heat maps of a statistic, one per tensor, side by side on one color scale, as a PNG.

    A tensor has no map if nothing was measured, or if a share is zero everywhere. Returns None if
    no tensor has a map with values.
    """
    grids = {tensor: grid(run, tensor, panel.stat) for tensor in panel.tensors}
    shown = {t: (values, bad) for t, (values, bad) in grids.items()
             if bad.any() or _has_values(values, panel)}  # fmt: skip
    if not any(_has_values(values, panel) for values, _ in shown.values()):
        return None
    layers = _order_layers(run)
    height = min(max(2.9, 1.5 + 0.19 * len(layers)), 12)
    width = 2.9 * len(shown) + 1.3 + 1.9 * (len(shown) == 1)
    figure, axes = figure_axes(1, len(shown), (width, height), sharey=True)
    norm, lowest = _scale(np.concatenate([values for values, _ in shown.values()]), panel)
    for axis, (tensor, (values, bad)) in zip(axes[0], shown.items()):
        values = np.where(values < lowest, lowest, values)  # NaN stays
        image = heat_map(axis, values, norm, colors=panel.colors, crosses=bad)
        axis.set_title(tensor, fontsize=10)
        _step_ticks(axis, list(run.layers))
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=min(1.0, 3.2 / height), pad=0.02,
                          aspect=18)  # fmt: skip
    _scale_ticks(bar.ax, panel)
    for value, _ in panel.marks:
        bar.ax.axhline(value, color="white", lw=3)
        bar.ax.axhline(value, color="black", lw=1.4)
    bar.outline.set_visible(False)
    kinds = [group_of(layer) for layer in layers]
    if len(layers) <= _ROW_LABELS:
        axes[0][0].set_yticks(range(len(layers)), _short_names(layers))
    else:
        middles = {k: kinds.index(k) + (kinds.count(k) - 1) / 2 for k in dict.fromkeys(kinds)}
        axes[0][0].set_yticks(list(middles.values()), list(map(plain_text, middles)))
    for row, (above, below) in enumerate(itertools.pairwise(kinds)):
        for axis in axes[0] if above != below else ():
            axis.axhline(row + 0.5, color="white", lw=1.6)
    marks = ", ".join(meaning for _, meaning in panel.marks)
    of = ", ".join(filter(None, (run.name, run.model)))
    title = f"{panel.title}: {panel.unit}\nlines on the scale: {marks}"
    figure.suptitle(f"{plain_text(of)}\n{title}", fontsize=10)
    return as_png(figure)


def _has_values(values: np.ndarray, panel: Panel) -> bool:
    finite = values[np.isfinite(values)]
    return bool(finite.any() if panel.share else finite.size)


def _scale(values: np.ndarray, panel: Panel) -> tuple[Normalize, float]:
    """Return the color scale for the values and the panel's marks, and the least value it shows."""
    finite = values[np.isfinite(values)]
    marks = [value for value, _ in panel.marks]
    middle = marks[0]
    if panel.share:  # the mark of plain data is the center
        return TwoSlopeNorm(middle, 0.0, max(2 * middle, *finite)), 0.0
    if not panel.log:
        far = max(abs(value - middle) for value in [*marks, *finite])
        return CenteredNorm(middle, far or 1.0), -math.inf
    positive = finite[finite > 0]
    low, high = min([*marks, *positive]), max([*marks, *positive])
    if panel.centred:
        far = min(max(high / middle, middle / low, 1.01), _FAR)
        return LogNorm(middle / far, middle * far), low
    return LogNorm(low, max(high, low * 1.01)), low


def _scale_ticks(axis: Axes, panel: Panel) -> None:
    """Label the color bar in plain numbers, not in matplotlib's powers of ten."""
    axis.tick_params(which="both")
    if panel.share:
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.log and panel.stat != "orthogonality":
        low, high = axis.get_ylim()
        subs = (1, 1.5, 2, 3, 5, 7) if high < 30 * low else (1, 3) if high < 1000 * low else (1,)
        axis.yaxis.set_major_locator(LogLocator(subs=subs))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(NullLocator())


def _step_ticks(axis: Axes, steps: list[int]) -> None:
    """Set at most eight labels, evenly spaced, from the first measurement on."""
    stride = max(1, math.ceil((len(steps) - 1) / (_COLUMN_LABELS - 1)))
    places = list(range(0, len(steps), stride))
    axis.set_xticks(places, [str(steps[place]) for place in places])
    axis.set_xlabel("step")
