"""Measure the effect of the batch shape on schemes with splits: the table of the record's README.

    python eval/studies/batch_tokens.py MODEL --text prose.txt

Evaluates the same held-out text in smaller and larger batches and in longer sequences, without
training. A split keeps directions of a batch and finds them from sums of its rows; the study also
finds them from sampled rows and from all rows. Writes eval/results/batch-tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from publish import RESULTS, publish_table

from metis_hf import MetisConfig
from metis_hf.lab.fidelity.predictions import predictions
from metis_hf.lab.fidelity.subject import ModelAndText, converted
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes.parts import Scheme, Spectral
from metis_hf.shared.records import environment

OUT = RESULTS / "batch-tokens"
PAGE = OUT / "README.md"
MARK = "tokens of a batch"
SEQUENCES, LENGTH = 16, 256
BATCHES = ((2, 256), (8, 256), (16, 256), (2, 2048))  # sequences, tokens of each
SAMPLED = "metis, directions from sampled rows"
DRAWS = (0, 1, 2)  # seeds of signs, samples and sketches
CONFIGS = {
    "nvfp4-rne": [MetisConfig(scheme="nvfp4-rne")],  # draws nothing
    "metis": [MetisConfig(seed=seed) for seed in DRAWS],
    SAMPLED: [MetisConfig(seed=seed) for seed in DRAWS],
    "metis, directions from all rows": [MetisConfig(sample_frac=1.0)],
}


def with_sampled_rows(scheme: Scheme) -> Scheme:
    """Return `metis` with input directions from sampled rows, as many as it makes sums of rows."""
    split = scheme.fprop_input.conditioner
    assert isinstance(split, Spectral)
    rows = replace(scheme.fprop_input, conditioner=replace(split, summed=False))
    return replace(scheme, fprop_input=rows)


def measure(model: str, text: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return scheme -> batch shape -> "kl" (nats) or "rise" (%) -> one value per draw."""
    # `ModelAndText` reserves the last third of its sequences for gradients.
    subject = ModelAndText(model, text, sequences=SEQUENCES * 3 // 2, length=LENGTH).open()
    ids = subject.held_out[:SEQUENCES]
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, config in ((name, config) for name, draws in CONFIGS.items() for config in draws):
        with converted(subject.model, config) as layers:
            schemes = {layer: part.scheme for layer, part in layers.items()}
            if name == SAMPLED:
                schemes = {layer: with_sampled_rows(scheme) for layer, scheme in schemes.items()}
            for batch, length in BATCHES:
                texts = ids.reshape(-1, length)
                (rows,) = predictions(subject.model, layers, texts, batch, [schemes])
                loss, exact, kl = (
                    statistics.fmean(row[key] for row in rows) for key in ("loss", "exact", "kl")
                )
                of_batch = found.setdefault(name, {}).setdefault(f"{batch} x {length:,}", {})
                of_batch.setdefault("kl", []).append(kl)
                of_batch.setdefault("rise", []).append(100 * (loss / exact - 1))
                print(name, batch, length, of_batch, flush=True)
    return found


def table(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Return the table: rise of the loss and divergence, with a column per batch shape.

    For several draws, a cell has the mean and, in brackets, the smallest and largest value.
    """
    batches = list(next(iter(found.values())))
    rows = []
    for key, title, spec in (("rise", "loss rise, %", "+.2f"), ("kl", "KL (nats)", ".3f")):
        for name, by_batch in found.items():
            cells = [_cell(by_batch[batch][key], spec) for batch in batches]
            rows.append([f"{name}: {title}", *cells])
    return markdown_table(["Sequences x tokens", *batches], rows)


def _cell(draws: list[float], spec: str) -> str:
    mean = format(statistics.fmean(draws), spec)
    if len(draws) == 1:
        return mean
    return f"{mean} ({min(draws):{spec}} to {max(draws):{spec}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="causal language model: a directory or a hub name")
    parser.add_argument("--text", type=Path, required=True, help="held-out text, a UTF-8 file")
    args = parser.parse_args()
    found = measure(args.model, args.text)
    OUT.mkdir(parents=True, exist_ok=True)
    record = {"model": Path(args.model).name, "text": args.text.name, "found": found}
    (OUT / "results.json").write_text(json.dumps(record | {"environment": environment()}) + "\n")
    publish_table(OUT, MARK, table(found), PAGE)


if __name__ == "__main__":
    main()
