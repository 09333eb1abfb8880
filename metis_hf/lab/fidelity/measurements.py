"""`fidelity`: measure one scheme after the other on one model, and store each finished part."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.conversion.attention import attention_products
from metis_hf.lab.cost import inputs_of, overhead, tokens_of_layers
from metis_hf.lab.fidelity import gradients, layer_errors, predictions
from metis_hf.lab.fidelity.fidelity_page import write_outputs
from metis_hf.lab.fidelity.gradients import GradientFile
from metis_hf.lab.fidelity.layer_errors import KINDS, only
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity
from metis_hf.lab.fidelity.settings import Settings
from metis_hf.lab.fidelity.subject import Part, Subject, converted, running, trainable
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.store import Store, source_digest, task_key
from metis_hf.lab.texts import MIN_LENGTH
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import CONTROL, Role, Scheme, source_digests
from metis_hf.shared.records import environment, write_json

LOSS, GRADIENTS, OPERANDS, ALONE = "loss", "gradients", "operands", "each layer"
PREDICTED_KINDS = ("input", "weight")  # operands that predictions depend on
# The cost of an item in forward passes over a batch, to estimate the time left.
_COSTS = {LOSS: 2.0, GRADIENTS: 6.0, OPERANDS: 15.0, ALONE: 1.0}
_TOKENS_A_DIRECTION = 10  # per batch; with fewer, a split keeps nearly all of the batch


def fidelity(settings: Settings, out: Path, console: Console | None = None) -> list[SchemeFidelity]:
    """Measure schemes on a model, and write results.json, table.md, cost.png, index.html.

    Parts that `out` already holds for the same model, text, settings and numerics are reused. The
    page is rewritten after each scheme.

    Raises:
        FileNotFoundError, ValueError: as `Settings.open` and `Settings.candidates`.
    """
    candidates = settings.candidates()
    if settings.tokens_per_step < 1:
        raise ValueError(f"tokens_per_step={settings.tokens_per_step}; choose at least 1")
    subject = settings.open()
    store = Store(out, device=subject.model.device)
    with store.hold():
        measurements = _Measurements(settings, subject, store, console or Console(quiet=True))
        return measurements.run(candidates)


@dataclasses.dataclass
class _Converted:
    """The model in a scheme: its layers, its quantized attention, and the scheme of each."""

    layers: dict[str, MetisLayer]
    attention: dict[str, Part]

    def __post_init__(self) -> None:
        self.parts: dict[str, Part] = {**self.layers, **self.attention}
        self.schemes = {name: layer.scheme for name, layer in self.layers.items()}
        self.whole = {name: part.scheme for name, part in self.parts.items()}
        self.weights = trainable(self.layers)

    def alone(self, kind: str) -> dict[str, Scheme]:
        """Return the layers' schemes with only the operands of one kind quantized."""
        return {name: only(scheme, kind) for name, scheme in self.schemes.items()}


class _Measurements:
    """The measurements of one model."""

    def __init__(self, settings: Settings, subject: Subject, store: Store, console: Console):
        self.settings, self.subject, self.store, self.console = settings, subject, store, console
        self.model, self.held_out = subject.model, subject.held_out
        self.batches = list(subject.training.split(settings.batch))
        self.folder, self.bars = store.directory / "gradients", TaskProgress(console)
        self.exact: tuple[list[str], GradientFile] | None = None  # with the layers' names
        with converted(self.model, MetisConfig(scheme=CONTROL)) as layers:
            few = self.held_out[:1, :MIN_LENGTH].to(self.model.device)
            # Layer -> name of its input tensor.
            self.inputs: dict[str, Hashable] = inputs_of(self.model, layers, few)
        loss = len(self.held_out.split(settings.batch))
        self.items = {  # items per scheme, for progress
            LOSS: loss + len(PREDICTED_KINDS) * max(1, loss // 3),
            GRADIENTS: len(self.batches) + len(KINDS),
            OPERANDS: 1,
            ALONE: len(self.inputs) + 1,
        }

    def run(self, candidates: Sequence[tuple[str, MetisConfig]]) -> list[SchemeFidelity]:
        """Measure all candidates."""
        alone = self.settings.alone
        alone = (candidates[0][0],) if alone is None else alone
        counts = {part: len(alone) if part == ALONE else len(candidates) for part in self.items}
        phases = {part: (n * counts[part], _COSTS[part]) for part, n in self.items.items()}
        results: list[SchemeFidelity] = []
        try:
            with self.bars.running(phases):
                for name, config in candidates:
                    results.append(self._measure(name, config, name in alone))
                    record = self._record(results, len(candidates))
                    write_json(self.store.directory / "results.json", record)
                    write_outputs(self.store.directory, record, results)
        except KeyboardInterrupt:
            text = (
                f"interrupted: run the same command again to continue from {self.store.directory}"
            )
            self.console.print(text, markup=False)
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return results

    def _record(self, results: Sequence[SchemeFidelity], expected: int) -> dict[str, Any]:
        settings = dataclasses.asdict(self.settings) | {
            "text": self.settings.text.name,
            "configs": [path.name for path in self.settings.configs],
        }
        return {
            "settings": settings,
            "held_out_tokens": self.held_out[:, 1:].numel(),  # predicted tokens
            "gradient_sequences": len(self.subject.training),
            "gradient_batches": len(self.batches),
            "missing": expected - len(results),
            "environment": environment(self.model.device),
            "schemes": [dataclasses.asdict(result) for result in results],
        }

    def _measure(self, name: str, config: MetisConfig, alone: bool) -> SchemeFidelity:
        result = SchemeFidelity(name, config.scheme, config.rank)
        settings = self.settings
        key = task_key(
            source_digest(*(str(m.__file__) for m in (gradients, layer_errors, predictions))),
            self.subject.identity,
            (settings.batch, settings.device),
            config.to_dict(),
            source_digests(config.schemes, config.format),
        )
        parts = [LOSS, GRADIENTS, OPERANDS, *([ALONE] if alone else [])]
        names = {part: f"measured/{name}/{part} {key[:8]}" for part in parts}
        stored = {part: self.store.get(names[part], key) for part in parts}
        found = {part: value for part, value in stored.items() if value is not None}
        with contextlib.ExitStack() as stack:
            try:
                layers = stack.enter_context(converted(self.model, config))
            except ValueError as error:
                result.note = str(error)
            for part in parts:
                if part in found or result.note:
                    self._advance(part, self.items[part], reused=True)
            if result.note:
                return result
            self._count(result, layers)
            result.warning = self._warning(layers)
            scheme = _Converted(layers, dict(attention_products(self.model)))
            measure = {
                LOSS: self._loss,
                GRADIENTS: self._gradients,
                OPERANDS: self._operands,
                ALONE: self._alone,
            }
            for part in parts:
                if part not in found:
                    found[part] = measure[part](scheme)
                    self.store.put(names[part], key, found[part])
        result.take(found[LOSS], found[GRADIENTS], found[OPERANDS], found.get(ALONE))
        return result

    def _advance(self, part: str, items: int = 1, *, reused: bool = False) -> None:
        for _ in range(items):
            self.bars.advance(part, reused=reused)

    def _count(self, result: SchemeFidelity, layers: dict[str, MetisLayer]) -> None:
        """Count the multiply-adds and the bits of a scheme."""
        shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
        reads = [self.inputs.get(name, name) for name in layers]
        seen = tokens_of_layers(self.model, self.settings.tokens_per_step)
        cost = overhead(shapes, [seen[name] for name in layers], reads)
        result.overhead, result.weight_bits = dict(cost.parts), cost.weight_bits

    def _warning(self, layers: dict[str, MetisLayer]) -> str:
        """Return a warning if batches have few tokens for the directions of a split, else ""."""
        batch, length = self.settings.batch, self.settings.length
        parts = (self.held_out, self.subject.training)
        tokens = min(part[:batch].numel() for part in parts)
        roles = [role for role in Role if role not in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)]
        kept = (layer.scheme.directions(role) for layer in layers.values() for role in roles)
        rank = max(kept, default=0)
        if tokens >= _TOKENS_A_DIRECTION * rank:
            return ""
        return (
            f"a batch of {tokens:,} tokens has only {tokens / rank:.1f} tokens for each of the "
            f"{rank} directions that the split keeps; with fewer than {_TOKENS_A_DIRECTION}, a "
            "split looks better than in training. Measure in batches of at least "
            f"{-(-_TOKENS_A_DIRECTION * rank // length)} sequences, on a text that fills them"
        )

    def _loss(self, scheme: _Converted) -> dict[str, Any]:
        (whole,) = self._predict(scheme, self.held_out, [scheme.whole], LOSS)
        training: list[predictions.Batch] = []
        if any(each.forward_is_random for each in scheme.whole.values()):
            (training,) = self._predict(scheme, self.held_out, [scheme.whole], training=True)
        few = max(1, len(whole) // 3)
        rows = self.held_out[: few * self.settings.batch]
        parts = self._predict(scheme, rows, [scheme.alone(kind) for kind in PREDICTED_KINDS], LOSS)
        effects = map(predictions.effect, [whole[:few], *parts])
        kinds = dict(zip(("all", *PREDICTED_KINDS), effects))
        return {"batches": whole, "training": training, "kinds": kinds}

    def _predict(
        self,
        scheme: _Converted,
        ids: Tensor,
        schemes: Sequence[dict[str, Scheme]],
        phase: str = "",
        *,
        training: bool = False,
    ) -> list[list[predictions.Batch]]:
        return predictions.predictions(
            self.model,
            scheme.parts,
            ids,
            self.settings.batch,
            schemes,
            lambda: self._advance(phase, 1 if phase else 0),
            training=training,
        )

    def _gradients(self, scheme: _Converted) -> dict[str, Any]:
        weights = list(scheme.weights.values())
        file = self._gradient_file("scheme", scheme)
        exact = self._exact_gradients(scheme)

        def keep(number: int) -> None:
            file.put(number, weights)
            self._advance(GRADIENTS)

        gradients.run_batches(self.model, weights, self.batches, keep)
        products = gradients.inner_products(exact, file)
        error, cosine = gradients.errors(products)
        kinds = {"all": {"gradient_error": error[0], "gradient_cosine": cosine[0]}}
        for kind in KINDS:
            with running(scheme.parts, scheme.alone(kind)):
                gradients.run_batches(self.model, weights, self.batches[:1], keep)
            alone = gradients.errors(gradients.inner_products(exact, file))
            kinds[kind] = {"gradient_error": alone[0][0], "gradient_cosine": alone[1][0]}
        file.remove()
        mean = gradients.mean_errors(products)
        return {"error": error, "cosine": cosine, "mean": mean, "kinds": kinds}

    def _gradient_file(self, name: str, scheme: _Converted) -> GradientFile:
        self.folder.mkdir(exist_ok=True)
        return GradientFile(self.folder / name, len(self.batches), scheme.layers)

    def _exact_gradients(self, scheme: _Converted) -> GradientFile:
        """Return the exact model's gradients; schemes that convert the same layers share them."""
        names, weights = list(scheme.layers), list(scheme.weights.values())
        if self.exact is None or self.exact[0] != names:
            file = self._gradient_file("exact", scheme)
            with running(scheme.parts):
                gradients.run_batches(
                    self.model, weights, self.batches, lambda number: file.put(number, weights)
                )
            self.exact = names, file
        return self.exact[1]

    def _operands(self, scheme: _Converted) -> dict[str, Any]:
        with running(scheme.attention):
            found = layer_errors.layer_errors(
                self.model, scheme.layers, scheme.weights, self.batches[0]
            )
        self._advance(OPERANDS)
        return found

    def _alone(self, scheme: _Converted) -> dict[str, Any]:
        """Quantize one layer at a time, on the first batch of the held-out text."""
        one_by_one = [{name: each} for name, each in scheme.schemes.items()]
        every = [scheme.whole, *one_by_one]
        rows = self.held_out[: self.settings.batch]
        whole, *parts = self._predict(scheme, rows, every, ALONE)
        layers = dict(zip(scheme.schemes, map(predictions.effect, parts)))
        return {"layers": layers, "whole": predictions.effect(whole)}
