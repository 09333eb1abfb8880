"""Training and evaluating one model under several schemes, so that only the scheme differs.

Same initialization, batches, order and schedule for each; MetisTrainer with MetisCallback. Each
run has its own directory and a `result.json` written last, so an interrupted experiment goes on
where it stopped. What is trained on which text, and how it is evaluated, is the caller's choice:
the demo and `compare` are two; recipes take their model from here.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chunked import causal_batch
from metis_hf.lab.compare.memory import PeakMemory
from metis_hf.lab.compare.optimization import ExperimentTrainer, scale_residuals
from metis_hf.lab.compare.results import SchemeResult, load_result, save_result
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.lab.measured import code_digest
from metis_hf.shared.checkpoints import last_checkpoint
from metis_hf.shared.devices import device_of
from metis_hf.shared.records import bf16_units, commit, device_name
from metis_hf.training.callback import MetisCallback
from metis_hf.training.cuda_graph import obstacles

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from metis_hf.lab.evaluate import EvalResult, TaskSpec
    from metis_hf.training.trainer import MetisTrainer

OnStep = Callable[[int, float | None], None]


@dataclass(frozen=True)
class Evaluated:
    """The result of evaluating a trained model.

    Attributes:
        loss: held-out loss, nats per token.
        tasks: task -> {"metric", "value", "stderr"}.
        record: results of lm-eval as they came.
        loss_dense: held-out loss with the quantizers off; None if not measured.
    """

    loss: float
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    loss_dense: float | None = None


@dataclass(frozen=True)
class Trained:
    """A trained run: the trainer, and what its record takes.

    Attributes:
        trainer: after training, with the model in it.
        directory: where model and tokenizer were saved.
        summary: the conversion report, as text.
        history: Trainer's log entries with a loss.
        seconds_per_step: median over normal steps.
        peak_memory: bytes, see `SchemeResult`.
        parameters: before the conversion.
    """

    trainer: MetisTrainer
    directory: Path
    summary: str
    history: list[dict[str, float]]
    seconds_per_step: float
    peak_memory: int
    parameters: int


def run_variant(
    experiment: Experiment,
    variant: Variant,
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    run: Path,
    evaluate: Callable[[Trained], Evaluated],
    *,
    on_step: OnStep = lambda step, loss: None,
    on_evaluate: Callable[[], None] = lambda: None,
    earlier_code: Sequence[str] = (),
) -> SchemeResult | None:
    """Train and evaluate one variant in `run`, or return its finished result.

    A run that was interrupted resumes from its last whole checkpoint. Its checkpoints are dropped
    once it has its result: `run/model` has the weights.

    Args:
        experiment: what all variants share.
        variant: what is trained.
        dataset: chunked sequences, rows of `input_ids` in torch format.
        tokenizer: saved beside the model.
        run: directory of the run.
        evaluate: called with the trained model on every process of the run.
        on_step: called with (step, training loss) after each log entry.
        on_evaluate: called before the evaluation.
        earlier_code: digests of the code that has trained the run until its last checkpoint.

    Returns:
        The result; None on the processes of a run beside its first.
    """
    done = load_result(run)
    if done is not None:
        drop_checkpoints(run)
        return done
    # Before training: files may change while it lasts.
    digests = dict.fromkeys([*earlier_code, code_digest()])
    code = {"sha256": "+".join(digests), "commit": commit()}
    trained = train(experiment, variant, dataset, tokenizer, run, on_step)
    on_evaluate()
    evaluated = evaluate(trained)
    if not trained.trainer.is_world_process_zero():
        return None
    result = _finished(experiment, variant, trained, evaluated, code)
    save_result(run, result)
    drop_checkpoints(run)
    return result


def drop_checkpoints(run: Path) -> None:
    """Remove the checkpoints of a run that has its result."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # other processes of the run do so too


def new_model(config: PreTrainedConfig, seed: int, device: torch.device) -> PreTrainedModel:
    """Return a causal model from scratch with fp32 weights, of the seed and the kind of device."""
    transformers.set_seed(seed)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def initial_model(experiment: Experiment, device: torch.device) -> PreTrainedModel:
    """Return the model that every run starts from, with fp32 weights."""
    if experiment.checkpoint is None:
        config = transformers.AutoConfig.for_model(**experiment.model)
        model = new_model(config, experiment.seed, device)
        if experiment.scaled_residuals:
            scale_residuals(model)
        return model
    transformers.set_seed(experiment.seed)
    return transformers.AutoModelForCausalLM.from_pretrained(
        experiment.checkpoint, dtype=torch.float32
    ).to(device)  # type: ignore[arg-type]


def training_arguments(experiment: Experiment, run: Path) -> transformers.TrainingArguments:
    """Return what every run shares, and over it what the experiment says.

    Raises:
        ValueError: transformers does not take the experiment's training arguments.
    """
    device = device_of(None)
    shared = {
        "output_dir": str(run),
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
    """Train one variant, from its last whole checkpoint if it has one; see `run_variant`.

    A callback of `callbacks` may end the training early: the trainer's state says at which step.
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
    # A step that was measured takes longer; it carries the figures in its entry.
    normal = [e["step_seconds"] for e in history if "metis/nonfinite_tensors" not in e]
    return Trained(
        trainer=trainer,
        directory=directory,
        summary=str(model.metis_report),
        history=history,
        seconds_per_step=statistics.median(normal or [e["step_seconds"] for e in history]),
        peak_memory=memory.bytes(),
        parameters=parameters,
    )


def whole_batches(
    dataset: datasets.Dataset | torch.utils.data.Dataset, args: transformers.TrainingArguments
) -> datasets.Dataset | torch.utils.data.Dataset:
    """Return the sequences of an epoch without the last ones that make no whole batch.

    Where training ends within the first epoch, nothing is taken off.

    Raises:
        ValueError: not one batch.
    """
    each = args.per_device_train_batch_size * args.world_size
    batch, count = each * args.gradient_accumulation_steps, len(dataset)  # type: ignore[arg-type]
    if count < batch:
        raise ValueError(
            f"{count} sequences to train on are no batch of {batch}; give more data, or choose a "
            "smaller batch"
        )
    if args.max_steps * batch <= count or count % batch == 0:
        return dataset
    whole = range(count - count % batch)
    select = getattr(dataset, "select", None)
    return torch.utils.data.Subset(dataset, whole) if select is None else select(whole)


class StepClock(transformers.TrainerCallback):
    """Adds `step_seconds` to each log entry; calls `on_step(step, loss)` after it."""

    def __init__(self, on_step: Callable[[int, float | None], None]) -> None:
        self.on_step = on_step
        self._start = self._seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        _synchronize()
        self._start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        _synchronize()
        self._seconds = time.perf_counter() - self._start

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            state.log_history[-1]["step_seconds"] = self._seconds
            self.on_step(state.global_step, logs["loss"])


def _synchronize() -> None:
    """Wait for what an accelerator has still to do, which no clock of the CPU sees."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _finished(
    experiment: Experiment,
    variant: Variant,
    trained: Trained,
    evaluated: Evaluated,
    code: dict[str, str | None],
) -> SchemeResult:
    """Return the result of a run from its parts."""
    return SchemeResult(
        scheme=variant.name,
        config=variant.metis_config(experiment.seed).to_dict(),
        summary=trained.summary,
        loss=evaluated.loss,
        tasks=evaluated.tasks,
        seconds_per_step=trained.seconds_per_step,
        history=trained.history,
        evaluation=evaluated.record,
        seed=experiment.seed,
        peak_memory=trained.peak_memory,
        parameters=trained.parameters,
        precision_schedule=variant.precision_schedule,
        loss_dense=evaluated.loss_dense,
        machine={
            "device": device_name(trained.trainer.args.device),
            "precision": "bf16" if trained.trainer.args.bf16 else "fp32",
        },
        code=code,
    )


def evaluate_checkpoint(
    directory: Path, tasks: Sequence[TaskSpec], include_path: Path | None = None
) -> EvalResult:
    """Load a checkpoint as anyone would and evaluate it through lm-eval, task by task.

    Each by itself: lm-eval puts the requests of all tasks of a call into the same batches, and a
    quantized model's likelihoods depend on what else is in their batch.

    Args:
        directory: of model and tokenizer.
        tasks: as `evaluation.evaluate_model` takes them.
        include_path: folder with more task YAMLs.
    """
    from metis_hf.lab.evaluate import EvalResult, evaluate_model

    device = device_of(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(device)  # type: ignore[arg-type]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return EvalResult.joined(
        [evaluate_model(model, tokenizer, [task], include_path=include_path) for task in tasks]
    )
