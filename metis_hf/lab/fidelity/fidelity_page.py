"""Files of a fidelity measurement: table.md, cost.png, and index.html with everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from metis_hf.lab.fidelity.fidelity_figures import cost_figure, layers_figure
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity, columns, table
from metis_hf.lab.show.figure import short_model
from metis_hf.lab.show.page import Cell, Page, number
from metis_hf.lab.show.table import markdown_table
from metis_hf.shared.layer_names import group_of

_WORST = 12  # listed layers with the largest KL


def write_outputs(out: Path, record: dict[str, Any], results: Sequence[SchemeFidelity]) -> None:
    """Write the table, the picture and the page of all measurements so far."""
    (out / "table.md").write_text(markdown_table(*table(results)), "utf-8")
    settings = record["settings"]
    picture = cost_figure(results, short_model(settings["model"]), settings["tokens_per_step"])
    if picture is not None:
        (out / "cost.png").write_bytes(picture)
    _page(record, results, picture).save(out / "index.html")


def _page(record: dict[str, Any], results: Sequence[SchemeFidelity], picture: bytes | None) -> Page:
    settings = record["settings"]
    page = Page(
        f"Fidelity of {settings['model']}",
        f"{record['held_out_tokens']:,} tokens of {settings['text']} for the loss; "
        f"{record['gradient_sequences']} sequences of {settings['length']} tokens in "
        f"{record['gradient_batches']} batches for gradients; nothing is trained",
    )
    if record["missing"]:
        page.notice(
            f"Not complete: {record['missing']} schemes are not measured yet. If the command was "
            "interrupted, run it again to continue."
        )
    for result in results:
        if result.note:
            page.notice(f"{result.name} was not measured: {result.note}.")
        if result.warning:
            page.notice(f"{result.name}: {result.warning}.")
    measured = [r for r in results if not r.note]
    page.cards(*_cards(measured))
    page.section("Schemes", *_TABLE_TEXT)
    if picture is not None:
        page.figure(picture, _COST_TEXT)
    page.table(*_table(measured))
    page.section("One kind of operand quantized at a time", _KINDS_TEXT)
    page.table(_KINDS_HEADER, [row for r in measured for row in _kind_rows(r)])
    for r in measured:
        page.section(f"Layers under {r.name}")
        if r.alone:
            _alone(page, r)
        if r.layers:
            page.figure(layers_figure(r, short_model(settings["model"])), _LAYERS_TEXT)
            page.table(_GROUP_HEADER, _group_rows(r), "Means over the layers of each kind.")
    return page


_TABLE_TEXT = (
    "Look at the KL first: it predicts the gap after training. The loss rise and the gradient "
    "errors are less reliable for ranking schemes. Good: a KL below .02, a loss rise below 1 %, "
    "a cosine above .95. Bad: a relative error of 1, which a gradient of zero also has.",
    "KL is the divergence of the exact model's next-token distribution from the scheme's. KL, "
    "loss and the share of tokens with the same most likely next token are measured with "
    "evaluation rounding. Gradients cover all converted weights and use training rounding; they "
    "are compared with the exact gradient of the same batch, and the mean gradient with the "
    "exact mean. ± is a standard error over batches (jackknife for the mean gradient).",
)
_COST_TEXT = (
    "Lower is better; further left is cheaper. Multiply-adds of splits, projections, rotations "
    "and corrections are counted relative to the 3 t o i multiply-adds of the GEMMs. Quantizers "
    "are elementwise and are not counted."
)
_KINDS_TEXT = (
    "Only one kind of operand is quantized, in all layers: KL and loss on a third of the "
    "batches, the gradient on one batch. If errors added up, the loss rises of inputs and "
    "weights would sum to the loss rise of the scheme."
)
_LAYERS_TEXT = (
    "Errors of each layer under the scheme, on the exact model's inputs and output gradients. "
    "On normal values, direct NVFP4 has an SQNR of about 20 dB. Top: higher is better. Bottom: "
    "lower is better."
)
_KINDS_HEADER = ("Scheme", "Quantized", "KL (nats)", "Loss rise %", "Gradient error", "Cosine")
_GROUP_HEADER = ("Layers", "SQNR input", "weight", "grad_output", "Error of y", "dx", "dw")


def _cards(results: Sequence[SchemeFidelity]) -> list[tuple[str, str, str]]:
    finite = [r for r in results if math.isfinite(r.kl_in_training.mean)]
    if not finite:
        return []
    best = min(finite, key=lambda r: r.kl_in_training.mean)
    exact = fmean(b["exact"] for b in best.batches)
    return [
        ("smallest KL", best.kl_in_training.text(".4f"), f"nats per token: {best.name}"),
        ("its loss rise", best.rise.text("+.2f") + " %", "of the exact loss"),
        ("its gradient", best.gradient("cosine").text(".3f"), "cosine, one batch"),
        ("exact loss", f"{exact:.4f}", "nats per token, held-out"),
    ]


def _table(results: Sequence[SchemeFidelity]) -> tuple[list[str], list[list[Cell]]]:
    """Return header and rows, sortable by each column."""
    header, texts = table(results)
    shown, rows = columns(results), []
    for result, row in zip(results, texts):
        means = [None, *(column.value(result).mean for column in shown)]
        rows.append([Cell(text, mean) for text, mean in zip(row, means)])
    return header, rows


_KIND_SPECS = {"kl": ".4f", "loss": "+.2f", "gradient_error": ".3f", "gradient_cosine": ".3f"}


def _kind_rows(result: SchemeFidelity) -> list[list[Cell]]:
    rows = []
    for kind, found in result.kinds.items():
        numbers = [
            number(found[key], spec) if key in found else Cell("", math.nan)
            for key, spec in _KIND_SPECS.items()
        ]
        rows.append([Cell(result.name), Cell(kind), *numbers])
    return rows


def _alone(page: Page, result: SchemeFidelity) -> None:
    """List the layers with the largest KL when quantized alone, and compare sum and whole."""
    layers, whole = result.alone["layers"], result.alone["whole"]
    total = sum(found["kl"] for found in layers.values())
    rise = sum(found["loss"] for found in layers.values())
    page.text(
        f"With each layer quantized alone, on one batch, the KL divergences sum to {total:.4f} "
        f"nats; with all layers quantized together, the KL is {whole['kl']:.4f}. The loss rises "
        f"sum to {rise:+.2f} %; together, the loss rise is {whole['loss']:+.2f} %."
    )
    rows = []
    for name in sorted(layers, key=lambda name: -layers[name]["kl"])[:_WORST]:
        kl, loss = layers[name]["kl"], layers[name]["loss"]
        share = number(100 * kl / total if total else math.nan, ".1f")
        rows.append([Cell(name), number(kl, ".5f"), share, number(loss, "+.3f")])
    page.table(("Layer alone", "KL (nats)", "% of the sum", "Loss rise %"), rows)


def _group_rows(result: SchemeFidelity) -> list[list[Cell]]:
    groups: dict[str, list[dict[str, float]]] = {}
    for name, found in result.layers.items():
        groups.setdefault(group_of(name), []).append(found)
    rows = []
    for group, members in groups.items():
        columns_of = {key: [m[key] for m in members] for key in members[0]}
        sqnr = [_sqnr(columns_of[key]) for key in ("input", "weight", "grad_output")]
        errors = [number(fmean(columns_of[key]), ".3f") for key in ("y", "dx", "dw")]
        rows.append([Cell(group), *sqnr, *errors])
    return rows


def _sqnr(values: Sequence[float]) -> Cell:
    """Return the mean over the layers that quantize the operand; "exact" if none does."""
    quantized = [value for value in values if value != math.inf]
    if not quantized:
        return Cell("exact", math.inf)
    return number(fmean(quantized), ".1f")
