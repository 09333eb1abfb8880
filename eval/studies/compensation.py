"""Measure the compensated residual and the split weight, each by itself.

    python eval/studies/compensation.py [--steps 400] [--out eval/results/compensation.json]

Trains a byte-level Llama (128 wide, 0.6M parameters) on the standard library's sources under each
variant, with the same initialization and batches. Some variants run at several learning rates, and
the split weight also with other rates and decay for its parts. On the control's tensors, measures
the error of y, dx and dw of each linear layer. Finished runs are kept, so the study can be
interrupted; an output file with other settings is refused. Writes JSON and markdown tables.

The record is from version 0.1.0 (commit 3650dbb). The configs here fix the rank, the gradient
directions and the split tensors of that version. But `metis`, and the schemes built from it here,
now find directions from sums of rows instead of sampled rows, and search the block scales of
forward tensors, so today's code gives other numbers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from refresh import kept, load_bytes
from torch import nn

from metis_hf import MetisConfig, get_metis_model, metis_layers, register_scheme
from metis_hf.lab.analyze.capture import Capture
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import relative_error
from metis_hf.operands import SplitWeight
from metis_hf.schemes import Scheme, scheme_info

SEQUENCE, BATCH = 128, 8
LEARNING_RATE = 4e-3
SWEEP = (1e-3, 2e-3, 4e-3)

SPLIT, SPLIT_UNIT = "fp32, split weight", "fp32, split weight, unit vectors"


@register_scheme("split-unit", summary="bf16-split with unit vectors", source="arXiv 2509.00404")
def split_unit(config: MetisConfig, rank: int) -> Scheme:
    """Factors stored as unit vectors, as published, instead of with entries of unit RMS."""
    return Scheme(weight=SplitWeight(rank))


@register_scheme(
    "compensated", summary="metis stored split, not corrected", source="arXiv 2509.00404"
)
def compensated(config: MetisConfig, rank: int) -> Scheme:
    """Compensated residuals alone: weights stored split, nothing corrected."""
    scheme = scheme_info("metis").build(config, rank).storing(split=True)
    return dataclasses.replace(scheme, corrected=frozenset())


@register_scheme("compensated-unit", summary="with unit vectors", source="arXiv 2509.00404")
def compensated_unit(config: MetisConfig, rank: int) -> Scheme:
    """`compensated` with unit vectors as factors."""
    scheme = compensated(config, rank)
    return dataclasses.replace(scheme, weight=SplitWeight(scheme.weight.rank))


# As in version 0.1.0, independent of today's defaults.
METIS = MetisConfig(
    scheme="metis",
    rank=32,
    gradient_rank_frac=1.0,
    decompose=("weight", "activation", "gradient"),
)
COMPENSATED = METIS.replace(scheme="compensated", rank=16)

# name -> config; the control comes first.
VARIANTS: dict[str, MetisConfig] = {
    "fp32": MetisConfig(scheme="bf16"),
    SPLIT: MetisConfig(scheme="bf16-split", rank_multiple=16),
    SPLIT_UNIT: MetisConfig(scheme="split-unit", rank_multiple=16),
    "direct, stochastic everywhere (nvfp4)": MetisConfig(scheme="nvfp4"),
    "direct, nearest forward": MetisConfig(
        scheme="nvfp4", forward_rounding="nearest", scale_rounding="nearest"
    ),
    "nvidia": MetisConfig(scheme="nvidia"),
    "published, rank 2 (metis-paper)": MetisConfig(scheme="metis-paper"),
    "compensated, rank 2, stochastic everywhere": COMPENSATED.replace(
        rank=2, forward_rounding="stochastic", scale_rounding="up"
    ),
    "compensated, rank 16, nearest forward": COMPENSATED,
    "the same, unit vectors": COMPENSATED.replace(scheme="compensated-unit"),
    "the same, weight dense and not split": METIS.replace(
        rank=16, decompose=("activation", "gradient")
    ),
    "metis: weight dense and split, both corrected, rank 32": METIS,
    "metis, contraction mode": METIS.replace(operand_mode="contraction"),
}


SWEPT = ("fp32", SPLIT, SPLIT_UNIT)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of AdamW.

    Attributes:
        decay: weight decay.
        spared: stored parts of a split weight that do not decay.
        factor_rate: learning rate of u, s and vh, divided by the learning rate of the rest.
    """

    decay: float = 0.01
    spared: tuple[str, ...] = ()
    factor_rate: float = 1.0


DECAY = 0.1
FACTORS, STORED = ("u", "s", "vh"), ("u", "s", "vh", "weight_residual")
# title -> (variant, settings): the optimizer's settings for the parts of a split weight.
OPTIMIZED: dict[str, tuple[str, Settings]] = {
    f"fp32, decay {DECAY}": ("fp32", Settings(DECAY)),
    f"decay {DECAY} of u, s, vh, residual": (SPLIT, Settings(DECAY)),
    f"decay {DECAY} of s, residual (MetisTrainer)": (SPLIT, Settings(DECAY, ("u", "vh"))),
    f"decay {DECAY} of the residual": (SPLIT, Settings(DECAY, FACTORS)),
    f"decay {DECAY} of none of them": (SPLIT, Settings(DECAY, STORED)),
    "rate of u, s, vh x 0.3": (SPLIT, Settings(factor_rate=0.3)),
    "rate of u, s, vh x 3": (SPLIT, Settings(factor_rate=3.0)),
}


def build_model() -> nn.Module:
    """Build the model, with the same initialization every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
        initializer_range=128**-0.5,
    )
    return transformers.LlamaForCausalLM(config)


def batch_at(data: torch.Tensor, step: int, batch: int = BATCH) -> torch.Tensor:
    """Return the token ids [batch SEQUENCE] of a step, which depend on the step alone."""
    generator = torch.Generator().manual_seed(1234 + step)
    starts = torch.randint(len(data) - SEQUENCE, (batch,), generator=generator)
    return torch.stack([data[i : i + SEQUENCE] for i in starts.tolist()]).long()


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Return one group per parameter, with its weight decay and its factor on the peak rate."""
    return [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name.rpartition(".")[2] in settings.spared else settings.decay,
            "factor": settings.factor_rate if name.rpartition(".")[2] in FACTORS else 1.0,
        }
        for name, parameter in model.named_parameters()
    ]


def train(
    config: MetisConfig,
    data: torch.Tensor,
    steps: int,
    peak: float,
    settings: Settings = Settings(),
) -> nn.Module:
    """Train one variant: AdamW, 5 % linear warm-up, cosine to 5 % of the peak."""
    model = get_metis_model(build_model(), config).train()
    groups = parameter_groups(model, settings)
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    warmup = max(1, steps // 20)
    for step in range(steps):
        progress = max(0, step - warmup) / max(1, steps - warmup)
        scale = min(1, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = peak * scale * group["factor"]
        ids = batch_at(data, step)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def validation_loss(model: nn.Module, data: torch.Tensor, batches: int = 40) -> float:
    """Return the mean loss in nats per byte, of the variant's own forward pass (eval: nearest)."""
    model.eval()
    drawn = (batch_at(data, 10**6 + i) for i in range(batches))
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in drawn]
    return sum(losses) / len(losses)


def capture(model: nn.Module, ids: torch.Tensor) -> list[tuple]:
    """Return (name, plain layer, x [t i], dy [t o]) of every converted layer, on one batch."""
    layers = dict(metis_layers(model))
    hooks = Capture(set(layers), lambda *_: None)
    hooks.run(model, ids, layers)
    model.zero_grad()
    return [
        (name, layer.to_dense(), hooks.rows(name, "activation"), hooks.rows(name, "gradient"))
        for name, layer in layers.items()
    ]


def operand_errors(config: MetisConfig, tensors: list) -> dict[str, float]:
    """Return the relative errors |exact - emulated| / |exact| of y, dx and dw: mean over layers."""
    sums = {"y": 0.0, "dx": 0.0, "dw": 0.0}
    for name, linear, x, dy in tensors:
        exact = copy.deepcopy(linear).double()
        x64 = x.double().requires_grad_()
        y64 = exact(x64)
        y64.backward(dy.double())
        layer = convert_linear(copy.deepcopy(linear), config, name=name).train()
        x32 = x.clone().requires_grad_()
        y32 = layer(x32)
        y32.backward(dy)
        # The last stored part is the residual, whose gradient is dL/dw.
        dw = layer.weight_params()[-1].grad
        sums["y"] += relative_error(y64, y32).item()
        sums["dx"] += relative_error(x64.grad, x32.grad).item()
        sums["dw"] += relative_error(exact.weight.grad, dw).item()
    return {key: value / len(tensors) for key, value in sums.items()}


def tables(results: dict) -> str:
    """Return the markdown tables: variants, the swept learning rates, the optimizer settings."""
    runs, errors = results["losses"], results["errors"]
    rate = str(LEARNING_RATE)
    control = runs["fp32"][rate]
    lines = [
        f"Relative errors of y, dx and dw on the trained control; held-out loss (nats per byte) "
        f"after {results['steps']} steps at learning rate {rate}. One seed.\n",
        "| variant | y | dx | dw | loss | to fp32 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in VARIANTS:
        cells = " | ".join(f"{errors[name][key]:.3f}" for key in ("y", "dx", "dw"))
        gap = 100 * (runs[name][rate] / control - 1)
        lines.append(f"| {name} | {cells} | {runs[name][rate]:.4f} | {gap:+.2f} % |")
    rates = [str(rate) for rate in SWEEP]
    lines += [
        "\nHeld-out loss by peak learning rate, and its distance from fp32 at the same rate.\n",
        "| variant | " + " | ".join(rates) + " |",
        "|---|" + "---:|" * len(rates),
    ]
    for name in SWEPT:
        gaps = ((runs[name][rate], runs["fp32"][rate]) for rate in rates)
        cells = " | ".join(f"{loss:.4f} ({100 * (loss / base - 1):+.2f} %)" for loss, base in gaps)
        lines.append(f"| {name} | {cells} |")
    lines += [
        f"\nThe split weight of fp32 at {rate}, by what AdamW does to its parts. AdamW decays by "
        f"{Settings().decay} elsewhere.\n",
        "| | loss | to fp32 |",
        "|---|---:|---:|",
    ]
    for title, loss in ({SPLIT: runs[SPLIT][rate]} | results["optimized"]).items():
        lines.append(f"| {title} | {loss:.4f} | {100 * (loss / control - 1):+.2f} % |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything that is missing from the output file, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("eval/results/compensation.json"))
    args = parser.parse_args()
    results = {
        "steps": args.steps,
        "tokens_per_step": BATCH * SEQUENCE,
        "seed": 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "configs": {name: config.to_dict() for name, config in VARIANTS.items()},
    }
    found = kept(args.out, results)
    for key in ("losses", "errors", "optimized"):
        results[key] = found.get(key, {})
    train_data, validation_data = load_bytes()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs = [(name, LEARNING_RATE) for name in VARIANTS]
    runs += [(name, rate) for rate in SWEEP if rate != LEARNING_RATE for name in SWEPT]
    for name, rate in runs:
        losses = results["losses"].setdefault(name, {})
        if str(rate) not in losses:
            model = train(VARIANTS[name], train_data, args.steps, rate)
            losses[str(rate)] = validation_loss(model, validation_data)
            print(name, rate, losses[str(rate)], flush=True)
            if not results["errors"]:  # this first model is the control
                tensors = capture(model, batch_at(validation_data, 10**7))
                for variant, config in VARIANTS.items():
                    results["errors"][variant] = operand_errors(config, tensors)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    for title, (name, settings) in OPTIMIZED.items():
        if title not in results["optimized"]:
            model = train(VARIANTS[name], train_data, args.steps, LEARNING_RATE, settings)
            loss = results["optimized"][title] = validation_loss(model, validation_data)
            print(title, loss, flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(tables(results))
    print(tables(results))


if __name__ == "__main__":
    main()
