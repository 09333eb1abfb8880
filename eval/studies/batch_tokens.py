"""What tokens of a batch do to schemes with splits: a table for docs/fidelity.md.

    python eval/studies/batch_tokens.py MODEL --text prose.txt

The same held-out sequences in smaller and larger batches, nothing trained: a split keeps directions
of a batch, and finds them from sampled rows. Writes eval/results/batch-tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from publish import RESULTS, ROOT, publish_table

from metis_hf import MetisConfig
from metis_hf.fidelity.loss import predictions
from metis_hf.fidelity.subject import converted, open_subject
from metis_hf.shared.records import environment
from metis_hf.shared.tables import markdown_table

PAGE = ROOT / "docs" / "fidelity.md"
OUT = RESULTS / "batch-tokens"
MARK = "tokens of a batch"
SEQUENCES, LENGTH = 16, 256
BATCHES = (2, 4, 8, 16)  # sequences of each
CONFIGS = {
    "nvfp4-rne": MetisConfig(scheme="nvfp4-rne"),
    "metis": MetisConfig(),
    "metis, directions from all rows": MetisConfig(sample_frac=1.0),
    "metis, rank 15": MetisConfig(rank=15),
}


def measure(model: str, text: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by scheme and tokens of a batch, "kl" (nats per token) and "rise" (of loss, %)."""
    # The last third of a subject's sequences is for gradients.
    subject = open_subject(
        model, text, tokenizer=None, sequences=SEQUENCES * 3 // 2, length=LENGTH, batch=2,
        dtype="float32", device="cpu",
    )  # fmt: skip
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, config in CONFIGS.items():
        with converted(subject.model, config) as layers:
            schemes = [{layer: part.scheme for layer, part in layers.items()}]
            for batch in BATCHES:
                ids = subject.held_out[:SEQUENCES]
                (rows,) = predictions(subject.model, layers, ids, batch, schemes)
                loss, exact, kl = (
                    statistics.fmean(row[key] for row in rows) for key in ("loss", "exact", "kl")
                )
                tokens = str(batch * LENGTH)
                found.setdefault(name, {})[tokens] = {"kl": kl, "rise": 100 * (loss / exact - 1)}
                print(name, tokens, found[name][tokens], flush=True)
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table: rise of the loss and divergence, a column for each batch."""
    tokens = list(next(iter(found.values())))
    rows = []
    for key, title, spec in (("rise", "loss rise, %", "+.2f"), ("kl", "KL (nats)", ".4f")):
        for name, by_tokens in found.items():
            rows.append([f"{name}: {title}", *(format(by_tokens[t][key], spec) for t in tokens)])
    return markdown_table(["Tokens of a batch", *(f"{int(t):,}" for t in tokens)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory or hub name")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file")
    args = parser.parse_args()
    found = measure(args.model, args.text)
    OUT.mkdir(parents=True, exist_ok=True)
    record = {"model": Path(args.model).name, "text": args.text.name, "found": found}
    (OUT / "results.json").write_text(json.dumps(record | {"environment": environment()}) + "\n")
    publish_table(OUT, MARK, table(found), PAGE)


if __name__ == "__main__":
    main()
