"""`fidelity`: one scheme after the other on one model, kept as it is measured, then the page."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.attention import attention_products
from metis_hf.lab.cost import TOKENS, inputs_of, overhead, tokens_of_layers
from metis_hf.lab.fidelity.gradients import (
    GradientFile,
    errors,
    inner_products,
    mean_errors,
    run_batches,
)
from metis_hf.lab.fidelity.loss import Batch, predictions
from metis_hf.lab.fidelity.operands import KINDS, layer_errors, only
from metis_hf.lab.fidelity.page import write_outputs
from metis_hf.lab.fidelity.result import SchemeResult
from metis_hf.lab.fidelity.subject import (
    Part,
    Subject,
    converted,
    is_transposed,
    open_subject,
    running,
    trainable,
)
from metis_hf.lab.measured import Store, code_digest
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.texts import MIN_LENGTH
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import CONTROL, Scheme, scheme_info, scheme_names, source_digests
from metis_hf.shared.inputs import digest
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.records import environment, write_json
from metis_hf.shared.texts import utf8_text

LOSS, GRADIENTS, OPERANDS, ALONE = "loss", "gradients", "operands", "layers alone"
PREDICTED_KINDS = ("input", "weight")  # operands that predictions depend on
# What one item costs, against a forward pass over a batch, for the time left.
_COSTS = {LOSS: 2.0, GRADIENTS: 6.0, OPERANDS: 15.0, ALONE: 1.0}


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        model: directory or hub name.
        text: UTF-8 file.
        tokenizer: directory of another tokenizer than the model's own.
        schemes: names; None: all but the control.
        ranks: further ranks at which `metis` is measured.
        configs: JSON files of further configs, called by the files' names in tables.
        alone: schemes whose layers are quantized one at a time; None: the first.
        sequences: of the text, at most.
        length: tokens of each.
        batch: sequences of a batch.
        tokens_per_step: that costs are counted for.
        dtype: of weights and exact computation.
        device: to run on.
        seed: of all noise; None: 0, and for `configs` that of the file.
    """

    model: str
    text: Path
    schemes: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = ()
    configs: tuple[Path, ...] = ()
    alone: tuple[str, ...] | None = None
    sequences: int = 18
    length: int = 256
    batch: int = 2
    tokens_per_step: int = TOKENS
    dtype: str = "float32"
    device: str = "cpu"
    seed: int | None = None
    tokenizer: str | None = None

    def candidates(self) -> list[tuple[str, MetisConfig]]:
        """Return (name in tables, config) of everything to measure.

        Raises:
            FileNotFoundError: no such file of a config.
            ValueError: a scheme is not registered; something is given twice, or nothing; `alone`
                names something else; a rank is not positive; a file that is no config.
        """
        names = self.schemes
        if names is None:
            names = tuple(name for name in scheme_names() if name != CONTROL)
        for name in names:
            scheme_info(name)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scheme named twice: {', '.join(twice)}")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks {', '.join(map(str, self.ranks))}: one is given twice")
        seed = self.seed or 0
        found = [(name, MetisConfig(scheme=name, seed=seed)) for name in names]
        found += [(f"metis, rank {rank}", MetisConfig(rank=rank, seed=seed)) for rank in self.ranks]
        found += [(path.stem, _read_config(path, self.seed)) for path in self.configs]
        if not found:
            raise ValueError("nothing to measure: name schemes, or all, or ranks or configs")
        twice = sorted({n for n, _ in found if [m for m, _ in found].count(n) > 1})
        if twice:
            raise ValueError(f"two rows would be called {', '.join(twice)}: rename a config's file")
        for name in self.alone or ():
            if name not in dict(found):
                measured = ", ".join(name for name, _ in found)
                raise ValueError(f"alone: {name!r} is not among what is measured: {measured}")
        return found


def fidelity(settings: Settings, out: Path, console: Console | None = None) -> list[SchemeResult]:
    """Measure what schemes do to a model, and write results.json, table.md, cost.png, index.html.

    What `out` holds already of the same model, text, settings and code is not measured again. The
    page is rewritten after each scheme.

    Raises:
        FileNotFoundError, ValueError: as `open_subject` and `Settings.candidates`.
    """
    candidates = settings.candidates()
    if settings.tokens_per_step < 1:
        raise ValueError(f"tokens_per_step={settings.tokens_per_step}; choose at least 1")
    console = console or Console(quiet=True)
    subject = open_subject(
        settings.model,
        settings.text,
        tokenizer=settings.tokenizer,
        sequences=settings.sequences,
        length=settings.length,
        batch=settings.batch,
        dtype=settings.dtype,
        device=settings.device,
    )
    out.mkdir(parents=True, exist_ok=True)
    with hold_directory(out):
        return _Measurements(settings, subject, out, console).run(candidates)


class _Measurements:
    """The measurements of one model, in the order in which they are made."""

    def __init__(self, settings: Settings, subject: Subject, out: Path, console: Console) -> None:
        self.settings, self.subject, self.out, self.console = settings, subject, out, console
        self.batches = list(subject.training.split(settings.batch))
        self.inputs: dict[str, Hashable] = {}  # layer -> the tensor that it reads
        self.items: dict[str, int] = {}  # part -> what is counted of it, for each scheme
        self.exact: tuple[list[str], GradientFile] | None = None  # with the layers' names
        # What every measurement depends on; those of schemes that are not asked for now stay.
        self.depends = digest(code_digest(), subject.identity, settings.batch, settings.device)
        self.store = Store(out, {self.depends}, keep_others=True)

    def run(self, candidates: Sequence[tuple[str, MetisConfig]]) -> list[SchemeResult]:
        """Measure all candidates."""
        alone = self.settings.alone
        alone = (candidates[0][0],) if alone is None else alone
        loss = len(self.subject.held_out.split(self.settings.batch))
        with converted(self.subject.model, MetisConfig(scheme=CONTROL)) as layers:
            few = self.subject.held_out[:1, :MIN_LENGTH].to(self.subject.model.device)
            self.inputs = inputs_of(self.subject.model, layers, few)
        self.items = {
            LOSS: loss + len(PREDICTED_KINDS) * max(1, loss // 3),
            GRADIENTS: len(self.batches) + len(KINDS),
            OPERANDS: 1,
            ALONE: len(self.inputs) + 1,
        }
        counts = {part: len(alone) if part == ALONE else len(candidates) for part in self.items}
        phases = {part: (n * counts[part], _COSTS[part]) for part, n in self.items.items()}
        results: list[SchemeResult] = []
        try:
            self.bars = TaskProgress(self.console)
            with self.bars.running(phases):
                for name, config in candidates:
                    results.append(self._measure(name, config, name in alone))
                    write_outputs(self.out, self._record(results, len(candidates)), results)
        except KeyboardInterrupt:
            text = f"interrupted: the same command goes on from {self.out}"
            self.console.print(text, markup=False)
            raise
        finally:
            shutil.rmtree(self.out / "gradients", ignore_errors=True)
        return results

    def _record(self, results: Sequence[SchemeResult], expected: int) -> dict[str, Any]:
        settings = dataclasses.asdict(self.settings) | {
            "text": self.settings.text.name,
            "configs": [path.name for path in self.settings.configs],
        }
        record = {
            "settings": settings,
            "held_out_tokens": self.subject.held_out[:, 1:].numel(),  # that are predicted
            "gradient_sequences": len(self.subject.training),
            "gradient_batches": len(self.batches),
            "missing": expected - len(results),
            "environment": environment(self.subject.model.device),
            "schemes": [dataclasses.asdict(result) for result in results],
        }
        write_json(self.out / "results.json", record)
        return record

    def _measure(self, name: str, config: MetisConfig, alone: bool) -> SchemeResult:
        result = SchemeResult(name, config.scheme, config.rank)
        parts = [LOSS, GRADIENTS, OPERANDS, *([ALONE] if alone else [])]
        kind = digest(config.to_dict(), source_digests(config.schemes, config.format))
        found = {part: self.store.get(part, name, kind, self.depends) for part in parts}
        missing = [part for part, value in found.items() if value is None]
        self._skip(part for part in parts if part not in missing)
        with contextlib.ExitStack() as stack:
            try:
                layers = stack.enter_context(converted(self.subject.model, config))
            except ValueError as error:
                result.note = str(error)
                self._skip(missing)
                return result
            shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
            reads = [self.inputs.get(name, name) for name in layers]
            seen = tokens_of_layers(self.subject.model, self.settings.tokens_per_step)
            cost = overhead(shapes, [seen[name] for name in layers], reads)
            result.overhead, result.weight_bits = dict(cost.parts), cost.weight_bits
            weights = trainable(layers)
            for part in missing:
                value = self._part(part, layers, weights)
                self.store.put(part, name, kind, self.depends, value)
                found[part] = value
        result.batches, result.kinds = found[LOSS]["batches"], found[LOSS]["kinds"]
        result.training = found[LOSS]["training"]
        for kind, values in found[GRADIENTS]["kinds"].items():
            result.kinds.setdefault(kind, {}).update(values)
        result.gradients = {k: v for k, v in found[GRADIENTS].items() if k != "kinds"}
        result.layers, result.alone = found[OPERANDS], found.get(ALONE) or {}
        return result

    def _skip(self, parts: Iterable[str]) -> None:
        """Count parts of a scheme as done that are not measured now."""
        for part in parts:
            for _ in range(self.items[part]):
                self.bars.advance(part, reused=True)

    def _part(
        self, part: str, layers: dict[str, MetisLayer], weights: dict[str, nn.Parameter]
    ) -> Any:
        if part == LOSS:
            return self._loss(layers)
        if part == GRADIENTS:
            return self._gradients(layers, weights)
        if part == OPERANDS:
            with running(self._attention()):
                found = layer_errors(self.subject.model, layers, weights, self.batches[0])
            self.bars.advance(OPERANDS)
            return found
        return self._alone(layers)

    def _attention(self) -> dict[str, Part]:
        """Return what quantizes the products of attention in the model as it is converted now."""
        return dict(attention_products(self.subject.model))

    def _loss(self, layers: dict[str, MetisLayer]) -> dict[str, Any]:
        schemes = {name: layer.scheme for name, layer in layers.items()}
        held_out, batch = self.subject.held_out, self.settings.batch
        attention = {name: part.scheme for name, part in self._attention().items()}
        (whole,) = self._predictions(layers, held_out, [schemes | attention], LOSS)
        training: list[Batch] = []
        if any(s.forward_is_random for s in (*schemes.values(), *attention.values())):
            (training,) = self._predictions(layers, held_out, [schemes | attention], training=True)
        few = max(1, len(whole) // 3)
        alone = [{n: only(s, kind) for n, s in schemes.items()} for kind in PREDICTED_KINDS]
        parts = self._predictions(layers, held_out[: few * batch], alone, LOSS)
        effects = map(_effect, [whole[:few], *parts])
        kinds = dict(zip(("all", *PREDICTED_KINDS), effects))
        return {"batches": whole, "training": training, "kinds": kinds}

    def _predictions(
        self,
        layers: dict[str, MetisLayer],
        ids: Tensor,
        schemes: Sequence[dict[str, Scheme]],
        phase: str | None = None,
        *,
        training: bool = False,
    ) -> list[list[Batch]]:
        model, batch = self.subject.model, self.settings.batch
        parts = {**layers, **self._attention()}

        def advance() -> None:
            if phase:
                self.bars.advance(phase)

        return predictions(model, parts, ids, batch, schemes, advance, training=training)

    def _gradients(
        self, layers: dict[str, MetisLayer], weights: dict[str, nn.Parameter]
    ) -> dict[str, Any]:
        parameters = list(weights.values())
        folder = self.out / "gradients"
        folder.mkdir(exist_ok=True)
        model = self.subject.model
        turned = [is_transposed(layer) for layer in layers.values()]
        file = GradientFile(folder / "scheme", len(self.batches), parameters, turned)
        exact = self._exact_gradients(layers, weights)

        def keep(number: int) -> None:
            file.put(number, parameters)
            self.bars.advance(GRADIENTS)

        run_batches(model, parameters, self.batches, keep)
        products = inner_products(exact, file)
        error, cosine = errors(products)
        found: dict[str, Any] = {
            "error": error,
            "cosine": cosine,
            "mean": mean_errors(products),
            "kinds": {"all": {"gradient_error": error[0], "gradient_cosine": cosine[0]}},
        }
        schemes = {name: layer.scheme for name, layer in layers.items()}
        for kind in KINDS:
            alone = {name: only(scheme, kind) for name, scheme in schemes.items()}
            with running({**layers, **self._attention()}, alone):
                run_batches(model, parameters, self.batches[:1], keep)
            error, cosine = errors(inner_products(exact, file))
            found["kinds"][kind] = {"gradient_error": error[0], "gradient_cosine": cosine[0]}
        file.remove()
        return found

    def _exact_gradients(
        self, layers: dict[str, MetisLayer], weights: dict[str, nn.Parameter]
    ) -> GradientFile:
        """Return the exact model's gradients; they are those of the last scheme's layers, too."""
        names = list(weights)
        if self.exact is None or self.exact[0] != names:
            parameters = list(weights.values())
            turned = [is_transposed(layer) for layer in layers.values()]
            path = self.out / "gradients" / "exact"
            file = GradientFile(path, len(self.batches), parameters, turned)
            with running({**layers, **self._attention()}):
                run_batches(
                    self.subject.model, parameters, self.batches, lambda n: file.put(n, parameters)
                )
            self.exact = names, file
        return self.exact[1]

    def _alone(self, layers: dict[str, MetisLayer]) -> dict[str, Any]:
        """Quantize one layer at a time, on the first sequence of the held-out text."""
        schemes = {name: layer.scheme for name, layer in layers.items()}
        one_by_one = [{name: scheme} for name, scheme in schemes.items()]
        first = self.subject.held_out[:1]
        attention = {name: part.scheme for name, part in self._attention().items()}
        every = [schemes | attention, *one_by_one]
        whole, *parts = self._predictions(layers, first, every, ALONE)
        return {"layers": dict(zip(schemes, map(_effect, parts))), "whole": _effect(whole)}


def _read_config(path: Path, seed: int | None) -> MetisConfig:
    text = utf8_text(path)
    try:
        config = MetisConfig.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path} holds no config: {error}") from error
    return config if seed is None else config.replace(seed=seed)


def _effect(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what a scheme does to the predictions: the loss's rise in %, and the divergence."""
    return {"loss": _rise(rows), "kl": _mean(rows, "kl")}


def _mean(rows: Sequence[dict[str, float]], key: str) -> float:
    return math.fsum(row[key] for row in rows) / len(rows)


def _rise(rows: Sequence[dict[str, float]]) -> float:
    """Return the loss above the exact model's, in % of it."""
    exact = _mean(rows, "exact")
    return 100 * (_mean(rows, "loss") - exact) / exact
