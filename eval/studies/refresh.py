"""Measure the effect of decomposing the weights again during training.

    python eval/studies/refresh.py [--steps 200] [--out eval/results/refresh.json]

Trains a byte-level Llama (96 wide, 0.2M parameters) on the standard library's sources with the
stock Trainer and MetisCallback, without refresh and with one every 25 or 100 steps, for each split
scheme (weights stored as u, s, vh and residual) and three seeds. Runs of one seed share
initialization, batches and noise keys, so they are compared in pairs. Finished runs are kept, so
the study can be interrupted; an output file with other settings is refused. Writes JSON and a
table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from metis_hf import MetisCallback, MetisConfig, get_metis_model
from metis_hf.data.corpus import split_documents, stdlib_documents

SCHEMES = ("metis", "metis-paper")
INTERVALS = (0, 25, 100)  # optimizer steps; 0 never refreshes
SEEDS = (0, 1, 2)
SEQUENCE, BATCH, VALIDATION_SEQUENCES = 64, 8, 256
LEARNING_RATE = 4e-3
WINDOW = 25  # steps that one point of a recorded curve averages
MODEL = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": True,
    "initializer_range": 96**-0.5,
}


class Windows(torch.utils.data.Dataset):
    """Evenly spaced windows of a byte stream, as token ids."""

    def __init__(self, data: torch.Tensor, count: int) -> None:
        self.data, self.count = data, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * (len(self.data) - SEQUENCE) // self.count
        ids = self.data[start : start + SEQUENCE].long()
        return {"input_ids": ids, "labels": ids}


def config_of(scheme: str) -> MetisConfig:
    """Return the scheme's config with stored factors, which a refresh needs."""
    return MetisConfig(scheme=scheme, split_weight=True)


def load_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (train, validation) as byte tensors."""
    splits = split_documents(stdlib_documents())
    return tuple(
        torch.frombuffer(bytearray("\0".join(d.text for d in docs).encode()), dtype=torch.uint8)
        for docs in (splits.train, splits.validation)
    )


def kept(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a file of results, {} if there is no file.

    Raises:
        SystemExit: the results have other settings, and would be lost.
    """
    found = json.loads(out.read_text()) if out.exists() else {}
    asked = json.loads(json.dumps(settings))  # turns tuples into lists, as in the file
    differing = [key for key, value in asked.items() if found and found.get(key) != value]
    if differing:
        raise SystemExit(
            f"{out} contains results with other {', '.join(differing)}, which would be lost; "
            "choose another --out"
        )
    return found


def train(scheme: str, interval: int, seed: int, steps: int, data: tuple) -> dict[str, Any]:
    """Train once; return held-out loss, curve (mean over WINDOW steps), refreshes, drift."""
    transformers.set_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    config = config_of(scheme).replace(seed=seed, refresh_interval=interval)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            get_metis_model(model, config),
            TrainingArguments(
                directory,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
                learning_rate=LEARNING_RATE,
                adam_beta2=0.95,
                warmup_steps=steps // 20,
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=seed,
            ),
            train_dataset=Windows(data[0], steps * BATCH),
            eval_dataset=Windows(data[1], VALIDATION_SEQUENCES),
            callbacks=[MetisCallback(health_interval=0)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    drifts = [entry["metis/refresh_drift"] for entry in history if "metis/refresh_drift" in entry]
    curve = [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
    return {"loss": loss, "curve": curve, "refreshes": len(drifts), "drift": max(drifts, default=0)}


def change(runs: dict[str, Any], scheme: str, interval: int, values: str) -> tuple[float, float]:
    """Return (mean, standard error) over seeds of the change by refresh, percent."""

    def value(run: dict[str, Any]) -> float:
        return run["loss"] if values == "loss" else statistics.fmean(run["curve"])

    percents = [
        100 * (value(runs[key_of(scheme, interval, s)]) / value(runs[key_of(scheme, 0, s)]) - 1)
        for s in SEEDS
    ]
    return statistics.fmean(percents), statistics.stdev(percents) / len(percents) ** 0.5


def key_of(scheme: str, interval: int, seed: int) -> str:
    """Return the name of a run in the results."""
    return f"{scheme}, every {interval}, seed {seed}"


def table(results: dict[str, Any]) -> str:
    """Return the markdown table, a row for each scheme and interval."""
    runs = results["runs"]
    lines = [
        f"Held-out loss (nats per byte) after {results['steps']} steps of "
        f"{results['tokens_per_step']} tokens, and the mean training loss of the whole curve; "
        f"mean over seeds {', '.join(map(str, SEEDS))}. Changes are against the run of the same "
        "scheme and seed without refresh: mean ± standard error over the seeds.\n",
        "| scheme | refresh every | refreshes | held-out loss | change | curve | change |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for scheme in SCHEMES:
        for interval in INTERVALS:
            mine = [runs[key_of(scheme, interval, seed)] for seed in SEEDS]
            loss = statistics.fmean(run["loss"] for run in mine)
            curve = statistics.fmean(statistics.fmean(run["curve"]) for run in mine)
            cells = ["", ""]
            if interval:
                changes = (change(runs, scheme, interval, v) for v in ("loss", "curve"))
                cells = [f"{mean:+.2f} ± {error:.2f} %" for mean, error in changes]
            lines.append(
                f"| {scheme} | {interval or 'never'} | {mine[0]['refreshes']} | {loss:.4f} | "
                f"{cells[0]} | {curve:.4f} | {cells[1]} |"
            )
    drift = max(run["drift"] for run in runs.values())
    lines.append(
        f"\nThe represented weight moved by at most {drift:.1e} of its norm in a refresh (fp32 "
        "rounding)."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything that is missing from the output file, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("eval/results/refresh.json"))
    args = parser.parse_args()
    results: dict[str, Any] = {
        "steps": args.steps,
        "tokens_per_step": BATCH * SEQUENCE,
        "learning_rate": LEARNING_RATE,
        "seeds": list(SEEDS),
        "model": MODEL,
        "configs": {name: config_of(name).to_dict() for name in SCHEMES},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    results["runs"] = kept(args.out, results).get("runs", {})
    data = load_bytes()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for scheme in SCHEMES:
            for interval in INTERVALS:
                key = key_of(scheme, interval, seed)
                if key not in results["runs"]:
                    results["runs"][key] = train(scheme, interval, seed, args.steps, data)
                    print(key, f"{results['runs'][key]['loss']:.4f}", flush=True)
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
