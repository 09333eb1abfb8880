"""Time the first training step under `metis` on a machine that has never compiled a quantizer.

    python benchmarks/first_step.py

Runs fresh processes, first with an empty folder for compiled code, then with the folder filled by
the first run; then the same model, dense and converted, under torch.compile without caches. The
time is the wall-clock time of the first step minus the second step's. Writes
results/first_step.json.
"""

from __future__ import annotations

import os
import tempfile

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
import sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from metis_hf import MetisConfig, get_metis_model

width, scheme, whole = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "whole"
shape = dict(vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8))
model = get_metis_model(model, MetisConfig(scheme=scheme)) if scheme != "dense" else model
call = torch.compile(model) if whole else model
ids = torch.arange(1024).view(4, 256) % 256
times = []
for _ in range(2):
    started = time.perf_counter()
    call(input_ids=ids, labels=ids).loss.backward()
    times.append(time.perf_counter() - started)
print(times[0] - times[1])
"""
EMPTY, KEPT = "metis, library compiled", "metis, library read from disk"
WHOLE = {"torch.compile, nn.Linear": "dense", "torch.compile, metis": "metis"}
ROUNDS = 4


def measure(width: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that the first step takes beyond the second, in each round."""
    times: dict[str, list[float]] = {EMPTY: [], KEPT: [], **{name: [] for name in WHOLE}}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"XDG_CACHE_HOME": folder}
            environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
            for name in times:
                whole = "whole" if name in WHOLE else "by layers"
                arguments = str(width), WHOLE.get(name, "metis"), whole
                seconds = printed_seconds(PROGRAM, *arguments, environment=environment)
                times[name].append(seconds)
    return times


def main() -> None:
    args = parse(program_arguments(__doc__))
    before = before_start()
    times = measure(64, 1) if args.quick else measure(512, ROUNDS)
    rows = [{"name": name, **summary(found)} for name, found in times.items()]
    print(table(["", f"ms {SPREAD}"], [[row["name"], spread(row, "ms")] for row in rows]))
    write(args.out, "first_step", {"machine": before, "rows": rows})


if __name__ == "__main__":
    main()
