"""Time what metis_hf adds to the imports of a training script, in fresh processes.

    python benchmarks/imports.py

The script first imports the transformers classes it needs, which import torch. The time is for the
metis_hf names that training needs, because `import metis_hf` alone loads hardly anything. Writes
results/imports.json.
"""

from __future__ import annotations

from timing import (
    SPREAD,
    before_start,
    parse,
    printed_seconds,
    program_arguments,
    spread,
    summary,
    table,
    write,
)

PROGRAM = """
import time
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer
started = time.process_time()
from metis_hf import MetisCallback, MetisConfig, MetisTrainer, get_metis_model
print(time.process_time() - started)
"""
NAME = "names of metis_hf for a training"
ROUNDS = 7


def measure(rounds: int) -> list[float]:
    """Return CPU seconds, without the first process, which reads the files from disk."""
    return [printed_seconds(PROGRAM) for _ in range(rounds + 1)][1:]


def main() -> None:
    args = parse(program_arguments(__doc__))
    before = before_start()
    rows = [{"name": NAME, **summary(measure(2 if args.quick else ROUNDS))}]
    print(table(["", f"ms {SPREAD}"], [[row["name"], spread(row, "ms")] for row in rows]))
    write(args.out, "imports", {"machine": before, "rows": rows})


if __name__ == "__main__":
    main()
