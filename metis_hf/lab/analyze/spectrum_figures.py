"""The figures of an analysis, each drawn from the data in its JSON file.

Columns are always weight, activation and gradient; a scheme has the same color in every figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from metis_hf.lab.analyze.analysis import KINDS
from metis_hf.lab.analyze.distortion import SCHEMES
from metis_hf.lab.analyze.short_names import short_names
from metis_hf.lab.show.figure import (
    COLORS,
    STYLES,
    as_png,
    figure_axes,
    heat_map,
    shared_legend,
    short_models,
    tidy,
)
from metis_hf.training.reference_values import RELATIVE_ERROR

Data = Mapping[str, Any]
SCHEME_COLORS = {scheme: STYLES[scheme].color for scheme in SCHEMES}
GREY = "#b8bcc2"
_PANEL = 3.2  # inches: three panels in a row are as wide as other figures
_RELATIVE = r"$\sigma_i\ /\ \sigma_1$"
_RAMP = ("#0b3954", "#0072B2", "#56B4E9", "#E69F00")  # leading to trailing component


def _panels(data: Data, part: str, label: str, height: float, rows: int = 1):
    """Return (figure, axes [rows n], the n kinds that have `part`); `label` is of the top left."""
    kinds = [kind for kind in KINDS if part in data.get(kind, {})]
    figure, axes = figure_axes(rows, max(len(kinds), 1), (_PANEL * max(len(kinds), 1), height))
    tidy(*axes.flat)
    for axis, kind in zip(axes[0], kinds):
        axis.set_title(f"{kind}  {data[kind]['shape'][0]} x {data[kind]['shape'][1]}")
    axes[0, 0].set_ylabel(label)
    return figure, axes, kinds


def _curve(axis: Any, data: Data, color: Any, label: str, lw: float = 1.8) -> None:
    """Draw s_i / s_0 against the share of components, with the elbow as a dot."""
    sigma = np.asarray(data["sigma"])
    share = (np.arange(len(sigma)) + 1) / len(sigma)
    axis.plot(share, sigma / sigma[0], color=color, lw=lw, label=label)
    found = data["elbow"]
    if found is not None:
        axis.plot(share[found], sigma[found] / sigma[0], "o", color=color, ms=6, mec="white")


def _spectrum_axes(axis: Any, curves: Sequence[Data]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    lowest = min(min(np.asarray(c["sigma"]) / c["sigma"][0]) for c in curves)
    lowest = max(lowest, 1e-5)
    axis.set_ylim(lowest / 1.5, 1.6)
    subs = (1.0, 2.0, 5.0) if lowest > 0.02 else (1.0,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("share of components")
    tidy(axis)


def spectra(data: Data, title: str) -> bytes:
    """Draw singular spectra with elbows, and the spectra of noise of the same norm."""
    figure, axes, kinds = _panels(data, "spectrum", _RELATIVE, 3.7)
    for axis, kind in zip(axes[0], kinds):
        curve = data[kind]["spectrum"]
        _spectrum_axes(axis, [curve])
        sigma, noise = np.asarray(curve["sigma"]), np.asarray(curve["noise_sigma"])
        share = (np.arange(len(sigma)) + 1) / len(sigma)
        axis.plot(share, noise / sigma[0], "--", color="#7a7f87", lw=1.3,
                  label="noise of the same norm")  # fmt: skip
        _curve(axis, curve, COLORS[0], "singular values")
        if curve["elbow"] is not None:
            axis.axvline(share[curve["elbow"]], color=COLORS[1], lw=1, ls=":")
            axis.text(0.03, 0.05,
                      f"elbow k* = {curve['elbow']} of {len(sigma)} ({curve['fraction']:.1%}),\n"
                      f"with {curve['energy']:.0%} of the energy",
                      transform=axis.transAxes, va="bottom",
                      bbox={"fc": "white", "ec": "none", "alpha": 0.8})  # fmt: skip
    shared_legend(figure, axes[0, :1])
    return as_png(figure, title)


def components(data: Data, title: str) -> bytes:
    """Draw histograms of rank-1 components over the full matrix's histogram."""
    figure, axes, kinds = _panels(data, "components", "density", 3.4)
    for axis, kind in zip(axes[0], kinds):
        part = data[kind]["components"]
        _fill(axis, part["edges"], part["full"], GREY, "full matrix")
        for color, (index, component) in zip(_RAMP, part["components"].items()):
            _step(axis, component["edges"], component["density"], color, f"component i = {index}")
        _log_density(axis, part["edges"], part["full"])
    shared_legend(figure, axes[0])
    return as_png(figure, title)


def _fill(axis: Any, edges: Sequence[float], density: Sequence[float], color: str, label: str):
    axis.stairs(density, edges, fill=True, color=color, alpha=0.75, label=label, baseline=1e-12)


def _step(axis: Any, edges: Sequence[float], density: Sequence[float], color: str, label: str):
    axis.stairs(density, edges, color=color, lw=1.5, label=label, baseline=None)


def _log_density(
    axis: Any, edges: Sequence[float], density: Sequence[float], room: float = 0.0
) -> None:
    """Make the y axis logarithmic, with `room` for text above, as a share of the axis height."""
    seen = [value for value in density if value > 0]
    axis.set_yscale("log")
    low, high = min(seen) / 2, axis.get_ylim()[1]
    axis.set_ylim(low, high * (high / low) ** room)
    axis.set_xlim(edges[0] * 1.02, edges[-1] * 1.02)
    axis.set_xlabel("element")
    axis.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))


def residuals(data: Data, title: str) -> bytes:
    """Draw left singular vectors (above) and the residual without 3 % of the components (below)."""
    figure, axes, kinds = _panels(data, "residual", "density", 6.2, rows=2)
    for column, kind in enumerate(kinds):
        part = data[kind]["residual"]
        top, bottom = axes[0, column], axes[1, column]
        for color, (index, vector) in zip(_RAMP, part["vectors"].items()):
            _step(top, vector["edges"], vector["density"], color, f"u, i = {index}")
        top.locator_params(axis="x", nbins=6)
        top.set_ylim(top=1.3 * top.get_ylim()[1])  # room for the legend
        top.set_xlabel("entry of a left singular vector")
        top.legend(frameon=False, loc="upper right")
        _fill(bottom, part["edges"], part["full"], GREY, "full matrix")
        _fill(bottom, part["residual_edges"], part["residual"], COLORS[4], "residual")
        _log_density(bottom, part["edges"], part["full"], room=0.3)
        narrowing = part["narrowing"]
        bottom.text(0.03, 0.97,
                    f"without the top {part['removed']}:\n{narrowing['max']:.1f}x narrower (max),\n"
                    f"{narrowing['q999']:.1f}x (99.9 %)", transform=bottom.transAxes, va="top",
                    )  # fmt: skip
    axes[1, 0].set_ylabel("density")
    shared_legend(figure, axes[1, :1])
    return as_png(figure, title)


def preprocessing(data: Data, title: str) -> bytes:
    """Draw histograms of the elements, of the Hadamard-rotated ones, and of Metis's residual."""
    figure, axes, kinds = _panels(data, "preprocessing", "density", 3.4)
    colors = {"original": GREY, "Hadamard": SCHEME_COLORS["nvidia"],
              "Metis residual": SCHEME_COLORS["metis"]}  # fmt: skip
    for axis, kind in zip(axes[0], kinds):
        part = data[kind]["preprocessing"]
        for name, density in part["density"].items():
            draw = _fill if name == "original" else _step
            draw(axis, part["edges"], density, colors[name], name)
        _log_density(axis, part["edges"], part["density"]["original"], room=0.4)
        wide = part["width"]
        lines = [f"{name}: {wide[name]['max'] / wide['original']['max']:.2f}" for name in colors]
        axis.text(0.03, 0.97, "largest element\n" + "\n".join(lines), transform=axis.transAxes,
                  va="top")  # fmt: skip
    shared_legend(figure, axes[0, :1])
    return as_png(figure, title)


def distortion(data: Data, title: str) -> bytes:
    """Draw magnitudes before and after quantization, and singular value and direction errors."""
    figure, axes, kinds = _panels(data, "distortion", "density", 9.4, rows=3)
    for column, kind in enumerate(kinds):
        part = data[kind]["magnitudes"]
        _magnitudes(axes[0, column], part)
        for row, (key, label) in enumerate(
            (("sigma_error", r"$|\hat\sigma_i-\sigma_i|\ /\ \sigma_i$"),
             ("left", r"$1-|\cos(u_i,\hat u_i)|$")), start=1,
        ):  # fmt: skip
            axis = axes[row, column]
            for scheme, errors in data[kind]["distortion"].items():
                x, y = binned(errors[key])
                axis.plot(x, y, color=SCHEME_COLORS[scheme], lw=1.6, label=SCHEMES[scheme])
            if key == "sigma_error":
                axis.axhline(RELATIVE_ERROR, color="#7a7f87", lw=1, ls="--",
                             label=f"{RELATIVE_ERROR}: NVFP4 of normal values")  # fmt: skip
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_ylim(bottom=max(axis.get_ylim()[0], 1e-7))
            axis.set_xlabel("index of the singular component")
            if column == 0:
                axis.set_ylabel(label)
    shared_legend(figure, axes[:2, 0], columns=5)
    return as_png(figure, title)


def _magnitudes(axis: Any, part: Data) -> None:
    edges, zero = np.asarray(part["edges"]), part["zero"]
    _fill(axis, part["edges"], part["density"]["before"], GREY, "before")
    for scheme in ("nvfp4", "metis"):
        density = part["density"][scheme]
        axis.stairs(density, edges, color=SCHEME_COLORS[scheme], lw=1.2, label=SCHEMES[scheme])
    # Exact zeros have no logarithm: a separate bar, whose area is their share.
    place, width = edges[0] - 0.45, 0.3
    axis.bar(place, zero["nvfp4"] / width, width, color=SCHEME_COLORS["nvfp4"])
    axis.text(0.13, 0.97,
              f"exactly 0:\n{zero['before']:.1%} before\n{zero['nvfp4']:.1%} direct\n"
              f"{zero['metis']:.1%} Metis", transform=axis.transAxes,
              va="top")  # fmt: skip
    axis.set_ylim(top=axis.get_ylim()[1] * 1.1)
    axis.set_xlim(edges[0] - 0.8, 1.9)
    axis.set_xlabel(r"$\log_{10}$ |element| / rms")


def binned(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean index from 1, median) of about 40 bins that are even on a logarithmic axis."""
    y = np.asarray(values)
    index = np.arange(1, len(y) + 1)
    edges = np.unique(np.geomspace(1, len(y) + 1, 41).round().astype(int))
    groups = [slice(low - 1, high - 1) for low, high in itertools.pairwise(edges)]
    x = np.array([index[group].mean() for group in groups])
    return x, np.array([np.median(y[group]) for group in groups])


def alignment(data: Data, title: str) -> bytes:
    """Draw the alignment of sampled subspaces with the whole batch's, against the sample ratio."""
    figure, axes, kinds = _panels(data, "alignment", "mean squared\ncanonical correlation", 3.6)
    for axis, kind in zip(axes[0], kinds):
        part = data[kind]["alignment"]
        for unit, color in (("row", COLORS[0]), ("sequence", COLORS[1])):
            curve = part.get(f"by_{unit}")
            if curve is None:
                continue  # an expert's rows form no sequences
            label = f"{unit}s, of {part['rows' if unit == 'row' else 'sequences']}"
            axis.plot(curve["ratio"], curve["mean"], "o-", ms=3.5, color=color, label=label)
            axis.fill_between(curve["ratio"], curve["low"], curve["high"], color=color, alpha=0.2)
        axis.axhline(0.9, color="#7a7f87", lw=1, ls="--")
        axis.axvline(0.01, color="#7a7f87", lw=1, ls="--")
        axis.set_xscale("log")
        axis.set_ylim(0, 1.03)
        axis.set_xlabel("sample ratio")
        axis.legend(loc="lower right", title=f"{part['rank']} directions")
    return as_png(figure, title)


def universality(models: Data, title: str) -> bytes:
    """Draw the spectrum of the last FFN's weight of every model."""
    figure, axes = figure_axes(1, 1, (6.4, 3.8 + 0.25 * len(models)))
    axis = axes[0, 0]
    _spectrum_axes(axis, list(models.values()))
    names = short_models(models)
    for color, (model, curve) in zip([*COLORS, *(["black"] * len(models))], models.items()):
        share = "no elbow" if curve["elbow"] is None else f"f = {curve['fraction']:.1%}"
        _curve(axis, curve, color, f"{names[model]}, {curve['layer']}: {share}")
    axis.set_ylabel(_RELATIVE)
    shared_legend(figure, [axis], columns=1)
    return as_png(figure, title)


def all_spectra(lines: Data, title: str) -> bytes:
    """Draw the spectra of all layers, early layers light, late layers dark."""
    from matplotlib import colormaps

    kinds = [
        kind for kind in KINDS if any("sigma" in line.get(kind, {}) for line in lines.values())
    ]
    figure, axes = figure_axes(1, max(len(kinds), 1), (_PANEL * max(len(kinds), 1), 3.5))
    for axis, kind in zip(axes[0], kinds):
        curves = [line[kind] for line in lines.values() if "sigma" in line.get(kind, {})]
        _spectrum_axes(axis, curves)
        for place, curve in enumerate(curves):
            color = colormaps["viridis_r"](0.1 + 0.9 * place / max(len(curves) - 1, 1))
            _curve(axis, curve, color, "", lw=0.9)
        axis.set_title(f"{kind}: {len(curves)} layers")
    axes[0, 0].set_ylabel(_RELATIVE)
    return as_png(figure, title)


def residual_spectra(layers: Data, title: str) -> bytes:
    """Draw spectra of Metis-trained residuals and of weights trained without Metis."""
    columns = min(2, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = figure_axes(rows, columns, (1.5 * _PANEL * columns, 3.6 * rows + 0.4))
    colors = {"residual": SCHEME_COLORS["metis"], "whole weight": COLORS[5], "weight": "black"}
    for axis in axes.flat[len(layers) :]:
        axis.remove()
    for axis, (layer, curves) in zip(axes.flat, layers.items()):
        _spectrum_axes(axis, list(curves.values()))
        for label, curve in curves.items():
            color = colors.get(label.split(": ")[1], "#7a7f87")
            _curve(axis, curve, color, label)
        axis.set_title(layer)
        axis.set_ylabel(_RELATIVE)
    shared_legend(figure, axes.flat[: len(layers)], columns=4)
    return as_png(figure, title)


def risk_map(lines: Data, title: str) -> bytes:
    """Draw the share of swamped directions by block and layer, direct NVFP4 above Metis."""
    from matplotlib.colors import Normalize

    kinds = [k for k in KINDS if any("nvfp4_swamped" in line.get(k, {}) for line in lines.values())]
    at = short_names(lines)
    blocks = list(dict.fromkeys(block for block, _ in at.values()))
    modules = list(dict.fromkeys(module for _, module in at.values()))
    height = 1.6 + 2 * (0.3 * len(blocks) + 0.5)
    if not kinds:  # all weights are zero or not finite
        figure, axes = figure_axes(1, 1, (4.3, 1.2))
        axes[0][0].set_axis_off()
        axes[0][0].text(0.5, 0.5, "no layer has a spectrum", ha="center", va="center")
        return as_png(figure, title)
    figure, axes = figure_axes(2, len(kinds), (_PANEL * len(kinds), min(height, 24)))
    for row, scheme in enumerate(("nvfp4", "metis")):
        for axis, kind in zip(axes[row], kinds):
            grid = np.full((len(blocks), len(modules)), np.nan)
            for name, line in lines.items():
                block, module = at[name]
                value = line.get(kind, {}).get(f"{scheme}_swamped", np.nan)
                grid[blocks.index(block), modules.index(module)] = value
            text = ".0%" if len(blocks) <= 24 else ""
            image = heat_map(axis, grid, Normalize(0, 1), colors="YlOrRd", text=text)
            axis.set_xticks(range(len(modules)), modules, rotation=40, ha="right")
            step = max(1, len(blocks) // 24)
            axis.set_yticks(range(0, len(blocks), step), blocks[::step])
            axis.set_title(f"{kind}, {SCHEMES[scheme]}")
    figure.colorbar(image, ax=axes, shrink=0.5, label="share of directions swamped")
    return as_png(figure, title)


# The figures of a layer's portrait: file name, part of the data, drawing function, caption.
PORTRAIT: tuple[tuple[str, str, Callable[[Data, str], bytes], str], ...] = (
    ("spectra", "spectrum", spectra,
     "Singular values with the elbow (dot), and the singular values of independent normal "
     "entries with the same norm (dashed). Where the curves agree, the matrix looks like noise: "
     "good for four bits. Bad: far above the dashed line on the left, and far below it on the "
     "right."),
    ("components", "components", components,
     "Elements of single components u s v^T, compared with the elements of the full matrix. The "
     "leading components reach far out; the trailing ones stay near zero. Good: all components "
     "look alike. Bad: the first one reaches as far as the full matrix, so that it sets the "
     "scales, and the last one is narrower than one four-bit step."),
    ("residuals", "residual", residuals,
     "Top: entries of left singular vectors, which look alike for all components. Bottom: the "
     "matrix without its top components (3 %, to the nearest power of two). Good for a split: "
     "several times narrower. At 1x, a split does not narrow the range, which is bad if there "
     "are outliers and harmless if there are none."),
    ("hadamard-metis", "preprocessing", preprocessing,
     "Elements of the original matrix, of the matrix after a Hadamard rotation in blocks of 16, "
     "and of the residual that Metis quantizes. The printed numbers are relative to the largest "
     "element of the original. Good: well below 1. Bad: 1 or more, where the transformation "
     "does not remove the outliers."),
    ("distortion", "distortion", distortion,
     "Top: magnitudes before and after quantization; the bar on the left shows exact zeros. "
     "Bottom: relative error of each singular value and error of each left singular direction, "
     "as medians over neighboring indices. nvidia rotates activations and gradients only in "
     "wgrad, and never rotates weights; each scheme is shown as it trains. Good: errors that "
     f"stay small up to the last component. Bad: errors above {RELATIVE_ERROR} (dashed), the "
     "relative error of normal values, and directions with an error near 1, which are lost."),
    ("alignment", "alignment", alignment,
     "Share of the batch's dominant subspace that a random sample finds; the band spans the "
     "draws. Dashed: a sample ratio of 1 % and an alignment of 0.9. Good: above 0.9 from 1 % "
     "on. Bad: below 0.9, where a split from a small sample misses dominant directions."),
)  # fmt: skip
