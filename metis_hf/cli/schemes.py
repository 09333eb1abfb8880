"""`metis-hf schemes`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from metis_hf.cli.options import Imports, import_sources


def schemes(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SCHEME ...]", help="Default: all.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="shared or contraction; default: each scheme's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    imports: Imports = None,
) -> None:
    """List the registered schemes, or show some of them.

    Shows what each does at each operand of the GEMMs, in how many bits, and its source.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.cost import TOKENS, scheme_overhead
    from metis_hf.schemes.listing import WIDTH, list_schemes

    records = list_schemes(names, mode)
    for record in records:
        record["extra_multiply_adds"] = round(scheme_overhead(record["name"], mode).share, 5)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    console = Console()
    console.print(_overview(records))
    console.print(_operands(records))
    console.print(
        "Rounding: of elements / of block scales; 4/6: a block's maximum on code 6 or 4; 16/17: on "
        "5.65, so that no element is beyond 6 (of blocks above 4e-5 of the tensor's largest); "
        "corrected: MS-EDEN's, stochastic. Bits per element with scales, factors and means (?: a "
        "conditioner that looks at values has no count), of a "
        f"layer of {WIDTH} x {WIDTH} and {WIDTH} tokens. Extra: multiply-adds beyond the three "
        f"GEMMs of that layer where hardware multiplies FP4, in % of theirs, for {TOKENS} tokens a "
        "step. docs/schemes.md says what each paper left open."
    )


# What block scales are rounded like, by rule.
_SCALES = {
    "absmax": "{}",
    "four-over-six": "{} 4/6",
    "search": "{} search",
    "eden": "corrected",
    "unbiased": "{} 16/17",
}


def _overview(records: list[dict[str, Any]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Registered schemes")
    table.add_column("Scheme", no_wrap=True)
    table.add_column("What it does, and where it is from")
    for record in records:
        what, source = escape(record["summary"]), escape(record["source"])
        table.add_row(escape(record["name"]), f"{what}\n[dim]{source}[/dim]")
    return table


def _operands(records: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    # One column alone is wrapped, which leaves it as wide as its longest word at 80 columns; rich
    # would shrink several without regard to their words.
    table = Table(title="Operands of the three GEMMs", box=SIMPLE)
    table.add_column("Scheme, operand: GEMMs", no_wrap=True)
    table.add_column("Blocks, conditioner")
    table.add_column("Rounding", no_wrap=True)
    table.add_column("Bits", no_wrap=True, justify="right")
    for record in records:
        table.add_row(f"[bold]{escape(record['name'])}[/bold]")
        for slot, operand in record["operands"].items():
            if "reuses" not in operand:
                users = {s: o for s, o in record["operands"].items() if o.get("reuses") == slot}
                gemms = ", ".join(used.split(".")[0] for used in (slot, *users))
                cells = _cells(operand, [operand, *users.values()])
                table.add_row(f"  {slot.split('.')[1]}: {gemms}", *cells)
        extra = f"{100 * record['extra_multiply_adds']:.1f} %"
        table.add_row("  extra multiply-adds", "", "", extra)
    return table


def _cells(operand: dict[str, Any], uses: list[dict[str, Any]]) -> list[str]:
    """Format blocks with conditioner, rounding and bits of an operand, in lines."""
    bits = ["?" if operand["bits"] is None else f"{operand['bits']:.2f}"]
    if "blocks" not in operand:
        return [operand["format"], "", *bits]
    scales = _SCALES[operand["scale_rule"]].format(operand["scale_rounding"] or "-")
    parts = [] if operand["conditioner"] == "identity" else [operand["conditioner"]]
    for correction in (use["correction"] for use in uses if "correction" in use):
        gemm, other = correction["along"].split(".")
        parts.append(f"{gemm}: errors along {other}")
        bits.append(f"+ {correction['bits']:.2f}")
    blocks = f"{operand['format']} {operand['blocks']} {operand['along'] or ''}"
    what = "\n".join([blocks.rstrip(), *([" + ".join(parts)] if parts else [])])
    return [what, f"{operand['rounding']} /\n{scales}", "\n".join(bits)]
