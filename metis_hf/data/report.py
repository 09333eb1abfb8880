"""Counts of what each filter dropped: per part while reading, summed up at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from metis_hf.data.filters import KEPT, RULES
from metis_hf.data.perplexity import DEVIATIONS, Outliers

if TYPE_CHECKING:
    import pyarrow as pa

_EXAMPLES = 5  # row numbers per filter


@dataclass
class Tally:
    """Counts of one part of the source, and where its stream goes on.

    Attributes:
        documents: Documents read.
        characters: Characters read.
        kept: Documents that passed the text filters.
        tokens: Tokens of those.
        dropped: Per filter, documents, characters and the first row numbers.
        languages: Documents dropped by the language filter, by language.
        stream: State of the `IterableDataset` after this part.
    """

    documents: int
    characters: int
    kept: int
    tokens: int
    dropped: dict[str, dict[str, Any]]
    languages: dict[str, int]
    stream: dict[str, Any]

    @classmethod
    def of(cls, table: pa.Table, first_row: int, stream: dict[str, Any]) -> Tally:
        """Count a table that `TextFilter` made; its first row is row `first_row` of the source."""
        reasons = np.asarray(table["reason"].to_pylist(), dtype=object)
        characters = table["characters"].to_numpy()
        dropped = {
            name: _dropped(reasons == name, characters, first_row + np.arange(len(reasons)))
            for name in RULES
        }
        codes = np.asarray(table["language"].to_pylist(), dtype=object)[reasons == "language"]
        return cls(
            documents=len(reasons),
            characters=int(characters.sum()),
            kept=int((reasons == KEPT).sum()),
            tokens=int(table["num_tokens"].to_numpy().sum()),
            dropped=dropped,
            languages=dict(Counter(codes)),
            stream=stream,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        """Return the inverse of `to_json`."""
        return cls(**values)


def build_report(
    tallies: list[Tally],
    tables: list[pa.Table],
    scores: np.ndarray | None,
    outliers: Outliers | None,
) -> dict[str, Any]:
    """Return the report up to arguments, versions and the number of sequences.

    Args:
        tallies: Per part, in order.
        tables: Per part, `row`, `characters`, `num_tokens` and `validation` of each document that
            passed the text filters.
        scores: Log perplexity of those documents, if measured.
        outliers: The decision by perplexity, if there is one.
    """
    read = {
        "documents": sum(t.documents for t in tallies),
        "characters": sum(t.characters for t in tallies),
    }
    columns = {
        name: np.concatenate([t[name].to_numpy() for t in tables] or [np.empty(0, int)])
        for name in ("row", "characters", "num_tokens", "validation")
    }
    filters = {name: _merged(name, tallies) for name in RULES}
    filters["language"]["languages"] = _languages(tallies)
    keep = np.ones(len(columns["row"]), bool)
    if scores is not None and outliers is not None:
        keep = outliers.keep
        dropped = _dropped(~keep, columns["characters"], columns["row"])
        filters["perplexity"] = {"dropped": dropped, **_perplexity(scores, outliers)}
    for entry in filters.values():
        for what in ("documents", "characters"):
            share = entry["dropped"][what] / max(read[what], 1)
            entry["dropped"][f"share_of_{what}"] = round(share, 6)
    report: dict[str, Any] = {"read": read, "filters": filters}
    for name, validation in (("train", False), ("validation", True)):
        chosen = keep & (columns["validation"] == validation)
        report[name] = {
            "documents": int(chosen.sum()),
            "characters": int(columns["characters"][chosen].sum()),
            "tokens": int(columns["num_tokens"][chosen].sum()),
        }
    return report


def _dropped(mask: np.ndarray, characters: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    return {
        "documents": int(mask.sum()),
        "characters": int(characters[mask].sum()),
        "example_rows": [int(row) for row in rows[mask][:_EXAMPLES]],
    }


def _merged(name: str, tallies: list[Tally]) -> dict[str, Any]:
    parts = [tally.dropped[name] for tally in tallies]
    rows = [row for part in parts for row in part["example_rows"]]
    return {
        "rule": RULES[name],
        "dropped": {
            "documents": sum(part["documents"] for part in parts),
            "characters": sum(part["characters"] for part in parts),
            "example_rows": rows[:_EXAMPLES],
        },
    }


def _languages(tallies: list[Tally]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally.languages)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _perplexity(scores: np.ndarray, outliers: Outliers) -> dict[str, Any]:
    """Return the band in numbers, and what the same rule would do to the logarithm."""
    log = Outliers.of(scores)
    band = DEVIATIONS * outliers.std
    return {
        "rule": f"perplexity is more than {DEVIATIONS:g} standard deviations from the mean of all "
        "documents that passed the other filters",
        "mean": outliers.mean,
        "std": outliers.std,
        "lowest_kept": outliers.mean - band,
        "highest_kept": outliers.mean + band,
        "too_high": outliers.too_high,
        "too_low": outliers.too_low,
        "on_log_perplexity": {
            "mean": log.mean,
            "std": log.std,
            "too_high": log.too_high,
            "too_low": log.too_low,
        },
    }
