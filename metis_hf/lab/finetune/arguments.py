"""Arguments of a fine-tuning for deployment, and the methods there are.

ptq   calibrate, train nothing
qat   train with the quantizers on, on the labels' cross entropy
qad   train with the quantizers on, towards the distributions of the unquantized model
lora  keep the packed weights of ptq, and train low-rank adapters beside them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from metis_hf.schemes import scheme_info
from metis_hf.training.calibration import METHODS as CALIBRATIONS

METHODS = ("ptq", "qat", "qad", "lora")
SCHEMES = ("w4a4", "w4a16")
LAYOUTS = ("compressed-tensors", "modelopt")


@dataclass
class FinetuneArguments:
    """Arguments of a fine-tuning besides transformers' TrainingArguments."""

    GOING_ON: ClassVar[str] = (
        "the same command with the same --output_dir goes on with the methods that are not finished"
    )

    model: str = field(default="", metadata={"help": "Directory or hub name of a causal LM."})
    data: str | None = field(
        default=None,
        metadata={"help": 'JSON lines of {"messages": [...]} or {"text": ...}, or a text.'},
    )
    held_out: str | None = field(
        default=None,
        metadata={
            "help": "Files to measure on, by commas, of the same kind; default: the last "
            "documents of --data."
        },
    )
    method: str = field(
        default="qad", metadata={"help": f"One or several of {', '.join(METHODS)}, by commas."}
    )
    compare: str = field(
        default="",
        metadata={
            "help": "Schemes to measure the untrained model in too, by commas, for example "
            "nvfp4-rne,four-over-six,metis."
        },
    )
    export: str | None = field(
        default=None,
        metadata={"help": "Directory to export into, a folder a method; default: in output_dir."},
    )
    layout: str = field(
        default="compressed-tensors", metadata={"help": "compressed-tensors or modelopt."}
    )
    scheme: str = field(default="w4a4", metadata={"help": "w4a4, or w4a16: weights alone."})
    calibration: str = field(
        default="mse",
        metadata={"help": f"How inputs' scales are found: {', '.join(CALIBRATIONS)}."},
    )
    calibration_sequences: int = field(
        default=32, metadata={"help": "Training sequences that scales are found on."}
    )
    sequence_length: int = field(default=512, metadata={"help": "Tokens of a sequence."})
    eval_sequences: int = field(
        default=32, metadata={"help": "Sequences to measure on, of each held-out file."}
    )
    tokens: float = field(
        default=1e6, metadata={"help": "Training tokens, unless max_steps is given."}
    )
    global_batch: int = field(default=16, metadata={"help": "Sequences of an optimizer step."})
    temperature: float = field(
        default=1.0, metadata={"help": "Of the teacher's and the student's logits."}
    )
    cross_entropy_share: float = field(
        default=0.0, metadata={"help": "Share of the labels' cross entropy in qad's loss."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_learning_rate: float = field(
        default=2e-4, metadata={"help": "Of the adapters, instead of --learning_rate."}
    )
    smoke: bool = field(
        default=False,
        metadata={"help": "The same code on the CPU in a minute: tiny model and text."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print what the run takes, and stop."})

    def methods(self) -> tuple[str, ...]:
        """Return the methods to compare, "ptq" first.

        Raises:
            ValueError: an unknown method, scheme or calibration, or a number out of range.
        """
        chosen = parts(self.method)
        for name, values, known in (
            ("method", chosen, METHODS),
            ("scheme", [self.scheme], SCHEMES),
            ("calibration", [self.calibration], CALIBRATIONS),
            ("layout", [self.layout], LAYOUTS),
        ):
            for value in values or [""]:
                if value not in known:
                    raise ValueError(f"--{name} {value!r}; choose of {', '.join(known)}")
        counts = ("calibration_sequences", "eval_sequences", "global_batch", "lora_rank")
        for name, good, expected in (
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("sequence_length", self.sequence_length >= 2, "at least 2"),
            *(
                (name, 0 < getattr(self, name) < math.inf, "a finite number above 0")
                for name in ("tokens", "temperature", "lora_learning_rate")
            ),
            ("cross_entropy_share", 0 <= self.cross_entropy_share <= 1, "a share from 0 to 1"),
        ):
            if not good:
                raise ValueError(f"--{name} {getattr(self, name)}; expected {expected}")
        return ("ptq", *(method for method in METHODS[1:] if method in chosen))

    def held_out_files(self) -> dict[str, Path]:
        """Return the files to measure on by their names; empty: the last documents of `data`.

        Raises:
            ValueError: two files of one name.
        """
        files = [Path(part) for part in parts(self.held_out or "")]
        found = {file.stem: file for file in files}
        if len(found) < len(files):
            raise ValueError(
                f"--held_out {self.held_out}: two files of one name, which the table could not "
                "tell apart; rename one"
            )
        return found

    def compared(self) -> tuple[str, ...]:
        """Return the schemes that the untrained model is measured in for comparison.

        Raises:
            ValueError: no such scheme; the message lists those there are.
        """
        names = tuple(parts(self.compare))
        for name in names:
            scheme_info(name)
        return names


def parts(text: str) -> list[str]:
    """Return what commas separate in an argument."""
    return [part.strip() for part in text.split(",") if part.strip()]
