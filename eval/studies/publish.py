"""Put finished experiments into the repository: records under eval/results, tables into pages.

    python eval/studies/publish.py compare --run runs/compare-custom-tiny --name methods-tiny
    python eval/studies/publish.py compare --name methods-tiny    # redraw a record's tables
    python eval/studies/publish.py compare --run RUN --name NAME --add    # add runs to a record
    python eval/studies/publish.py fidelity --run runs/fidelity-NAME --name real-model/prose-a
    python eval/studies/publish.py fidelity --name real-model/prose-a    # redraw
    python eval/studies/publish.py finetune --run runs/seed-0 runs/seed-1 --name deploy/smollm2
    python eval/studies/publish.py finetune --name deploy/smollm2    # redraw
    python eval/studies/publish.py eval --run runs/eval --name deploy/smollm2-tasks

The table of the comparison N goes between `<!-- compare N -->` and `<!-- end -->` on every page of
`pages()` that has these markers. The table with published losses goes between `<!-- published N
-->` and `<!-- end -->`, and so on. The demo is a comparison: `--run runs/demo`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metis_hf.lab.compare.plan import ComparisonPlan
    from metis_hf.lab.compare.results import SchemeResult

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results"
COMPARE_FILES = ("table.md", "loss.png", "gap.png", "cost.png")
BESIDE_PUBLISHED = "published.md"  # only for comparisons that repeat published runs
FIDELITY_FILES = ("table.md", "cost.png")
EVAL_FILES = ("table.md", "table.csv")


def pages() -> list[Path]:
    """Return the files that may show a table: README.md, docs/ and the technical report."""
    folders = (ROOT / "docs", ROOT / "eval" / "results" / "report")
    return [ROOT / "README.md", *(page for each in folders for page in sorted(each.glob("*.md")))]


def page_with(marker: str, table: str, page: str) -> str:
    """Return the page with the table between `<!-- marker -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the page does not have these markers exactly once.
    """
    marked = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = marked.subn(lambda match: f"{match[1]}{table}{match[2]}", page)
    if count != 1:
        raise ValueError(
            f"found {count} places with '<!-- {marker} -->' ... '<!-- end -->'; expected one"
        )
    return text


def publish_table(out: Path, marker: str, table: str, page: Path) -> None:
    """Write a study's table to `out` and into the page that shows it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table)
    page.write_text(page_with(marker, table, page.read_text()))


def publish_compare(run: Path, name: str) -> None:
    """Publish a comparison's record and tables; local paths are reduced to file names."""
    target = RESULTS / name
    _copy(run, target, COMPARE_FILES)
    record = json.loads((run / "compare.json").read_text())
    record["weights"] = _weights(run, record["plan"])
    record["plan"] = _without_paths(record["plan"])
    target.with_suffix(".json").write_text(json.dumps(record) + "\n")
    _into_pages(f"compare {name}", target)
    if (run / BESIDE_PUBLISHED).exists():
        _copy(run, target, (BESIDE_PUBLISHED,))
        _into_pages(f"published {name}", target, BESIDE_PUBLISHED)


def add_runs(run: Path, name: str) -> None:
    """Add new runs to a recorded comparison, and redraw it.

    Raises:
        ValueError: the plan, the initial weights or a variant's config differs from the record's; a
            run differs from the recorded one; or no run is new.
    """
    file = RESULTS / f"{name}.json"
    record, more = json.loads(file.read_text()), json.loads((run / "compare.json").read_text())
    known = {
        each: record["variants"].get(each, config) for each, config in more["variants"].items()
    }
    plans = [_without_paths(each["plan"]) for each in (record, more)]
    for plan in plans:  # a directory may have another name
        plan["experiment"] = plan["experiment"] | {"checkpoint": None}
    compared = [(key, there, plans[1].get(key)) for key, there in plans[0].items()]
    for what, there, now in (*compared, ("variants", known, more["variants"])):
        if there != now:
            raise ValueError(f"{run} and {name} differ in {what}: {now}, not {there}")
    weights, own = record.get("weights"), _weights(run, more["plan"])
    if weights and own and weights != own:
        raise ValueError(f"{run} started from other weights than {name}")
    present = {(each["scheme"], each["seed"]): each for each in record["runs"]}
    offered = {(each["scheme"], each["seed"]): each for each in more["runs"]}
    for (scheme, seed), on_record in present.items():
        if offered.get((scheme, seed), on_record) != on_record:
            raise ValueError(f"{name} already has a different run of {scheme}, seed {seed}")
    if not offered.keys() - present.keys():
        raise ValueError(f"{name} already has all runs of {run}")
    record["variants"] |= more["variants"]
    record["seeds"] = list(dict.fromkeys(record["seeds"] + more["seeds"]))
    record["runs"] = list((present | offered).values())
    record["timed"] = record.get("timed", False) and more.get("timed", False)
    file.write_text(json.dumps(record) + "\n")
    draw_compare(name)


def results_of(record: dict[str, Any]) -> list[SchemeResult]:
    """Return the runs of a recorded comparison, with their curves."""
    from metis_hf.lab.compare.results import SchemeResult

    found = []
    for run in record["runs"]:
        curve = run["curve"]
        history = [{"step": s, "loss": x} for s, x in zip(curve["step"], curve["loss"])]
        fields = {key: value for key, value in run.items() if key != "curve"}
        found.append(SchemeResult(**fields, summary="", history=history))
    return found


def plan_of(record: dict[str, Any]) -> ComparisonPlan:
    """Return the plan of a recorded comparison, with file names instead of paths."""
    from metis_hf.lab.compare.plan import ComparisonPlan
    from metis_hf.lab.compare.variants import Experiment, Variant

    settings, seeds = record["plan"], tuple(record["seeds"])
    variants = record["variants"].items()
    return ComparisonPlan(
        **settings
        | {
            "experiment": Experiment(**settings["experiment"], seed=seeds[0]),
            "variants": tuple(Variant.of_fields(name, fields) for name, fields in variants),
            "seeds": seeds,
            "reference": record.get("reference"),
        }
    )


def draw_compare(name: str) -> None:
    """Recompute a recorded comparison's summaries, tables and figures, with today's costs."""
    import paper_parts  # noqa: F401  # schemes that some records have
    import training_parts  # noqa: F401

    from metis_hf.lab.compare import loss_table, published
    from metis_hf.lab.compare.outputs import (
        count_extra,
        describe,
        different_code,
        different_machines,
        write_tables,
    )
    from metis_hf.lab.compare.statistics import summarize
    from metis_hf.lab.compare.step_times import UNRECORDED

    target = RESULTS / name
    record = json.loads(target.with_suffix(".json").read_text())
    plan, results = plan_of(record), results_of(record)
    extra = count_extra(plan.experiment.model, results)
    reference = record.get("reference")
    summaries = loss_table.ordered(summarize(results, reference, extra=extra))
    sentences = [
        describe(plan, results),
        *loss_table.findings(summaries, reference),
        *different_machines(results),
        *different_code(results),
        *(text for text in record["findings"] if text.startswith(UNRECORDED)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        timed = record.get("timed", False)
        write_tables(summaries, results, Path(folder), sentences, reference, timed=timed)
        _copy(Path(folder), target, COMPARE_FILES)
    record["findings"] = sentences
    record["summaries"] = [asdict(summary) for summary in summaries]  # other studies read them
    target.with_suffix(".json").write_text(json.dumps(record) + "\n")
    _into_pages(f"compare {name}", target)
    if (beside := published.match(plan)) is not None:
        (target / BESIDE_PUBLISHED).write_text(published.markdown(beside, summaries))
        _into_pages(f"published {name}", target, BESIDE_PUBLISHED)


def publish_fidelity(run: Path, name: str) -> None:
    """Publish a fidelity record; the paths of model and text are reduced to file names."""
    target = RESULTS / name
    _copy(run, target, FIDELITY_FILES)
    record = _read_rounded(run / "results.json")
    settings = record["settings"]
    record["settings"] = settings | {key: Path(settings[key]).name for key in ("model", "text")}
    (target / "results.json").write_text(json.dumps(record) + "\n")
    _into_pages(f"fidelity {name}", target)


def draw_fidelity(name: str) -> None:
    """Write the table and the figure of a recorded measurement."""
    from metis_hf.lab.fidelity.fidelity_page import write_outputs
    from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity

    target = RESULTS / name
    record = json.loads((target / "results.json").read_text())
    results = [SchemeFidelity(**row) for row in record["schemes"]]
    with tempfile.TemporaryDirectory() as folder:
        write_outputs(Path(folder), record, results)
        _copy(Path(folder), target, FIDELITY_FILES)
    _into_pages(f"fidelity {name}", target)


def publish_finetune(runs: Sequence[Path], name: str) -> None:
    """Publish a fine-tuning record, one run per seed; paths are reduced to file names."""
    target = RESULTS / name
    target.mkdir(parents=True, exist_ok=True)
    records = []
    for run in runs:
        record = _read_rounded(run / "results.json")
        arguments = record["arguments"]
        held_out = arguments["held_out"] and [
            Path(p).name for p in arguments["held_out"].split(",")
        ]
        model = Path(arguments["model"]).name
        record["arguments"] = arguments | {"model": model, "export": None, "held_out": held_out}
        for outcome in record["outcomes"]:
            if outcome["directory"]:
                outcome["directory"] = Path(outcome["directory"]).name
        records.append(record)
    (target / "results.json").write_text(json.dumps({"runs": records}) + "\n")
    draw_finetune(name)


def draw_finetune(name: str) -> None:
    """Write the table of a recorded fine-tuning."""
    from metis_hf.lab.finetune_table import Outcome, markdown_tables

    target = RESULTS / name
    records = json.loads((target / "results.json").read_text())["runs"]
    runs = [[Outcome.of(outcome) for outcome in record["outcomes"]] for record in records]
    (target / "table.md").write_text(markdown_tables(*runs))
    _into_pages(f"finetune {name}", target)


def publish_eval(run: Path, name: str) -> None:
    """Publish an evaluation's tables; its result files, which hold every item, are not copied."""
    target = RESULTS / name
    _copy(run, target, EVAL_FILES)
    _into_pages(f"eval {name}", target)


def _read_rounded(path: Path) -> dict[str, Any]:
    """Read a JSON file, with floats rounded to five digits; more depend on the machine's sums."""
    return json.loads(path.read_text(), parse_float=lambda text: float(f"{float(text):.5g}"))


def _copy(run: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copy files; remove figures that the run did not draw."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith(".png") and not (run / name).exists():
            (target / name).unlink(missing_ok=True)
        else:
            shutil.copyfile(run / name, target / name)


def _weights(run: Path, plan: dict[str, Any]) -> str | None:
    """Return the digest of the initial checkpoint; None without one, or if not recorded."""
    file, checkpoint = run / "inputs.json", plan.get("experiment", {}).get("checkpoint")
    return json.loads(file.read_text()).get(checkpoint) if file.is_file() else None


def _without_paths(plan: dict[str, Any]) -> dict[str, Any]:
    places = {key: plan[key] for key in ("data", "validation", "tasks_dir")}
    named = plan | {key: path and Path(path).name for key, path in places.items()}
    if checkpoint := plan.get("experiment", {}).get("checkpoint"):
        named["experiment"] = plan["experiment"] | {"checkpoint": Path(checkpoint).name}
    return named


def _into_pages(marker: str, results: Path, file: str = "table.md") -> None:
    """Put a table into the pages that have its markers."""
    table = (results / file).read_text()
    for page in pages():
        text = page.read_text()
        if f"<!-- {marker} -->" in text:
            page.write_text(page_with(marker, table, text))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "compare": ("output directory of metis-hf compare", {}),
        "fidelity": ("output directory of metis-hf fidelity", {}),
        "finetune": ("output_dir of recipes/finetune_nvfp4.py, one per seed", {"nargs": "+"}),
        "eval": ("output directory of metis-hf eval", {"required": True}),
    }
    for kind, (source, options) in sources.items():
        of_kind = kinds.add_parser(kind)
        of_kind.add_argument("--run", type=Path, help=source, **options)
        what = "record and of the directory" if kind == "compare" else "directory"
        of_kind.add_argument("--name", required=True, help=f"name of the {what} below eval/results")
        if kind == "compare":
            of_kind.add_argument(
                "--add", action="store_true", help="add the runs to the existing record"
            )
    args = parser.parse_args()
    if args.kind == "compare" and args.add:
        if args.run is None:
            parser.error("--add needs --run DIR, which has the runs to add")
        add_runs(args.run, args.name)
    elif args.run is None:
        draw = {"compare": draw_compare, "fidelity": draw_fidelity, "finetune": draw_finetune}
        draw[args.kind](args.name)
    else:
        publish: dict[str, Callable[[Any, str], None]] = {
            "compare": publish_compare,
            "fidelity": publish_fidelity,
            "finetune": publish_finetune,
            "eval": publish_eval,
        }
        publish[args.kind](args.run, args.name)
        if args.kind == "fidelity":
            draw_fidelity(args.name)  # from the rounded numbers that the record has


if __name__ == "__main__":
    main()
