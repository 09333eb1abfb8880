"""Writes an analysis' index.html and its files, repeatedly as results come in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from metis_hf.lab.analyze import spectrum_figures as figures
from metis_hf.lab.analyze.alignment import at_ratio
from metis_hf.lab.analyze.analysis import KINDS, Analysis, json_text, write_csv
from metis_hf.lab.analyze.short_names import short_names
from metis_hf.lab.show import figure
from metis_hf.lab.show.figure import short_model
from metis_hf.lab.show.page import Cell, Page, number
from metis_hf.lab.store import Store, source_digest
from metis_hf.shared.inputs import digest
from metis_hf.shared.records import write_atomically
from metis_hf.training.reference_values import SQNR_NEAREST, SQNR_STOCHASTIC, ZEROED

RISK = (
    "The risk of a layer is the largest share, over its weight, activation and gradient, of "
    "singular directions that rounding may replace. By Weyl's and Wedin's inequalities, these "
    "are the directions whose singular value is below the spectral norm of direct NVFP4's "
    "rounding error."
)
SCALE = (
    f"For comparison: direct NVFP4 zeroes {ZEROED:.1%} of independent normal values, and its "
    f"SQNR on them is {SQNR_NEAREST} dB with rounding to nearest and {SQNR_STOCHASTIC} dB with "
    "stochastic rounding. Good: about these numbers, or better. Bad: several times this share "
    "of zeros, or an SQNR several decibels lower."
)
HEADER = ("Layer", "Risk", "Tensor", "Elbow f", "f of noise", "Energy of k*", "Stable rank",
          "Zeroed", "SQNR dB", "Swamped", "SQNR dB (Metis)", "Swamped (Metis)")  # fmt: skip
Draw = Callable[[str, Callable[[Any, str], bytes], Any, str], bytes]  # name, make, data, title


class PageWriter:
    """Writes figures/*.png and *.json, layers.csv and index.html; `write` may be called repeatedly.

    A figure is redrawn only if its data or the drawing code has changed; `drawn` is called after
    each one.
    """

    def __init__(self, store: Store, drawn: Callable[[], None]) -> None:
        self.out, self._store, self._drawn = store.directory, store, drawn
        self._code = source_digest(str(figures.__file__), str(figure.__file__))

    def write(self, result: Analysis) -> None:
        """Write everything measured so far.

        While results are missing, only one layer's portrait is drawn, because the data of the
        others will still change.
        """
        (self.out / "figures").mkdir(parents=True, exist_ok=True)
        page = Page(f"Spectra of {short_model(result.model)}", _subtitle(result))
        if result.missing:
            page.notice(
                f"Not complete: {result.missing}. This page is updated as results come in. If "
                "the analysis was interrupted, run the same command again to continue."
            )
        at = short_names([*result.lines, *result.portraits])
        page.text(_finding(result, at))
        write_csv(self.out / "layers.csv", result)
        page.cards(*_cards(result, at))
        if len(result.lines) > 1 or not result.missing:
            _overview(page, result, self._draw)
        _comparisons(page, result, self._draw)
        portraits = list(result.portraits)
        if not result.missing:  # the riskiest layer comes first, unfolded
            portraits.sort(key=lambda layer: -np.nan_to_num(result.risk(layer), nan=-1.0))
        for layer in portraits[: 1 if result.missing else None]:
            _portrait(page, result, layer, at[layer], self._draw, folded=layer != portraits[0])
        _table(page, result)
        page.section("How it was measured", *_method(result), *result.notes)
        page.save(self.out / "index.html")

    def _draw(self, name: str, make: Callable[[Any, str], bytes], data: Any, title: str) -> bytes:
        text = json_text(data)
        key = digest(text, self._code, title)
        picture, beside = (self.out / "figures" / f"{name}.{end}" for end in ("png", "json"))
        done = self._store.get(f"measured/drawn/{name}", key) is not None
        if not (done and picture.exists() and beside.exists()):
            content = make(data, title)
            write_atomically(beside, lambda file: file.write(text.encode()))
            write_atomically(picture, lambda file: file.write(content))
            self._store.put(f"measured/drawn/{name}", key, {})
            self._drawn()
        return picture.read_bytes()


def _subtitle(result: Analysis) -> str:
    batch = result.text
    parts = [result.model, f"{len(result.lines)} linear layers"]
    if batch:
        parts.append(f"{batch['sequences']} x {batch['length']} tokens of {batch['file']}")
    if result.control:
        parts.append(f"control: {short_model(result.control)}")
    return " · ".join(parts)


def _values(result: Analysis, kind: str, key: str) -> list[float]:
    lines = (line.get(kind, {}).get(key) for line in result.lines.values())
    return [value for value in lines if value is not None and math.isfinite(value)]


def _place(name: tuple[str, str]) -> str:
    return "block {}, {}".format(*name)


def _finding(result: Analysis, at: Mapping[str, tuple[str, str]]) -> str:
    """Return the page's opening sentence."""
    known = [name for name in result.lines if math.isfinite(result.risk(name))]
    if not known:
        return (
            "No matrix has a spectrum: every matrix is zero or contains NaN or infinite elements."
        )
    riskiest = max(known, key=result.risk)
    lines = result.lines[riskiest]
    kind = max(lines, key=lambda kind: lines[kind].get("nvfp4_swamped", -1.0))
    median = float(np.median([result.risk(name) for name in known]))
    count = f"the riskiest of {len(known)} layers (median {median:.0%})"
    return (
        f"Rounding to NVFP4 may replace {result.risk(riskiest):.0%} of the singular directions "
        f"of {_place(at[riskiest])}, in its {kind}; it is {count}. With metis, rounding may "
        f"replace {lines[kind]['metis_swamped']:.0%} of them."
    )


def _cards(result: Analysis, at: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return the cards of key numbers; medians are over layers."""
    cards = []
    for kind in KINDS:
        shares = _values(result, kind, "fraction")
        if shares:
            noise = np.median(_values(result, kind, "noise_fraction"))
            note = f"median elbow k*/r (noise: {noise:.1%})"
            cards.append((f"{kind} elbow", f"{np.median(shares):.1%}", note))
    for key, label in (("zeroed", "zeroed by NVFP4"), ("swamped", "directions swamped")):
        medians = {
            kind: np.median(found)
            for kind in KINDS
            if (found := _values(result, kind, f"nvfp4_{key}"))
        }
        if medians:
            worst = max(medians, key=lambda kind: medians[kind])
            others = ", ".join(f"{kind} {medians[kind]:.0%}" for kind in medians if kind != worst)
            note = f"{worst}, median of layers" + f" ({others})" * bool(others)
            cards.append((label, f"{medians[worst]:.0%}", note))
    cards += _alignment(result, at)
    riskiest = max(result.lines, key=lambda name: np.nan_to_num(result.risk(name), nan=-1.0))
    cards.append(("riskiest layer", f"{result.risk(riskiest):.0%}", _place(at[riskiest])))
    return cards


def _alignment(result: Analysis, at: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return the card of the first portrait's alignment; none if 1 % is less than one row."""
    layer, portrait = next(iter(result.portraits.items()), ("", {}))
    found = {
        kind: at_ratio(portrait[kind]["alignment"]["by_row"], 0.01)
        for kind in KINDS[1:]
        if "alignment" in portrait.get(kind, {})
    }
    if not found or not all(map(math.isfinite, found.values())):
        return []
    text = ", ".join(f"{value:.2f}" for value in found.values())
    return [("alignment from 1 % of rows", text, f"{_place(at[layer])}: {', '.join(found)}")]


def _overview(page: Page, result: Analysis, draw: Draw) -> None:
    page.section("All layers", RISK)
    title = f"{short_model(result.model)}: all layers"
    page.figure(
        draw("risk", figures.risk_map, result.lines, title),
        "Share of singular directions that the rounding error swamps, by block (rows) and layer "
        "(columns): direct NVFP4 at the top, Metis at the bottom. Good: light cells, a few "
        "percent. Bad: dark cells, where rounding may replace half of the tensor's directions "
        "or more.",
    )
    page.figure(
        draw("all-spectra", figures.all_spectra, result.lines, title),
        "Spectra of all layers, from the first blocks (light) to the last ones (dark); dots are "
        "elbows. Good for four bits: flat curves. Bad: curves that fall by orders of magnitude "
        "at the start, where a few directions set the scales for all others.",
    )


def _comparisons(page: Page, result: Analysis, draw: Draw) -> None:
    if result.universality:
        page.section("Last FFN of each model")
        page.figure(
            draw("universality", figures.universality, result.universality, "Last FFN"),
            "Weight of the last FFN's output projection; f = k*/r is the position of the elbow "
            "as a share of all components. Good for four bits: a flat curve. Bad: a curve that "
            "falls steeply at the start.",
            wide=False,
        )
    if result.residuals:
        title = f"{short_model(result.model)}: residuals"
        page.section(
            "Residual after training",
            "A weight trained with Metis is stored as a low-rank part and a residual. If the "
            "residual's spectrum is flat, anisotropy has not come back. For a fair comparison, "
            "take a weight that was trained without Metis and remove the same number of leading "
            "components.",
        )
        page.figure(
            draw("residual-spectra", figures.residual_spectra, result.residuals, title),
            "Each curve is relative to its own largest singular value; dots are elbows. Good: "
            "the residual's curve is the flattest. Bad: it falls as steeply as the curve of the "
            "whole weight.",
        )


def _portrait(
    page: Page, result: Analysis, layer: str, at: tuple[str, str], draw: Draw, *, folded: bool
) -> None:
    data = result.portraits[layer]
    title = f"{short_model(result.model)}: {layer}"
    notes = [f"{kind}: {part['note']}" for kind, part in data.items() if "note" in part]
    block, module = at
    page.section(f"Block {block}: {module}", layer, *notes, folded=folded)
    for name, part, make, caption in figures.PORTRAIT:
        if any(part in tensor for tensor in data.values()):
            keys = ("shape", "note", part, *(("magnitudes",) if part == "distortion" else ()))
            shown = {
                kind: {key: tensor[key] for key in keys if key in tensor}
                for kind, tensor in data.items()
            }
            page.figure(draw(f"{name}.{layer}", make, shown, title), caption)


def _table(page: Page, result: Analysis) -> None:
    page.section("Layers by risk", RISK, SCALE, "Click a column title to sort by it.")
    rows = []
    for name in result.by_risk():
        risk = result.risk(name)
        for kind, line in result.lines[name].items():
            head = [Cell(name), number(risk, ".0%", shade=risk), Cell(kind)]
            if "note" in line:
                cells = [Cell(line["note"], math.nan, 1.0), *[Cell("")] * (len(HEADER) - 4)]
            else:
                cells = _cells(line)
            rows.append([*head, *cells])
    page.table(HEADER, rows)


def _cells(line: dict[str, Any]) -> list[Cell]:
    def share(key: str, shade: bool = False) -> Cell:
        value = line[key]
        if value is None:
            return Cell("none", math.nan)
        return number(value, ".1%", shade=value if shade else 0.0)

    return [
        share("fraction"),
        share("noise_fraction"),
        share("energy"),
        number(line["stable_rank"], ".1f"),
        share("nvfp4_zeroed", shade=True),
        number(line["nvfp4_sqnr_db"], ".1f"),
        share("nvfp4_swamped", shade=True),
        number(line["metis_sqnr_db"], ".1f"),
        share("metis_swamped", shade=True),
    ]


def _method(result: Analysis) -> list[str]:
    ranks = sorted(set(result.ranks.values()))
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return [
        "Elbow: the point of greatest curvature of the polygon (i / (r - 1), singular values "
        "scaled to 0..1), sampled evenly in arc length and smoothed over 1 % of that length, or "
        "over 10 components if that is more. A matrix of independent normal entries has an "
        "elbow too, so its share is shown next to each other share. A share alone is no "
        "evidence of anisotropy; the energy of the components up to the elbow is.",
        f"Metis splits off {shown} directions of inputs; by default it splits off a quarter as "
        "many of output gradients, and none of weights. Figures that show what Metis leaves "
        "remove as many directions from every tensor as from inputs. Quantizers are the "
        "schemes' own, in training mode.",
        "Histograms of larger matrices show about 4 million elements, in whole rows.",
        "The table measures activations and gradients on the first 8 sequences. Figures use at "
        "most 4096 rows; alignment uses all rows. If both sides of a matrix are larger than "
        "4096, 4096 of its rows are sampled, and 1280 for quantization in the table and for "
        "errors by index.",
    ]
