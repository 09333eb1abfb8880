"""Puts finished experiments into the repository: records below eval/results, tables into README.md.

    make demo && python eval/publish.py demo [--run runs/demo]
    python eval/publish.py compare --run runs/compare-custom-tiny --name methods-tiny

README.md shows the demo between `<!-- demo table -->` and `<!-- end -->`, and the comparison of
the name N between `<!-- compare N -->` and `<!-- end -->` where it has these markers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
DEMO_FILES = ("table.md", "loss.png", "spectra.png")
COMPARE_FILES = ("table.md", "loss.png", "gap.png", "cost.png")
CURVE_KEYS = ("step", "loss", "grad_norm", "learning_rate", "step_seconds")


def readme_with(marker: str, table: str, readme: str) -> str:
    """README text with the table between `<!-- marker -->` and the next `<!-- end -->`."""
    marked = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marked.search(readme):
        raise ValueError(f"README.md has no '<!-- {marker} -->' ... '<!-- end -->' markers")
    return marked.sub(lambda match: f"{match[1]}{table}{match[2]}", readme)


def publish_demo(run: Path) -> None:
    """The demo's record, without the per-group health series that its plot shows."""
    target = RESULTS / "demo"
    _copy(run, target, DEMO_FILES)
    record = json.loads((run / "results.json").read_text())
    for result in record["results"]:
        result["history"] = [{k: e[k] for k in CURVE_KEYS if k in e} for e in result["history"]]
    (target / "results.json").write_text(json.dumps(record) + "\n")
    _into_readme("demo table", target)


def publish_compare(run: Path, name: str) -> None:
    """A comparison's record; paths of this machine become the names of what they lead to."""
    target = RESULTS / name
    _copy(run, target, COMPARE_FILES)
    record = json.loads((run / "compare.json").read_text())
    record["plan"] = _without_paths(record["plan"])
    target.with_suffix(".json").write_text(json.dumps(record) + "\n")
    if f"<!-- compare {name} -->" in (ROOT / "README.md").read_text():
        _into_readme(f"compare {name}", target)


def _copy(run: Path, target: Path, names: tuple[str, ...]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(run / name, target / name)


def _without_paths(plan: dict[str, Any]) -> dict[str, Any]:
    places = {key: plan[key] for key in ("data", "validation", "tasks_dir")}
    return plan | {key: path and Path(path).name for key, path in places.items()}


def _into_readme(marker: str, results: Path) -> None:
    readme = ROOT / "README.md"
    table = (results / "table.md").read_text()
    readme.write_text(readme_with(marker, table, readme.read_text()))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    demo = kinds.add_parser("demo")
    demo.add_argument("--run", type=Path, default=ROOT / "runs" / "demo")
    compare = kinds.add_parser("compare")
    compare.add_argument("--run", type=Path, required=True, help="directory of metis-hf compare")
    compare.add_argument(
        "--name", required=True, help="of the record and the directory below eval/results"
    )
    args = parser.parse_args()
    if args.kind == "demo":
        publish_demo(args.run)
    else:
        publish_compare(args.run, args.name)


if __name__ == "__main__":
    main()
