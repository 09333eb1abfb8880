"""Train a language model from scratch with FP4 GEMMs: Llama-3 8B on 100B tokens, as in Metis.

    accelerate launch --config_file recipes/accelerate/8gpu_fsdp2.yaml recipes/llama3_8b.py \\
        --data DIR                                             # the run
    python recipes/llama3_8b.py --smoke                        # the same code on a CPU, in seconds
    python recipes/llama3_8b.py --dry-run --world-size 64      # what the run takes
    python recipes/llama3_8b.py --config recipes/gpt2_130m.yaml --data DIR   # another size

The model, 100B tokens of DCLM, W4A4G4 in NVFP4 and rank 1.5 % are the paper's (arXiv 2509.00404).
recipes/README.md gives the source of every other number. To train something else, copy this file.
"""

import json
import math
import os
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from metis_hf import MetisCallback, MetisConfig, MetisTrainer, get_metis_model, scheme_names
from metis_hf.data.chunked import causal_batch, load_chunked, read_meta
from metis_hf.data.corpus import chunk, stdlib_documents, train_tokenizer
from metis_hf.lab.rank_memory import Workload
from metis_hf.lab.training_plan import plan_training, print_plan
from metis_hf.schemes import import_schemes
from metis_hf.shared.checkpoints import last_checkpoint, newest_first
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.messages import one_line_errors
from metis_hf.shared.yaml_file import as_arguments, read_yaml
from metis_hf.training.cuda_graph import obstacles

MODEL = {  # Llama-3 8B as published; keyword arguments of a transformers config
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TRAINING = {  # transformers' TrainingArguments
    "output_dir": "runs/llama3_8b",
    "learning_rate": 1.5e-4,  # the authors' script for Llama
    "lr_scheduler_type": "linear",  # the authors' scripts
    "warmup_steps": 0.01,  # of all steps; the scripts have 20 to 50 steps
    "weight_decay": 0.1,  # two of the scripts; not on biases, norms, u and vh
    "adam_beta2": 0.95,  # the scripts
    "max_grad_norm": 1.0,  # the script for Llama
    "bf16": True,  # GEMMs under autocast; weights and optimizer are in fp32
    "seed": 42,  # the scripts
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "logging_steps": 10,
    "save_steps": 1000,
    "save_total_limit": 2,
    "ddp_find_unused_parameters": False,
    "dataloader_num_workers": 2,
}
# --smoke: a tiny model of the same architecture, a few steps, the standard library as text.
SMOKE_MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMOKE = {
    "output_dir": "runs/smoke",
    "max_steps": 4,
    "sequence_length": 64,
    "global_batch": 4,
    "per_device_train_batch_size": 2,
    "eval_sequences": 8,
    "health_interval": 100,
    "save_steps": 2,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
}


@dataclass
class RecipeArguments:
    """Arguments of the recipe besides TrainingArguments and those that `parse_arguments` adds."""

    data: str | None = field(
        default=None, metadata={"help": "Training data: a folder from recipes/prepare_data.py."}
    )
    scheme: str = field(
        default="metis", metadata={"help": f"Quantization scheme: {', '.join(scheme_names())}."}
    )
    tokens: float = field(default=100e9, metadata={"help": "Used unless --max_steps is given."})
    sequence_length: int = field(default=1024, metadata={"help": "Sequence length in tokens."})
    global_batch: int = field(
        default=512, metadata={"help": "Sequences per optimizer step, over all processes."}
    )
    eval_sequences: int = field(
        default=1024, metadata={"help": "From DATA/validation, or else from the end of the data."}
    )
    health_interval: int = field(
        default=500, metadata={"help": "Steps between measurements of spectral health; 0: never."}
    )
    resume: bool = field(
        default=False, metadata={"help": "Resume from the last checkpoint in --output_dir."}
    )
    smoke: bool = field(default=False, metadata={"help": "Train a tiny model on the CPU."})
    dry_run: bool = field(default=False, metadata={"help": "Print steps, time, memory; exit."})
    world_size: int | None = field(default=None, metadata={"help": "Processes for --dry-run."})
    device: Literal["h100", "h200", "cpu"] | None = field(
        default=None, metadata={"help": "Device for --dry-run; default: this machine, or h200."}
    )
    json: bool = field(default=False, metadata={"help": "Print the dry run as JSON."})

    def __post_init__(self) -> None:
        if not math.isfinite(self.tokens):
            raise ValueError(f"--tokens {self.tokens}; expected a finite number, for example 1e9")
        if not self.dry_run and (self.json or self.world_size is not None or self.device):
            raise ValueError("--json, --world-size and --device apply only to --dry-run; add it")
        if self.data and not self.dry_run:
            read_meta(Path(self.data))  # here, because TrainingArguments may refuse the machine
        elif not (self.smoke or self.dry_run):
            raise ValueError("no data: give --data DIR with data from recipes/prepare_data.py, "
                             "or try --smoke")  # fmt: skip


def parse_arguments():
    """Parse arguments; the command line overrides --smoke, --config FILE.yaml, the defaults."""
    first = ArgumentParser(add_help=False)
    first.add_argument("--config", help="YAML of these arguments; the command line overrides it.")
    first.add_argument("--model", type=json.loads, default=MODEL, help="Model config as JSON.")
    first.add_argument("--metis", type=json.loads, default={}, help="MetisConfig fields as JSON.")
    first.add_argument("--import", nargs="+", default=[], metavar="FILE_OR_MODULE",
                       help="Python files or modules that register your schemes.")  # fmt: skip
    parser = HfArgumentParser(
        (RecipeArguments, TrainingArguments), description=__doc__, allow_abbrev=False,
        usage="%(prog)s [--argument VALUE ...]", parents=[first],
    )  # fmt: skip
    parser.set_defaults(**TRAINING)
    command = sys.argv[1:]
    config = parser.parse_known_args(command)[0].config
    given = as_arguments(read_yaml(Path(config))) if config else []
    asked = parser.parse_known_args(given + command)[0]
    if asked.smoke:
        given += as_arguments(SMOKE)
    if asked.smoke or asked.dry_run:
        given.append("--use_cpu")
    return parser.parse_args_into_dataclasses(args=given + command)


def prepare(held: ExitStack) -> MetisTrainer | None:
    """Return the trainer with its model and data; None after a dry run."""
    recipe, training, more = parse_arguments()
    length, batch = recipe.sequence_length, recipe.global_batch
    for source in getattr(more, "import"):
        import_schemes(source)
    if not isinstance(more.metis, dict) or "scheme" in more.metis:
        raise ValueError(
            f"--metis {more.metis}; expected a JSON object of MetisConfig fields without the "
            "scheme, which --scheme sets"
        )
    metis = MetisConfig.from_dict({"seed": training.seed, **more.metis, "scheme": recipe.scheme})
    config = AutoConfig.for_model(**more.model | (SMOKE_MODEL if recipe.smoke else {}))
    if length > getattr(config, "max_position_embeddings", length):
        raise ValueError(
            f"--sequence-length {length} does not fit in the model's context of "
            f"{config.max_position_embeddings} tokens; choose shorter sequences"
        )
    if training.max_steps <= 0:
        training.max_steps = -(-int(recipe.tokens) // max(batch * length, 1))  # rounded up
    world = training.world_size if recipe.world_size is None else recipe.world_size
    load = Workload(
        steps=training.max_steps,
        sequence_length=length,
        global_batch=batch,
        device_batch=training.per_device_train_batch_size,
        world_size=world,
        bf16=training.bf16,
        checkpointing=training.gradient_checkpointing,
    )
    if recipe.dry_run:
        if training.process_index == 0:
            plan = plan_training(config, metis, load)
            if recipe.json:
                print(json.dumps(plan.to_dict(), indent=2))
            else:
                print_plan(plan, device=recipe.device)
        return None
    if training.resume_from_checkpoint:
        raise ValueError(
            "--resume_from_checkpoint is not supported; use --resume, which continues in output_dir"
        )
    if training.gradient_accumulation_steps not in (1, load.accumulation):
        raise ValueError(
            f"gradient_accumulation_steps={training.gradient_accumulation_steps} contradicts "
            f"global_batch={batch}, which requires {load.accumulation} on {world} processes; "
            "leave it out"
        )
    training.gradient_accumulation_steps = load.accumulation

    # One run at a time in output_dir; --resume continues from the last complete checkpoint.
    output = Path(training.output_dir)
    if training.process_index == 0:
        held.enter_context(hold_directory(output, "--output_dir"))
    if not recipe.resume and (present := newest_first(output)):
        raise ValueError(
            f"output_dir {output} already has checkpoints ({present[0].name}); continue with "
            "--resume, or choose another --output_dir"
        )

    # Data: chunked tokens from recipes/prepare_data.py, or the standard library's text (--smoke).
    held_out = tokenizer = None
    if recipe.data is not None:
        data = Path(recipe.data)
        if (own := read_meta(data)["seq_len"]) != length:
            raise ValueError(
                f"--data {data} contains sequences of {own} tokens, but the run uses {length}; "
                f"pass --sequence-length {own} or chunk again"
            )
        train = load_chunked(data, vocab_size=config.vocab_size)
        if (data / "validation" / "meta.json").is_file():
            held_out = load_chunked(data / "validation", vocab_size=config.vocab_size)
        if (data / "tokenizer").is_dir():
            tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    else:
        documents = stdlib_documents()[:60]
        tokenizer = train_tokenizer(documents, config.vocab_size)
        train = chunk(documents, tokenizer, length).select_columns(["input_ids"])
    count = recipe.eval_sequences
    left = len(train) - (count if held_out is None else 0)
    if count < 1 or left < batch:
        raise ValueError(
            f"eval_sequences={count} leaves {left} training sequences; a step needs {batch}, and "
            "the evaluation needs at least one"
        )
    if held_out is None:  # the last sequences
        held_out, train = train.select(range(left, left + count)), train.select(range(left))
    held_out = held_out.select(range(min(count, len(held_out))))
    # Shuffle once, in memory: a sampler would keep a list of all indices on every process.
    seed = training.seed if training.data_seed is None else training.data_seed
    train = train.shuffle(seed=seed, keep_in_memory=True)
    training.train_sampling_strategy = "sequential"
    if load.steps * batch > len(train):  # several epochs, each of full batches
        train = train.select(range(len(train) // batch * batch))
        if training.process_index == 0:
            print(f"Each of the {len(train):,} training sequences is seen "
                  f"{load.steps * batch / len(train):.1f} times.")  # fmt: skip

    # Convert a model with fp32 weights, which are the same on every process.
    set_seed(training.seed)
    with training.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    get_metis_model(model, metis)
    if training.process_index == 0:
        print(model.metis_report, flush=True)

    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        # Otherwise every rank would accumulate unsharded gradients, in bf16.
        training.accelerator_config.gradient_accumulation_kwargs = {"sync_each_batch": True}
    return MetisTrainer(
        model=model,
        args=training,
        train_dataset=train.with_format("torch"),
        eval_dataset=held_out.with_format("torch"),
        processing_class=tokenizer,
        data_collator=causal_batch,
        callbacks=[MetisCallback(health_interval=recipe.health_interval)],
        cuda_graphs=not obstacles(training),
    )


def main() -> None:
    with ExitStack() as held:
        with one_line_errors():
            trainer = prepare(held)
        if trainer is None:
            return
        trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))
        trainer.save_model()
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
