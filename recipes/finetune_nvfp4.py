"""A causal language model, fine-tuned so that it can be deployed in NVFP4 (W4A4 or W4A16).

    python recipes/finetune_nvfp4.py MODEL --data chat.jsonl --method qad --export DIR
    python recipes/finetune_nvfp4.py MODEL --data chat.jsonl --method ptq,qat,qad,lora \\
        --held_out prose.jsonl,questions.jsonl --compare nvfp4-rne,four-over-six,metis
    python recipes/finetune_nvfp4.py --smoke

Methods: ptq (calibrate, train nothing), qat (train with quantizers on), qad (the same, towards the
unquantized model's distributions), lora (adapters beside the packed weights). The loss of the exact
model, of ptq, of schemes to compare with and of each method stands in a table at the end, one for
each text to measure on. docs/finetuning.md says which to take.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from metis_hf import MetisCallback, MetisConfig, MetisTrainer, calibrate, get_metis_model
from metis_hf.data.chat import check_vocabulary, chunked_sequences, first_sequences
from metis_hf.data.chunked import causal_batch
from metis_hf.data.corpus import stdlib_documents, train_tokenizer
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.packed import load_deployed, load_packed
from metis_hf.deploy.source import check_packable
from metis_hf.lab.compare.training import whole_batches
from metis_hf.lab.cost import meta_model
from metis_hf.lab.finetune_table import (
    HEADER,
    Measured,
    Outcome,
    different_code,
    losses,
    markdown_tables,
    rows_of,
)
from metis_hf.lab.show.table import terminal_table
from metis_hf.lab.store import Store, numerics_digest
from metis_hf.schemes import scheme_info
from metis_hf.shared.checkpoints import last_checkpoint, load_complete
from metis_hf.shared.inputs import digest_of_path
from metis_hf.shared.quiet import no_warnings
from metis_hf.shared.records import commit, environment, read_json, write_json
from metis_hf.training.calibration import METHODS as CALIBRATIONS
from metis_hf.training.distillation import DistillTrainer

METHODS = ("ptq", "qat", "qad", "lora")
RESULT_VERSION = 3  # before, other tokens of a text were held out
# Arguments that decide no result; of TrainingArguments the beginnings of their names.
FREE = ("method", "compare", "export", "dry_run")
FREE_TRAINING = (
    "output_dir", "log", "report_to", "run_name", "project", "trackio", "disable_tqdm", "save_",
    "hub_", "push_to_hub", "resume_from_checkpoint", "restore_callback_states", "use_cpu",
    "local_rank", "ddp_", "dataloader_num", "dataloader_p", "dataloader_multi", "debug",
    "skip_memory_metrics", "do_",
)  # fmt: skip
DEFAULTS = {
    "output_dir": "runs/finetune-nvfp4", "learning_rate": 1e-5, "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "logging_steps": 10, "save_strategy": "no", "report_to": "none",
}  # fmt: skip
SMOKE = {
    "output_dir": "runs/smoke-finetune-nvfp4", "method": "ptq,qat,qad,lora", "max_steps": 4,
    "learning_rate": 1e-3, "sequence_length": 64, "global_batch": 4, "eval_sequences": 4,
    "calibration_sequences": 4, "logging_steps": 1, "dataloader_pin_memory": False,
}  # fmt: skip


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Arguments:
    model: str = option("", "Directory or hub name of a causal LM.")
    data: str | None = option(
        None, 'JSON lines of {"messages": [...]} or {"text": ...}, or a text.'
    )
    held_out: str | None = option(
        None, "Files to measure on, by commas; default: the last documents of --data."
    )
    method: str = option("qad", f"One or several of {', '.join(METHODS)}, by commas.")
    compare: str = option(
        "", "Schemes to measure the untrained model in too, by commas: nvfp4-rne,metis."
    )
    export: str | None = option(
        None, "Directory to export into, a folder a method; default: in output_dir."
    )
    layout: str = option("compressed-tensors", "compressed-tensors or modelopt.")
    scheme: str = option("w4a4", "w4a4, or w4a16: weights alone.")
    calibration: str = option("mse", f"Scales of inputs by: {', '.join(CALIBRATIONS)}.")
    calibration_sequences: int = option(32, "Training sequences that scales are found on.")
    sequence_length: int = option(512, "Tokens of a sequence.")
    eval_sequences: int = option(32, "Sequences to measure on, of each held-out file.")
    tokens: float = option(1e6, "Training tokens, unless max_steps is given.")
    global_batch: int = option(16, "Sequences of an optimizer step.")
    temperature: float = option(1.0, "Temperature of the teacher's and the student's logits.")
    cross_entropy_share: float = option(0.0, "Share of the labels' cross entropy in qad's loss.")
    lora_rank: int = option(16, "Rank of the adapters.")
    lora_learning_rate: float = option(2e-4, "For the adapters, instead of --learning_rate.")
    smoke: bool = option(False, "The same code on the CPU in a minute: tiny model and text.")
    dry_run: bool = option(False, "Print what the run takes, and stop.")

    def __post_init__(self) -> None:
        for name, known in {
            "method": METHODS, "scheme": ("w4a4", "w4a16"), "calibration": CALIBRATIONS,
            "layout": ("compressed-tensors", "modelopt"),
        }.items():  # fmt: skip
            given = getattr(self, name)
            for value in parts(given) or [""] if name == "method" else [given]:
                if value not in known:
                    raise ValueError(f"--{name} {value!r}; choose of {', '.join(known)}")
        finite, share = "a finite number above 0", "a share from 0 to 1"
        for name, least, most, expected in (
            ("calibration_sequences", 1, math.inf, "at least 1"),
            ("eval_sequences", 1, math.inf, "at least 1"),
            ("global_batch", 1, math.inf, "at least 1"),
            ("lora_rank", 1, math.inf, "at least 1"),
            ("sequence_length", 2, math.inf, "at least 2"),
            ("tokens", 5e-324, sys.float_info.max, finite),
            ("temperature", 5e-324, sys.float_info.max, finite),
            ("lora_learning_rate", 5e-324, sys.float_info.max, finite),
            ("cross_entropy_share", 0, 1, share),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"--{name} {getattr(self, name)}; expected {expected}")
        for name in parts(self.compare):
            scheme_info(name)  # or its error lists the schemes


def parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


# ---- model and data -----------------------------------------------------------------------------


def smoke_model(directory: Path, *, write: bool = True) -> tuple[str, str]:
    """Write a tiny model with its tokenizer, and conversations; return the two paths."""
    path, data = directory / "smoke-model", directory / "smoke.jsonl"
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        texts = stdlib_documents()[:40]
        tokenizer = train_tokenizer(texts, vocab_size=512)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
        )
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, initializer_range=0.08,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        talks = [
            [{"role": "user", "content": text.path},
             {"role": "assistant", "content": text.text[:2000]}]
            for text in texts
        ]  # fmt: skip
        data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path), str(data)


def load_data(a: Arguments, tokenizer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return token ids [n length]: to train on, and to measure on by the name of the text."""
    data, length, count = Path(str(a.data)), a.sequence_length, a.eval_sequences
    files = [Path(part) for part in parts(a.held_out)]
    if not files:
        train, held = chunked_sequences(data, tokenizer, length, count)
        return train, {"held-out": held}
    if len({file.stem for file in files}) < len(files):
        raise ValueError(
            f"--held_out {a.held_out}: two files of one name, which the table could not tell "
            "apart; rename one"
        )
    for file in files:
        if file.is_file() and file.samefile(data):
            raise ValueError(
                f"--held_out {file} is what --data trains on; leave --held_out out, and the end of "
                "the data is held out"
            )
    texts = {file.stem: first_sequences(file, tokenizer, length, count) for file in files}
    return first_sequences(data, tokenizer, length, sys.maxsize), texts


def load(a: Arguments, training: TrainingArguments) -> Any:
    """Return the unquantized model, with fp32 weights on this process's device."""
    model = load_complete(AutoModelForCausalLM, a.model, dtype=torch.float32)
    model.config.use_cache = False
    return nn.Module.to(model, training.device)


def quantized(a: Arguments, training: TrainingArguments, train: Tensor) -> Any:
    """Return the model in the scheme, calibrated."""
    model = get_metis_model(load(a, training), MetisConfig(scheme=a.scheme, seed=training.seed))
    batches = train[: a.calibration_sequences].split(training.per_device_eval_batch_size)
    with torch.autocast(training.device.type, torch.bfloat16, enabled=bool(training.bf16)):
        calibrate(model, list(batches), method=a.calibration)
    return model


def check(a: Arguments, training: TrainingArguments) -> tuple[Any, int, int]:
    """Refuse what could not run; return the tokenizer, the parameters, and how many are packed."""
    if not a.model:
        raise ValueError("no model: give a directory or hub name, or try --smoke")
    if a.data is None:
        raise ValueError("no data: give --data FILE, JSON lines of messages or text")
    launched = any(parse_flag_from_env(f"ACCELERATE_USE_{x}") for x in ("FSDP", "DEEPSPEED"))
    if training.fsdp or training.deepspeed or launched:
        raise ValueError(
            "fine-tuning for deployment exports whole models from one process, which FSDP and "
            "DeepSpeed have cut; run it in one process or under DDP (accelerate launch)"
        )
    for name, instead in (
        ("num_train_epochs", "--tokens says how long a run is"),
        ("resume_from_checkpoint", "the same command goes on with what is not finished"),
    ):
        if getattr(training, name) != getattr(TrainingArguments, name):
            raise ValueError(f"{name}={getattr(training, name)}: {instead}; leave it out")
    config = AutoConfig.from_pretrained(a.model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and a.sequence_length > context:
        raise ValueError(
            f"--sequence_length {a.sequence_length} does not fit the model's context of {context} "
            "tokens; choose shorter sequences"
        )
    with no_warnings():  # what cannot be packed is refused before anything is read
        model = meta_model(config)
        parameters = sum(param.numel() for param in model.parameters())
        report = get_metis_model(model, MetisConfig(scheme=a.scheme)).metis_report
    check_packable(model)
    at_once = training.world_size * training.per_device_train_batch_size
    if a.global_batch % at_once:
        raise ValueError(
            f"--global_batch {a.global_batch} is no multiple of {at_once}, what "
            f"{training.world_size} processes with {training.per_device_train_batch_size} "
            "sequences each take at a time"
        )
    training.gradient_accumulation_steps = a.global_batch // at_once
    if training.max_steps <= 0:
        training.max_steps = max(1, round(a.tokens / (a.global_batch * a.sequence_length)))
    return AutoTokenizer.from_pretrained(a.model), parameters, report.converted_params


# ---- train, export, measure ---------------------------------------------------------------------


def fit(kind: type[Trainer], method: str, model: Any, a: Arguments, training: Any, train: Tensor,
        **options: Any) -> None:  # fmt: skip
    """Train a model in place, from its last checkpoint where there is one."""
    args = copy.copy(training)
    args.output_dir = str(Path(training.output_dir) / method)
    if method == "lora":
        args.learning_rate = a.lora_learning_rate
        # Packed weights are buffers, equal everywhere, that DDP cannot send.
        args.ddp_broadcast_buffers = False
    rows = Dataset.from_dict({"input_ids": train.tolist()}).shuffle(seed=args.seed)
    rows = whole_batches(rows, args).with_format("torch")
    run = kind(model=model, args=args, train_dataset=rows, data_collator=causal_batch, **options)
    run.train(resume_from_checkpoint=last_checkpoint(Path(args.output_dir)))
    # accelerate has wrapped the forward pass in autocast; losses are measured without.
    run.accelerator.unwrap_model(run.model_wrapped, keep_fp32_wrapper=False)


def run_method(
    method: str, a: Arguments, training: Any, tokenizer: Any, train: Tensor,
    texts: dict[str, Tensor], export: Path, packed: str | None,
) -> Outcome:  # fmt: skip
    """Train, export and measure; `packed` is where ptq was exported, which lora trains beside."""
    transformers.set_seed(training.seed)  # adapters are drawn before Trainer does so
    main, batch = training.process_index == 0, training.per_device_eval_batch_size
    trained, steps, reader = 0, training.max_steps, None
    quiet = [MetisCallback(health_interval=0)]
    if method == "exact":
        model: Any = load(a, training)
    elif method not in METHODS:  # a scheme to compare with: nothing is calibrated or exported
        config = MetisConfig(scheme=method, seed=training.seed)
        model = get_metis_model(load(a, training), config)
    elif method == "lora":
        if packed is None or not Path(packed).is_dir():
            raise ValueError(
                f"lora trains beside the packed weights of ptq, which {training.output_dir} has "
                f"exported to {packed}: nothing is there now; put it back, or choose another "
                "--output_dir"
            )
        base = load_packed(packed, dtype=torch.bfloat16 if training.bf16 else torch.float32)
        adapters = LoraConfig(r=a.lora_rank, lora_alpha=2 * a.lora_rank,
                              target_modules="all-linear")  # fmt: skip
        model = get_peft_model(nn.Module.to(base, training.device), adapters)
        fit(Trainer, method, model, a, training, train)
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        if main:
            model.save_pretrained(export)
        PartialState().wait_for_everyone()
        del model, base
        # In fp32, as all others are measured.
        base = nn.Module.to(load_packed(packed, dtype=torch.float32), training.device)
        model = PeftModel.from_pretrained(base, str(export))
    else:
        model = quantized(a, training, train)
        if method == "qat":
            fit(MetisTrainer, method, model, a, training, train, callbacks=quiet)
        elif method == "qad":
            teacher = {"teacher": a.model, "temperature": a.temperature,
                       "cross_entropy_share": a.cross_entropy_share}  # fmt: skip
            fit(DistillTrainer, method, model, a, training, train, callbacks=quiet, **teacher)
        if method != "ptq":
            trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        if main:
            saved = Path(training.output_dir) / method / "model"
            cached = getattr(AutoConfig.from_pretrained(a.model), "use_cache", None)
            if cached is not None:  # off in training, and of use in generation
                model.config.use_cache = cached
            model.save_pretrained(saved)
            tokenizer.save_pretrained(saved)
            export_checkpoint(saved, export, format=a.layout)
        PartialState().wait_for_everyone()  # lora reads what ptq has exported
        if main and a.layout == "compressed-tensors" and find_spec("compressed_tensors"):
            reader = nn.Module.to(load_deployed(export), training.device)
    exact = None if method == "exact" else load(a, training)
    measured = {}
    for name, rows in texts.items():
        loss, divergence = losses(model, rows, batch, exact)
        read = None if reader is None else losses(reader, rows, batch)[0]
        measured[name] = Measured(loss, divergence, read)
    code = " ".join(filter(None, (commit(), numerics_digest()[:6])))
    exported = str(export) if method in METHODS else None
    return Outcome(method, measured, trained, steps if trained else 0, exported, code)


# ---- the run: what is finished stays, and each method is written down when it is -----------------


def parse(argv: list[str] | None = None) -> tuple[Arguments, TrainingArguments]:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    parser = HfArgumentParser(
        (Arguments, TrainingArguments), description=__doc__, allow_abbrev=False
    )
    defaults = DEFAULTS | (SMOKE if "--smoke" in argv else {})
    parser.set_defaults(**{name: str(value) for name, value in defaults.items()})
    if "--smoke" in argv or {"--dry_run", "--dry-run"} & {*argv}:
        parser.set_defaults(use_cpu=True)
    a, training = parser.parse_args_into_dataclasses(argv)
    return a, training


def describe(a: Arguments, training: TrainingArguments, size: tuple[int, int], train: Tensor,
             texts: dict[str, Tensor]) -> str:  # fmt: skip
    """Return lines of text: parameters, data, steps and memory of a run."""
    parameters, packed = size
    computed, mib = 2 if training.bf16 else 4, 2**20  # bytes of a number; for people
    export = 2 * parameters - packed * (16 - 4.5) / 8
    tokens = training.max_steps * a.global_batch * a.sequence_length
    lines = [
        f"model      {parameters:,} parameters, {packed:,} of them packed",
        f"export     {export / mib:,.0f} MiB; in BF16 {2 * parameters / mib:,.0f} MiB",
        f"data       {len(train):,} sequences of {a.sequence_length} tokens to train on",
        *(f"measured   on {x[:, 1:].numel():,} tokens of {name}" for name, x in texts.items()),
        f"training   {training.max_steps:,} steps, {tokens:,} tokens, each sequence "
        f"{tokens / train.numel():.1f} times",
        f"memory     {16 * parameters / mib:,.0f} MiB for weights, gradients and Adam of qat and "
        f"qad, {computed * parameters / mib:,.0f} MiB more for qad's teacher, "
        f"{(packed * 4.5 / 8 + (parameters - packed) * computed) / mib:,.0f} MiB for the packed "
        "base of lora; activations come on top",
    ]
    return "\n".join(lines)


def finetune(a: Arguments, training: TrainingArguments) -> list[Outcome]:
    """Run the methods that are not finished; return the outcomes of the directory."""
    main, out = training.process_index == 0, Path(training.output_dir)
    say = print if main else lambda text: None
    if a.smoke and not a.model:
        with training.main_process_first(local=False):
            a.model, data = smoke_model(out, write=main)
        a.data = a.data or data
    tokenizer, *size = check(a, training)
    train, texts = load_data(a, tokenizer)
    vocabulary = AutoConfig.from_pretrained(a.model).get_text_config().vocab_size
    for rows in (train, *texts.values()):
        check_vocabulary(rows, vocabulary, a.model)
    if a.dry_run:
        print(describe(a, training, (size[0], size[1]), train, texts))
        return []
    settings = {k: v for k, v in asdict(a).items() if k not in FREE}
    given = training.to_dict().items()
    settings |= {k: v for k, v in given if not k.startswith(FREE_TRAINING)}
    settings["format_version"] = RESULT_VERSION
    files = [Path(str(path)) for path in (a.model, a.data, *parts(a.held_out))]
    inputs = {str(path): digest_of_path(path) for path in files if path.exists()}  # else of the hub
    store, results = Store(out, "--output_dir", training.device), out / "results.json"
    chosen = [method for method in METHODS if method == "ptq" or method in parts(a.method)]
    folders = {method: Path(a.export or out / "export") / method for method in chosen}
    with ExitStack() as held:
        if main:
            held.enter_context(store.hold())
            store.claim(settings, inputs)
        PartialState().wait_for_everyone()
        record = read_json(results) if results.is_file() else {"outcomes": []}
        finished = {values["method"]: Outcome.of(values) for values in record["outcomes"]}
        begun = record.get("exporting", {})  # a killed export is made again
        for method, folder in folders.items():
            ours = begun.get(method) == str(folder.resolve())
            if main and method not in finished and folder.exists() and any(folder.iterdir()):
                if not ours:
                    raise ValueError(
                        f"{folder} exists already, and {method} would be exported there; remove "
                        "it, or choose another --export"
                    )
                shutil.rmtree(folder)
        for method in ("exact", "ptq", *parts(a.compare), *chosen[1:]):
            if (done := finished.get(method)) is not None:
                where = f", exported to {done.directory}" if done.directory else ""
                say(f"{method}: finished before{where}")
                continue
            say(f"{method} ...")
            folder = folders.get(method, out)
            if method in folders:
                begun[method] = str(folder.resolve())
                if main:
                    write_json(results, {**record, "exporting": begun})
            packed = finished["ptq"].directory if method == "lora" else None
            finished[method] = run_method(
                method, a, training, tokenizer, train, texts, folder, packed
            )
            # What is measured as it is, then what was trained.
            names = [name for name in finished if name not in METHODS[1:]] + list(METHODS[1:])
            outcomes = [finished[name] for name in names if name in finished]
            record = {
                "format_version": RESULT_VERSION,
                "arguments": asdict(a) | {"data": Path(str(a.data)).name},
                "learning_rate": training.learning_rate,
                "seed": training.seed,
                "tokens": training.max_steps * a.global_batch * a.sequence_length,
                "held_out_tokens": {name: rows[:, 1:].numel() for name, rows in texts.items()},
                "outcomes": [asdict(outcome) for outcome in outcomes],
                **environment(training.device),
            }
            if main:
                write_json(results, {**record, "exporting": begun})
                (out / "table.md").write_text(markdown_tables(outcomes) + different_code(outcomes))
    return [Outcome.of(values) for values in record["outcomes"]]


def main() -> None:
    try:
        a, training = parse()
        outcomes = finetune(a, training)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if outcomes and training.process_index == 0:
        from rich.console import Console

        console = Console()
        for text in outcomes[0].texts:
            title = f"{a.model} on {text}, nats per token"
            console.print(terminal_table(HEADER, rows_of([outcomes], text), title=title))
        exported = [f"{each.method} to {each.directory}" for each in outcomes if each.directory]
        said = f"{different_code(outcomes)}Exported: {', '.join(exported)}"
        console.print(said, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
