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

import sys
from pathlib import Path

from metis_hf.lab.finetune.arguments import FinetuneArguments
from metis_hf.lab.finetune.report import (
    HEADER,
    describe,
    different_code,
    tables_of,
)
from metis_hf.lab.finetune.run import LEARNING_RATE, Finetuning
from metis_hf.lab.finetune.smoke import smoke_model
from metis_hf.lab.recipe import one_line_errors
from metis_hf.lab.recipe_arguments import parse_arguments
from metis_hf.lab.show.table import terminal_table

DEFAULTS = {
    "output_dir": "runs/finetune-nvfp4",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 42,
}
SMOKE = {
    "output_dir": "runs/smoke-finetune-nvfp4",
    "method": "ptq,qat,qad,lora",
    "max_steps": 4,
    "learning_rate": 1e-3,
    "sequence_length": 64,
    "global_batch": 4,
    "eval_sequences": 4,
    "calibration_sequences": 4,
    "logging_steps": 1,
    "dataloader_pin_memory": False,
}


def main() -> None:
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    with one_line_errors():
        arguments, training = parse_arguments(
            DEFAULTS, SMOKE, description=__doc__, argv=argv, kind=FinetuneArguments
        )
        if arguments.smoke and not arguments.model:
            directory = Path(training.output_dir)
            with training.main_process_first(local=False):
                arguments.model, data = smoke_model(directory, write=training.process_index == 0)
            arguments.data = arguments.data or data
        run = Finetuning(arguments, training)
        if arguments.dry_run:
            held_out, bf16 = run.held_out.tokens, bool(training.bf16)
            print(describe(arguments, len(run.train), held_out, run.steps, bf16=bf16))
            return
    outcomes = run.run()
    if run.is_main:
        from rich.console import Console

        console = Console()
        for text, rows in tables_of([outcomes]).items():
            title = f"{arguments.model} on {text}, nats per token"
            console.print(terminal_table(HEADER, rows, title=title))
        exported = [f"{each.method} to {each.directory}" for each in outcomes if each.directory]
        said = [*different_code(outcomes), f"Exported: {', '.join(exported)}"]
        console.print("\n".join(said), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
