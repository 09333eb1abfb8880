"""Subspaces with and without a small eigenvalue problem, and kept ones: on a real model.

    python eval/studies/subspace_finders.py MODEL TEXT

MODEL is a checkpoint of transformers, nothing is trained; TEXT has documents between lines of
"<|endoftext|>". Writes eval/results/subspace-finders.json, whose trainings "from scratch" are of
`metis-hf compare` with the settings of eval/results/width-96/compare.yaml and these variants.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

from metis_hf import MetisConfig, get_metis_model
from metis_hf.noise import Key
from metis_hf.training.layer_states import after_step
from metis_hf.transforms.spectral import fewest_rotations, find_basis, find_subspace

OUT = Path(__file__).parents[1] / "results" / "subspace-finders.json"
SEQUENCES, LENGTH = 4, 256
MEASURED = 4  # batches
RANKS = (15, 48, 96)
ROWS = 16  # sums of rows for each column of a sketch, as in `metis`
FINDERS = {
    "eigenvectors": {},
    "one product": {"oversample": 0},
    "one product, exact backward": {"oversample": 0, "high_precision": ("backward",)},
    "two products": {"oversample": 0, "n_iter": 2},
    "kept": {"subspace_interval": 100},
    "kept, refined": {"subspace_interval": 100, "subspace_refinements": 1},
}


def batches(model: str, text: str, count: int) -> list[Tensor]:
    """Return that many batches of token ids [4 256], a document's beginning in each row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows: list[list[int]] = []
    for document in Path(text).read_text(encoding="utf8").split("\n<|endoftext|>\n"):
        ids = tokenizer(document)["input_ids"]
        if len(ids) >= LENGTH:
            rows.append(ids[:LENGTH])
        if len(rows) == count * SEQUENCES:
            break
    return list(torch.tensor(rows).split(SEQUENCES))


def losses_and_gradients(
    model: torch.nn.Module, names: list[str], text: list[Tensor]
) -> tuple[list[float], list[Tensor]]:
    """Return the losses and gradients [n] of all batches but the first, each a step of training.

    No weight changes; the first batch is where kept subspaces come from.
    """
    model.train()
    losses, gradients = [], []
    for step, ids in enumerate(text, 1):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        after_step(model, step, len(text))
        if step > 1:
            losses.append(loss.item())
            weights = [model.get_submodule(name).weight.grad for name in names]
            gradients.append(torch.cat([grad.flatten() for grad in weights]))
    return losses, gradients


def on_a_model(path: str, text: str) -> dict[str, dict[str, list[float]]]:
    """Return loss rises in percent and cosines to the exact gradient, by finder and rank."""

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    ids = batches(path, text, 1 + MEASURED)
    exact = load()
    names = [
        name
        for name, module in exact.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]
    losses, gradients = losses_and_gradients(exact, names, ids)
    found = {}
    for rank in RANKS:
        for name, fields in FINDERS.items():
            model = get_metis_model(load(), MetisConfig(rank=rank, **fields))
            ours, steps = losses_and_gradients(model, names, ids)
            found[f"{name}, rank {rank}"] = {
                "loss rise, %": [100 * (a / b - 1) for a, b in zip(ours, losses)],
                "cosine": [cosine_similarity(a, b, dim=0).item() for a, b in zip(steps, gradients)],
            }
            print(name, rank, found[f"{name}, rank {rank}"], flush=True)
    return found


def energy(x: Tensor, basis: Tensor) -> float:
    """Return the share of the energy of x [t c] that an orthonormal basis [c k] holds."""
    return ((x @ basis.double()).square().sum() / x.square().sum()).item()


def without_a_gap(rows: int = 4096, columns: int = 512) -> dict[str, dict[str, float]]:
    """Return the energy that finders hold, as a share of what the SVD holds, worst of five keys."""
    random = torch.Generator().manual_seed(0)
    gaussian = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    spectra = {"Gaussian": gaussian}
    for power in (0.5, 1.0, 2.0):
        spectra[f"i^-{power:g}"] = (u * torch.arange(1.0, columns + 1) ** -power) @ vh
    found = {}
    for name, x in spectra.items():
        squares = torch.linalg.svdvals(x).square()
        for rank in RANKS:
            best = (squares[:rank].sum() / squares.sum()).item()
            shares: dict[str, list[float]] = {
                finder: [] for finder in ("eigenvectors", "one product", "two products")
            }
            for key in map(Key, range(5)):
                options = {"sample_frac": 0.01, "summed": True, "key": key}
                shares["eigenvectors"].append(
                    energy(
                        x,
                        find_subspace(
                            x.float(),
                            rank,
                            min_rows=ROWS * (rank + 8),
                            n_iter=1,
                            rotations=fewest_rotations(rank + 8),
                            **options,
                        ),
                    )
                )
                for finder, n_iter in (("one product", 1), ("two products", 2)):
                    basis = find_basis(
                        x.float(), rank, min_rows=ROWS * rank, n_iter=n_iter, **options
                    )
                    shares[finder].append(energy(x, basis))
            found[f"{name}, rank {rank}"] = {
                finder: min(values) / best for finder, values in shares.items()
            }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    record = json.loads(OUT.read_text()) if OUT.exists() else {}  # keeps what trainings said
    record["torch"] = torch.__version__
    record["energy"] = without_a_gap()
    record["model"] = on_a_model(*sys.argv[1:3])
    OUT.write_text(json.dumps(record, indent=1) + "\n")
