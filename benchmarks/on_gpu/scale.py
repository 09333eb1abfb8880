"""The part `scale`: runs from scratch at real size, as many as fit, most valuable first.

A unit is one variant of a preset with one seed. Each unit is an item, so that a call that runs out
of time keeps all finished units; the unfinished one leaves a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import transformers
from timing import Row

from metis_hf.data.chunked import load_tokens, read_meta
from metis_hf.data.shards import Streams, tokenize_embedded, tokenize_folder
from metis_hf.lab.compare.presets import PRESET_DEFAULTS, PRESETS
from metis_hf.lab.compare.results import compact
from metis_hf.lab.compare.sizes import SIZES, Size
from metis_hf.lab.compare.training import held_out_result, train
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.lab.store import numerics_digest
from metis_hf.shared.inputs import digest, digest_of_path
from metis_hf.shared.records import write_atomically
from on_gpu import ROOT, machine
from on_gpu.compare import Sequences, StopInTime, half, steps_of
from on_gpu.context import Context
from on_gpu.record import Entry, Item, OutOfTime, Skipped, free_memory

FIRST = ("bf16", "metis", "nvidia", "nvfp4-rne")  # three seeds of these come first
SEEDS = (0, 1, 2)
_SLACK = 1.1  # factor for recording a step and for evaluation
_QUICK_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2}  # fmt: skip
_QUICK_MODELS = {"llama": _QUICK_LLAMA, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2}}


@dataclass(frozen=True)
class Text:
    """The tokens that all units read.

    Attributes:
        name: of the text's folder.
        streams: token ids.
        vocabulary: size of the models' embedding.
        digest: of the token ids.
    """

    name: str
    streams: Streams
    vocabulary: int
    digest: str

    @property
    def options(self) -> Row:
        """Return the options that results depend on."""
        return {"text": self.name, "tokens": self.digest, "numerics": numerics_digest()}


@dataclass(frozen=True)
class Unit:
    """One variant with one seed."""

    preset: str
    variant: Variant
    seed: int

    @property
    def key(self) -> str:
        return f"{self.preset}, {self.variant.name}, seed {self.seed}"


def units(quick: bool = False) -> list[Unit]:
    """Return all units, most valuable first."""
    variants = {variant.name: variant for variant in PRESETS["30m"]()}
    others = [variants[name] for name in variants if name not in FIRST]
    seeds, rest = (SEEDS[:2], SEEDS[:1]) if quick else (SEEDS, SEEDS)
    return [
        *(Unit("30m", variants[name], seed) for seed in seeds for name in FIRST),
        *(Unit("30m", variant, 0) for variant in others),
        *(Unit("130m", variant, 0) for variant in PRESETS["130m"]()),
        *(Unit("30m", variant, seed) for seed in rest[1:] for variant in others),
    ]


def size_of(preset: str, quick: bool) -> Size:
    """Return the model and training settings of a preset, tiny if `quick`."""
    size = SIZES[PRESET_DEFAULTS[preset]["size"]]
    if not quick:
        return size
    return replace(
        size,
        config={**size.config, **_QUICK_MODELS[size.model_type]},
        sequence_length=32,
        global_batch=4,
        tokens=4 * 4 * 32,
        eval_sequences=8,
    )


# --- the text -------------------------------------------------------------------------------------


def open_text(text: Path | None, data: Path | None, quick: bool, work: Path) -> Text:
    """Read a folder of text or of chunked tokens, or, with neither, the embedded text.

    Raises:
        FileNotFoundError, ValueError: as `tokenize_folder` or `load_tokens`; or there are fewer
            tokens than a unit trains on.
    """
    vocabulary = 512 if quick else SIZES["scale-30m"].config["vocab_size"]
    if text is None and data is not None:
        name, vocabulary = data.absolute().name, read_meta(data)["vocab_size"]
        parts = (load_tokens(folder).flatten().numpy() for folder in (data, data / "validation"))
        streams = Streams(*parts)
    else:
        name = "Python's standard library" if text is None else text.absolute().name
        streams = _tokenized(text, vocabulary, quick, work)
    size = size_of("30m", quick)
    for found, needed, what in (
        (streams.train, size.tokens, f"training tokens, but {size.steps} steps need"),
        (streams.held_out, size.sequence_length, "held-out tokens, but a sequence needs"),
    ):
        if len(found) < needed:
            raise ValueError(
                f"{text or data or name} has {len(found):,} {what} {needed:,}; give more text"
            )
    hashed = sha256(b"".join(np.ascontiguousarray(s, np.int32).tobytes() for s in streams))
    return Text(name, streams, vocabulary, hashed.hexdigest()[:16])


def _tokenized(text: Path | None, vocabulary: int, quick: bool, work: Path) -> Streams:
    """Tokenize text; the tokens are cached in `work` for the next call."""
    tokens = max(size_of(preset, quick).tokens for preset in ("30m", "130m"))
    if text is None:
        return tokenize_embedded(vocabulary, tokens=tokens)
    key = digest(digest_of_path(text), vocabulary, tokens, quick)
    path = work / "scale" / f"tokens-{key}.npz"
    if path.is_file():
        with np.load(path) as kept:
            return Streams(kept["train"], kept["held_out"])
    limit = 100_000 if quick else None
    streams = tokenize_folder(text, vocabulary, tokens=tokens, characters=limit)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: np.savez(file, **streams._asdict()))
    return streams


# --- the units ------------------------------------------------------------------------------------


def scale(context: Context) -> Iterator[Item]:
    if context.tokens is None:
        raise Skipped("no text was given; pass --text DIR, or --parts scale with --data DIR")
    transformers.utils.logging.disable_progress_bar()
    entry = context.entry("scale")
    late = []
    for unit in units(context.quick):
        seconds = _seconds(unit, entry, context)
        item = Item(unit.key, partial(measure, unit, context, context.tokens), seconds)
        if unit.key not in entry.items and context.clock.left() <= seconds:
            late.append(item)  # a cheaper unit may still fit
        else:
            yield item
    yield from late


def _rows(entry: Entry, preset: str) -> list[tuple[str, Row]]:
    items = entry.items.items()
    return [(key, row) for key, row in items if row.get("preset") == preset]


def _seconds(unit: Unit, entry: Entry, context: Context) -> float:
    """Estimate a unit's seconds from finished units, as an upper bound; 0 without any."""
    if any(_run(unit, context).glob("checkpoint-*")):
        return 0.0
    rows = _rows(entry, unit.preset)
    same = [found for found in rows if found[1]["scheme"] == unit.variant.name]
    steps = size_of(unit.preset, context.quick).steps
    taken = [
        max(entry.seconds.get(key, 0.0), _SLACK * steps * row["seconds_per_step"])
        for key, row in same or rows
    ]
    seconds = max(taken, default=0.0)
    # A unit that needs longer than a whole call starts anyway: it leaves a checkpoint.
    return seconds if seconds < 0.9 * context.clock.seconds else 0.0


def _run(unit: Unit, context: Context) -> Path:
    """Return the folder of a unit's checkpoint, which depends on tokens and numerics."""
    assert context.tokens is not None
    return context.work / "scale" / digest(context.tokens.options, context.quick) / unit.key


def measure(unit: Unit, context: Context, text: Text) -> Row:
    """Train a unit; return its held-out loss, curve, speed and memory.

    If memory is too small, the step is split into smaller micro-batches. Later units start with
    the same micro-batches, because tensor scales are per micro-batch.
    """
    size = size_of(unit.preset, context.quick)
    if len(text.streams.train) < size.tokens:
        have, need = len(text.streams.train), size.tokens
        return {"reason": f"{text.name} has {have:,} training tokens, but this run needs {need:,}"}
    rows = [row for _, row in _rows(context.entry("scale"), unit.preset)]
    batch = min((row["device_batch"] for row in rows), default=size.global_batch)
    run = _run(unit, context)
    while True:
        try:
            return train_unit(unit, size, context, text, batch, run)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch = half(batch, size.global_batch)
        shutil.rmtree(run, ignore_errors=True)
        free_memory()


def train_unit(
    unit: Unit, size: Size, context: Context, text: Text, device_batch: int, run: Path
) -> Row:
    """Train a unit until its last step, or until the time is up."""
    experiment = Experiment(
        model={**size.config, "model_type": size.model_type, "vocab_size": text.vocabulary},
        training={
            **size.training,
            "max_steps": size.steps,
            "per_device_train_batch_size": device_batch,
            "per_device_eval_batch_size": device_batch,
            "gradient_accumulation_steps": size.global_batch // device_batch,
            "train_sampling_strategy": "sequential",  # the sequences are shuffled already
            "save_strategy": "no",
            "use_cpu": context.device.type == "cpu",
        },
        sequence_length=size.sequence_length,
        health_interval=0,
        seed=unit.seed,
    )
    train_on, held_out = (_sequences(stream, size.sequence_length) for stream in text.streams)
    order = torch.randperm(len(train_on), generator=torch.Generator().manual_seed(unit.seed))
    trained = train(
        experiment,
        unit.variant,
        Sequences(train_on[order[: size.steps * size.global_batch]]),
        None,
        run,
        lambda step, loss: None,
        callbacks=[StopInTime(context.clock)],
    )
    if (done := steps_of(trained)) < size.steps:
        raise OutOfTime(
            f"{done} of {size.steps} steps are done; the next call continues from its checkpoint"
        )
    code = {"sha256": numerics_digest(), "commit": machine.commit(ROOT)}
    held_out = Sequences(held_out[: size.eval_sequences])
    result = held_out_result(trained, unit.variant, unit.seed, held_out, code)
    shutil.rmtree(run, ignore_errors=True)
    graphs = trained.trainer.graphs
    return {
        "preset": unit.preset,
        **compact(result),
        "steps": size.steps,
        "tokens": size.tokens,
        "device_batch": device_batch,
        "recorded": graphs is not None and not graphs.refused,
        "text": text.name,
        "tokens_digest": text.digest,
        "settings": digest(vars(size) | {"vocabulary": text.vocabulary}),
    }


def _sequences(stream: np.ndarray, length: int) -> torch.Tensor:
    whole = stream[: len(stream) // length * length].astype(np.int32)
    return torch.from_numpy(whole).view(-1, length)
