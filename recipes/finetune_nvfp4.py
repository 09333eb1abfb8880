"""Fine-tune a causal language model for deployment in NVFP4 (W4A4 or W4A16).

    python recipes/finetune_nvfp4.py MODEL --data chat.jsonl --method qad --export DIR
    python recipes/finetune_nvfp4.py MODEL --data chat.jsonl --method ptq,qat,qad,lora \\
        --held-out prose.jsonl,questions.jsonl --compare nvfp4-rne,four-over-six,metis
    python recipes/finetune_nvfp4.py --smoke

Methods: ptq (calibrate, train nothing), qat (train with quantizers on), qad (qat towards the
unquantized model's distributions), lora (adapters over the packed weights). The run ends with one
table for each held-out text: the loss of the exact model, of ptq, of the schemes of --compare and
of each method. docs/finetuning.md says which method to use.
"""

from __future__ import annotations

import copy
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

from metis_hf import MetisCallback, MetisConfig, MetisTrainer, calibrate, get_metis_model
from metis_hf.data.chat import check_vocabulary, chunked_sequences, first_sequences
from metis_hf.data.chunked import causal_batch
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.packed import load_deployed, load_packed
from metis_hf.deploy.source import check_packable
from metis_hf.lab.compare.training import whole_batches
from metis_hf.lab.cost import meta_model
from metis_hf.lab.finetune_table import Measured, Outcome, different_code, losses, markdown_tables
from metis_hf.lab.rank_memory import Workload
from metis_hf.lab.smoke import smoke_model
from metis_hf.lab.store import Store, numerics_digest
from metis_hf.lab.training_plan import plan_training, print_plan
from metis_hf.schemes import scheme_info
from metis_hf.shared.checkpoints import last_checkpoint, load_complete
from metis_hf.shared.inputs import digest_of_path
from metis_hf.shared.messages import one_line_errors
from metis_hf.shared.quiet import no_warnings
from metis_hf.shared.records import commit, environment, read_json, write_json
from metis_hf.training.cuda_graph import obstacles
from metis_hf.training.distillation import DistillTrainer

METHODS = ("ptq", "qat", "qad", "lora")
RESULT_VERSION = 3  # earlier versions held out other tokens of a text
# Arguments that do not affect results; for TrainingArguments, prefixes of their names.
FREE = ("method", "compare", "export", "dry_run", "device")
FREE_TRAINING = (
    "output_dir", "log", "report_to", "run_name", "project", "trackio", "disable_tqdm", "save_",
    "hub_", "push_to_hub", "resume_from_checkpoint", "restore_callback_states", "use_cpu", "do_",
    "local_rank", "ddp_", "dataloader_num", "dataloader_p", "dataloader_multi", "debug", "skip_mem",
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
    model: str = option("", "Causal language model: a directory or a hub name.")
    data: str | None = option(None, 'JSON lines of {"messages": ...} or {"text": ...}, or text.')
    held_out: str | None = option(None, "Held-out files, comma-separated; default: end of --data.")
    method: str = option("qad", f"Comma-separated methods to run: {', '.join(METHODS)}.")
    compare: str = option("", "Comma-separated schemes to measure the untrained model in.")
    export: str | None = option(None, "Directory for the exports; default: inside output_dir.")
    format: Literal["compressed-tensors", "modelopt"] = option("compressed-tensors", "File layout.")
    scheme: Literal["w4a4", "w4a16"] = option("w4a4", "w4a16 quantizes only the weights.")
    calibration_method: Literal["mse", "amax", "percentile"] = option("mse", "For input scales.")
    calibration_sequences: int = option(32, "Number of training sequences used for calibration.")
    sequence_length: int = option(512, "Sequence length in tokens.")
    eval_sequences: int = option(32, "Number of sequences to evaluate from each held-out file.")
    tokens: float = option(1e6, "Number of training tokens, unless --max_steps is given.")
    global_batch: int = option(16, "Sequences per optimizer step, over all processes.")
    temperature: float = option(1.0, "Softmax temperature of teacher and student in qad.")
    cross_entropy_share: float = option(0.0, "Weight of the labels' cross entropy in qad's loss.")
    lora_rank: int = option(16, "Rank of the LoRA adapters.")
    lora_learning_rate: float = option(2e-4, "Replaces --learning_rate for the LoRA adapters.")
    smoke: bool = option(False, "Run the same code on the CPU in a minute, with a tiny model.")
    dry_run: bool = option(False, "Print the tokens, steps, time and memory of the run, and exit.")
    device: Literal["h100", "h200", "cpu"] | None = option(None, "Device that --dry-run assumes.")

    def __post_init__(self) -> None:
        for name in parts(self.method) or [""]:
            if name not in METHODS:
                raise ValueError(f"--method {name!r}; choose from {', '.join(METHODS)}")
        above, most = 5e-324, sys.float_info.max  # the finite numbers above 0
        for names, least, largest, expected in (
            ("calibration_sequences eval_sequences global_batch lora_rank", 1, most, "at least 1"),
            ("sequence_length", 2, most, "at least 2"),
            ("tokens temperature lora_learning_rate", above, most, "a finite number above 0"),
            ("cross_entropy_share", 0, 1, "a share from 0 to 1"),
        ):
            for name in names.split():
                if not least <= getattr(self, name) <= largest:
                    raise ValueError(f"--{name} {getattr(self, name)}; expected {expected}")
        for name in parts(self.compare):
            scheme_info(name)  # raises an error that lists the schemes


def parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


# ---- model and data -----------------------------------------------------------------------------


def load_data(a: Arguments, tokenizer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token ids [n length] to train on, and held-out text -> token ids [n length]."""
    data, length, count = Path(str(a.data)), a.sequence_length, a.eval_sequences
    files = [Path(part) for part in parts(a.held_out)]
    if not files:
        train, held = chunked_sequences(data, tokenizer, length, count)
        return train, {"held-out": held}
    if len({file.stem for file in files}) < len(files):
        raise ValueError(f"--held-out {a.held_out}: two files have the same name; rename one")
    if any(file.is_file() and file.samefile(data) for file in files):
        raise ValueError(
            f"--held-out {a.held_out}: {data} is also the file of --data; leave "
            "--held-out out to hold out the end of the data"
        )
    texts = {file.stem: first_sequences(file, tokenizer, length, count) for file in files}
    return first_sequences(data, tokenizer, length, sys.maxsize), texts


def load(a: Arguments, training: TrainingArguments) -> Any:
    """Return the unquantized model, with fp32 weights on this process's device."""
    model = load_complete(transformers.AutoModelForCausalLM, a.model, dtype=torch.float32)
    return nn.Module.to(model, training.device)


def check(a: Arguments, training: TrainingArguments) -> Workload:
    """Refuse arguments that cannot run, set the accumulation, and return the workload."""
    if not a.model:
        raise ValueError("no model: give a directory or a hub name, or try --smoke")
    if a.data is None:
        raise ValueError("no data: give --data FILE with JSON lines of messages or text")
    launched = any(parse_flag_from_env(f"ACCELERATE_USE_{x}") for x in ("FSDP", "DEEPSPEED"))
    if training.fsdp or training.deepspeed or launched:
        raise ValueError(
            "fine-tuning for deployment exports whole models from one process, but FSDP and "
            "DeepSpeed shard them; run it in one process or under DDP (accelerate launch)"
        )
    for name, instead in (
        ("num_train_epochs", "--tokens sets the length of the run"),
        (
            "resume_from_checkpoint",
            "the same command continues with the methods that are not finished",
        ),
    ):
        if (value := getattr(training, name)) != getattr(TrainingArguments, name):
            raise ValueError(f"{name}={value}: {instead}; leave it out")
    config = AutoConfig.from_pretrained(a.model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and a.sequence_length > context:
        raise ValueError(
            f"--sequence-length {a.sequence_length} does not fit in the model's context of "
            f"{context} tokens; choose shorter sequences"
        )
    with no_warnings():  # refuse a model that cannot be packed before any weight is read
        check_packable(get_metis_model(meta_model(config), MetisConfig(scheme=a.scheme)))
    if training.max_steps <= 0:
        training.max_steps = max(1, round(a.tokens / (a.global_batch * a.sequence_length)))
    work = Workload(
        steps=training.max_steps, sequence_length=a.sequence_length, global_batch=a.global_batch,
        device_batch=training.per_device_train_batch_size, world_size=training.world_size,
        bf16=training.bf16, checkpointing=training.gradient_checkpointing,
    )  # fmt: skip
    training.gradient_accumulation_steps = work.accumulation
    return work


# ---- train, export, measure ---------------------------------------------------------------------


def fit(kind: type[Trainer], method: str, model: Any, a: Arguments, training: Any, train: Tensor,
        **options: Any) -> int:  # fmt: skip
    """Train a model in place, from its last checkpoint if any; return the trained parameters."""
    args = copy.copy(training)
    args.output_dir = str(Path(training.output_dir) / method)
    if method == "lora":
        args.learning_rate = a.lora_learning_rate
        # Packed weights are buffers that are equal on all processes and that DDP cannot broadcast.
        args.ddp_broadcast_buffers = False
    rows = Dataset.from_dict({"input_ids": train.tolist()}).shuffle(seed=args.seed)
    rows = whole_batches(rows, args).with_format("torch")
    run = kind(model=model, args=args, train_dataset=rows, data_collator=causal_batch, **options)
    run.train(resume_from_checkpoint=last_checkpoint(Path(args.output_dir)))
    # accelerate wraps the forward pass in autocast; losses are measured without autocast.
    run.accelerator.unwrap_model(run.model_wrapped, keep_fp32_wrapper=False)
    return sum(param.numel() for param in model.parameters() if param.requires_grad)


def run_method(
    method: str, a: Arguments, training: Any, tokenizer: Any, train: Tensor,
    texts: dict[str, Tensor], export: Path | None, packed: str | None,
) -> Outcome:  # fmt: skip
    """Train, export and measure; `packed` is the folder of ptq's export, the base of lora."""
    transformers.set_seed(training.seed)  # adapters are drawn before Trainer sets the seed
    main, batch = training.process_index == 0, training.per_device_eval_batch_size
    trained, reader = 0, None
    if method == "lora":
        if packed is None or not Path(packed).is_dir():
            raise ValueError(
                f"lora trains adapters on the packed weights that ptq exported to {packed}, but "
                "that folder is missing; restore it, or choose another --output_dir"
            )
        base = load_packed(packed, dtype=torch.bfloat16 if training.bf16 else torch.float32)
        adapters = LoraConfig(
            r=a.lora_rank, lora_alpha=2 * a.lora_rank, target_modules="all-linear"
        )
        model: Any = get_peft_model(nn.Module.to(base, training.device), adapters)
        trained = fit(Trainer, method, model, a, training, train)
        if main:
            model.save_pretrained(export)
        PartialState().wait_for_everyone()
        del model, base
        # All methods are measured in fp32.
        base = nn.Module.to(load_packed(packed, dtype=torch.float32), training.device)
        model = PeftModel.from_pretrained(base, str(export))
    else:
        model = load(a, training)
        if method != "exact":
            scheme = a.scheme if method in METHODS else method  # else a scheme of --compare
            model = get_metis_model(model, MetisConfig(scheme=scheme, seed=training.seed))
    if method in ("ptq", "qat", "qad"):
        batches = train[: a.calibration_sequences].split(batch)
        with torch.autocast(training.device.type, torch.bfloat16, enabled=bool(training.bf16)):
            calibrate(model, list(batches), method=a.calibration_method)
        options: dict[str, Any] = {
            "callbacks": [MetisCallback(health_interval=0)], "cuda_graphs": not obstacles(training)
        }  # fmt: skip
        if method == "qat":
            trained = fit(MetisTrainer, method, model, a, training, train, **options)
        elif method == "qad":
            trained = fit(DistillTrainer, method, model, a, training, train, **options,
                          teacher=a.model, temperature=a.temperature,
                          cross_entropy_share=a.cross_entropy_share)  # fmt: skip
        if main:
            saved = Path(training.output_dir) / method / "model"
            # Training turned the cache off; generation needs it.
            model.config.use_cache = getattr(AutoConfig.from_pretrained(a.model), "use_cache", True)
            model.save_pretrained(saved)
            tokenizer.save_pretrained(saved)
            export_checkpoint(saved, export, format=a.format)
        PartialState().wait_for_everyone()  # lora reads ptq's export
        if main and a.format == "compressed-tensors" and find_spec("compressed_tensors"):
            reader = nn.Module.to(load_deployed(export), training.device)
    exact = None if method == "exact" else load(a, training)
    measured = {}
    for name, rows in texts.items():
        loss, divergence = losses(model, rows, batch, exact)
        read = None if reader is None else losses(reader, rows, batch)[0]
        measured[name] = Measured(loss, divergence, read)
    code = " ".join(filter(None, (commit(), numerics_digest()[:6])))
    steps = training.max_steps if trained else 0
    return Outcome(method, measured, trained, steps, export and str(export), code)


# ---- the run: keeps finished methods, and records each method when it finishes -------------------


def parse() -> tuple[Arguments, TrainingArguments]:
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    parser = HfArgumentParser(
        (Arguments, TrainingArguments), description=__doc__, allow_abbrev=False,
        usage="%(prog)s MODEL [--argument VALUE ...]",
    )  # fmt: skip
    smoke = "--smoke" in argv
    parser.set_defaults(**{k: str(v) for k, v in (DEFAULTS | (SMOKE if smoke else {})).items()})
    if smoke or {"--dry_run", "--dry-run"} & {*argv}:
        parser.set_defaults(use_cpu=True)
    return parser.parse_args_into_dataclasses(argv)


def finetune(a: Arguments, training: TrainingArguments) -> list[Outcome]:
    """Run the methods that are not finished; return the outcomes of the directory."""
    main, out = training.process_index == 0, Path(training.output_dir)
    say = print if main else lambda text: None
    if a.smoke and not a.model:
        with training.main_process_first(local=False):
            a.model, data = smoke_model(out, write=main)
        a.data = a.data or data
    work = check(a, training)
    tokenizer, config = AutoTokenizer.from_pretrained(a.model), AutoConfig.from_pretrained(a.model)
    train, texts = load_data(a, tokenizer)
    for rows in (train, *texts.values()):
        check_vocabulary(rows, config.get_text_config().vocab_size, a.model)
    measured = {name: rows[:, 1:].numel() for name, rows in texts.items()}
    if a.dry_run:
        if main:
            plan = plan_training(config, MetisConfig(scheme=a.scheme), work)
            trained = sum(method != "ptq" for method in parts(a.method))
            print_plan(plan, device=a.device, runs=max(1, trained))
            said = ", ".join(f"{count:,} tokens of {name}" for name, count in measured.items())
            print(f"{len(train):,} training sequences; losses are measured on {said}")
        return []
    settings = {"format_version": RESULT_VERSION}
    settings |= {k: v for k, v in asdict(a).items() if k not in FREE}
    settings |= {k: v for k, v in training.to_dict().items() if not k.startswith(FREE_TRAINING)}
    files = [Path(str(path)) for path in (a.model, a.data, *parts(a.held_out))]
    inputs = {str(path): digest_of_path(path) for path in files if path.exists()}  # not hub names
    store, results = Store(out, "--output_dir", training.device), out / "results.json"
    marks = out / "exporting.json"  # export folders: a killed run's partial export is replaced
    chosen = [method for method in METHODS if method == "ptq" or method in parts(a.method)]
    folders = {method: Path(a.export or out / "export") / method for method in chosen}
    with ExitStack() as held:
        if main:
            held.enter_context(store.hold())
            store.claim(settings, inputs)
        PartialState().wait_for_everyone()
        record = read_json(results)["outcomes"] if results.is_file() else []
        finished = {values["method"]: Outcome.of(values) for values in record}
        begun = read_json(marks) if marks.is_file() else {}
        for method, folder in folders.items():
            if main and method not in finished and folder.exists() and any(folder.iterdir()):
                if begun.get(method) != str(folder.resolve()):
                    raise ValueError(
                        f"{folder} already exists, and {method} would be exported there; remove "
                        "it, or choose another --export"
                    )
                shutil.rmtree(folder)
        if main:
            write_json(marks, begun | {name: str(each.resolve()) for name, each in folders.items()})
        for method in ("exact", "ptq", *parts(a.compare), *chosen[1:]):
            if (done := finished.get(method)) is not None:
                where = f", exported to {done.directory}" if done.directory else ""
                say(f"{method}: already finished{where}")
                continue
            say(f"{method} ...")
            packed = finished["ptq"].directory if method == "lora" else None
            finished[method] = run_method(
                method, a, training, tokenizer, train, texts, folders.get(method), packed
            )
            if main:
                outcomes = sorted(finished.values(), key=lambda each: each.trained > 0)
                record = {
                    "format_version": RESULT_VERSION,
                    "arguments": asdict(a) | {"data": Path(str(a.data)).name},
                    "learning_rate": training.learning_rate,
                    "seed": training.seed,
                    "tokens": work.steps * work.tokens_per_step,
                    "held_out_tokens": measured,
                    "outcomes": [asdict(outcome) for outcome in outcomes],
                    **environment(training.device),
                }
                write_json(results, record)
                (out / "table.md").write_text(markdown_tables(outcomes) + different_code(outcomes))
    return sorted(finished.values(), key=lambda each: each.trained > 0)


def main() -> None:
    with one_line_errors():
        a, training = parse()
        outcomes = finetune(a, training)
    if outcomes and training.process_index == 0:
        print(f"\n{a.model}, nats per token\n\n{markdown_tables(outcomes)}")
        exported = [f"{each.method} to {each.directory}" for each in outcomes if each.directory]
        print(f"{different_code(outcomes)}Exported: {', '.join(exported)}")


if __name__ == "__main__":
    main()
