"""Training and evaluating one model under several schemes, so that only the scheme differs.

Same initialization, batches, order and schedule for each; MetisTrainer with MetisCallback; every
checkpoint loaded again and evaluated through lm-eval. Each variant has its own directory and a
`result.json` written last, so an interrupted experiment goes on where it stopped. What is trained
on which text is the caller's choice: the demo and `compare` are two.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chunked import causal_batch
from metis_hf.shared.records import bf16_units, read_json, write_json
from metis_hf.training.callback import MetisCallback
from metis_hf.training.precision_schedule import PrecisionSchedule
from metis_hf.training.trainer import MetisTrainer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from metis_hf.evaluation import EvalResult, TaskSpec

RESULT_FILE = "result.json"
_SCHEDULE = "precision_schedule"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all variants of a comparison share; any difference makes it another experiment.

    Args:
        model: keyword arguments of a transformers config, with its `model_type`.
        training: keyword arguments of TrainingArguments, `max_steps` among them; what every run
            shares (output directory, seed, device, logging) is set here.
        sequence_length: tokens per sequence.
        health_interval: steps between measurements of spectral health; 0 never measures.
        seed: of initialization, data order and noise.
    """

    model: dict[str, Any]
    training: dict[str, Any]
    sequence_length: int
    health_interval: int
    seed: int

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return int(self.training["max_steps"])


@dataclass(frozen=True)
class Variant:
    """What differs between the runs of a comparison.

    Args:
        name: of its directory and table row.
        config: fields of MetisConfig, `scheme` among them.
        precision_schedule: arguments of PrecisionSchedule; None keeps one precision throughout.
    """

    name: str
    config: dict[str, Any]
    precision_schedule: dict[str, Any] | None = None

    @classmethod
    def of_scheme(cls, scheme: str) -> Variant:
        """A scheme as it is registered."""
        return cls(scheme, {"scheme": scheme})

    @classmethod
    def of_fields(cls, name: str, fields: Mapping[str, Any]) -> Variant:
        """From fields of MetisConfig and, it may be, `precision_schedule`, in one mapping."""
        config = dict(fields)
        schedule = config.pop(_SCHEDULE, None)
        return cls(name, config, None if schedule is None else dict(schedule))

    def fields(self) -> dict[str, Any]:
        """What `of_fields` takes."""
        schedule = self.precision_schedule
        return self.config if schedule is None else {**self.config, _SCHEDULE: schedule}

    def callbacks(self) -> list[transformers.TrainerCallback]:
        """What the variant adds to the Trainer.

        Raises:
            ValueError: PrecisionSchedule does not take these arguments.
        """
        if self.precision_schedule is None:
            return []
        try:
            return [PrecisionSchedule(**self.precision_schedule)]
        except TypeError as error:
            raise ValueError(
                f"variant {self.name!r}: precision_schedule is {{at, high_precision}}; {error}"
            ) from None

    def metis_config(self, seed: int) -> MetisConfig:
        """The conversion; noise takes the run's seed."""
        return MetisConfig.from_dict({**self.config, "seed": seed})


@dataclass(frozen=True)
class SchemeResult:
    """What one variant gave.

    Attributes:
        scheme: the variant's name.
        config: its MetisConfig as a dict.
        summary: the conversion report, as text.
        loss: held-out loss, nats per token.
        tasks: task -> {"metric", "value", "stderr"}.
        seconds_per_step: median over normal (not measured) steps.
        history: Trainer's log entries, one a logged step.
        evaluation: lm-eval's results as they came.
        seed: of the run.
        peak_memory: bytes, the most in use beyond what was in use before the model was built.
        parameters: of the model as transformers builds it, before the conversion.
        precision_schedule: of the variant.
    """

    scheme: str
    config: dict[str, Any]
    summary: str
    loss: float
    tasks: dict[str, dict[str, Any]]
    seconds_per_step: float
    history: list[dict[str, float]]
    evaluation: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    peak_memory: int = 0
    parameters: int = 0
    precision_schedule: dict[str, Any] | None = None


def load_result(directory: Path) -> SchemeResult | None:
    """The result of a finished run, or None.

    Raises:
        ValueError: the file is not whole, or not a result.
    """
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    try:
        return SchemeResult(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is not a result of this version ({error}); delete it") from None


class StepClock(transformers.TrainerCallback):
    """Adds `step_seconds` to each log entry; calls `on_step(step, loss)` after it."""

    def __init__(self, on_step: Callable[[int, float | None], None]) -> None:
        self.on_step = on_step
        self._start = self._seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._seconds = time.perf_counter() - self._start

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            state.log_history[-1]["step_seconds"] = self._seconds
            self.on_step(state.global_step, logs["loss"])


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


def training_arguments(experiment: Experiment, run: Path) -> transformers.TrainingArguments:
    """What every run shares, below what the experiment says.

    Raises:
        ValueError: the experiment's training arguments are not those of transformers.
    """
    shared = {
        "output_dir": str(run),
        "bf16": bf16_units(),
        "use_cpu": not torch.accelerator.is_available(),
        "seed": experiment.seed,
        "logging_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    try:
        return transformers.TrainingArguments(**{**shared, **experiment.training})
    except TypeError as error:
        raise ValueError(
            f"the experiment's training arguments are not those of transformers: {error}"
        ) from None


def train(
    experiment: Experiment,
    variant: Variant,
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    run: Path,
    on_step: Callable[[int, float | None], None] = lambda step, loss: None,
) -> Trained:
    """Trains one variant, resuming from its last checkpoint if it has one.

    Args:
        dataset: chunked sequences, rows of `input_ids` in torch format.
        run: directory of checkpoints and, in `run/model`, of the trained model.
        on_step: called with (step, training loss) after each log entry.
    """
    args = training_arguments(experiment, run)
    memory = PeakMemory()
    transformers.set_seed(experiment.seed)
    config = transformers.AutoConfig.for_model(**experiment.model)
    with args.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    get_metis_model(model, variant.metis_config(experiment.seed))
    trainer = MetisTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=causal_batch,
        callbacks=[
            MetisCallback(experiment.health_interval),
            *variant.callbacks(),
            StepClock(on_step),
        ],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    checkpoint = get_last_checkpoint(str(run)) if run.exists() else None
    trainer.train(resume_from_checkpoint=checkpoint)
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


class PeakMemory:
    """The most memory in use since this was made, in bytes, beyond what was in use then.

    On an accelerator what is allocated there, else the size of the process.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # Linux resets the process's peak on this
            Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()

    def bytes(self) -> int:
        """The peak so far."""
        return self._peak() - self._start

    @staticmethod
    def _peak() -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            import psutil  # accelerate needs it too

            return psutil.Process().memory_info().rss


def run_scheme(
    experiment: Experiment,
    scheme: str,
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    out: Path,
    tasks: Sequence[str],
    tasks_dir: Path,
    loss_task: str,
    on_step: Callable[[int, float | None], None] = lambda step, loss: None,
    on_evaluate: Callable[[], None] = lambda: None,
) -> SchemeResult:
    """Trains and evaluates one scheme in `out/scheme`, or returns its finished result.

    The held-out loss is that of `loss_task`, a rolling log-likelihood task.
    """
    run = out / scheme
    done = load_result(run)
    if done is not None:
        return done
    variant = Variant.of_scheme(scheme)
    trained = train(experiment, variant, dataset, tokenizer, run, on_step)
    on_evaluate()
    from metis_hf.evaluation import held_out_loss

    result = evaluate_checkpoint(trained.directory, [loss_task, *tasks], tasks_dir)
    loss = held_out_loss(result, loss_task, tokenizer, tasks_dir / f"{loss_task}.jsonl")
    scores = headlines(result, tasks)
    return finish(run, experiment, variant, trained, loss, scores, result.to_dict())


def finish(
    run: Path,
    experiment: Experiment,
    variant: Variant,
    trained: Trained,
    loss: float,
    tasks: dict[str, dict[str, Any]],
    evaluation: dict[str, Any],
) -> SchemeResult:
    """Writes a run's result, and drops its checkpoints: the model directory has the weights."""
    result = SchemeResult(
        scheme=variant.name,
        config=variant.metis_config(experiment.seed).to_dict(),
        summary=trained.summary,
        loss=loss,
        tasks=tasks,
        seconds_per_step=trained.seconds_per_step,
        history=trained.history,
        evaluation=evaluation,
        seed=experiment.seed,
        peak_memory=trained.peak_memory,
        parameters=trained.parameters,
        precision_schedule=variant.precision_schedule,
    )
    write_json(run / RESULT_FILE, asdict(result))
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return result


def evaluate_checkpoint(
    directory: Path, tasks: Sequence[TaskSpec], include_path: Path | None = None
) -> EvalResult:
    """Loads a checkpoint as anyone would and evaluates it through lm-eval.

    Args:
        directory: of model and tokenizer.
        tasks: as `evaluation.evaluate_model` takes them.
        include_path: folder with more task YAMLs.
    """
    from metis_hf.evaluation import evaluate_model

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return evaluate_model(
        model.to(device),  # type: ignore[arg-type]
        tokenizer,
        tasks,
        include_path=include_path,
    )


def headlines(result: EvalResult, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """task -> {"metric", "value", "stderr"}: what a table shows."""
    found = {}
    for task in tasks:
        metric, value, stderr = result.headline(task)
        found[task] = {"metric": metric, "value": value, "stderr": stderr}
    return found
