"""Measurements of an analysis, their order, and the moments when its page is written.

Every measurement is kept on disk at once, and the page is rewritten as figures come: an interrupted
analysis goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from metis_hf.lab.analyze import capture, figures
from metis_hf.lab.analyze.distortion import Quantizers, Sample
from metis_hf.lab.analyze.page import ReportWriter
from metis_hf.lab.analyze.portrait import residual_spectra, tensor_line, tensor_portrait, unusable
from metis_hf.lab.analyze.result import KINDS, Analysis
from metis_hf.lab.analyze.source import StoredWeight, WeightSource, last_ffn
from metis_hf.lab.analyze.spectra import LastSpectrum, limit_rows, singular_values, spectrum_data
from metis_hf.lab.measured import Store, code_digest
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.shared.inputs import digest

WEIGHTS, LINES, TEXT, PORTRAITS, FIGURES = (
    "weights", "activations and gradients", "text", "portraits", "figures",
)  # fmt: skip
# What one item of a phase takes, in seconds of one core, for a layer of 576 x 1536.
_COSTS = {WEIGHTS: 0.2, LINES: 0.2, TEXT: 9.0, PORTRAITS: 12.0, FIGURES: 2.0}
_SHARED_FIGURES = 3  # risk, all spectra, the last FFNs


class Measurements:
    """The measurements of one analysis.

    Args:
        source: the checkpoint that is analyzed.
        control: the one to compare residuals with, if any.
        models: checkpoints whose last FFNs are compared.
        names: layers of `source` that get a line.
        chosen: those of them that get a portrait, the first of them first.
        rank: directions that Metis keeps apart; None takes the schemes' own.
        ids: the text's tokens [n length], if any.
        result: is filled.
    """

    def __init__(
        self,
        source: WeightSource,
        control: WeightSource | None,
        models: Sequence[WeightSource],
        names: list[str],
        chosen: list[str],
        rank: int | None,
        ids: Tensor | None,
        result: Analysis,
    ) -> None:
        self.source, self.control, self.models = source, control, models
        self.names, self.chosen, self.ids, self.result = names, chosen, ids, result
        self.quantizers = {name: Quantizers(name, source.shape(name), rank) for name in names}
        result.ranks |= {name: q.split_rank() for name, q in self.quantizers.items()}
        # What measurements depend on, besides the layer's name.
        self.of_weights = digest(code_digest(), source.identity(), rank)
        self.of_control = digest(self.of_weights, None if control is None else control.identity())
        self.of_models = [digest(code_digest(), model.identity()) for model in models]
        batch = b"" if ids is None else ids.numpy().tobytes()
        shape = None if ids is None else list(ids.shape)
        self.of_text = digest(self.of_weights, hashlib.sha256(batch).hexdigest(), shape)
        self.made = 0  # measurements that were not in the store
        self.kinds: tuple[str, ...] = ()  # of what the text gives: known once the model is
        self.first_batch = True

    def progress(self, console: Console) -> AbstractContextManager[None]:
        """Show the phases while the context lasts."""
        batches = 0 if self.ids is None else -(-len(self.ids) // capture.MICRO_BATCH)
        kinds = 0 if self.ids is None else len(KINDS) - 1
        items = {
            WEIGHTS: len(self.names),
            LINES: kinds * len(self.names),
            TEXT: batches,
            PORTRAITS: kinds * len(self.chosen),
            FIGURES: len(self.chosen) * len(figures.PORTRAIT) + _SHARED_FIGURES,
        }
        self.bars = TaskProgress(console)
        return self.bars.running({k: (n, _COSTS[k]) for k, n in items.items()})

    def run(self, out: Path) -> None:
        """Measure everything, and write the page: after the first portrait, and as more come."""
        self.store = Store(out, {self.of_weights, self.of_control, self.of_text, *self.of_models})
        self.writer = ReportWriter(out, self.store, lambda: self.bars.advance(FIGURES))
        self.kinds = tuple((self._about() or {"kinds": ()})["kinds"])
        first, rest = self.chosen[0], [name for name in self.names if name != self.chosen[0]]
        self._weight(first)
        self._write(f"the weights of {len(rest)} more layers are to come", overview=False)
        for name in rest:
            self._weight(name)
        for model, depends in zip(self.models, self.of_models):
            self._last_ffn(model, depends)
        if self.ids is not None:
            # With activations and gradients these figures will be others.
            self._write("activations and gradients are to come", deferred=self.chosen[1:])
            self._text(self.ids)
        self._write("")
        for phase in (LINES, TEXT, PORTRAITS, FIGURES):
            self.bars.finish(phase)

    def _about(self) -> Any:
        """Return what an earlier run found out of the model: its class, and the kinds."""
        return self.store.get("model", "", "", self.of_text)

    def _write(self, missing: str, **options: Any) -> None:
        self.result.missing = missing
        self._take()
        self.result.sort(self.names, self.chosen)
        self.writer.write(self.result, **options)

    def _measured(
        self, part: str, name: str, kind: str, depends: str, measure: Callable[[], Any]
    ) -> Any:
        """Return a measurement from the store, else make and keep it."""
        value = self.store.get(part, name, kind, depends)
        if value is None:
            value = measure()
            self.made += 1
            self.store.put(part, name, kind, depends, value)
        return value

    def _weight(self, name: str) -> None:
        """Measure a layer's weight: its line, and what figures show of it."""
        before, result = self.made, self.result
        weight = _Weight(self.source, name, self.quantizers[name])
        measured = functools.partial(self._measured, name=name, kind="weight")
        line = measured("line", depends=self.of_weights, measure=weight.line)
        result.lines[name] = {"weight": line}
        if name in self.chosen:
            portrait = measured("portrait", depends=self.of_weights, measure=weight.portrait)
            result.portraits[name] = {"weight": portrait}
            curves = measured(
                "residual",
                depends=self.of_control,
                measure=lambda: weight.residual(self.control, result.ranks[name]),
            )
            if curves:
                result.residuals[name] = curves
        self.bars.advance(WEIGHTS, reused=self.made == before)

    def _last_ffn(self, source: WeightSource, depends: str) -> None:
        name = last_ffn(source.names)

        def measure() -> dict[str, Any]:
            rows = limit_rows(source.load(name).weight)
            reason = unusable(rows)
            if reason is not None:
                return {"note": reason}
            data = spectrum_data(singular_values(rows), (rows.shape[0], rows.shape[1]))
            return {"layer": name, "shape": list(rows.shape), **data}

        data = self._measured("last ffn", name, source.checkpoint, depends, measure)
        if "note" in data:
            self.result.notes.append(
                f"{source.checkpoint}, {name}: {data['note']}; not among the models compared"
            )
        else:
            self.result.universality[source.checkpoint] = data

    def _text(self, ids: Tensor) -> None:
        """Run the text as far as something of it is not measured yet, and measure that."""
        model, about = None, self._about()
        if about is None:
            model = capture.load_model(self.source)
            found = KINDS[1:] if capture.has_loss(model) else KINDS[1:2]
            about = {"class": type(model).__name__, "kinds": found}
            self.store.put("model", "", "", self.of_text, about)
        kinds = self.kinds = tuple(about["kinds"])
        if len(kinds) == 1:
            self.result.notes.append(
                f"{about['class']} has no loss on tokens of its own, so there are no gradients"
            )
        lines = self._missing("line", self.names)
        portraits = self._missing("portrait", self.chosen)
        for _ in range(len(self.names) * len(kinds) - len(lines)):
            self.bars.advance(LINES, reused=True)
        for _ in range(len(self.chosen) * len(kinds) - len(portraits)):
            self.bars.advance(PORTRAITS, reused=True)
        if lines or portraits:
            layers = list(dict.fromkeys(name for name, _ in portraits))
            hooks = capture.Capture(set(layers), functools.partial(self._line, LastSpectrum()))
            batches = ids if portraits else ids[: capture.MICRO_BATCH]
            model = capture.load_model(self.source) if model is None else model
            self.first_batch = True
            hooks.run(model, batches, self.names, self._batch)
            del model
            for place, name in enumerate(layers):
                for kind in kinds:
                    self._portrait(hooks, name, kind)
                later = layers[place + 1 :]
                if later:
                    self._write(f"figures of {len(later)} layers are to come", deferred=later)
        self._take()
        unseen = [name for name in self.names if "activation" not in self.result.lines[name]]
        if unseen:
            self.result.notes.append(
                f"{len(unseen)} layers saw no token of the first micro-batch (experts, or weights "
                f"that the model applies without a layer of their own): {', '.join(unseen[:3])}"
            )

    def _missing(self, part: str, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the (layer, kind) of the text of which the store lacks a part."""
        pairs = [(name, kind) for name in names for kind in self.kinds]
        return [pair for pair in pairs if self.store.get(part, *pair, self.of_text) is None]

    def _line(self, spectrum: LastSpectrum, name: str, kind: str, x: Tensor) -> None:
        """Measure a layer's rows of the first micro-batch, inside the model's forward pass."""
        before = self.made
        sample = Sample(x, kind, self.quantizers[name])
        self._measured("line", name, kind, self.of_text, lambda: tensor_line(sample, spectrum))
        if self.made != before:
            self.bars.advance(LINES)

    def _batch(self) -> None:
        """Count a micro-batch; after the first one all lines are there, and the page shows them."""
        self.bars.advance(TEXT)
        if not self.first_batch:
            return
        self.first_batch = False
        for name, kind in self._missing("line", self.names):
            # It saw no token: nothing to measure, in the next run neither.
            self.store.put("line", name, kind, self.of_text, {})
        self._write("figures of single layers are to come", deferred=self.chosen[1:])

    def _portrait(self, hooks: capture.Capture, name: str, kind: str) -> None:
        rows = hooks.rows(name, kind)
        if self.store.get("portrait", name, kind, self.of_text) is not None:
            return
        assert self.ids is not None
        value: dict[str, Any] = {}
        if rows is not None:
            # An expert has rows of the tokens that it saw, of any sequence.
            whole = len(rows) == self.ids.numel()
            length = self.ids.shape[1] if whole else None
            value = tensor_portrait(Sample(rows, kind, self.quantizers[name]), length)
        self.store.put("portrait", name, kind, self.of_text, value)
        self.bars.advance(PORTRAITS)

    def _take(self) -> None:
        """Take lines and portraits of activations and gradients from the store into the result."""
        for part, found in (("line", self.result.lines), ("portrait", self.result.portraits)):
            for name, by_kind in found.items():
                for kind in self.kinds:
                    value = self.store.get(part, name, kind, self.of_text)
                    if value:  # {}: it saw no token
                        by_kind[kind] = value


@dataclass
class _Weight:
    """A layer's weight, read when it is first asked for."""

    source: WeightSource
    name: str
    quantizers: Quantizers

    @functools.cached_property
    def stored(self) -> StoredWeight:
        return self.source.load(self.name)

    @property
    def sample(self) -> Sample:
        return Sample(self.stored.weight, "weight", self.quantizers, self.stored)

    def line(self) -> dict[str, Any]:
        return tensor_line(self.sample)

    def portrait(self) -> dict[str, Any]:
        return tensor_portrait(self.sample, None)

    def residual(self, control: WeightSource | None, rank: int) -> dict[str, Any]:
        """Return the curves of `residual_spectra`; {} where the weight is not stored split."""
        other = None if control is None else control.load(self.name)
        kept = rank if self.stored.parts is None else len(self.stored.parts[1])
        return residual_spectra(self.stored, other, kept) or {}
