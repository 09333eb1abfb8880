"""Does the compensated residual help? Operand errors on a trained model, and short trainings.

    python eval/compensation.py [--steps 300] [--out eval/results/compensation.json]

Trains a byte-level Llama (192 wide, 1.8M parameters) on the standard library's sources under each
variant with the same initialization and batches, then measures on the control's tensors how far
y, dx and dw of every linear layer are from the exact ones. Writes JSON and a markdown table.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from pathlib import Path

import torch
import transformers
from torch import nn

from metis_hf import MetisConfig, get_metis_model
from metis_hf.corpus import split_documents, stdlib_documents
from metis_hf.linear import convert_linear
from metis_hf.numerics import relative_error

SEQUENCE, BATCH, PEAK_LR = 256, 8, 3e-3

# name -> config; the control comes first.
VARIANTS: dict[str, MetisConfig] = {
    "fp32": MetisConfig(scheme="bf16"),
    "fp32, split weights (rank 16)": MetisConfig(scheme="bf16-split"),
    "direct, stochastic everywhere (nvfp4)": MetisConfig(scheme="nvfp4"),
    "direct, nearest forward": MetisConfig(
        scheme="nvfp4", forward_rounding="nearest", scale_rounding="nearest"
    ),
    "nvidia": MetisConfig(scheme="nvidia"),
    "published, rank 3 (metis-paper)": MetisConfig(scheme="metis-paper"),
    "compensated, rank 3, stochastic everywhere": MetisConfig(
        scheme="metis", rank_multiple=1, forward_rounding="stochastic", scale_rounding="up"
    ),
    "compensated, rank 16, nearest forward (metis)": MetisConfig(scheme="metis"),
    "metis, scales up in the forward pass too": MetisConfig(scheme="metis", scale_rounding="up"),
    "metis, dense weight": MetisConfig(scheme="metis", decompose=("activation", "gradient")),
    "metis, contraction mode": MetisConfig(scheme="metis", operand_mode="contraction"),
}


def build_model() -> nn.Module:
    """The same initialization every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def load_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """(train, validation) as byte tensors."""
    splits = split_documents(stdlib_documents())
    return tuple(
        torch.frombuffer(bytearray("\0".join(d.text for d in docs).encode()), dtype=torch.uint8)
        for docs in (splits.train, splits.validation)
    )


def batch_at(data: torch.Tensor, step: int, batch: int = BATCH) -> torch.Tensor:
    """[batch SEQUENCE] token ids of a step; a function of the step alone."""
    generator = torch.Generator().manual_seed(1234 + step)
    starts = torch.randint(len(data) - SEQUENCE, (batch,), generator=generator)
    return torch.stack([data[i : i + SEQUENCE] for i in starts.tolist()]).long()


def train(config: MetisConfig, train_data: torch.Tensor, steps: int) -> tuple[nn.Module, float]:
    """Trains one variant; returns the model and its seconds per step (median)."""
    model = get_metis_model(build_model(), config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    warmup = max(1, steps // 20)
    times = []
    for step in range(steps):
        progress = max(0, step - warmup) / max(1, steps - warmup)
        scale = min(1, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * scale
        start = time.perf_counter()
        ids = batch_at(train_data, step)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return model, sorted(times)[len(times) // 2]


@torch.no_grad()
def validation_loss(model: nn.Module, data: torch.Tensor, batches: int = 40) -> float:
    """Mean loss in nats per byte, with the variant's own forward pass (eval: nearest)."""
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in _validation(data, batches)]
    return sum(losses) / len(losses)


def _validation(data: torch.Tensor, batches: int):
    return (batch_at(data, 10**6 + i) for i in range(batches))


def capture(model: nn.Module, ids: torch.Tensor) -> list[tuple[str, nn.Linear, torch.Tensor]]:
    """(name, plain layer, x, dy) of every linear layer of the control, on one batch."""
    tensors: dict[str, list] = {}
    handles = []
    for name, layer in model.named_modules():
        if hasattr(layer, "weight_form"):

            def hook(module, args, out, name=name):
                tensors[name] = [args[0].detach()]
                out.register_hook(lambda grad: tensors[name].append(grad.detach()))

            handles.append(layer.register_forward_hook(hook))
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return [(n, model.get_submodule(n).to_dense(), *pair) for n, pair in tensors.items()]


def operand_errors(config: MetisConfig, tensors: list) -> dict[str, float]:
    """Relative errors |exact - emulated| / |exact| of y, dx and dw: mean over layers."""
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
        # The residual's gradient is dL/dw itself.
        dw = layer.weight_params()[-1].grad
        sums["y"] += relative_error(y64, y32).item()
        sums["dx"] += relative_error(x64.grad, x32.grad).item()
        sums["dw"] += relative_error(exact.weight.grad, dw).item()
    return {key: value / len(tensors) for key, value in sums.items()}


def table(results: dict) -> str:
    """Markdown: one row per variant."""
    control = results["variants"]["fp32"]["loss"]
    lines = ["| variant | y | dx | dw | loss | to fp32 |", "|---|---|---|---|---|---|"]
    for name, row in results["variants"].items():
        errors = " | ".join(f"{row['errors'][key]:.3f}" for key in ("y", "dx", "dw"))
        gap = 100 * (row["loss"] / control - 1)
        lines.append(f"| {name} | {errors} | {row['loss']:.4f} | {gap:+.2f} % |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs everything and writes the results; finished variants of an earlier run are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("eval/results/compensation.json"))
    args = parser.parse_args()
    train_data, validation_data = load_bytes()
    results = {
        "steps": args.steps,
        "tokens_per_step": BATCH * SEQUENCE,
        "seed": 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "variants": {},
    }
    if args.out.exists():
        previous = json.loads(args.out.read_text())
        if all(previous.get(key) == results[key] for key in results if key != "variants"):
            results = previous
    tensors = None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, config in VARIANTS.items():
        if name in results["variants"] and tensors is not None:
            continue
        model, seconds = train(config, train_data, args.steps)
        if tensors is None:
            tensors = capture(model, batch_at(validation_data, 10**7))
            for other, other_config in VARIANTS.items():
                print(other, operand_errors(other_config, tensors), flush=True)
        results["variants"][name] = {
            "config": config.to_dict(),
            "loss": validation_loss(model, validation_data),
            "errors": operand_errors(config, tensors),
            "seconds_per_step": seconds,
        }
        print(name, results["variants"][name]["loss"], f"{seconds:.2f} s/step", flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
