"""Compare the input scales that `calibrate` finds on samples with the scales of whole tensors.

    python eval/studies/input_scales.py MODEL TEXT HELD_OUT

Calibrates a causal language model in "w4a4" on the beginning of TEXT, and meanwhile measures the
error of each tried scale on all rows that a layer reads. Counts the layers for which whole tensors
choose another scale, and measures the loss on HELD_OUT with both choices. The record is
eval/results/deploy/input-scales.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from publish import RESULTS
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from weight_scales import BATCH, losses

from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.conversion.deployed import input_groups
from metis_hf.data.chat import first_sequences
from metis_hf.lab.compare.statistics import t_interval
from metis_hf.shared.records import environment, write_json
from metis_hf.training import calibration
from metis_hf.training.scale_error import BlockSample

OUT = RESULTS / "deploy" / "input-scales.json"
LENGTH = 512


class Searches(BlockSample):
    """A `BlockSample` that also keeps all rows; `found` compares the choices of both searches."""

    # Largest magnitude -> (amax chosen on whole tensors, excess error of the sample's choice, %).
    found: dict[float, tuple[float, float]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: list[Tensor] = []

    def add(self, x: Tensor, source: Tensor) -> None:
        seen = self.seen
        super().add(x, source)
        if self.seen > seen:
            self.rows.append(x)

    def errors(self, amaxes: Sequence[float]) -> list[float]:
        sampled = super().errors(amaxes)
        whole = [self._of_all(torch.tensor(amax)) for amax in amaxes]
        best = whole.index(min(whole))
        excess = whole[sampled.index(min(sampled))] / whole[best] - 1
        self.found[amaxes[0]] = amaxes[best], 100 * excess
        return sampled

    def _of_all(self, amax: Tensor) -> float:
        parts = ((self.quantizer(x, amax=amax) - x).square_() for x in self.rows)
        return sum(part.sum(dtype=torch.float64).item() for part in parts)


def measure(model: PreTrainedModel, ids: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Convert a dense model, and return its record; ids and held_out are token ids [n length]."""
    get_metis_model(model, MetisConfig(scheme="w4a4")).eval()
    Searches.found = {}
    with mock.patch.object(calibration, "BlockSample", Searches):
        scales = calibrate(model, list(ids.split(BATCH)))
    sampled, layers, excesses, others = losses(model, held_out), dict(metis_layers(model)), [], 0
    for group in dict.fromkeys(input_groups(scales).values()):
        amax, excess = Searches.found[max(scales[name].largest for name in group)]
        excesses.append(excess)
        others += len(group) if excess else 0
        for name in group:
            layers[name].get_buffer("input_amax").fill_(amax)
    pairs = zip(sampled, losses(model, held_out))
    difference = t_interval([of_sample - of_whole for of_sample, of_whole in pairs])
    return {
        "tokens": ids.numel(),
        "held_out_tokens": held_out.numel(),
        "layers": len(scales),
        "layers with another scale": others,
        "largest excess of the squared error, %": max(excesses),
        "loss with sampled scales": sum(sampled) / len(sampled),
        "loss above that with whole tensors' scales": difference.mean,
        "95 % interval": difference.half_width,
        **environment(model.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="causal language model: a directory or a hub name")
    parser.add_argument(
        "texts", nargs=2, type=Path, help="UTF-8 files: the calibration text and the held-out text"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=24,
        help=f"number of sequences of {LENGTH} tokens from each text",
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = [first_sequences(text, tokenizer, LENGTH, args.sequences) for text in args.texts]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    record = measure(model, *ids)
    write_json(OUT, record)
    print(record)


if __name__ == "__main__":
    main()
