"""Tables in a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from metis_hf.lab.show.table import terminal_table

HEADER = ["Variant", "Loss", "Gap to control, %", "Gap dense, %", "Extra multiply-adds, %", "MB"]
LONG = "nearest forward, residual against the quantized factors, weight not split"


def shown(*names: str) -> list[str]:
    cells = ["4.4991", "+2.12 ± 0.31", "+1.92 ± 0.20", "4.6", "244"]
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal_table(HEADER, [[name, *cells] for name in names], title="losses"))
    return console.file.getvalue().splitlines()


def test_a_long_name_leaves_the_numbers_whole():
    lines = shown("bf16", LONG)
    assert max(map(len, lines)) <= 80
    assert sum("+2.12 ± 0.31" in line and "244" in line for line in lines) == 2
    names = " ".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert names.split() == ["bf16", *LONG.split()]


def test_a_short_name_stays_on_its_line():
    assert any(
        line.startswith("│ metis subspaces of 8 steps")
        for line in shown("metis subspaces of 8 steps")
    )
