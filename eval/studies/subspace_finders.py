"""Compare subspaces with and without singular vectors, and kept ones, on a real model.

    python eval/studies/subspace_finders.py MODEL TEXT

MODEL is a transformers checkpoint; nothing is trained. TEXT has documents separated by lines of
"<|endoftext|>". Writes eval/results/subspace-finders.json, but keeps its parts "from scratch" and
"noise"; eval/results/report/method.md names their source.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

from metis_hf import MetisConfig, get_metis_model
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands.conditioners import spectral
from metis_hf.training.layer_states import after_step
from metis_hf.transforms.spectral import (
    dominant_basis,
    dominant_subspace,
    fewest_rows,
    find_basis,
    sum_rows,
)

OUT = Path(__file__).parents[1] / "results" / "subspace-finders.json"
SEQUENCES, LENGTH = 4, 256
MEASURED = 4  # batches
RANKS = (6, 15, 48, 96)
MODEL_RANKS = (15, 48)
ROWS = 16  # sums of rows for each column of a sketch, as in `metis`
KEYS = 5
# (sample [n c], rank k, noise key) -> basis [c k]. "singular vectors" takes the best directions in
# the span of a sketch with 8 extra columns.
FINDERS: dict[str, Callable[..., Tensor]] = {
    "singular vectors, one product": partial(dominant_subspace, oversample=8, n_iter=1),
    "one product": partial(dominant_basis, n_iter=1),
    "two products": partial(dominant_basis, n_iter=2),
    "three products": partial(dominant_basis, n_iter=3),
}
KEPT = {
    "kept": {"subspace_interval": 100},
    "kept, refined": {"subspace_interval": 100, "subspace_refinements": 1},
}
LAYERS = [
    f"model.layers.{block}.{name}"
    for block in (1, 5, 15, 25)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]


def sums_of(x: Tensor, rank: int, key: Key) -> Tensor:
    """Return the sums of rows from which `metis` finds a subspace of x [t c]."""
    return sum_rows(x, max(-(-len(x) // 100), fewest_rows(rank, ROWS)), key.fold(4))


@contextmanager
def found_by(finder: str) -> Iterator[None]:
    """Make layers find their subspaces with one of `FINDERS`."""

    def find(x: Tensor, rank: int, *, key: Key, start: Tensor | None = None, **options) -> Tensor:
        if start is not None:
            return find_basis(x, rank, key=key, start=start, **options)
        return FINDERS[finder](sums_of(x, rank, key), rank, key=key.fold(5))

    with mock.patch.object(spectral, "find_basis", find):
        yield


def batches(model: str, text: str, count: int) -> list[Tensor]:
    """Return `count` batches of token ids [4 256]; each row is the beginning of a document."""
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
    """Return the losses and gradients [n] of training steps on all batches except the first.

    The weights do not change. The first batch initializes kept subspaces.
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
    cases = [(name, name, {}) for name in FINDERS]
    cases += [(name, "two products", fields) for name, fields in KEPT.items()]
    for rank in MODEL_RANKS:
        for name, finder, fields in cases:
            model = get_metis_model(load(), MetisConfig(rank=rank, **fields))
            with found_by(finder):
                ours, steps = losses_and_gradients(model, names, ids)
            found[f"{name}, rank {rank}"] = {
                "loss rise, %": [100 * (a / b - 1) for a, b in zip(ours, losses)],
                "cosine": [cosine_similarity(a, b, dim=0).item() for a, b in zip(steps, gradients)],
            }
            print(name, rank, found[f"{name}, rank {rank}"], flush=True)
    return found


def rounding_errors(path: str, text: str) -> dict[str, dict[str, float]]:
    """Return relative errors of layers' inputs and outputs in percent, by rank and finder.

    The errors are geometric means over layers, with the input split and quantized and the weight
    exact. "turned" multiplies the first finder's basis by a random orthogonal matrix.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs: dict[str, Tensor] = {}

    def keep(name: str, module: torch.nn.Module, args: tuple[Tensor]) -> None:
        inputs[name] = args[0].flatten(0, 1)

    for name in LAYERS:
        model.get_submodule(name).register_forward_pre_hook(partial(keep, name))
    with torch.no_grad():
        model(input_ids=torch.cat(batches(path, text, 2)))
    found = {}
    for rank in RANKS:
        logs: dict[str, list[Tensor]] = {}
        for name, x in inputs.items():
            weight = model.get_submodule(name).weight.detach()
            bases = {
                finder: find(sums_of(x, rank, Key(1)), rank, key=Key(2))
                for finder, find in FINDERS.items()
            }
            random = torch.randn(rank, rank, generator=torch.Generator().manual_seed(0))
            first = next(iter(bases))
            bases[f"{first}, turned"] = bases[first] @ torch.linalg.qr(random).Q
            for finder, v in bases.items():
                split = spectral.Spectral(rank, rows=ROWS, summed=True)
                with mock.patch.object(spectral, "find_basis", lambda *_, v=v, **__: v):
                    x_hat = split(x, Quantizer(scale_rule="search"), dim=-1, key=Key(3))
                y = x @ weight.T
                errors = (x_hat - x).norm() / x.norm(), (x_hat @ weight.T - y).norm() / y.norm()
                logs.setdefault(finder, []).append(torch.stack(errors).log())
        for finder, each in logs.items():
            of_x, of_y = (100 * torch.stack(each).mean(0).exp()).tolist()
            found[f"{finder}, rank {rank}"] = {"input, %": of_x, "output, %": of_y}
    return found


def energy(x: Tensor, basis: Tensor) -> float:
    """Return the share of the energy of x [t c] in the span of an orthonormal basis [c k]."""
    return ((x @ basis.double()).square().sum() / x.square().sum()).item()


def without_a_gap(rows: int = 4096, columns: int = 512) -> dict[str, dict[str, float]]:
    """Return the energy in the finders' subspaces relative to the SVD's, worst over the keys."""
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
            shares: dict[str, list[float]] = {finder: [] for finder in FINDERS}
            for key in map(Key, range(KEYS)):
                sample = sums_of(x.float(), rank, key)
                for finder, find in FINDERS.items():
                    shares[finder].append(energy(x, find(sample, rank, key=key.fold(5))))
            found[f"{name}, rank {rank}"] = {
                finder: min(values) / best for finder, values in shares.items()
            }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(OUT.read_text()) if OUT.exists() else {}  # keeps the other parts
    record["torch"] = torch.__version__
    record["energy"] = without_a_gap()
    record["errors"] = rounding_errors(args.model, args.text)
    record["model"] = on_a_model(args.model, args.text)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
