"""Times `import metis_hf` beyond importing torch and transformers, in fresh processes.

    python benchmarks/imports.py

Writes results/imports.json.
"""

from __future__ import annotations

import subprocess
import sys

from timing import arguments, machine, parse, spread, summary, table, write

PROGRAM = """
import time
import torch, transformers
started = time.process_time()
import metis_hf
print(time.process_time() - started)
"""
ROUNDS = 7


def measure(rounds: int) -> list[float]:
    """CPU seconds, the first process left out: it reads the files from disk."""
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        for _ in range(rounds + 1)
    ]
    return [float(run.stdout) for run in runs[1:]]


def main() -> None:
    args = parse(arguments(__doc__))
    before = machine()
    rows = [{"name": "import metis_hf", **summary(measure(2 if args.quick else ROUNDS))}]
    print(table(["", "ms (quartiles)"], [[row["name"], spread(row, "ms")] for row in rows]))
    write(args.out, "imports", {"machine": before, "rows": rows})


if __name__ == "__main__":
    main()
