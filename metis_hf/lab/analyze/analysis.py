"""Results of an analysis, and their machine-readable files: JSON of figures, layers.csv."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metis_hf.shared.records import write_atomically

KINDS = ("weight", "activation", "gradient")
_COLUMNS = ("fraction", "energy", "noise_fraction", "stable_rank", "nvfp4_sqnr_db", "nvfp4_zeroed",
            "nvfp4_swamped", "metis_sqnr_db", "metis_zeroed", "metis_swamped", "note")  # fmt: skip


@dataclass
class Analysis:
    """Results so far, JSON-ready."""

    model: str
    # Layer -> kind -> table values (`tensor_line`) and figure data (`tensor_portrait`).
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    portraits: dict[str, dict[str, Any]] = field(default_factory=dict)
    residuals: dict[str, dict[str, Any]] = field(default_factory=dict)  # layer -> curves
    universality: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> last FFN
    ranks: dict[str, int] = field(default_factory=dict)  # layer -> directions kept apart by Metis
    text: dict[str, Any] = field(default_factory=dict)  # file, sequences and length
    control: str = ""  # the control checkpoint, "" for none
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why
    missing: str = ""  # what is still to be measured

    def risk(self, layer: str) -> float:
        """Return the largest share of singular directions that direct NVFP4 swamps, else NaN."""
        shares = [line.get("nvfp4_swamped", math.nan) for line in self.lines[layer].values()]
        return max((share for share in shares if not math.isnan(share)), default=math.nan)

    def by_risk(self) -> list[str]:
        """Return the layers without a known risk, then the others from the riskiest down."""
        risks = {name: self.risk(name) for name in self.lines}
        return sorted(risks, key=lambda name: -2.0 if math.isnan(risks[name]) else -risks[name])

    def sort(self, names: Sequence[str], chosen: Sequence[str]) -> None:
        """Sort lines in the order of `names`, portraits and residuals in the order of `chosen`."""
        orders = (self.lines, names), (self.portraits, chosen), (self.residuals, chosen)
        for part, order in orders:
            for name in [name for name in order if name in part]:
                part[name] = part.pop(name)


def json_text(data: Any) -> str:
    """Return a figure's data as JSON of `rounded` values."""
    return json.dumps(rounded(data), allow_nan=False)


def rounded(data: Any) -> Any:
    """Round the floats of JSON data to six significant digits; NaN and infinity become None."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    if isinstance(data, float):
        value = float(f"{data:.6g}")  # enough for any figure, and a third of the size
        return value if math.isfinite(value) else None
    return data


def write_csv(path: Path, result: Analysis) -> None:
    """Write the table of layers atomically: one line per layer and tensor."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("layer", "tensor", "rows", "columns", "risk", *_COLUMNS))
    for name in result.by_risk():
        for kind, line in result.lines[name].items():
            risk = f"{result.risk(name):.4f}"
            cells = (line.get(column, "") for column in _COLUMNS)
            writer.writerow((name, kind, *line["shape"], risk, *cells))
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
