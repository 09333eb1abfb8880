"""Measure the effect of the choice of weight scales on a model deployed in NVFP4.

    python eval/studies/weight_scales.py MODEL TEXT

Quantizes only the weights of a causal language model in four ways, without training, and measures
their signal-to-noise ratio and the loss on a text. Two of the ways clip each row of a weight to a
share of each block's largest magnitude, the share from `SHARES` with the smallest squared error,
which bounds the gain of learned clipping (OmniQuant, arXiv 2308.13137) in squared error. The record
is eval/results/deploy/weight-scales.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from publish import RESULTS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from metis_hf.lab.compare.statistics import t_interval
from metis_hf.lab.show.table import markdown_table
from metis_hf.numerics import NVFP4, Quantizer
from metis_hf.numerics.scaling import ScaleRule

OUT = RESULTS / "deploy" / "weight-scales"
SHARES = [1 - 0.02 * step for step in range(18)]  # 1 to .66 of the largest magnitude
LENGTH, BATCH = 256, 4
DIRECT, SEARCHED = Quantizer(), Quantizer(scale_rule=ScaleRule.SEARCH)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest magnitude": DIRECT,
    "largest magnitude, rows clipped": lambda weight: best_clipped(weight, DIRECT),
    "searched": SEARCHED,
    "searched, rows clipped": lambda weight: best_clipped(weight, SEARCHED),
}


def best_clipped(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """Quantize a weight [o i], each row clipped by the share with the smallest squared error."""
    blocks = weight.unflatten(1, (-1, NVFP4.block_size))
    largest = blocks.abs().amax(-1, keepdim=True)
    best = quantizer(weight)
    smallest = (best - weight).square().sum(1)
    for share in SHARES[1:]:
        limit = share * largest
        values = quantizer(blocks.clamp(-limit, limit).flatten(1))
        error = (values - weight).square().sum(1)
        better = error < smallest
        best[better], smallest[better] = values[better], error[better]
    return best


@torch.no_grad()
def measure(model: PreTrainedModel, ids: Tensor) -> list[dict[str, str | float]]:
    """Return a row for each of `WAYS`, measured on tokens [n length]; restore the weights.

    All linear layers of the dense model except the output head are quantized.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    exact = [layer.weight.clone() for layer in layers]
    before, rows = losses(model, ids), []
    for name, quantized in WAYS.items():
        signal = noise = 0.0
        for layer, weight in zip(layers, exact):
            layer.weight.copy_(quantized(weight))
            signal += weight.square().sum().item()
            noise += (layer.weight - weight).square().sum().item()
        mean = sum(before) / len(before)
        rise = t_interval(
            [100 * (now - was) / mean for now, was in zip(losses(model, ids), before)]
        )
        found = {"scales": name, "sqnr_db": 10 * math.log10(signal / noise)}
        rows.append(found | {"rise_percent": rise.mean, "rise_interval": rise.half_width})
    for layer, weight in zip(layers, exact):
        layer.weight.copy_(weight)
    return rows


@torch.no_grad()
def losses(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Return the loss of each batch, nats per token."""
    return [model(input_ids=rows, labels=rows).loss.item() for rows in ids.split(BATCH)]


def table(rows: list[dict]) -> str:
    cells = [
        [row["scales"], f"{row['sqnr_db']:.2f}",
         f"{row['rise_percent']:+.2f} ± {row['rise_interval']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["Scales of weights", "SQNR, dB", "Loss rise, %"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="causal language model: a directory or a hub name")
    parser.add_argument("text", type=Path, help="text to measure the loss on, a UTF-8 file")
    parser.add_argument(
        "--sequences", type=int, default=48, help=f"number of sequences of {LENGTH} tokens"
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.text.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) < 2 * BATCH * LENGTH:
        parser.error(f"{args.text} has {len(ids)} tokens; give at least {2 * BATCH * LENGTH}")
    ids = ids[: args.sequences * LENGTH]
    ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = measure(model, ids)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (OUT / "table.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
