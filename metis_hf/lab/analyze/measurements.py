"""Runs the measurements of an analysis and rewrites its page as results come in.

Every measurement is saved to disk at once, so that an interrupted analysis resumes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from metis_hf.lab.analyze import (
    alignment,
    capture,
    distortion,
    distributions,
    portrait,
    spectra,
    spectrum_figures,
)
from metis_hf.lab.analyze.analysis import KINDS, Analysis
from metis_hf.lab.analyze.analysis_page import PageWriter
from metis_hf.lab.analyze.distortion import Quantizers, Sample
from metis_hf.lab.analyze.stored_weights import WeightSource, last_ffn
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.store import Store, source_digest, task_key

WEIGHTS, LINES, TEXT, PORTRAITS, FIGURES = (
    "weights", "activations and gradients", "text", "portraits", "figures",
)  # fmt: skip
# Seconds per item of a phase, on one core, for a layer of 576 x 1536.
_COSTS = {WEIGHTS: 0.2, LINES: 0.2, TEXT: 9.0, PORTRAITS: 12.0, FIGURES: 2.0}
_SHARED_FIGURES = 3  # risk, all spectra, the last FFNs
_CODE = (alignment, capture, distortion, distributions, portrait, spectra)

Measured = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A checkpoint, and the parts of it that are analyzed."""

    source: WeightSource
    control: WeightSource | None  # to compare residuals with
    models: Sequence[WeightSource]  # models whose last FFNs are compared
    names: list[str]  # layers of `source` that get a line in the table
    chosen: list[str]  # layers that also get a portrait
    rank: int | None  # directions that Metis splits off; None takes the schemes' defaults
    ids: Tensor | None  # the text's tokens [n length]


class Measurements:
    """The measurements of one analysis, which fill `result`."""

    def __init__(self, request: Request, store: Store, result: Analysis, console: Console) -> None:
        self.request, self.store, self.result = request, store, result
        self.source, self.names, self.chosen = request.source, request.names, request.chosen
        shapes = {name: self.source.shape(name) for name in self.names}
        self.quantizers = {n: Quantizers(n, shapes[n], request.rank) for n in self.names}
        result.ranks |= {name: q.split_rank() for name, q in self.quantizers.items()}
        code = source_digest(*(str(module.__file__) for module in _CODE))
        # Store keys: each covers the inputs that its measurements depend on.
        self.of_model = functools.partial(task_key, code)
        self.of_weights = self.of_model(self.source.identity(), request.rank)
        control = None if request.control is None else request.control.identity()
        self.of_control = task_key(self.of_weights, control)
        text = None
        if request.ids is not None:
            batch = hashlib.sha256(request.ids.numpy().tobytes()).hexdigest()
            text = [batch, list(request.ids.shape)]
        self.of_text = task_key(self.of_weights, text)
        self.known: dict[str, Measured | None] = {}
        self.kinds: tuple[str, ...] = ()  # kinds measured on the text, known with the model
        self.bars = TaskProgress(console)
        self.page = PageWriter(store, lambda: self.bars.advance(FIGURES))

    def progress(self) -> AbstractContextManager[None]:
        """Show progress bars of the phases inside the context."""
        ids = self.request.ids
        kinds = 0 if ids is None else len(KINDS) - 1
        items = {
            WEIGHTS: len(self.names),
            LINES: kinds * len(self.names),
            TEXT: 0 if ids is None else -(-len(ids) // capture.MICRO_BATCH),
            PORTRAITS: kinds * len(self.chosen),
            FIGURES: len(self.chosen) * len(spectrum_figures.PORTRAIT) + _SHARED_FIGURES,
        }
        return self.bars.running({name: (n, _COSTS[name]) for name, n in items.items()})

    def run(self) -> None:
        """Measure everything; write the page after the first portrait and as results come in."""
        if self.request.ids is not None:  # an earlier run may have stored them
            known = self._get("class", "model", "", self.of_text)
            self.kinds = tuple(known["kinds"]) if known else ()
        first, rest = self.chosen[0], [name for name in self.names if name != self.chosen[0]]
        self._weight(first)
        self._write(f"the weights of {len(rest)} more layers are not measured yet")
        for name in rest:
            self._weight(name)
        for model in self.request.models:
            self._last_ffn(model)
        if self.request.ids is not None:
            self._write("activations and gradients are not measured yet")
            self._text(self.request.ids)
        self._write("")
        for phase in (LINES, TEXT, PORTRAITS, FIGURES):
            self.bars.finish(phase)

    def _write(self, missing: str) -> None:
        self.result.missing = missing
        self._take()
        self.result.sort(self.names, self.chosen)
        self.page.write(self.result)

    def _get(self, part: str, name: str, kind: str, key: str) -> Measured | None:
        record = f"measured/{name}/{kind} {part}"
        if self.known.get(record) is None:
            self.known[record] = self.store.get(record, key)
        return self.known[record]

    def _put(self, part: str, name: str, kind: str, key: str, value: Measured) -> None:
        record = f"measured/{name}/{kind} {part}"
        self.store.put(record, key, value)
        self.known[record] = value

    def _measured(
        self, part: str, name: str, kind: str, key: str, measure: Callable[[], Measured]
    ) -> Measured:
        """Return a measurement from the store, or measure and store it."""
        value = self._get(part, name, kind, key)
        if value is None:
            value = measure()
            self._put(part, name, kind, key, value)
        return value

    def _weight(self, name: str) -> None:
        """Measure a layer's weight: its table line and, for chosen layers, its portrait."""
        result, control = self.result, self.request.control
        stored = functools.cache(lambda: self.source.load(name))  # loaded on first use

        def sample() -> Sample:
            return Sample(stored().weight, "weight", self.quantizers[name], stored())

        def residual() -> Measured:  # {} if the weight is not stored split
            parts = stored().parts
            other = None if control is None else control.load(name)
            kept = result.ranks[name] if parts is None else len(parts[1])
            return portrait.residual_spectra(stored(), other, kept) or {}

        reused = self._get("line", name, "weight", self.of_weights) is not None
        measured = functools.partial(self._measured, name=name, kind="weight")
        line = measured("line", key=self.of_weights, measure=lambda: portrait.tensor_line(sample()))
        result.lines[name] = {"weight": line}
        if name in self.chosen:
            shown = measured(
                "portrait",
                key=self.of_weights,
                measure=lambda: portrait.tensor_portrait(sample(), None),
            )
            result.portraits[name] = {"weight": shown}
            curves = measured("residual", key=self.of_control, measure=residual)
            if curves:
                result.residuals[name] = curves
        self.bars.advance(WEIGHTS, reused=reused)

    def _last_ffn(self, source: WeightSource) -> None:
        name = last_ffn(source.names)

        def measure() -> Measured:
            rows = spectra.limit_rows(source.load(name).weight)
            reason = portrait.unusable(rows)
            if reason is not None:
                return {"note": reason}
            data = spectra.spectrum_data(spectra.singular_values(rows), rows.shape)
            return {"layer": name, "shape": list(rows.shape), **data}

        key = self.of_model(source.identity())
        data = self._measured("last ffn", source.checkpoint, "weight", key, measure)
        if "note" in data:
            self.result.notes.append(
                f"{source.checkpoint} is left out of the comparison of models: {name}: "
                f"{data['note']}"
            )
        else:
            self.result.universality[source.checkpoint] = data

    def _text(self, ids: Tensor) -> None:
        """Run the text if any of its measurements is missing, and measure those."""
        model, about = None, self._get("class", "model", "", self.of_text)
        if about is None:
            model = capture.load_model(self.source)
            found = KINDS[1:] if capture.has_loss(model) else KINDS[1:2]
            about = {"class": type(model).__name__, "kinds": found}
            self._put("class", "model", "", self.of_text, about)
        self.kinds = tuple(about["kinds"])
        if len(self.kinds) == 1:
            self.result.notes.append(
                f"{about['class']} does not compute a loss on its own tokens, so there are no "
                "gradients"
            )
        lines, portraits = self._missing("line"), self._missing("portrait")
        for phase, all_, left in (
            (LINES, self.names, lines), (PORTRAITS, self.chosen, portraits)
        ):  # fmt: skip
            for _ in range(len(all_) * len(self.kinds) - len(left)):
                self.bars.advance(phase, reused=True)
        if lines or portraits:
            keep = {name for name, _ in portraits}
            hooks = capture.Capture(
                keep, functools.partial(self._line, spectra.LastSpectrum()), self._batch
            )
            batches = ids if portraits else ids[: capture.MICRO_BATCH]
            hooks.run(model or capture.load_model(self.source), batches, self.names)
            del model
            for name, kind in portraits:
                self._portrait(hooks, name, kind, ids)
        self._take()
        unseen = [name for name in self.names if "activation" not in self.result.lines[name]]
        if unseen:
            self.result.notes.append(
                f"{len(unseen)} layers received no token of the first micro-batch (experts, or "
                "weights that the model applies without calling a layer): "
                f"{', '.join(unseen[:3])}"
            )

    def _missing(self, part: str) -> list[tuple[str, str]]:
        """Return the (layer, kind) pairs of the text whose `part` is not in the store."""
        names = self.names if part == "line" else self.chosen
        pairs = [(name, kind) for name in names for kind in self.kinds]
        return [pair for pair in pairs if self._get(part, *pair, self.of_text) is None]

    def _line(self, spectrum: spectra.LastSpectrum, name: str, kind: str, x: Tensor) -> None:
        """Measure a layer's rows of the first micro-batch, inside a hook of the model."""
        if self._get("line", name, kind, self.of_text) is None:
            sample = Sample(x, kind, self.quantizers[name])
            value = portrait.tensor_line(sample, spectrum)
            self._put("line", name, kind, self.of_text, value)
            self.bars.advance(LINES)

    def _batch(self, number: int) -> None:
        """Count a micro-batch; after the first all lines are measured, and the page is written."""
        self.bars.advance(TEXT)
        if number == 0:
            for name, kind in self._missing("line"):  # saw no token, nor will it in the next run
                self._put("line", name, kind, self.of_text, {})
            self._write("figures of single layers are not drawn yet")

    def _portrait(self, hooks: capture.Capture, name: str, kind: str, ids: Tensor) -> None:
        rows, value = hooks.rows(name, kind), {}
        if rows is not None:
            # An expert's rows are the tokens routed to it, from any sequence.
            length = ids.shape[1] if len(rows) == ids.numel() else None
            value = portrait.tensor_portrait(Sample(rows, kind, self.quantizers[name]), length)
        self._put("portrait", name, kind, self.of_text, value)
        self.bars.advance(PORTRAITS)

    def _take(self) -> None:
        """Copy activation and gradient measurements from the store into the result."""
        for part, found in (("line", self.result.lines), ("portrait", self.result.portraits)):
            for name, by_kind in found.items():
                for kind in self.kinds:
                    value = self._get(part, name, kind, self.of_text)
                    if value:  # {}: the layer saw no token
                        by_kind[kind] = value
