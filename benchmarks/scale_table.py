"""Tabulate the part `scale` of one or more records of `make gpu`.

    python benchmarks/scale_table.py RECORD.json [RECORD.json ...] [--out DIR]

With --out, writes table.md to DIR, a PRESET.png with curves and gaps for each preset, and, for
several records, the runs in scale.json. Also fills each table of DIR/README.md, between
`<!-- scale PRESET -->` and `<!-- end -->`. Runs with different numerics, tokens or settings are
refused. If several records have a run, the first one counts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import on_gpu  # noqa: F401  # makes metis_hf importable
from timing import Row

from metis_hf.lab.compare import loss_table
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.statistics import summarize
from metis_hf.shared.records import read_json, write_json

REFERENCE = "metis"
_SAME = {"numerics": "numerics", "tokens_digest": "tokens", "settings": "settings of training"}


def rows_of(items: dict[str, Row]) -> dict[str, Row]:
    """Return the units of a record's part that have a loss."""
    return {
        key: {**row, "numerics": row["code"]["sha256"]}
        for key, row in items.items()
        if "loss" in row
    }


def joined(paths: Sequence[Path]) -> dict[str, Row]:
    """Join the units of several records.

    Raises:
        ValueError: a file is not a record, none has a unit, or their units cannot share a table.
    """
    rows: dict[str, Row] = {}
    first: dict[tuple[str, str], tuple[Path, Row]] = {}
    for path in paths:
        record = read_json(path)
        if not isinstance(record, dict) or "parts" not in record:
            raise ValueError(f"{path} is not a record of make gpu")
        for key, row in rows_of(record["parts"].get("scale", {}).get("items", {})).items():
            for name, title in _SAME.items():
                where, other = first.setdefault((row["preset"], name), (path, row))
                if row[name] != other[name]:
                    raise ValueError(
                        f"{path} has runs of {row['preset']} with different {title} "
                        f"({row[name][:12]}, commit {row['code']['commit']}) than {where} "
                        f"({other[name][:12]}, commit {other['code']['commit']}); such runs "
                        "cannot share a table, so leave one of the files out"
                    )
            rows.setdefault(key, row)
    if not rows:
        raise ValueError(f"no run of the part scale in {', '.join(map(str, paths))}")
    return rows


def markdown(rows: dict[str, Row]) -> str:
    """Return a section for each preset: the table and the findings."""
    return "\n".join(f"### {preset}\n\n{text}" for preset, text in tables(rows).items())


def tables(rows: dict[str, Row]) -> dict[str, str]:
    """Return each preset's table, common settings and findings."""
    texts = {}
    for preset in dict.fromkeys(row["preset"] for row in rows.values()):
        own = [row for row in rows.values() if row["preset"] == preset]
        summaries = summarize([_result(row) for row in own], REFERENCE)
        sentences = [_shared(own), *loss_table.findings(summaries, REFERENCE)]
        if len(batches := sorted({row["device_batch"] for row in own})) > 1:
            sentences.append(f"Micro-batches of {' and '.join(map(str, batches))} sequences.")
        body = loss_table.markdown(summaries, REFERENCE) + "\n"
        texts[preset] = body + "".join(f"- {text}\n" for text in sentences)
    return texts


def write(rows: dict[str, Row], out: Path, *, several: bool) -> None:
    """Write the files of a folder, and update the tables of its README.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(markdown(rows))
    if several:
        write_json(out / "scale.json", rows)
    draw(rows, out)
    page = out / "README.md"
    for preset, text in tables(rows).items() if page.exists() else ():
        marked = re.compile(rf"(<!-- scale {preset} -->\n).*?(<!-- end -->)", re.DOTALL)
        page.write_text(marked.sub(lambda m, text=text: f"{m[1]}{text}{m[2]}", page.read_text()))


def _result(row: Row) -> SchemeResult:
    known = {field.name for field in fields(SchemeResult)}
    values = {key: value for key, value in row.items() if key in known}
    curve = [{"step": s, "loss": v} for s, v in zip(row["curve"]["step"], row["curve"]["loss"])]
    return SchemeResult(**values, summary="", history=curve)


def draw(rows: dict[str, Row], out: Path) -> None:
    """Draw the smoothed curves of each preset, and their gaps to BF16."""
    from metis_hf.lab.compare.loss_figures import plot_curves

    for preset in dict.fromkeys(row["preset"] for row in rows.values()):
        own = [row for row in rows.values() if row["preset"] == preset]
        row = own[0]
        each = row["tokens"] // row["steps"]
        title = f"{row['parameters'] / 1e6:.0f}M parameters from scratch, {each:,} tokens a step"
        results = [_result(one) for one in own]
        plot_curves(results, out / f"{preset}.png", title, REFERENCE)


def _shared(rows: Sequence[Row]) -> str:
    """Return a sentence on size, tokens, machines and commits of one preset's runs."""

    def each(values: Sequence[object]) -> str:
        return " and ".join(dict.fromkeys(map(str, values)))

    row = rows[0]
    return (
        f"{row['parameters'] / 1e6:.1f}M parameters, {row['steps']} steps, "
        f"{row['tokens'] / 1e6:.1f}M tokens of {row['text']} ({row['tokens_digest']}); on "
        f"{each([r['machine']['device'] + ' in ' + r['machine']['precision'] for r in rows])}; "
        f"commit {each([r['code']['commit'] or 'not known' for r in rows])}, numerics "
        f"{row['numerics']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder for the table, the runs and the figures")
    args = parser.parse_args()
    try:
        rows = joined(args.records)
        text = markdown(rows)
        if args.out is not None:
            write(rows, args.out, several=len(args.records) > 1)
    except (ValueError, OSError) as error:
        sys.exit(f"scale_table: {error}")
    print(text)


if __name__ == "__main__":
    main()
