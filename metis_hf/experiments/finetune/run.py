"""One model and its data, and what each method makes of it.

What a method leaves is exported as an inference engine reads it, and its held-out loss is compared
with that of the unquantized model.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.conversion.packed import load_packed
from metis_hf.data.chat import chunked_sequences
from metis_hf.data.chunked import causal_batch
from metis_hf.experiments.finetune.arguments import METHODS, FinetuneArguments
from metis_hf.experiments.finetune.report import HEADER, Outcome, rows_of, trainable
from metis_hf.export import export_checkpoint
from metis_hf.shared.records import claim_directory, environment, read_json, write_json
from metis_hf.shared.tables import markdown_table
from metis_hf.training.calibration import calibrate
from metis_hf.training.callback import MetisCallback
from metis_hf.training.distillation import DistillTrainer
from metis_hf.training.distillation_loss import distillation_loss
from metis_hf.training.trainer import MetisTrainer

# Where --learning_rate is 0: of weights, and of adapters, which start at zero.
LEARNING_RATE = {"qat": 1e-5, "qad": 1e-5, "lora": 2e-4}
RESULTS_FILE, TABLE_FILE = "results.json", "table.md"
_RESULT_VERSION = 1


class Finetuning:
    """One model, its data, and what the methods make of it."""

    def __init__(self, arguments: FinetuneArguments, training: TrainingArguments) -> None:
        self.arguments, self.training = arguments, training
        self.methods = arguments.methods()
        if not arguments.model:
            raise ValueError("no model: give a directory or hub name, or try --smoke")
        if arguments.data is None:
            raise ValueError("no data: give --data FILE, JSON lines of messages or text")
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(arguments.model)
        self.train, self.held_out = chunked_sequences(
            Path(arguments.data),
            self.tokenizer,
            arguments.sequence_length,
            arguments.eval_sequences,
        )
        self.out = Path(str(training.output_dir))
        self.exports = Path(arguments.export) if arguments.export else self.out / "export"
        training.max_steps = self.steps
        processes = training.world_size * training.per_device_train_batch_size
        if arguments.global_batch % processes:
            raise ValueError(
                f"--global_batch {arguments.global_batch} is no multiple of {processes}, what "
                f"{training.world_size} processes with {training.per_device_train_batch_size} "
                "sequences each take at a time"
            )
        training.gradient_accumulation_steps = arguments.global_batch // processes
        self._claim()

    def _claim(self) -> None:
        """Take the output directory, with the methods that earlier runs of it have finished.

        Raises:
            ValueError: it holds a run of other settings, or an export would have to be overwritten.
        """
        free = ("method", "export", "dry_run")
        settings = {k: v for k, v in asdict(self.arguments).items() if k not in free}
        names = ("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "seed", "bf16")
        settings |= {name: str(getattr(self.training, name)) for name in names}
        self.finished: dict[str, Outcome] = {}
        if self.arguments.dry_run:
            return
        if self.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            claim_directory(self.out, settings)
        if (self.out / RESULTS_FILE).is_file():
            kept = read_json(self.out / RESULTS_FILE)["outcomes"]
            self.finished = {values["method"]: Outcome(**values) for values in kept}
        for method in self.methods:
            directory = self._directory(method)
            if method not in self.finished and directory.exists() and any(directory.iterdir()):
                raise ValueError(
                    f"{directory} exists already, and {method} would be exported there; remove it, "
                    "or choose another --export"
                )

    @property
    def steps(self) -> int:
        """Optimizer steps of a method that trains."""
        a = self.arguments
        if self.training.max_steps > 0:
            return self.training.max_steps
        return max(1, round(a.tokens / (a.global_batch * a.sequence_length)))

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files."""
        return self.training.process_index == 0

    def load(self) -> PreTrainedModel:
        """Return the unquantized model, with fp32 weights on this process's device."""
        model = AutoModelForCausalLM.from_pretrained(self.arguments.model, dtype=torch.float32)
        model.config.use_cache = False
        nn.Module.to(model, self.training.device)
        return model

    def quantized(self) -> PreTrainedModel:
        """Return the model in the scheme, calibrated."""
        a = self.arguments
        model = self.load()
        get_metis_model(model, MetisConfig(scheme=a.scheme, seed=self.training.seed))
        rows = self.train[: a.calibration_sequences]
        batch = self.training.per_device_eval_batch_size
        with self._autocast():
            calibrate(model, list(rows.split(batch)), method=a.calibration)
        return model

    def loss(self, model: PreTrainedModel) -> float:
        """Return the held-out cross entropy, nats per token."""
        return self.measure(model)[0]

    @torch.no_grad()
    def measure(
        self, model: PreTrainedModel, exact: PreTrainedModel | None = None
    ) -> tuple[float, float]:
        """Return held-out cross entropy and KL from the unquantized model, nats per token.

        Args:
            model: in its own precision.
            exact: the unquantized model; None: the KL is 0.
        """
        totals = torch.zeros(2, dtype=torch.float64)
        training, device = model.training, next(model.parameters()).device
        model.eval()
        for rows in self.held_out.split(self.training.per_device_eval_batch_size):
            rows = rows.to(device)
            with self._autocast():
                logits = model(input_ids=rows).logits
                target = None if exact is None else exact.eval()(input_ids=rows).logits
            for row, ids in zip(logits[:, :-1], rows[:, 1:]):
                totals[0] += F.cross_entropy(row.float(), ids, reduction="sum").cpu()
            if target is not None:
                mask = torch.ones_like(rows, dtype=torch.bool)
                mask[:, -1] = False
                totals[1] += distillation_loss(logits, target, mask, tokens=1).cpu()
        model.train(training)
        loss, divergence = (totals / self.held_out[:, 1:].numel()).tolist()
        return loss, divergence

    def _autocast(self) -> Any:
        enabled = bool(self.training.bf16)
        return torch.autocast(self.training.device.type, torch.bfloat16, enabled=enabled)

    def run(self, report: Callable[[str], None] = print) -> list[Outcome]:
        """Run the methods that are not finished, and write results.json and table.md after each.

        Args:
            report: takes a line of text when a method begins.

        Returns:
            What all methods of this directory gave, the exact model first.
        """
        if "exact" not in self.finished:
            self.finished["exact"] = Outcome("exact", self.loss(self.load()))
        for method in self.methods:
            if method in self.finished:
                report(f"{method}: finished before")
                continue
            report(f"{method} ...")
            self.finished[method] = getattr(self, f"_{method}")()
            gc.collect()
            if self.is_main:
                self._write(self._outcomes())
        return self._outcomes()

    def _outcomes(self) -> list[Outcome]:
        return [self.finished[name] for name in ("exact", *METHODS) if name in self.finished]

    def _ptq(self) -> Outcome:
        model = self.quantized()
        return self._finish("ptq", model, 0)

    def _qat(self) -> Outcome:
        model = self.quantized()
        self._fit(MetisTrainer, "qat", model, callbacks=[MetisCallback(health_interval=0)])
        return self._finish("qat", model, self.steps)

    def _qad(self) -> Outcome:
        model, a = self.quantized(), self.arguments
        self._fit(
            DistillTrainer,
            "qad",
            model,
            callbacks=[MetisCallback(health_interval=0)],
            teacher=a.model,
            temperature=a.temperature,
            cross_entropy_share=a.cross_entropy_share,
        )
        return self._finish("qad", model, self.steps)

    def _lora(self) -> Outcome:
        dtype = torch.bfloat16 if self.training.bf16 else torch.float32
        base = load_packed(str(self._directory("ptq")), dtype=dtype)
        rank = self.arguments.lora_rank
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        nn.Module.to(base, self.training.device)
        model: Any = get_peft_model(base, config)
        self._fit(Trainer, "lora", model)
        loss, divergence = self.measure(model, self.load())
        outcome = Outcome(
            "lora",
            loss,
            divergence,
            trained=trainable(model),
            steps=self.steps,
            directory=str(self._directory("lora")),
        )
        if self.is_main:
            model.save_pretrained(self._directory("lora"))
        return outcome

    def _fit(self, trainer: type[Trainer], method: str, model: Any, **options: Any) -> None:
        arguments = copy.copy(self.training)
        arguments.output_dir = str(self.out / method)
        arguments.learning_rate = self.training.learning_rate or LEARNING_RATE[method]
        if method == "lora":  # packed weights are buffers, equal everywhere, that DDP cannot send
            arguments.ddp_broadcast_buffers = False
        columns = {"input_ids": self.train.tolist()}
        rows = Dataset.from_dict(columns).shuffle(seed=arguments.seed).with_format("torch")
        trainer(
            model=model,
            args=arguments,
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=causal_batch,
            **options,
        ).train()

    def _directory(self, method: str) -> Path:
        return self.exports / method

    def _finish(self, method: str, model: PreTrainedModel, steps: int) -> Outcome:
        """Evaluate, save and export a model in the scheme."""
        loss, divergence = self.measure(model, self.load())
        trained = trainable(model) if steps else 0
        directory = self._directory(method)
        if self.is_main:
            saved = self.out / method / "model"
            model.save_pretrained(saved)
            self.tokenizer.save_pretrained(saved)
            export_checkpoint(saved, directory, format=self.arguments.layout)
        PartialState().wait_for_everyone()  # lora reads what ptq has exported
        exported = self._read(directory)
        return Outcome(method, loss, divergence, exported, trained, steps, str(directory))

    def _read(self, directory: Path) -> float | None:
        """Return the loss of an export in the hands of the library that reads it."""
        if self.arguments.layout != "compressed-tensors" or not find_spec("compressed_tensors"):
            return None
        if not self.is_main:
            return None
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        model.config.use_cache = False
        nn.Module.to(model, self.training.device)
        return self.loss(model)

    def _write(self, outcomes: list[Outcome]) -> None:
        record = {
            "format_version": _RESULT_VERSION,
            "arguments": asdict(self.arguments) | {"data": Path(str(self.arguments.data)).name},
            "tokens": self.steps * self.arguments.global_batch * self.arguments.sequence_length,
            "held_out_tokens": self.held_out[:, 1:].numel(),
            "outcomes": [asdict(outcome) for outcome in outcomes],
            **environment(),
        }
        write_json(self.out / RESULTS_FILE, record)
        (self.out / TABLE_FILE).write_text(markdown_table(HEADER, rows_of(outcomes)))
