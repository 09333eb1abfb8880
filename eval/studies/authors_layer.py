"""The layer that the authors of Metis published, trained in this project's protocol.

    git clone https://github.com/sii-research/Metis PAPER
    python eval/studies/authors_layer.py PAPER --like runs/paper-parts/runs/bf16/seed-0

`--like` names a finished run of `metis-hf compare`, which supplies model, data, steps and seed. The
linear layers become the checkout's `BitLinear`. TransformerEngine, which the layer imports but does
not call here, is stubbed, and so are its calls to `Tensor.cuda`. Writes eval/results/authors-layer
and the table of docs/reproduce.md after each run; recorded runs are not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from publish import RESULTS, ROOT, publish_table
from torch import nn

from metis_hf.lab.compare import training
from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.lab.show.table import markdown_table
from metis_hf.shared.records import commit, environment, read_json, write_json

OUT = RESULTS / "authors-layer"
PAGE = ROOT / "docs" / "reproduce.md"
MARK = "the authors' layer"
RANK = 16  # in the authors' scripts, for weights, inputs and output gradients
ITERATIONS = 2  # theirs for output gradients; their default of 0 for inputs cannot run
SHIPPED = {"weight": True, "input": True, "gradient": True}
# metis_hf converts only the head, which then computes as nn.Linear does.
HEAD_ALONE = Variant("authors", {"scheme": "bf16", "target_modules": ["lm_head"]})
RUNS: dict[str, dict[str, bool]] = {
    "as published": SHIPPED,
    "weights not split": {**SHIPPED, "weight": False},
    "inputs not split": {**SHIPPED, "input": False},
    "gradients not split": {**SHIPPED, "gradient": False},
    "the branch alone": {**SHIPPED, "input": False, "gradient": False},
    "nothing split": dict.fromkeys(SHIPPED, False),
}


def authors_module(checkout: Path) -> Any:
    """Import `Metis.bitlinear` from a checkout, and add the format that its scripts use.

    The scripts name "nvfp4e2m1bnosr", NVFP4 without stochastic rounding. The published `quant.py`
    does not define it; it is composed here from two published classes.
    """
    engine = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
    sys.path.insert(0, str(checkout))
    quant, layer = (importlib.import_module(f"Metis.{name}") for name in ("quant", "bitlinear"))
    stochastic = quant.Cast2NVFp4e2m1Block

    class Nearest(stochastic):
        @classmethod
        @torch.no_grad()
        def quant(cls, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            blocks, scale = cls._reshape(x, s)
            return quant.Cast2Fp4e2m1.quant(blocks, scale).view(x.shape)

    layer.quant_func |= {"nearest": Nearest, "stochastic": stochastic}
    return layer


def settings(split: dict[str, bool]) -> types.SimpleNamespace:
    """Return the arguments of the authors' scripts for the 130M model, with splits disabled."""
    operands = [f"{way}_{name}" for way in ("forward", "backward") for name in ("input", "weight")]
    return types.SimpleNamespace(
        **{f"q_{operand}": "nearest" for operand in operands},
        q_backward_outputgrad="stochastic",
        device=torch.device("cpu"),
        enable_lowbit=True,
        enable_te=False,
        enable_nv_recipe=False,
        enable_forward_svd=split["weight"],
        forward_svd_rank=RANK,
        forward_svd_warmup_steps=0,
        enable_forward_svd_intime=False,
        forward_lowrank_svd_intime=0,
        enable_activation_svd=split["input"],
        activation_lowrank_svd=RANK,
        activation_lowrank_niter=ITERATIONS,
        enable_backward_svd=split["gradient"],
        backward_lowrank_svd=RANK,
        backward_lowrank_niter=ITERATIONS,
        activation_broadcast_dim=-1,
        backward_broadcast_dim=-1,
        gradacc_broadcast=False,
        gradacc_broadcast_steps=1,
    )


def with_authors_layers(model: nn.Module, layer: Any, args: types.SimpleNamespace) -> nn.Module:
    """Replace all linear layers except the head by `BitLinear`s with the same initial weights."""
    unsplit = types.SimpleNamespace(**{**vars(args), "forward_svd_warmup_steps": 1})
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        new = layer.BitLinear(linear.in_features, linear.out_features, unsplit, bias=False)
        with torch.no_grad():
            new.warmup_linear.weight.copy_(linear.weight)
            with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor):
                new.split()
        model.set_submodule(name, new)
    return model


def run(layer: Any, split: dict[str, bool], spec: dict[str, Any]) -> dict[str, Any]:
    """Train one model, and return its held-out loss and its curve."""
    experiment = Experiment(**spec["experiment"])
    dataset, held_out, tokenizer = load_data(
        spec["data"], spec["validation"], experiment, spec["eval_sequences"]
    )
    layer.LinearLowbitFunction.state.clear()
    make, args = training.initial_model, settings(split)

    def initial(experiment: Experiment, device: Any) -> Any:
        return with_authors_layers(make(experiment, device), layer, args)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(training, "initial_model", initial),
    ):
        trained = training.train(experiment, HEAD_ALONE, dataset, tokenizer, Path(folder), _say)
        loss = trained.trainer.evaluate(held_out)["eval_loss"]
    return {
        "split": split,
        "loss": loss,
        "seed": experiment.seed,
        "seconds_per_step": trained.seconds_per_step,
        "curve": [entry["loss"] for entry in trained.history],
    }


def _say(step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"  step {step}: {loss:.3f}", flush=True)


def table(record: dict[str, Any]) -> str:
    """Return the table: each run's held-out loss, and its gap to the matching BF16 run."""
    control = record["control"]
    rows = [["bf16", f"{control:.4f}", ""]]
    for name, found in record["runs"].items():
        rows.append([name, f"{found['loss']:.4f}", f"{100 * (found['loss'] / control - 1):+.1f}"])
    return markdown_table(["The authors' layer", "Loss", "Gap to bf16, %"], rows)


def main() -> None:
    """Train the runs that are not on record yet."""
    parser = argparse.ArgumentParser(description="Train the authors' layer in this protocol.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--like", type=Path, required=True, help="directory of a finished run of metis-hf compare"
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    asked = parser.parse_args()
    layer, spec = authors_module(asked.checkout), read_json(asked.like / "run.json")
    file = OUT / "results.json"
    record = read_json(file) if file.exists() else {"runs": {}}
    git = ["git", "-C", str(asked.checkout), "rev-parse", "--short", "HEAD"]
    published = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    record |= {"experiment": spec["experiment"], "authors": published, "rank": RANK}
    record["control"] = read_json(asked.like / "result.json")["loss"]
    for name in asked.runs:
        if name in record["runs"]:
            continue
        print(name, flush=True)
        found = run(layer, RUNS[name], spec)
        record["runs"][name] = found | {"commit": commit()}
        print(f"{name}: held-out loss {found['loss']:.4f}", flush=True)
        OUT.mkdir(parents=True, exist_ok=True)
        write_json(file, record | {"environment": environment()})
        publish_table(OUT, MARK, table(record), PAGE)


if __name__ == "__main__":
    main()
