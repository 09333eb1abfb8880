"""index.html of an analysis and the files behind it, written while figures come and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metis_hf.lab.analyze import figures
from metis_hf.lab.analyze.alignment import at_ratio
from metis_hf.lab.analyze.places import places
from metis_hf.lab.analyze.result import KINDS, Analysis, json_text, write_csv
from metis_hf.lab.measured import FIGURE, Store, code_digest
from metis_hf.lab.show.page import Cell, Page, number
from metis_hf.shared.inputs import digest
from metis_hf.training.reference_values import SQNR_NEAREST, SQNR_STOCHASTIC, ZEROED

RISK = (
    "Risk is the largest share, over a layer's weight, activation and gradient, of singular "
    "directions whose singular value is below the spectral norm of direct NVFP4's rounding error: "
    "by Weyl's and Wedin's inequalities rounding may replace them."
)
SCALE = (
    f"For comparison: direct NVFP4 zeroes {ZEROED:.1%} of independent normal values, and gives "
    f"{SQNR_NEAREST} dB rounding them to nearest, {SQNR_STOCHASTIC} dB stochastically. Good: about "
    "that, or better. Bad: several times the share, or decibels less."
)
HEADER = ("Layer", "Risk", "Tensor", "Elbow f", "f of noise", "Energy of k*", "Stable rank",
          "Zeroed", "SQNR dB", "Swamped", "SQNR dB (Metis)", "Swamped (Metis)")  # fmt: skip
Draw = Callable[[str, Callable[[Any], bytes], Any], bytes]


class ReportWriter:
    """Writes figures/*.png and *.json, layers.csv and index.html, as often as it is asked to.

    A figure is drawn again only where its data are others: in this process, or in one before.

    Args:
        out: directory to write to.
        store: remembers from which data the pictures in `out` were drawn.
        drawn: called after each figure.
    """

    def __init__(self, out: Path, store: Store, drawn: Callable[[], None] = lambda: None) -> None:
        self.out, self._store, self._drawn = out, store, drawn

    def write(
        self, result: Analysis, *, deferred: Collection[str] = (), overview: bool = True
    ) -> None:
        """Write everything that was measured so far.

        Args:
            result: with `missing` where that is not all.
            deferred: layers whose figures are left out, since their data are about to change.
            overview: draw the figures of all layers together, too.
        """
        (self.out / "figures").mkdir(parents=True, exist_ok=True)
        page = Page(f"Spectra of {figures.short_model(result.model)}", _subtitle(result))
        if result.missing:
            page.notice(
                f"Not complete: {result.missing}. This page is rewritten as figures come. If the "
                "analysis was interrupted, the same command goes on from here."
            )
        if result.lines:
            write_csv(self.out / "layers.csv", result)
            page.cards(*_cards(result))
        if result.lines and overview:
            _overview(page, result, self._draw)
        _comparisons(page, result, self._draw)
        at = places([*result.lines, *result.portraits])
        for layer in result.portraits:
            if layer not in deferred:
                _portrait(page, layer, at[layer], result.portraits[layer], self._draw)
        if result.lines:
            _table(page, result)
        page.section("How it was measured", *_method(result), *result.notes)
        page.save(self.out / "index.html")

    def _draw(self, name: str, make: Callable[[Any], bytes], data: Any) -> bytes:
        text = json_text(data)
        source = digest(text, code_digest())
        target = self.out / "figures" / f"{name}.png"
        beside = target.with_name(f"{name}.json")
        if self._store.get(FIGURE, name, "", source) and target.exists() and beside.exists():
            return target.read_bytes()
        # Its old source is forgotten first: an interrupted process may leave half a picture.
        self._store.put(FIGURE, name, "", source, False)
        beside.write_text(text)
        picture = make(data)
        target.write_bytes(picture)
        self._store.put(FIGURE, name, "", source, True)
        self._drawn()
        return picture


def _subtitle(result: Analysis) -> str:
    batch = result.text
    parts = [result.model, f"{len(result.lines)} linear layers"]
    if batch:
        parts.append(f"{batch['sequences']} x {batch['length']} tokens of {batch['file']}")
    if result.control:
        parts.append(f"control: {figures.short_model(result.control)}")
    return " · ".join(parts)


def _values(result: Analysis, kind: str, key: str) -> list[float]:
    lines = (line.get(kind, {}).get(key) for line in result.lines.values())
    return [value for value in lines if value is not None and math.isfinite(value)]


def _cards(result: Analysis) -> list[tuple[str, str, str]]:
    """Add key figures; medians over layers."""
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
    at = {
        name: f"block {block}, {module}" for name, (block, module) in places(result.lines).items()
    }
    cards += _alignment(result, at)
    riskiest = max(result.lines, key=lambda name: np.nan_to_num(result.risk(name), nan=-1.0))
    cards.append(("riskiest layer", f"{result.risk(riskiest):.0%}", at[riskiest]))
    return cards


def _alignment(result: Analysis, at: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the card of the first portrait's alignment; none where 1 % is less than a row."""
    layer, portrait = next(iter(result.portraits.items()), ("", {}))
    curves = {k: portrait[k]["alignment"] for k in KINDS[1:] if "alignment" in portrait.get(k, {})}
    found = {
        unit: [at_ratio(curve[key], 0.01) for curve in curves.values() if key in curve]
        for unit, key in (("row", "by_row"), ("sequence", "by_sequence"))
    }
    texts = {
        unit: ", ".join(f"{value:.2f}" for value in values)
        for unit, values in found.items()
        if len(values) == len(curves) and all(map(math.isfinite, values))
    }
    if not curves or "row" not in texts:
        return []
    note = f"{at[layer]}: {', '.join(curves)}"
    if "sequence" in texts:
        note += f"; 1 % of sequences: {texts['sequence']}"
    return [("alignment from 1 % of rows", texts["row"], note)]


def _overview(page: Page, result: Analysis, draw: Draw) -> None:
    page.section("All layers", RISK)
    page.figure(
        draw("risk", figures.risk_map, result.lines),
        "Share of singular directions that the rounding error swamps, by block (rows) and layer: "
        "direct NVFP4 above, Metis below. Good: light, a few percent. Bad: dark; half and more of "
        "the directions that the tensor has may be replaced by rounding.",
    )
    page.figure(
        draw("all-spectra", figures.all_spectra, result.lines),
        "Spectra of all layers, first blocks light, last ones dark; dots are elbows. Good for four "
        "bits: flat curves. Bad: curves that fall by orders of magnitude at their beginning, where "
        "a few directions set the scales for all others.",
    )


def _comparisons(page: Page, result: Analysis, draw: Draw) -> None:
    if result.universality:
        page.section("Last FFN of each model")
        page.figure(
            draw("universality", figures.universality, result.universality),
            "Weight of the last FFN's output projection; f = k*/r, the elbow's share. Good for "
            "four bits: a flat curve. Bad: a curve that falls steeply at its beginning.",
            wide=False,
        )
    if result.residuals:
        page.section(
            "Residual after training",
            "A weight trained with Metis is stored as a low-rank part and a residual. If the "
            "residual's spectrum is flat, anisotropy has not come back. The fair comparison is a "
            "weight trained without Metis and freed of as many leading components.",
        )
        page.figure(
            draw("residual-spectra", figures.residual_spectra, result.residuals),
            "Each curve relative to its own largest singular value; dots are elbows. Good: the "
            "residual's curve is the flattest. Bad: it falls as steeply as that of the whole "
            "weight.",
        )


def _portrait(
    page: Page, layer: str, at: tuple[str, str], data: dict[str, Any], draw: Draw
) -> None:
    notes = [f"{kind}: {part['note']}" for kind, part in data.items() if "note" in part]
    block, module = at
    page.section(f"Block {block}: {module}", layer, *notes)
    for name, part, make, caption in figures.PORTRAIT:
        if any(part in tensor for tensor in data.values()):
            keys = ("shape", "note", part, *(("magnitudes",) if part == "distortion" else ()))
            shown = {
                kind: {key: tensor[key] for key in keys if key in tensor}
                for kind, tensor in data.items()
            }
            page.figure(draw(f"{name}.{layer}", make, shown), caption)


def _table(page: Page, result: Analysis) -> None:
    page.section("Layers by risk", RISK, SCALE, "A click on a column's head sorts by it.")
    rows = []
    for name in result.by_risk():
        risk = result.risk(name)
        for kind, line in result.lines[name].items():
            head = [Cell(name), number(risk, ".0%", shade=risk), Cell(kind)]
            if "note" in line:
                flagged = [Cell(line["note"], math.nan, 1.0), *[Cell("")] * (len(HEADER) - 4)]
                rows.append([*head, *flagged])
                continue
            rows.append([*head, *_cells(line)])
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
        "scaled to 0..1), sampled evenly in arc length and smoothed by 1 % of that length, or by "
        "10 components if that is more. A matrix of independent normal entries has an elbow too: "
        "its share stands beside every other, and a share alone is no evidence of anisotropy; the "
        "energy that it holds is.",
        f"Metis keeps {shown} directions of inputs apart, by default a quarter of them for output "
        "gradients and none for weights; where figures show what it leaves, as many as for inputs "
        "are taken off each tensor. Quantizers are the schemes' own, in training mode.",
        "Histograms show about 4 million elements of a larger matrix, in whole rows.",
        "The table measures activations and gradients on the first 8 sequences, figures on at most "
        "4096 rows, alignment on all. A matrix with both sides above 4096 is row-sampled to 4096, "
        "for quantization in the table and for errors by index to 1280.",
    ]
