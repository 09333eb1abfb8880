"""Llama-3 8B from scratch on 100B tokens with FP4 GEMMs, the largest run of the Metis paper.

    accelerate launch --config_file recipes/accelerate/8gpu_fsdp2.yaml recipes/llama3_8b.py \\
        --data DIR
    python recipes/llama3_8b.py --smoke
    python recipes/llama3_8b.py --dry-run --world-size 64

From the paper (arXiv 2509.00404): the model, 100B tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from transformers import LlamaConfig

from metis_hf.experiments.recipe import (
    build_model,
    build_trainer,
    check_run,
    dry_run,
    load_data,
    one_line_errors,
    train_and_evaluate,
)
from metis_hf.experiments.recipe_arguments import parse_arguments
from metis_hf.experiments.sizes import SIZES

SIZE = SIZES["8b"]
MODEL = SIZE.config
SMOKE_MODEL = MODEL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DEFAULTS = {
    "output_dir": "runs/llama3_8b",
    "tokens": 100e9,
    "sequence_length": SIZE.sequence_length,
    "global_batch": SIZE.global_batch,
    "seed": 42,
    **SIZE.training,
}
SMOKE = {
    "output_dir": "runs/smoke-llama3_8b",
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


def main() -> None:
    with one_line_errors():
        arguments, training = parse_arguments(DEFAULTS, SMOKE, description=__doc__)
        config = LlamaConfig(**(SMOKE_MODEL if arguments.smoke else MODEL))
        if arguments.dry_run:
            dry_run(config, arguments, training)
            return
        check_run(arguments, training, config)
        train, evaluation, tokenizer = load_data(arguments, training, config)
    model = build_model(config, arguments, training)
    trainer = build_trainer(model, arguments, training, train, evaluation, tokenizer)
    train_and_evaluate(trainer, arguments)


if __name__ == "__main__":
    main()
