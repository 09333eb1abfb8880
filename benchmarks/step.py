"""Time a training step of GPT-2 and Llama models per scheme against plain fp32 and bf16.

    python benchmarks/step.py            # ten minutes on one core
    python benchmarks/step.py --quick    # seconds

A step is forward, backward and AdamW. Parameters are fp32; "bf16" rows run under autocast, the
others in fp32 (on a GPU all but the first run under autocast). Ratios are to the plain fp32 model
in the same round, on a GPU also to the plain bf16 model. On a GPU, "recorded" rows replay their
forward and backward pass as a CUDA graph. Writes results/step.json and .png.

Saved bytes are the storages that autograd keeps between forward and backward
(`saved_tensors_hooks`), each counted once, without parameters. They are given for the linear
layers' own forward passes, without copies of weights, and for the whole model. Peak memory is the
peak of the second step minus the memory before it: resident memory on a CPU, the caching
allocator's memory on a GPU. It includes gradients but not AdamW's state.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from memory import megabytes, peak_memory
from timing import (
    SPREAD,
    Row,
    arguments,
    before_start,
    dtype_name,
    figure,
    interleave,
    parse,
    prepare,
    spread,
    summary,
    table,
    write,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.numerics import fake_quantize
from metis_hf.training import cuda_graph
from metis_hf.training.cuda_graph import StepGraphs

SCHEMES = ("nvfp4", "nvidia", "metis-paper", "metis")
PLAIN = "nn.Linear"
ROUNDS, BUDGET = 5, 540.0
BATCH, LENGTH = 4, 512


class Shape(NamedTuple):
    """A model's config, its batch, and the schemes to time."""

    config: Callable[[], Any]
    batch: int
    length: int
    schemes: tuple[str, ...] = SCHEMES
    autocast: tuple[str, ...] = (PLAIN, "metis")


def gpt2(**changes: Any) -> transformers.GPT2Config:
    """Return the config of GPT-2, 124 million parameters unless changed."""
    return transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **changes)


def llama(hidden: int, inner: int, layers: int, heads: int, vocab: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=LENGTH,
    )


def smollm2() -> transformers.LlamaConfig:
    """Return the config of SmolLM2, 135 million parameters."""
    config = llama(576, 1536, 30, 9, 49152)
    config.num_key_value_heads, config.tie_word_embeddings = 3, True
    return config


SHAPES = {
    "GPT-2 130M": Shape(gpt2, BATCH, LENGTH, ("nvfp4", "metis"), (PLAIN,)),
    "Llama 60M": Shape(lambda: llama(512, 1376, 8, 8, 32000), BATCH // 2, LENGTH),
    "SmolLM2 135M": Shape(smollm2, BATCH, LENGTH // 2, ("nvfp4-rne", "metis")),
}
QUICK_SHAPES = {
    "GPT-2": Shape(
        lambda: gpt2(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=32), 3, 32
    ),
    "Llama": Shape(lambda: llama(64, 96, 2, 2, 128), 3, 32, ("metis",), ()),
}


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    graphs: StepGraphs | None = None  # replays forward and backward

    def gradients(self, inputs: Mapping[str, Any], count: Any = None) -> Tensor:
        enabled = self.dtype is torch.bfloat16
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=enabled):
            loss = self.model(**inputs).loss
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        inputs = {"input_ids": self.tokens, "labels": self.tokens}
        if self.graphs is None:
            self.gradients(inputs)
        else:
            self.graphs.run(self.gradients, inputs, None)
        self.optimizer.step()
        self.optimizer.zero_grad()


def cases(shape: Shape, device: torch.device) -> list[Case]:
    config = shape.config()
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).train()
    size = (shape.batch, shape.length)
    tokens = torch.randint(0, config.vocab_size, size, generator=torch.Generator().manual_seed(1))
    models = {PLAIN: plain}
    for scheme in shape.schemes:
        models[scheme] = get_metis_model(copy.deepcopy(plain), MetisConfig(scheme=scheme)).train()
    low = torch.bfloat16
    runs = [(PLAIN, torch.float32)]
    if device.type == "cuda":
        runs += [(name, low) for name in models]
    else:
        runs += [(name, torch.float32) for name in shape.schemes]
        runs += [(name, low) for name in shape.autocast]
    optimizers = {}
    for name, model in models.items():
        model.to(device)
        optimizers[name] = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = tokens.to(device)
    found = [Case(name, dtype, models[name], optimizers[name], tokens) for name, dtype in runs]
    if device.type == "cuda":
        low_cases = [case for case in found if case.dtype is low]
        recorder = cuda_graph.CudaRecorder()  # one for all, so that recordings share memory
        found += [case._replace(graphs=StepGraphs(case.model, recorder)) for case in low_cases]
    return found


# --- memory ---------------------------------------------------------------------------------------


class Saved:
    """Bytes of the tensors that autograd saves, in total and for linear layers."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.sizes: dict[int, int] = {}  # by address; all stay alive until the backward pass
        self.of_linears: set[int] = set()
        self.module: nn.Module | None = None

    def pack(self, x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in self.parameters:
            self.sizes[place] = x.untyped_storage().nbytes()
            if self.module is not None and not _is_weight(x, self.module):
                self.of_linears.add(place)
        return x

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of (linear layers, the whole model)."""
        return sum(self.sizes[place] for place in self.of_linears), sum(self.sizes.values())


def _is_weight(x: Tensor, module: nn.Module) -> bool:
    """Return whether x looks like a copy of a parameter, which autocast makes."""
    shapes = {tuple(p.shape) for p in module.parameters()}
    return tuple(x.shape) in shapes or tuple(x.shape[::-1]) in shapes


def converted_names(case: Case, shape: Shape) -> set[str]:
    """Return the layers that schemes convert; others, such as the output head, never differ."""
    model = case.model
    if not any(isinstance(module, MetisLayer) for module in model.modules()):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape.config())
            model = get_metis_model(model, MetisConfig(scheme="nvfp4"))
    return {name for name, _ in metis_layers(model)}


@contextlib.contextmanager
def counting_saved(case: Case, shape: Shape) -> Iterator[Saved]:
    """Count what the forward pass inside the block saves; a backward pass may follow."""
    saved = Saved(case.model)

    def enter(module: nn.Module, *_: Any) -> None:
        saved.module = module

    def leave(*_: Any) -> None:
        saved.module = None

    names = converted_names(case, shape)
    with contextlib.ExitStack() as stack:
        for name, module in case.model.named_modules():
            if name in names:
                assert isinstance(module, nn.Linear | Conv1D | MetisLayer)
                stack.enter_context(module.register_forward_pre_hook(enter))
                stack.enter_context(module.register_forward_hook(leave))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x))
        yield saved


# --- measurement ----------------------------------------------------------------------------------


def load_compiler(device: torch.device) -> None:
    """Load the compiler before memory is measured: it takes a few hundred megabytes."""
    x = torch.ones(256, 256, device=device)
    for rounding in ("nearest", "stochastic"):
        fake_quantize(x, rounding=rounding)


def measure(name: str, shape: Shape, rounds: int, budget: float, device: torch.device) -> list[Row]:
    found = cases(shape, device)
    rows = []
    for case in found:
        # Warm-up; it also creates AdamW's state for every case, including those that share a model.
        case.step()
        with counting_saved(case, shape) as saved, peak_memory(device) as peak:
            case.step()
        linears, everything = saved.bytes()
        rows.append(
            {
                "model": name,
                "name": case.name,
                "dtype": dtype_name(case.dtype),
                "recorded": case.graphs is not None,
                "note": None,
                "batch": [shape.batch, shape.length],
                "parameters": sum(p.numel() for p in case.model.parameters()),
                "saved_linear_bytes": linears,
                "saved_bytes": everything,
                # A recording holds its memory all the time, so a step has no peak of its own.
                "peak_bytes": None if case.graphs is not None else peak.get("bytes"),
            }
        )
    for row, case in zip(rows, found):
        if case.graphs is not None:
            for _ in range(cuda_graph.WARM_UP + 1):  # the last step is recorded
                case.step()
            row["recorded"] = case.graphs.recordings > 0
            row["note"] = case.graphs.refused
    calls = [case.step for case in found]
    times = interleave(calls, rounds, budget=budget, device=device, warm_up=False)
    tokens = shape.batch * shape.length
    for row, seconds in zip(rows, times):
        row |= summary(seconds, times[0])
        row["tokens_per_s"] = tokens / statistics.median(seconds)
    _add_ratios(rows, times, device)
    return rows


def _add_ratios(rows: list[Row], times: list[list[float]], device: torch.device) -> None:
    """Add ratios to the plain bf16 model: of saved bytes, on a GPU also of times and memory."""
    kinds = [(row["name"], row["dtype"]) for row in rows]
    if (PLAIN, "bfloat16") not in kinds:
        return
    plain = kinds.index((PLAIN, "bfloat16"))
    for row, seconds in zip(rows, times):
        row["saved_over_bf16"] = row["saved_linear_bytes"] / rows[plain]["saved_linear_bytes"]
        if device.type == "cuda":
            over = summary(seconds, times[plain])
            row["over_bf16"], row["quartiles_over_bf16"] = over["ratio"], over["quartiles_ratio"]
            if row["peak_bytes"] is not None:
                row["peak_over_bf16"] = row["peak_bytes"] / rows[plain]["peak_bytes"]


def markdown(rows: list[Row]) -> str:
    on_gpu = any("over_bf16" in row for row in rows)
    cells = [
        [
            f"{row['model']}, {row['batch'][0]} x {row['batch'][1]}",
            row["name"] + _how(row),
            "bf16" if row["dtype"] == "bfloat16" else "fp32",
            row["rounds"],
            spread(row, "ms"),
            f"{row['tokens_per_s']:.0f}",
            spread(row),
            *([spread(row, "over_bf16")] if on_gpu else []),
            megabytes(row["peak_bytes"]),
            *([ratio(row, "peak_over_bf16")] if on_gpu else []),
            megabytes(row["saved_bytes"]),
            megabytes(row["saved_linear_bytes"]),
            ratio(row, "saved_over_bf16"),
        ]
        for row in rows
    ]
    columns = ["model", "linears", "GEMMs", "rounds", f"ms a step {SPREAD}", "tokens/s"]
    columns += ["over fp32", *(["over bf16"] if on_gpu else []), "peak MB"]
    columns += [*(["of bf16's"] if on_gpu else []), "saved MB", "saved by linears MB", "of bf16's"]
    return table(columns, cells)


def _how(row: Row) -> str:
    if row.get("note"):
        return f", not recorded: {row['note']}"
    return ", recorded" if row.get("recorded") else ""


def ratio(row: Row, key: str) -> str:
    return f"{row[key]:.2f}" if key in row else ""


def draw(rows: list[Row], path: Path) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    found, axes = figure(2, len(models), (5 * len(models), 5.5))
    for column, model in enumerate(models):
        shown = [row for row in rows if row["model"] == model]
        kinds = {"float32": "fp32", "bfloat16": "bf16"}
        shown = [row for row in shown if not _how(row)]
        labels = [f"{row['name']}\n{kinds[row['dtype']]}" for row in shown]
        colors = ["black" if row["name"] == PLAIN else "#0072B2" for row in shown]
        values = [
            [row["ratio"] for row in shown],
            [row["saved_linear_bytes"] / 2**20 for row in shown],
        ]
        for axis, heights in zip(axes[:, column], values):
            bars = axis.bar(range(len(shown)), heights, color=colors)
            axis.bar_label(bars, fmt="%.3g", padding=2)
            axis.set_xticks(range(len(shown)), labels, fontsize=7)
            axis.margins(y=0.12)
        axes[0, column].set_title(model)
    axes[0, 0].set_ylabel("time over plain fp32")
    axes[1, 0].set_ylabel("saved by linear layers (MB)")
    found.savefig(path)


def main() -> None:
    args = parse(arguments(__doc__))
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    before = before_start(args.device)
    shapes = QUICK_SHAPES if args.quick else SHAPES
    rounds = 2 if args.quick else ROUNDS
    load_compiler(args.device)
    rows: list[Row] = []
    for name, shape in shapes.items():
        prepare(args.threads)
        rows += measure(name, shape, rounds, BUDGET / len(shapes), args.device)
    write(args.out, "step", {"machine": before, "rows": rows})  # once, with all models
    print(markdown(rows))
    draw(rows, args.out / "step.png")


if __name__ == "__main__":
    main()
