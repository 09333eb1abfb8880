"""`metis-hf schemes`; nothing else imports this."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(schemes)


def schemes(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SCHEME ...]", help="Default: all.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="shared or contraction; default: each scheme's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the registered schemes: what each does at each operand of the GEMMs, bits, source."""
    from rich.console import Console

    from metis_hf.schemes.listing import WIDTH, list_schemes

    records = list_schemes(names, mode)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    console = Console()
    console.print(_overview(records))
    console.print(_operands(records))
    console.print(
        "Rounding: of elements / of block scales; 4/6: a block's maximum on code 6 or 4; "
        "corrected: MS-EDEN's, stochastic. Bits per element with scales, factors and means, of a "
        f"layer of {WIDTH} x {WIDTH} and {WIDTH} tokens. docs/schemes.md says what each paper left "
        "open."
    )


# What block scales are rounded like, by rule.
_SCALES = {"absmax": "{}", "four-over-six": "{} 4/6", "eden": "corrected"}


def _overview(records: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Registered schemes")
    table.add_column("Scheme", no_wrap=True)
    table.add_column("What it does")
    table.add_column("Source")
    for record in records:
        table.add_row(record["name"], record["summary"], record["source"])
    return table


def _operands(records: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title="Operands of the three GEMMs", box=SIMPLE)
    table.add_column("Scheme, operand: GEMMs", no_wrap=True)
    for title in ("Blocks", "Rounding", "Conditioner"):
        table.add_column(title, overflow="fold")
    table.add_column("Bits", justify="right")
    for record in records:
        table.add_row(f"[bold]{record['name']}[/bold]")
        for slot, operand in record["operands"].items():
            if "reuses" not in operand:
                users = {s: o for s, o in record["operands"].items() if o.get("reuses") == slot}
                gemms = ", ".join(used.split(".")[0] for used in (slot, *users))
                cells = _cells(operand, [operand, *users.values()])
                table.add_row(f"  {slot.split('.')[1]}: {gemms}", *cells)
    return table


def _cells(operand: dict[str, Any], uses: list[dict[str, Any]]) -> list[str]:
    bits = f"{operand['bits']:.2f}"
    if "blocks" not in operand:
        return [operand["format"], "", "", bits]
    blocks = f"{operand['format']} {operand['blocks']} {operand['along'] or ''}"
    scales = _SCALES[operand["scale_rule"]].format(operand["scale_rounding"] or "-")
    rounding = f"{operand['rounding']} / {scales}"
    conditioner = "" if operand["conditioner"] == "identity" else operand["conditioner"]
    for correction in (use["correction"] for use in uses if "correction" in use):
        gemm, other = correction["along"].split(".")
        conditioner += f" + {gemm}: errors along {other}"
        bits += f" + {correction['bits']:.2f}"
    return [blocks, rounding, conditioner.removeprefix(" + "), bits]
