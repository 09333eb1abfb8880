"""Measure the effect of each choice in a four-bit scheme on a trained model's operands.

    python eval/studies/operand_study.py --model runs/compare-custom-tiny/runs/bf16/seed-0/model \
        --data prose-validation [--out eval/results/operand-study.json]

Uses a trained control and real text, and trains nothing. Measures the relative errors
|exact - emulated| / |exact| of x, w, dy, y, dx and dw, the error of the mean of dw over 8 draws of
noise (its bias), the error of x in the lower half of its singular directions, and the rise of the
held-out loss with the forward pass quantized. Finished variants are kept. Writes JSON, and the
tables into eval/results/report/tiny-model.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from publish import RESULTS, ROOT, page_with
from study_conditioners import (
    FOUR_SIX,
    FP8,
    NEAREST,
    NEAREST_UP,
    STOCHASTIC,
    STOCHASTIC_NEAREST,
    Eden,
    Factors,
    MeanThenSplit,
    RotatedResidual,
    WarmStarted,
)
from torch import Tensor, nn

from metis_hf import MetisConfig, get_metis_model, metis_layers, register_scheme
from metis_hf.data.chunked import load_chunked
from metis_hf.lab.analyze.capture import Capture
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import relative_error
from metis_hf.operands import (
    HIGH_PRECISION,
    IDENTITY,
    Hadamard,
    HotChannels,
    MeanRemoved,
    Operand,
    Spectral,
)
from metis_hf.schemes import Role, Scheme

RANK = 32  # the default at this width in version 0.1.0
SEQUENCES, BATCH, DRAWS = 256, 32, 8
PAGE = ROOT / "eval" / "results" / "report" / "tiny-model.md"
KEYS = ("x", "w", "dy", "y", "dx", "dw", "dw_bias", "x_small", "loss")
TITLES = ("x", "w", "dy", "y", "dx", "dw", "bias of dw", "x, lower half", "loss, forward only")


def split(rank: int = RANK, **options: Any) -> Spectral:
    return Spectral(rank=rank, **options)


def scheme(x=IDENTITY, w=IDENTITY, dy=IDENTITY, *, qx=NEAREST, qw=NEAREST, qdy=STOCHASTIC,
           corrected=()) -> Scheme:  # fmt: skip
    """Build a scheme with one copy of each tensor for all GEMMs; a None quantizer is exact."""
    operands = (
        Operand(q, c) if q is not None else HIGH_PRECISION for q, c in ((qx, x), (qw, w), (qdy, dy))
    )
    return Scheme(*operands, corrected=frozenset(corrected))


def own_copies(base: Scheme, **weight: Any) -> Scheme:
    """Return the scheme in contraction mode, where each GEMM has its own copies."""
    return replace(
        base,
        fprop_weight=replace(base.fprop_weight, quantizer=replace(NEAREST, **weight)),
        dgrad_weight=replace(base.fprop_weight, quantizer=replace(NEAREST, **weight)),
        wgrad_grad_output=base.dgrad_grad_output,
        wgrad_input=base.fprop_input,
    )


EXACT_W = {"qw": None, "qdy": None}
WEIGHT = split(sample_frac=1.0)
ALL = {"x": split(), "w": WEIGHT, "dy": split()}
X, W = Role.FPROP_INPUT, (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
DY_DGRAD, DY_WGRAD = Role.DGRAD_GRAD_OUTPUT, Role.WGRAD_GRAD_OUTPUT
CORRECTED = (X, *W)  # as in metis
METIS = scheme(**ALL, corrected=CORRECTED)

# question -> variant -> scheme
STUDIES: dict[str, dict[str, Scheme]] = {
    "what is split": {
        "nothing": scheme(),
        "x": scheme(x=split()),
        "w": scheme(w=WEIGHT),
        "dy": scheme(dy=split()),
        "x, w": scheme(x=split(), w=WEIGHT),
        "x, w, dy": scheme(**ALL),
        "hot channels of x and w, 1/16": scheme(x=HotChannels(), w=HotChannels()),
        "hot channels of x and w, 1/3": scheme(x=HotChannels(1 / 3), w=HotChannels(1 / 3)),
    },
    "what is corrected": {
        "nothing": scheme(**ALL),
        "x": scheme(**ALL, corrected=(X,)),
        "w": scheme(**ALL, corrected=W),
        "x, w (metis)": METIS,
        "x, w, dy in dgrad": scheme(**ALL, corrected=(*CORRECTED, DY_DGRAD)),
        "x, w, dy in wgrad": scheme(**ALL, corrected=(*CORRECTED, DY_WGRAD)),
        "x, w, dy": scheme(**ALL, corrected=(*CORRECTED, DY_DGRAD, DY_WGRAD)),
        "x, of a w split for it alone": scheme(w=WEIGHT, corrected=(X,)),
    },
    "residual": {
        "compensated": scheme(**ALL),
        "exact": scheme(**{k: replace(v, compensated=False) for k, v in ALL.items()}),
    }
    | {
        f"exact for {k} alone": scheme(**ALL | {k: replace(v, compensated=False)})
        for k, v in ALL.items()
    },
    "rank": {
        f"rank {k}": scheme(split(k), split(k, sample_frac=1.0), split(k), corrected=CORRECTED)
        for k in (1, 2, 4, 8, 16, 24, 32, 48, 64)
    }
    | {"rank 2 of x, 32 of w": scheme(split(2), WEIGHT, split(2), corrected=CORRECTED)},
    "factors": {
        "FP4": scheme(split(), **EXACT_W),
        "FP8": scheme(Factors(split(), FP8), **EXACT_W),
        "exact": scheme(Factors(split()), **EXACT_W),
    },
    "input": {
        "direct": scheme(**EXACT_W),
        "mean removed": scheme(MeanRemoved(), **EXACT_W),
        "Hadamard": scheme(Hadamard(), **EXACT_W),
        "split": scheme(split(), **EXACT_W),
        "mean removed, then split": scheme(MeanThenSplit(split()), **EXACT_W),
        "split, residual rotated": scheme(RotatedResidual(split()), **EXACT_W),
        "split, 4/6 scales": scheme(split(), qx=FOUR_SIX, **EXACT_W),
        "split, scales up": scheme(split(), qx=NEAREST_UP, **EXACT_W),
        "split, stochastic": scheme(split(), qx=STOCHASTIC, **EXACT_W),
    },
    "subspace": {
        f"{100 * rows:g} % of rows, n_iter {n}": scheme(
            split(sample_frac=rows, n_iter=n), **EXACT_W
        )
        for rows, n in ((0.01, 0), (0.01, 1), (0.01, 2), (0.1, 1), (1.0, 1), (1.0, 4))
    }
    | {
        f"{100 * rows:g} % of rows, one step from the last": scheme(
            WarmStarted(RANK, sample_frac=rows), **EXACT_W
        )
        for rows in (0.01, 0.1, 1.0)
    },
    "weight": {
        "direct": scheme(qx=None, qdy=None),
        "direct, 4/6": scheme(qx=None, qdy=None, qw=FOUR_SIX),
        "direct, scales up": scheme(qx=None, qdy=None, qw=NEAREST_UP),
        "direct, 16x16 tiles": scheme(qx=None, qdy=None, qw=replace(NEAREST, tile="square")),
        "split": scheme(w=WEIGHT, qx=None, qdy=None),
        "split, 4/6": scheme(w=WEIGHT, qx=None, qdy=None, qw=FOUR_SIX),
        "split, 16x16 tiles": scheme(
            w=WEIGHT, qx=None, qdy=None, qw=replace(NEAREST, tile="square")
        ),
    },
    "gradient": {
        "direct, stochastic": scheme(qx=None, qw=None),
        "direct, stochastic, scales nearest": scheme(qx=None, qw=None, qdy=STOCHASTIC_NEAREST),
        "direct, MS-EDEN": scheme(dy=Eden(), qx=None, qw=None),
        "direct, nearest": scheme(qx=None, qw=None, qdy=NEAREST),
        "split, stochastic": scheme(dy=split(), qx=None, qw=None),
        "split, stochastic, scales nearest": scheme(
            dy=split(), qx=None, qw=None, qdy=STOCHASTIC_NEAREST
        ),
        "split, MS-EDEN": scheme(dy=Eden(split()), qx=None, qw=None),
        "split, nearest": scheme(dy=split(), qx=None, qw=None, qdy=NEAREST),
        "split, 4/6 nearest": scheme(dy=split(), qx=None, qw=None, qdy=FOUR_SIX),
    },
    "contraction": {
        "shared": METIS,
        "own copies": own_copies(METIS),
        "own copies, weight in 16x16 tiles": own_copies(METIS, tile="square"),
    },
}


def register(name: str, built: Scheme) -> MetisConfig:
    """Register a scheme, and return its config; each layer copies it, with its own state."""
    register_scheme(name, summary="", source="")(lambda config, rank: copy.deepcopy(built))
    return MetisConfig(scheme=name)


class Layer(NamedTuple):
    """The tensors that enter a converted layer in training."""

    name: str
    linear: nn.Linear
    x: Tensor  # [t i]
    dy: Tensor  # [t o]
    before: Tensor  # x of the previous batch


def capture(model: nn.Module, ids: Tensor, before: Tensor) -> list[Layer]:
    """Capture every converted layer on the batch `ids`, with its input on the batch `before`."""
    layers = dict(metis_layers(model))
    hooks = Capture(set(layers), lambda *_: None)
    hooks.run(model, before, layers)
    inputs = {name: hooks.rows(name, "activation") for name in layers}
    hooks = Capture(set(layers), lambda *_: None)
    hooks.run(model, ids, layers)
    model.zero_grad()
    return [
        Layer(
            name,
            layer.to_dense(),
            hooks.rows(name, "activation"),
            hooks.rows(name, "gradient"),
            inputs[name],
        )
        for name, layer in layers.items()
    ]


def errors(config: MetisConfig, layers: list[Layer]) -> dict[str, float]:
    """Return the means over layers of the values in KEYS, except the loss."""
    sums = dict.fromkeys(KEYS[:-1], 0.0)
    for layer in layers:
        x, w, dy = layer.x, layer.linear.weight.detach(), layer.dy
        exact = {"x": x, "w": w, "dy": dy, "y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
        found = emulated(config.replace(seed=0), layer)
        draws = [found["dw"]]
        for seed in range(1, DRAWS):
            draws.append(emulated(config.replace(seed=seed), layer)["dw"])
        for key, value in exact.items():
            sums[key] += relative_error(value, found[key]).item()
        sums["dw_bias"] += relative_error(exact["dw"], sum(draws) / DRAWS).item()
        small = torch.linalg.svd(x, full_matrices=False).Vh[x.shape[1] // 2 :].T
        sums["x_small"] += relative_error(x @ small, found["x"] @ small).item()
    return {key: value / len(layers) for key, value in sums.items()}


def emulated(config: MetisConfig, captured: Layer) -> dict[str, Tensor]:
    """Return the operands and results of one layer in fp32, as in its second training step."""
    layer = convert_linear(copy.deepcopy(captured.linear), config, name=captured.name).train()
    with torch.no_grad():
        layer(captured.before)
    scheme = copy.deepcopy(layer.scheme)  # its state before the second step
    x = captured.x.clone().requires_grad_()
    y = layer(x)
    y.backward(captured.dy)
    keys = layer.call_keys(captured.x)
    weight = layer.weight_params()[-1].detach()
    found = {"y": y.detach(), "dx": x.grad, "dw": layer.weight_params()[-1].grad}
    for key, role, value in (
        ("x", Role.FPROP_INPUT, captured.x),
        ("w", Role.FPROP_WEIGHT, weight),
        ("dy", Role.DGRAD_GRAD_OUTPUT, captured.dy),
    ):
        operand = scheme.resolve(role)[1]
        found[key] = operand(value, dim=-1, key=keys[role], dtype=torch.float32)[0]
    return found


@torch.no_grad()
def loss_of(model: nn.Module, ids: Tensor) -> float:
    """Return the mean loss in nats per token in eval mode."""
    model.eval()
    batches = ids.split(64)
    return sum(model(input_ids=b, labels=b).loss.item() for b in batches) / len(batches)


def study(model_dir: Path, data_dir: Path, out: Path) -> dict[str, Any]:
    """Return question -> variant -> KEYS (loss in percent above the control's); update `out`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    held_out = load_chunked(data_dir)
    ids = torch.as_tensor(held_out[: min(SEQUENCES, len(held_out))]["input_ids"])
    layers = capture(model, ids[:BATCH], before=ids[BATCH : 2 * BATCH])
    dense = copy.deepcopy(model)
    for layer in layers:
        dense.set_submodule(layer.name, copy.deepcopy(layer.linear))
    record = {"sequences": len(ids), "batch": BATCH, "rank": RANK, "control": loss_of(model, ids)}
    found = json.loads(out.read_text()) if out.exists() else {}
    kept = found["studies"] if {k: v for k, v in found.items() if k != "studies"} == record else {}
    studies: dict[str, Any] = {}
    for question, variants in STUDIES.items():
        for name, built in variants.items():
            result = kept.get(question, {}).get(name)
            if result is None:
                config = register(f"{question}: {name}", built)
                result = errors(config, layers)
                quantized = get_metis_model(copy.deepcopy(dense), config)
                result["loss"] = 100 * (loss_of(quantized, ids) / record["control"] - 1)
                print(name, {k: round(v, 4) for k, v in result.items()}, flush=True)
            studies.setdefault(question, {})[name] = result
            out.write_text(json.dumps(record | {"studies": merged(kept, studies)}, indent=1) + "\n")
    return record | {"studies": studies}


def merged(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Merge two records of question -> variant -> result; the second takes precedence."""
    return {question: kept.get(question, {}) | found.get(question, {}) for question in kept | found}


def table(variants: dict[str, dict[str, float]]) -> str:
    """Return one question's markdown table: errors, and the rise of the loss in percent."""
    lines = ["| | " + " | ".join(TITLES) + " |", "|---|" + "---:|" * len(TITLES)]
    for name, found in variants.items():
        errors = [f"{found[key]:.3f}" for key in KEYS[:-1]]
        lines.append(f"| {name} | {' | '.join(errors)} | {found[KEYS[-1]]:+.2f} % |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, record: dict[str, Any]) -> str:
    """Put each question's table between `<!-- study: QUESTION -->` and `<!-- end -->`.

    Raises:
        ValueError: the questions of the record and of the page differ.
    """
    asked, marked = set(record["studies"]), set(re.findall("<!-- study: (.*?) -->", page))
    if asked != marked:
        raise ValueError(
            f"the questions of the study differ from the marks on the page: {asked ^ marked}"
        )
    for question, variants in record["studies"].items():
        page = page_with(f"study: {question}", table(variants), page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="trained bf16 checkpoint")
    parser.add_argument(
        "--data", type=Path, required=True, help="directory of chunked held-out tokens"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "operand-study.json")
    args = parser.parse_args()
    record = study(args.model, args.data, args.out)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
