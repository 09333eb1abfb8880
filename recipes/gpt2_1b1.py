"""GPT-2 1.1B from scratch on 100B tokens with FP4 GEMMs, the middle run of the Metis paper.

    accelerate launch recipes/gpt2_1b1.py --data DIR
    python recipes/gpt2_1b1.py --smoke
    python recipes/gpt2_1b1.py --dry-run --world-size 8

From the paper (arXiv 2509.00404): the size, at least 32 blocks (it shows layers 1, 16 and 32), 100B
tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from transformers import GPT2Config

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

SIZE = SIZES["1b1"]
MODEL = SIZE.config
SMOKE_MODEL = MODEL | {
    "vocab_size": 512,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DEFAULTS = {
    "output_dir": "runs/gpt2_1b1",
    "tokens": 100e9,
    "sequence_length": SIZE.sequence_length,
    "global_batch": SIZE.global_batch,
    "seed": 42,
    **SIZE.training,
}
SMOKE = {
    "output_dir": "runs/smoke-gpt2_1b1",
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
        config = GPT2Config(**(SMOKE_MODEL if arguments.smoke else MODEL))
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
