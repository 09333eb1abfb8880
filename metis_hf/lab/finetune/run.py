"""One model and its data, and what each method makes of it.

What a method leaves is exported as an inference engine reads it, and its held-out loss is compared
with that of the unquantized model.
"""

from __future__ import annotations

import copy
import gc
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chat import check_vocabulary, chunked_sequences, first_sequences
from metis_hf.data.chunked import causal_batch
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.packed import load_packed
from metis_hf.lab.compare.runner import whole_batches
from metis_hf.lab.finetune.arguments import METHODS, FinetuneArguments
from metis_hf.lab.finetune.measure import HeldOut
from metis_hf.lab.finetune.report import (
    Outcome,
    different_code,
    markdown_tables,
    parameters_to_pack,
    trainable,
)
from metis_hf.lab.measured import code_digest
from metis_hf.lab.recipe_arguments import check_context
from metis_hf.shared.checkpoints import load_complete
from metis_hf.shared.inputs import claim_inputs, digest_of_path
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.records import (
    claim_directory,
    commit,
    environment,
    read_json,
    write_json,
)
from metis_hf.training.calibration import calibrate
from metis_hf.training.callback import MetisCallback
from metis_hf.training.distillation import DistillTrainer
from metis_hf.training.trainer import MetisTrainer

LEARNING_RATE = 1e-5  # of weights, where --learning_rate is 0
RESULTS_FILE, TABLE_FILE = "results.json", "table.md"
EXPORTS_FILE = "exports.json"  # method -> the export that this output directory has made
_RESULT_VERSION = 3  # before, other tokens of a text were held out
# How arguments of TrainingArguments begin that decide no result.
_NOT_IN_RESULT = (
    "output_dir", "log", "report_to", "run_name", "project", "trackio", "disable_tqdm",
    "save_", "hub_", "push_to_hub", "resume_from_checkpoint", "restore_callback_states",
    "use_cpu", "local_rank", "ddp_", "dataloader_num", "dataloader_p", "dataloader_multi",
    "debug", "skip_memory_metrics", "do_",
)  # fmt: skip


class Finetuning:
    """One model, its data, and what the methods make of it."""

    def __init__(self, arguments: FinetuneArguments, training: TrainingArguments) -> None:
        self.arguments, self.training = arguments, training
        self.methods, self.compared = arguments.methods(), arguments.compared()
        if not arguments.model:
            raise ValueError("no model: give a directory or hub name, or try --smoke")
        if arguments.data is None:
            raise ValueError("no data: give --data FILE, JSON lines of messages or text")
        engines = ("FSDP", "DEEPSPEED")
        launched = any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in engines)
        if training.fsdp or training.deepspeed or launched:
            raise ValueError(
                "fine-tuning for deployment exports whole models from one process, which FSDP and "
                "DeepSpeed have cut; run it in one process or under DDP (accelerate launch)"
            )
        parameters_to_pack(arguments)  # or refuses
        self.config = AutoConfig.from_pretrained(arguments.model)
        check_context(self.config, arguments.sequence_length)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(arguments.model)
        self.train, texts = self._sequences()
        vocabulary = self.config.get_text_config().vocab_size
        for rows in (self.train, *texts.values()):
            check_vocabulary(rows, vocabulary, arguments.model)
        batch = training.per_device_eval_batch_size
        self.held_out = HeldOut(texts, batch, training.device)
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
        self.finished: dict[str, Outcome] = {}

    def _sequences(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sequences to train on, and those to measure on by the name of their text."""
        a, data = self.arguments, Path(str(self.arguments.data))
        files = a.held_out_files()
        if not files:
            train, held = chunked_sequences(
                data, self.tokenizer, a.sequence_length, a.eval_sequences
            )
            return train, {"held-out": held}
        same = [name for name, file in files.items() if file.is_file() and file.samefile(data)]
        if same:
            raise ValueError(
                f"--held_out {files[same[0]]} is what --data trains on; leave --held_out out, and "
                "the end of the data is held out"
            )
        texts = {
            name: first_sequences(file, self.tokenizer, a.sequence_length, a.eval_sequences)
            for name, file in files.items()
        }
        return first_sequences(data, self.tokenizer, a.sequence_length, sys.maxsize), texts

    def _claim(self) -> None:
        """Take the output directory, with the methods that earlier runs of it have finished.

        Its exports that were not measured, since their process ended, are removed.

        Raises:
            ValueError: it holds a run of other settings, or an export would have to be overwritten.
        """
        free = ("method", "compare", "export", "dry_run")
        settings = {k: v for k, v in asdict(self.arguments).items() if k not in free}
        given = self.training.to_dict().items()
        settings |= {k: v for k, v in given if not k.startswith(_NOT_IN_RESULT)}
        settings["learning_rate"] = self.training.learning_rate or LEARNING_RATE
        settings["format_version"] = _RESULT_VERSION
        claim_directory(self.out, settings, "--output_dir")
        a = self.arguments
        read = (a.model, a.data, *a.held_out_files().values())
        there = [Path(str(path)) for path in read if Path(str(path)).exists()]  # else of the hub
        claim_inputs(self.out, {str(p): digest_of_path(p) for p in there}, "--output_dir")
        self._read_finished()
        for method in self.methods:
            directory = self._directory(method)
            if method in self.finished or not directory.exists() or not any(directory.iterdir()):
                continue
            if self._exported().get(method) != _identity(directory):
                raise ValueError(
                    f"{directory} exists already, and {method} would be exported there; remove it, "
                    "or choose another --export"
                )
            shutil.rmtree(directory)

    def _read_finished(self) -> None:
        if (self.out / RESULTS_FILE).is_file():
            kept = read_json(self.out / RESULTS_FILE)["outcomes"]
            self.finished = {values["method"]: Outcome.of(values) for values in kept}

    def _exported(self) -> dict[str, Any]:
        path = self.out / EXPORTS_FILE
        return read_json(path) if path.is_file() else {}

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
        model = load_complete(AutoModelForCausalLM, self.arguments.model, dtype=torch.float32)
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

    def _autocast(self) -> Any:
        enabled = bool(self.training.bf16)
        return torch.autocast(self.training.device.type, torch.bfloat16, enabled=enabled)

    def run(self, report: Callable[[str], None] = print) -> list[Outcome]:
        """Run the methods that are not finished, and write results.json and table.md after each.

        Args:
            report: takes a line of text when a method begins.

        Returns:
            What all methods of this directory gave, the exact model first.

        Raises:
            ValueError: the output directory is in use by another process or holds a run of other
                settings, or an export would have to be overwritten.
        """
        with hold_directory(self.out, "--output_dir") if self.is_main else nullcontext():
            if self.is_main:
                self._claim()
            PartialState().wait_for_everyone()
            self._read_finished()
            return self._run(report)

    def _run(self, report: Callable[[str], None]) -> list[Outcome]:
        for method in ("exact", *self.methods[:1], *self.compared, *self.methods[1:]):
            if (done := self.finished.get(method)) is not None:
                where = "" if done.directory is None else f", exported to {done.directory}"
                report(f"{method}: finished before{where}")
                continue
            report(f"{method} ...")
            code = " ".join(filter(None, (commit(), code_digest()[:6])))  # before: files may change
            self.finished[method] = replace(self._outcome(method), code=code)
            gc.collect()
            if self.is_main:
                self._write(self._outcomes())
        return self._outcomes()

    def _outcome(self, method: str) -> Outcome:
        set_seed(self.training.seed)  # adapters are drawn before Trainer does so
        own = {
            "exact": self._exact,
            "ptq": self._ptq,
            "qat": self._qat,
            "qad": self._qad,
            "lora": self._lora,
        }
        return own[method]() if method in own else self._scheme(method)

    def _outcomes(self) -> list[Outcome]:
        trained = METHODS[1:]
        names = [name for name in self.finished if name not in trained]
        return [self.finished[name] for name in (*names, *trained) if name in self.finished]

    def _exact(self) -> Outcome:
        return Outcome("exact", self.held_out.measure(self.load()))

    def _scheme(self, name: str) -> Outcome:
        """Measure the untrained model in a scheme; nothing is calibrated or exported."""
        model = self.load()
        get_metis_model(model, MetisConfig(scheme=name, seed=self.training.seed))
        return Outcome(name, self.held_out.measure(model, self.load()))

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
        packed = self._packed_weights()
        base = load_packed(packed, dtype=dtype)
        rank = self.arguments.lora_rank
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        nn.Module.to(base, self.training.device)
        model: Any = get_peft_model(base, config)
        self._fit(Trainer, "lora", model)
        trained, directory = trainable(model), self._directory("lora")
        if self.is_main:
            model.save_pretrained(directory)
            self._note_export("lora")
        PartialState().wait_for_everyone()
        del model, base
        # In fp32, as all others are measured.
        plain: Any = load_packed(packed, dtype=torch.float32)
        nn.Module.to(plain, self.training.device)
        plain = PeftModel.from_pretrained(plain, str(directory))
        found = self.held_out.measure(plain, self.load())
        return Outcome("lora", found, trained, self.steps, str(directory))

    def _packed_weights(self) -> str:
        """Return where ptq was exported: by this command, or before to another place.

        Raises:
            ValueError: the export is not there any more.
        """
        directory = self.finished["ptq"].directory
        if directory is None or not Path(directory).is_dir():
            raise ValueError(
                f"lora trains beside the packed weights of ptq, which {self.out} has exported to "
                f"{directory}: nothing is there now; put it back, or choose another --output_dir"
            )
        return directory

    def _fit(self, trainer: type[Trainer], method: str, model: Any, **options: Any) -> None:
        arguments = copy.copy(self.training)
        arguments.output_dir = str(self.out / method)
        arguments.learning_rate = self.training.learning_rate or LEARNING_RATE
        if method == "lora":
            arguments.learning_rate = self.arguments.lora_learning_rate
            # Packed weights are buffers, equal everywhere, that DDP cannot send.
            arguments.ddp_broadcast_buffers = False
        columns = {"input_ids": self.train.tolist()}
        rows = Dataset.from_dict(columns).shuffle(seed=arguments.seed).with_format("torch")
        run = trainer(
            model=model,
            args=arguments,
            train_dataset=whole_batches(rows, arguments),  # type: ignore[arg-type]
            data_collator=causal_batch,
            **options,
        )
        run.train()
        # accelerate has wrapped the forward pass in autocast; losses are measured without.
        run.accelerator.unwrap_model(run.model_wrapped, keep_fp32_wrapper=False)

    def _directory(self, method: str) -> Path:
        return self.exports / method

    def _note_export(self, method: str) -> None:
        """Note an export as one that this output directory has made."""
        exported = self._exported() | {method: _identity(self._directory(method))}
        write_json(self.out / EXPORTS_FILE, exported)

    def _finish(self, method: str, model: PreTrainedModel, steps: int) -> Outcome:
        """Save and export a model in the scheme, and measure it and its export."""
        trained = trainable(model) if steps else 0
        directory = self._directory(method)
        if self.is_main:
            saved = self.out / method / "model"
            if hasattr(self.config, "use_cache"):  # off in training, and of use in generation
                model.config.use_cache = self.config.use_cache
            model.save_pretrained(saved)
            self.tokenizer.save_pretrained(saved)
            export_checkpoint(saved, directory, format=self.arguments.layout)
            self._note_export(method)
        PartialState().wait_for_everyone()  # lora reads what ptq has exported
        reads = self.is_main and self.arguments.layout == "compressed-tensors"
        found = self.held_out.measure(model, self.load(), directory if reads else None)
        return Outcome(method, found, trained, steps, str(directory))

    def _write(self, outcomes: list[Outcome]) -> None:
        record = {
            "format_version": _RESULT_VERSION,
            "arguments": asdict(self.arguments) | {"data": Path(str(self.arguments.data)).name},
            "learning_rate": self.training.learning_rate or LEARNING_RATE,
            "seed": self.training.seed,
            "tokens": self.steps * self.arguments.global_batch * self.arguments.sequence_length,
            "held_out_tokens": self.held_out.tokens,
            "outcomes": [asdict(outcome) for outcome in outcomes],
            **environment(self.training.device),
        }
        write_json(self.out / RESULTS_FILE, record)
        below = "".join(f"\n{sentence}\n" for sentence in different_code(outcomes))
        (self.out / TABLE_FILE).write_text(markdown_tables(outcomes) + below)


def _identity(directory: Path) -> list[Any]:
    """Return what tells a directory from another of the same place, or from a changed one."""
    return [str(directory.resolve()), directory.stat().st_mtime_ns]
