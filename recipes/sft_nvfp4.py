"""SFT with TRL, then NVFP4: train, calibrate, train in four bits, export, serve.

    pip install trl compressed-tensors
    python recipes/sft_nvfp4.py --model MODEL --data chat.jsonl --export DIR
    python recipes/sft_nvfp4.py --smoke

Both training runs use the same arguments, all of TRL's SFTConfig. In four bits, `--method qad`
trains towards the distributions of the high-precision model, `--method qat` on the labels.
"""

import sys
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from metis_hf import DistillTrainerMixin, MetisConfig, MetisTrainerMixin, calibrate, get_metis_model
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.staging import check_free
from metis_hf.lab.smoke import smoke_model
from metis_hf.shared.messages import one_line_errors

try:
    from trl import SFTConfig, SFTTrainer
except ImportError:
    sys.exit("recipes/sft_nvfp4.py needs TRL; run pip install trl")

SMOKE = {
    "output_dir": "runs/smoke-sft-nvfp4", "export": "runs/smoke-sft-nvfp4/nvfp4", "max_steps": 30,
    "learning_rate": 5e-4, "max_length": 64, "logging_steps": 5, "save_strategy": "no",
    "use_cpu": True, "bf16": False,
}  # fmt: skip


@dataclass
class Arguments:
    model: str = field(default="", metadata={"help": "Causal LM: a directory or a hub name."})
    data: str = field(default="", metadata={"help": "JSON lines for TRL, or a dataset's hub name."})
    export: str = field(default="nvfp4", metadata={"help": "Directory for the packed model."})
    method: Literal["qad", "qat"] = field(default="qad", metadata={"help": "Four-bit training."})
    scheme: Literal["w4a4", "w4a16"] = field(
        default="w4a4", metadata={"help": "Scheme to deploy; w4a16 quantizes only the weights."}
    )
    smoke: bool = field(default=False, metadata={"help": "Run on the CPU in a minute, tiny."})


class QatTrainer(MetisTrainerMixin, SFTTrainer):
    """SFTTrainer for converted models."""


class QadTrainer(DistillTrainerMixin, MetisTrainerMixin, SFTTrainer):
    """SFTTrainer for converted models that learn from a teacher."""


def main() -> None:
    parser = HfArgumentParser((Arguments, SFTConfig), description=__doc__)
    if "--smoke" in sys.argv:
        parser.set_defaults(**{name: str(value) for name, value in SMOKE.items()})
    a, args = parser.parse_args_into_dataclasses()
    out = Path(args.output_dir)
    if a.smoke and not a.model:
        a.model, a.data = smoke_model(out)
    if not (a.model and a.data):
        raise ValueError("give --model and --data, or try --smoke")
    check_free(Path(a.export).resolve())
    of_sft, of_four_bits = copy(args), copy(args)
    of_sft.output_dir, of_four_bits.output_dir = str(out / "sft"), str(out / a.method)

    # SFT in high precision.
    source = {"path": "json", "data_files": a.data} if Path(a.data).is_file() else {"path": a.data}
    data = load_dataset(**source, split="train").train_test_split(0.05, seed=args.seed)
    shared = {
        "train_dataset": data["train"], "eval_dataset": data["test"],
        "processing_class": AutoTokenizer.from_pretrained(a.model),
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    sft = SFTTrainer(model, of_sft, **shared)
    sft.train()
    sft.save_model()
    losses = {"sft": sft.evaluate()["eval_loss"]}

    # The head stays in high precision: TRL's losses use its weight without calling the module.
    model = AutoModelForCausalLM.from_pretrained(out / "sft", dtype=torch.float32).to(args.device)
    model = get_metis_model(model, MetisConfig(scheme=a.scheme))
    with sft.accelerator.autocast():
        calibrate(model, islice(sft.get_train_dataloader(), 32))

    if a.method == "qad":
        trainer = QadTrainer(model, of_four_bits, teacher=out / "sft", **shared)
    else:
        trainer = QatTrainer(model, of_four_bits, **shared)
    losses[f"{a.scheme}, calibrated"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses[f"{a.scheme}, {a.method}"] = trainer.evaluate()["eval_loss"]

    model.config.use_cache = True  # training turned the cache off
    model.config.name_or_path = a.model  # becomes base_model in the model cards
    trainer.save_model()
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        report = export_checkpoint(out / a.method, a.export, format="compressed-tensors")
        print("\nNats per token on held-out documents:")
        for name, loss in losses.items():
            print(f"  {name:18} {loss:.4f}")
        print(f"\nTo serve it:\n{report.serving}")


if __name__ == "__main__":
    with one_line_errors():
        main()
