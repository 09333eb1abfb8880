"""Training and evaluating one model under several schemes, so that only the scheme differs.

Same initialization, batches, order and schedule for each; stock Trainer with MetisCallback; every
checkpoint evaluated through lm-eval. Each scheme has its own directory and a `result.json` written
last, so an interrupted experiment goes on where it stopped. What is trained on which text is the
caller's choice (`demo` is one).
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from metis_hf.callback import MetisCallback
from metis_hf.config import MetisConfig
from metis_hf.model import get_metis_model

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

RESULT_FILE = "result.json"
SETTINGS_FILE = "settings.json"
CONTROL = "bf16"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all schemes of a comparison share; any difference makes it another experiment.

    Args:
        model: keyword arguments of `LlamaConfig`.
        steps: optimizer steps.
        batch_size: sequences per step.
        sequence_length: tokens per sequence.
        learning_rate: peak, after a linear warm-up; cosine to zero.
        warmup_steps: of those steps.
        seed: of initialization, data order and noise.
        health_interval: steps between measurements of spectral health.
        save_interval: steps between checkpoints that an interrupted run resumes from.
    """

    model: dict[str, Any]
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    warmup_steps: int
    seed: int
    health_interval: int
    save_interval: int


@dataclass(frozen=True)
class SchemeResult:
    """What one scheme gave.

    Attributes:
        scheme: its name.
        config: its MetisConfig as a dict.
        summary: the conversion report, as text.
        loss: held-out loss, nats per token.
        tasks: task -> {"metric", "value", "stderr"}.
        seconds_per_step: median over normal (not measured) steps.
        history: Trainer's log entries, one a step.
        evaluation: lm-eval's results as they came.
    """

    scheme: str
    config: dict[str, Any]
    summary: str
    loss: float
    tasks: dict[str, dict[str, Any]]
    seconds_per_step: float
    history: list[dict[str, float]]
    evaluation: dict[str, Any] = field(default_factory=dict)


def bf16_units() -> bool:
    """Whether the device multiplies bf16 natively; else a bf16 run is an fp32 run, only slower."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def device_name() -> str:
    """What the experiment ran on, for its record."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    units = "with" if bf16_units() else "without"
    return f"{platform.machine()} CPU {units} bf16 units, {torch.get_num_threads()} threads"


def environment() -> dict[str, Any]:
    """Versions, device and commit, for the record."""
    packages = ("metis-hf", "torch", "transformers", "accelerate", "datasets", "lm_eval")
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "versions": found,
        "python": platform.python_version(),
        "device": device_name(),
        "precision": "bf16" if bf16_units() else "fp32",
        "commit": git.stdout.strip() or None,
    }


def open_directory(out: Path, experiment: Experiment) -> None:
    """Claims `out` for an experiment, or goes on with the same one.

    Raises:
        ValueError: it holds another experiment; the message names the settings that differ.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS_FILE
    settings = json.loads(json.dumps(asdict(experiment)))
    if path.exists():
        found = json.loads(path.read_text())
        if found != settings:
            keys = [k for k in settings | found if settings.get(k) != found.get(k)]
            shown = ", ".join(f"{k}: {found.get(k)} there, {settings.get(k)} now" for k in keys)
            raise ValueError(
                f"{out} holds a run with other settings ({shown}). "
                "Choose another --out, or delete the directory"
            )
    write_json(path, settings)


def write_json(path: Path, data: Any) -> None:
    """Writes a JSON file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


def load_result(out: Path, scheme: str) -> SchemeResult | None:
    """A finished scheme's result, or None."""
    path = out / scheme / RESULT_FILE
    return SchemeResult(**json.loads(path.read_text())) if path.exists() else None


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


def train_scheme(
    experiment: Experiment,
    scheme: str,
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    on_step: Callable[[int, float | None], None] = lambda step, loss: None,
) -> tuple[Path, str, list[dict[str, float]]]:
    """Trains one scheme with the stock Trainer, resuming from its last checkpoint if it has one.

    Returns:
        (directory of the trained model and tokenizer, conversion report, log history)
    """
    run = out / scheme
    transformers.set_seed(experiment.seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**experiment.model))
    get_metis_model(model, MetisConfig(scheme=scheme, seed=experiment.seed))
    args = transformers.TrainingArguments(
        output_dir=str(run),
        max_steps=experiment.steps,
        per_device_train_batch_size=experiment.batch_size,
        learning_rate=experiment.learning_rate,
        warmup_steps=experiment.warmup_steps,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=bf16_units(),
        use_cpu=not torch.accelerator.is_available(),
        seed=experiment.seed,
        logging_steps=1,
        save_steps=experiment.save_interval,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
        callbacks=[MetisCallback(experiment.health_interval), StepClock(on_step)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    checkpoint = get_last_checkpoint(str(run)) if run.exists() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    directory = run / "model"
    trainer.save_model(str(directory))
    return directory, str(model.metis_report), trainer.state.log_history


def evaluate_checkpoint(
    directory: Path, tasks: Sequence[str], tasks_dir: Path, loss_task: str
) -> tuple[float, dict[str, dict[str, Any]], dict[str, Any]]:
    """Loads a checkpoint as anyone would and evaluates it through lm-eval.

    Returns:
        (held-out loss in nats per token, task -> headline metric, lm-eval's results)
    """
    from metis_hf.evaluation import evaluate_model, held_out_loss

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    result = evaluate_model(
        model.to(device),  # type: ignore[arg-type]
        tokenizer,
        [loss_task, *tasks],
        include_path=str(tasks_dir),
    )
    loss = held_out_loss(result, loss_task, tokenizer, tasks_dir / f"{loss_task}.jsonl")
    headlines = {}
    for task in tasks:
        metric, value, stderr = result.headline(task)
        headlines[task] = {"metric": metric, "value": value, "stderr": stderr}
    return loss, headlines, result.to_dict()


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
    """Trains and evaluates one scheme, or returns its finished result."""
    done = load_result(out, scheme)
    if done is not None:
        return done
    directory, summary, history = train_scheme(experiment, scheme, dataset, tokenizer, out, on_step)
    on_evaluate()
    loss, headlines, evaluation = evaluate_checkpoint(directory, tasks, tasks_dir, loss_task)
    history = [entry for entry in history if "loss" in entry]
    # A step that was measured takes longer; it carries the figures in its entry.
    normal = [e["step_seconds"] for e in history if "metis/nonfinite_tensors" not in e]
    result = SchemeResult(
        scheme=scheme,
        config=MetisConfig(scheme=scheme, seed=experiment.seed).to_dict(),
        summary=summary,
        loss=loss,
        tasks=headlines,
        seconds_per_step=statistics.median(normal or [e["step_seconds"] for e in history]),
        history=history,
        evaluation=evaluation,
    )
    write_json(out / scheme / RESULT_FILE, asdict(result))
    for checkpoint in (out / scheme).glob("checkpoint-*"):  # the model directory has the weights
        shutil.rmtree(checkpoint)
    return result
