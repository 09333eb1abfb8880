"""`metis-hf schemes`."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from textwrap import shorten
from typing import Annotated, Any

import typer

from metis_hf.cli.options import Imports, import_sources
from metis_hf.lab.scheme_list import FIRST, GROUPS, Line


def schemes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCHEME ...]", help="Schemes whose operands, bits and source are shown."
        ),
    ] = None,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="List every scheme instead of only the main dozen.")
    ] = False,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Operand mode of the named schemes, shared or contraction; default: each "
            "scheme's own."
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the details as JSON, for every scheme if none is named."
        ),
    ] = False,
    imports: Imports = None,
) -> None:
    """List the schemes, or show details of some.

    For each named scheme, shows the operands of the three GEMMs, their bits, and its source.
    """
    import_sources(imports)
    if names or as_json:
        _show(names, mode, as_json)
    elif mode is not None:
        raise ValueError(f"--mode {mode} has no effect on the list; name schemes, or use --json")
    else:
        typer.echo(_list(all_of_them, own=bool(imports)))


def _list(all_of_them: bool, *, own: bool) -> str:
    """Return one line per scheme; torch is imported only if the user has schemes of their own."""
    groups = {
        group: [line for line in lines if all_of_them or line.name in FIRST]
        for group, lines in GROUPS.items()
    }
    if own or entry_points(group="metis_hf.schemes"):  # schemes that other packages register
        groups["Your own"] = _own()
    row = "  {:<24} {:<30} {:>5} {:>7} {:>7}".format
    text = [row("Scheme", "What it is for", "Extra", "0.3M", "51M")]
    for group, lines in groups.items():
        text += [group] if lines else []
        for line in lines:
            gaps = ("" if gap is None else f"{gap:+.2f}" for gap in (line.tiny, line.larger))
            text.append(row(line.name, line.use, f"{line.extra:.1f}", *gaps).rstrip())
    more = sum(map(len, GROUPS.values())) - len(FIRST)
    others = "" if all_of_them else f" --all lists {more} more."
    return "\n".join([
        *text,
        "",
        "Extra: multiply-adds added to the three GEMMs of a 4096 x 4096 layer on FP4",
        "hardware, in %. 0.3M, 51M: loss above BF16's, in %, for models of that size",
        "trained from scratch (three seeds; one seed). Empty: not measured.",
        f"`metis-hf schemes NAME` shows operands and source.{others}",
    ])  # fmt: skip


def _own() -> list[Line]:
    """Return lines for the schemes that the user's files and other packages register."""
    from metis_hf.lab.cost import scheme_overhead
    from metis_hf.schemes import scheme_info, scheme_names

    ours = {line.name for lines in GROUPS.values() for line in lines}
    return [
        Line(name, shorten(scheme_info(name).summary, 30), 100 * scheme_overhead(name).share)
        for name in scheme_names()
        if name not in ours
    ]


def _show(names: list[str] | None, mode: str | None, as_json: bool) -> None:
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
        "Rounding: elements / block scales. 4/6: the block's maximum maps to code 6 or 4. 16/17: "
        "it maps to 5.65, so that no element exceeds 6 (in blocks above 4e-5 of the tensor's "
        "maximum). corrected: as in MS-EDEN, stochastic. Bits: per element, with scales, factors "
        f"and means, for a layer of {WIDTH} x {WIDTH} and {WIDTH} tokens (?: a conditioner "
        "depends on the values, so there is no fixed number). Extra: multiply-adds that the scheme "
        f"adds to the three GEMMs of that layer on FP4 hardware, in %, for {TOKENS} tokens per "
        "step. docs/schemes.md says what each paper left open."
    )


# Scale rule -> how the table shows it; {} is the rounding of block scales.
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

    # Only one column may wrap, so at 80 columns it is still as wide as its longest word; if several
    # could, rich would shrink them below the width of their words.
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
    """Return an operand's cells: blocks with conditioner, rounding, bits."""
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
