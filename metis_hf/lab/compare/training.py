"""Train one model under several schemes, so that only the scheme differs.

Initialization, batches, order and schedule are the same for each. The trainer is MetisTrainer with
MetisCallback. An interrupted run resumes from its last complete checkpoint.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chunked import causal_batch
from metis_hf.lab.compare.meters import OnStep, PeakMemory, StepClock
from metis_hf.lab.compare.optimization import ExperimentTrainer, scale_residuals
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.shared.checkpoints import last_checkpoint
from metis_hf.shared.devices import device_of
from metis_hf.shared.records import bf16_units, device_name
from metis_hf.training.callback import MetisCallback
from metis_hf.training.cuda_graph import obstacles
from metis_hf.training.precision import high_precision

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from metis_hf.training.trainer import MetisTrainer


@dataclass(frozen=True)
class Trained:
    """A trained run: the trainer, and values for the record.

    Fields without a comment are as in `SchemeResult`.
    """

    trainer: MetisTrainer  # after training, with the model
    directory: Path  # where model and tokenizer were saved
    summary: str
    history: list[dict[str, float]]
    seconds_per_step: float
    peak_memory: int
    parameters: int


def drop_checkpoints(run: Path) -> None:
    """Remove the checkpoints of a finished run."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # other processes of the run remove it too


def initial_model(experiment: Experiment, device: torch.device) -> PreTrainedModel:
    """Return the model that every run starts from, with fp32 weights.

    Random weights depend on the seed and on the type of the device.
    """
    transformers.set_seed(experiment.seed)
    if experiment.checkpoint is None:
        config = transformers.AutoConfig.for_model(**experiment.model)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if experiment.scaled_residuals:
            scale_residuals(model)
        return model
    return transformers.AutoModelForCausalLM.from_pretrained(
        experiment.checkpoint, dtype=torch.float32
    ).to(device)  # type: ignore[arg-type]


def training_arguments(experiment: Experiment, run: Path) -> transformers.TrainingArguments:
    """Return the arguments that every run shares, overridden by the experiment's own.

    Raises:
        ValueError: transformers rejects the experiment's training arguments.
    """
    device = device_of(None)
    shared = {
        "output_dir": str(run),
        "run_name": "/".join(run.parts[-2:]),  # <variant>/seed-<n>, for reporters
        "bf16": bf16_units() and not experiment.training.get("fp16"),
        "use_cpu": device.type == "cpu",
        "seed": experiment.seed,
        "logging_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": device.type != "cpu",
    }
    given = {**shared, **experiment.training}
    try:
        # A run that ends before its first log entry would have no loss and no times to show.
        given["logging_steps"] = min(given["logging_steps"], experiment.steps)
        return transformers.TrainingArguments(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"training: {error}") from None


def train(
    experiment: Experiment,
    variant: Variant,
    dataset: datasets.Dataset | torch.utils.data.Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    run: Path,
    on_step: OnStep,
    callbacks: Sequence[transformers.TrainerCallback] = (),
) -> Trained:
    """Train one variant, from its last complete checkpoint if it has one.

    Args:
        experiment, variant: the settings that all variants share, and the variant's own.
        dataset: chunked sequences, rows of `input_ids` in torch format.
        tokenizer: saved with the model.
        run: directory of the run.
        on_step: called with (step, training loss) after each log entry.
        callbacks: additional callbacks; one may end the training early.
    """
    args = training_arguments(experiment, run)
    dataset = whole_batches(dataset, args)
    memory = PeakMemory()
    model = initial_model(experiment, args.device)
    parameters = sum(p.numel() for p in model.parameters())
    get_metis_model(model, variant.metis_config(experiment.seed))
    trainer = ExperimentTrainer(
        experiment,
        cuda_graphs=not obstacles(args),
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=causal_batch,
        callbacks=[
            MetisCallback(experiment.health_interval),
            *variant.callbacks(),
            StepClock(on_step),
            *callbacks,
        ],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=last_checkpoint(run))
    directory = run / "model"
    trainer.save_model(str(directory))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    # Steps with health measurements, which their log entries contain, take longer.
    normal = [e["step_seconds"] for e in history if "metis/nonfinite_tensors" not in e]
    # A callback may have ended the run before its first log entry.
    times = normal or [e["step_seconds"] for e in history] or [math.nan]
    return Trained(
        trainer=trainer,
        directory=directory,
        summary=str(model.metis_report),
        history=history,
        seconds_per_step=statistics.median(times),
        peak_memory=memory.bytes(),
        parameters=parameters,
    )


def held_out_result(
    trained: Trained, variant: Variant, seed: int, held_out: Any, code: dict[str, str | None]
) -> SchemeResult:
    """Evaluate a trained run on held-out sequences, and return its result."""
    trainer = trained.trainer
    loss = trainer.evaluate(held_out)["eval_loss"]
    assert trainer.model is not None
    with high_precision(trainer.model):  # logged as eval_dense_loss
        dense = trainer.evaluate(held_out, metric_key_prefix="eval_dense")["eval_dense_loss"]
    return SchemeResult(
        scheme=variant.name,
        config=variant.metis_config(seed).to_dict(),
        summary=trained.summary,
        loss=loss,
        tasks={},
        seconds_per_step=trained.seconds_per_step,
        history=trained.history,
        seed=seed,
        peak_memory=trained.peak_memory,
        parameters=trained.parameters,
        precision_schedule=variant.precision_schedule,
        loss_dense=dense,
        machine={
            "device": device_name(trainer.args.device),
            "precision": "bf16" if trainer.args.bf16 else "fp32",
        },
        code=code,
    )


def whole_batches(
    dataset: datasets.Dataset | torch.utils.data.Dataset, args: transformers.TrainingArguments
) -> datasets.Dataset | torch.utils.data.Dataset:
    """Return the dataset without the last sequences if they do not fill a batch.

    If training ends within the first epoch, the dataset is returned unchanged.

    Raises:
        ValueError: the dataset does not fill one batch.
    """
    each = args.per_device_train_batch_size * args.world_size
    batch, count = each * args.gradient_accumulation_steps, len(dataset)  # type: ignore[arg-type]
    if count < batch:
        raise ValueError(
            f"{count} training sequences do not fill one batch of {batch}; give more data, or "
            "choose a smaller batch"
        )
    if args.max_steps * batch <= count or count % batch == 0:
        return dataset
    whole = range(count - count % batch)
    select = getattr(dataset, "select", None)
    return torch.utils.data.Subset(dataset, whole) if select is None else select(whole)
