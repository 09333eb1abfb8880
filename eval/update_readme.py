"""Puts a finished demo into the repository: its record under eval/results/demo, its table and
sentence into README.md between the markers.

    make demo && python eval/update_readme.py [--run runs/demo]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results" / "demo"
FILES = ("table.md", "loss.png", "spectra.png")
MARKED = re.compile(r"(<!-- demo table -->\n).*?(<!-- end -->)", re.DOTALL)


def readme_with(table: str, readme: str) -> str:
    """README text with the table between its markers."""
    if not MARKED.search(readme):
        raise ValueError("README.md has lost its '<!-- demo table -->' ... '<!-- end -->' markers")
    return MARKED.sub(lambda match: f"{match[1]}{table}{match[2]}", readme)


def main() -> None:
    """Copies and edits; the record loses the per-group health series, which the plot shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "demo")
    run = parser.parse_args().run
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(run / name, RESULTS / name)
    record = json.loads((run / "results.json").read_text())
    keep = ("step", "loss", "grad_norm", "learning_rate", "step_seconds")
    for result in record["results"]:
        result["history"] = [{k: e[k] for k in keep if k in e} for e in result["history"]]
    (RESULTS / "results.json").write_text(json.dumps(record) + "\n")
    readme = ROOT / "README.md"
    readme.write_text(readme_with((RESULTS / "table.md").read_text(), readme.read_text()))


if __name__ == "__main__":
    main()
