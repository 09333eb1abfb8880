"""How far four-bit training steps of a trained model are from exact ones, for every scheme.

    python eval/studies/gradient_error.py --model runs/compare-custom-tiny/runs/bf16/seed-0/model \
        --data prose-validation [--out eval/results/gradient-error.json]

For a trained control and real text: the gradient of all converted weights, with every GEMM of the
scheme, against that of the model in fp32. Relative error of one batch's gradient; of the mean over
all batches, with the norm of that mean beside it (its bias: what averaging over data and draws
leaves); and by how much the held-out loss rises when the model runs in the scheme. Nothing is
trained. Writes JSON, and the table to its place in docs/method.md.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from method_page import PAGE, arguments, markdown, placed
from operand_study import ALL, CORRECTED, DY_DGRAD, DY_WGRAD, loss_of, register, scheme
from torch import Tensor, nn
from tqdm import tqdm

from metis_hf import MetisConfig, get_metis_model, metis_layers, scheme_names
from metis_hf.data.chunked import load_chunked

SEQUENCES, BATCH = 512, 32
MARK = "gradient error"
TITLES = ("one batch", "mean of 16 batches", "held-out loss")


def variants() -> dict[str, MetisConfig]:
    """Every scheme that trains in FP4, and what `metis` is without some of its parts."""
    others = {"bf16", "bf16-split", "w4a4", "w4a16"}
    configs = {name: MetisConfig(scheme=name) for name in scheme_names() if name not in others}
    every = (*CORRECTED, DY_DGRAD, DY_WGRAD)
    return configs | {
        "metis, contraction mode": MetisConfig(operand_mode="contraction"),
        "metis, nothing corrected": register("gradient: nothing corrected", scheme(**ALL)),
        "metis, dy corrected too": register(
            "gradient: dy corrected", scheme(**ALL, corrected=every)
        ),
        "metis, forward pass alone": MetisConfig(high_precision=("backward",)),
        "metis, backward pass alone": MetisConfig(high_precision=("forward",)),
        "metis, rank 48": MetisConfig(rank=48),
    }


def gradients(model: nn.Module, names: list[str], ids: Tensor) -> Tensor:
    """[batches n]: of the weights of those layers, in training mode.

    Of a weight that is stored split, the gradient of the matrix: that of its residual.
    """
    model.train()
    stored = dict(model.named_parameters())
    weights = [
        stored.get(f"{name}.weight", stored.get(f"{name}.weight_residual")) for name in names
    ]
    rows = []
    for batch in ids.split(BATCH):
        model.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        rows.append(torch.cat([w.grad.flatten() for w in weights]))
    return torch.stack(rows)


def measure(model_dir: Path, data_dir: Path) -> dict[str, Any]:
    """{"schemes": name -> {"batch", "mean", "loss"}} and what was measured on."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    held_out = load_chunked(data_dir)
    ids = torch.as_tensor(held_out[: min(SEQUENCES, len(held_out))]["input_ids"])
    names = [name for name, _ in metis_layers(model)]
    dense = copy.deepcopy(model)
    for name, layer in metis_layers(model):
        dense.set_submodule(name, layer.to_dense())
    exact, control = gradients(dense, names, ids), loss_of(dense, ids)
    mean = exact.mean(0)
    found = {}
    for name, config in tqdm(variants().items(), unit="scheme"):
        converted = get_metis_model(copy.deepcopy(dense), config)
        error = gradients(converted, names, ids) - exact
        found[name] = {
            "batch": (error.norm(dim=1) / exact.norm(dim=1)).mean().item(),
            "mean": (error.mean(0).norm() / mean.norm()).item(),
            "loss": 100 * (loss_of(converted, ids) / control - 1),
        }
    return {
        "sequences": len(ids),
        "batch": BATCH,
        "control": control,
        "batch_over_mean": (exact.norm(dim=1).mean() / mean.norm()).item(),
        "schemes": dict(sorted(found.items(), key=lambda item: item[1]["mean"])),
    }


def table(record: dict[str, Any]) -> str:
    """Markdown, smallest error first."""
    rows = [
        (name, (found["batch"], found["mean"]), found["loss"])
        for name, found in record["schemes"].items()
    ]
    return markdown(TITLES, rows)


def main() -> None:
    """Entry point."""
    args = arguments(__doc__ or "", "eval/results/gradient-error.json")
    record = measure(args.model, args.data)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(placed(PAGE.read_text(), MARK, table(record)))


if __name__ == "__main__":
    main()
