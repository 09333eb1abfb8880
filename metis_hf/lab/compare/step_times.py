"""Times of the variants' training steps, measured side by side in one process.

The runs of a comparison share the machine at different times, so their own step times also differ
for reasons that have nothing to do with the variants.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from metis_hf.conversion.convert import get_metis_model
from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.meters import synchronize
from metis_hf.lab.compare.plan import ComparisonPlan
from metis_hf.lab.compare.training import initial_model, training_arguments
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.store import task_key
from metis_hf.schemes import source_digests
from metis_hf.shared.records import environment, read_json, write_json
from metis_hf.training.cuda_graph import obstacles
from metis_hf.training.weight_reuse import reuse_weights

TIMES_FILE = "times.json"
UNRECORDED = (
    "Steps were timed with kernels launched by Python; the runs themselves replayed recorded CUDA "
    "graphs, where schemes cost less."
)
WARM_UP, ROUNDS = 3, 9  # steps per variant


def measure_times(plan: ComparisonPlan, data: Path, path: Path) -> dict[str, float]:
    """Measure the seconds of an optimizer step of each variant, and write them to a file.

    The times are medians over rounds in which every variant takes one step on the same batch:
    forward and backward passes of the micro-batches, clipping, optimizer. All models are in memory
    at once. Python launches every step; the file notes if the runs themselves replay CUDA graphs.
    The plan's first seed is used, and `data` is as in `load_data`.
    """
    batches = batches_of_a_step(plan, data)
    steps = {variant.name: step_of(plan, variant, batches) for variant in plan.variants}
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in tqdm(range(WARM_UP + ROUNDS), desc="timing steps side by side", leave=False):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            synchronize()
            rounds[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in rounds.items()}
    unrecorded = {"unrecorded": True} if not obstacles(_arguments(plan)) else {}
    of = {variant.name: _identity(plan, variant) for variant in plan.variants}
    found = {"seconds": seconds, "rounds": ROUNDS, "of": of, **unrecorded, **environment()}
    write_json(path, found)
    return seconds


def load_times(
    plan: ComparisonPlan, path: Path, names: Collection[str]
) -> tuple[dict[str, float], list[str]]:
    """Return the times that `measure_times` wrote, and notes to print below their table.

    Only times that were measured side by side are comparable, so the times are {} unless the file
    has all the variants `names`. Times of other code, or of another variant with the same name, do
    not count.
    """
    if not path.exists():
        return {}, []
    found = read_json(path)
    asked = {each.name: _identity(plan, each) for each in plan.variants if each.name in names}
    if asked.items() <= found.get("of", {}).items():
        return found["seconds"], [UNRECORDED] if found.get("unrecorded") else []
    return {}, [
        f"Step times in {path.name} come from other code or variants; --times measures them again."
    ]


def _identity(plan: ComparisonPlan, variant: Variant) -> str:
    """Return a digest of everything that decides a variant's step: fields, schemes, code."""
    config = variant.metis_config(plan.seeds[0])
    sources = source_digests(config.schemes, config.format)
    return task_key(variant.fields(), sources)


def batches_of_a_step(plan: ComparisonPlan, data: Path) -> list[Tensor]:
    """Return the micro-batches of one step, [sequences tokens]."""
    experiment = plan.of_seed(plan.seeds[0])
    dataset, _, _ = load_data(data, plan.validation, experiment, plan.eval_sequences)
    rows = dataset.select(range(plan.global_batch))["input_ids"]
    ids = torch.stack([torch.as_tensor(row) for row in rows])
    return list(ids.split(experiment.training["per_device_train_batch_size"]))


def _arguments(plan: ComparisonPlan) -> transformers.TrainingArguments:
    return training_arguments(plan.experiment, Path("unused"))


def step_of(plan: ComparisonPlan, variant: Variant, batches: list[Tensor]) -> Callable[[], None]:
    """Return a function that runs one optimizer step of a variant."""
    args = _arguments(plan)
    model: Any = initial_model(plan.of_seed(plan.seeds[0]), args.device)
    get_metis_model(model, variant.metis_config(plan.seeds[0]))
    model.train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = kind(options.pop("params", None) or model.parameters(), **options)
    ids = [batch.to(args.device) for batch in batches]

    def step() -> None:
        with reuse_weights(model) if len(ids) > 1 else contextlib.nullcontext():
            for batch in ids:
                with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
                    loss = model(input_ids=batch, labels=batch).loss
                (loss / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step
