"""Evaluations side by side in the shape of the paper's tables, with differences and footnotes.

Numbers only; `formats` turns them into text. Scores are in percent, errors are one standard error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from metis_hf.lab.evaluate import paper
from metis_hf.lab.evaluate.held_out import LOSS_TASK
from metis_hf.lab.evaluate.results import headline, is_share, metrics_of, union

BASES = ("bf16", "dense")  # unquantized; the first that has a row is the default control
LOSS, AVERAGE = "Loss", "Avg"
TRUNCATED = ("truncated_requests", "truncated_tokens")
HELD_OUT = ("held_out_loss", "held_out_tokens")
FEW_ITEMS = 100  # with as many, a score's standard error is up to 5 points


@dataclass(frozen=True)
class Score:
    """A number of a table."""

    value: float  # in percent, nats per token, or the metric's unit; NaN is flagged
    error: float = math.nan  # one standard error, in the same unit; NaN if unknown
    metric: str = ""
    percent: bool = True  # a share of right answers, which the average includes
    lower_is_better: bool = False
    items: str = ""  # one digit per document, if the metric is 0 or 1 for each
    digits: int | None = None  # known decimals; None: as many as the column shows


@dataclass(frozen=True)
class Row:
    """One evaluation, or one published row, which has neither label, scheme nor precision."""

    name: str  # shown in the first column
    scores: dict[str, Score]  # by column title; a column without a number is absent
    label: str = ""
    scheme: str = ""
    precision: str = ""  # "scheme" or "dense"
    method: str | None = None  # the paper's name of the method, if it has it


@dataclass(frozen=True)
class Block:
    """Rows under one title; `kind` is measured, published, or a difference to control or paper."""

    kind: str
    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Comparison:
    """A table to be shown: columns, blocks of rows, and footnotes."""

    columns: list[str]
    blocks: list[Block]
    notes: list[str] = field(default_factory=list)

    def best(self, column: str) -> float | None:
        """Return a column's best measured value, rounded as shown; None if all are equal."""
        scores = [row.scores[column] for row in self.blocks[0].rows if column in row.scores]
        finite = [score for score in scores if math.isfinite(score.value)]
        values = {round(score.value, digits(column)) for score in finite}
        if not values or (len(values) == 1 and len(finite) == len(scores)):
            return None
        return min(values) if finite[0].lower_is_better else max(values)


def digits(column: str) -> int:
    """Return the number of decimals that a column shows."""
    return 4 if column == LOSS else 1


def title(task: str) -> str:
    """Return a task's column title, the paper's where it has the task."""
    return paper.TITLES.get(task, task)


def parse_metrics(options: Sequence[str]) -> dict[str, str]:
    """Return `["acc"]` or `["race=acc", ...]` as task -> metric; the key "" stands for all tasks.

    Raises:
        ValueError: a metric for all tasks that is none of acc, acc_norm, default.
    """
    chosen: dict[str, str] = {}
    for option in options:
        task, equals, metric = option.rpartition("=")
        if (equals and not (task and metric)) or (
            not equals and metric not in ("acc", "acc_norm", "default")
        ):
            raise ValueError(
                f"metric {option!r}; expected acc, acc_norm, default, or <task>=<metric>"
            )
        chosen[task] = metric
    return chosen


def compare(
    results: Sequence[Sequence[dict[str, Any]]],
    tasks: Sequence[str],
    *,
    metrics: Mapping[str, str],
    control: str | None = None,
    published: str | None = None,
) -> Comparison:
    """Build the table from results.

    Args:
        results: for each row, the results of its tasks from `jobs.read_result`.
        tasks: the tasks in the order of the columns.
        metrics: from `parse_metrics`.
        control: label or name of the row that differences are relative to; by default the first
            row trained in bf16, else the first dense model, if any.
        published: the paper's model whose rows are added, e.g. "gpt2-130m".

    Raises:
        ValueError: no such control, metric or published model, or no published row that matches.
    """
    notes: list[str] = []
    records = [_joined(each) for each in results]
    rows = [_measured(record, tasks, metrics) for record in records]
    found = {column for row in rows for column in row.scores}
    columns = [c for c in (LOSS, *map(title, tasks), AVERAGE) if c in found]
    blocks = [Block("measured", "", rows)]
    reference = _control(rows, control)
    others = [row for row in rows if row is not reference]
    if reference is not None and others:
        differences = [difference(row, reference) for row in others]
        blocks.append(
            Block("difference to control", f"Difference to {reference.name}", differences)
        )
    if tasks:
        notes += _metric_notes(rows, tasks, metrics)
        notes += _error_notes(reference if others else None)
    of_note: dict[str, list[str]] = {}
    for record, row in zip(records, rows):
        for note in _row_notes(record):
            of_note.setdefault(note, []).append(row.name)
    notes += [f"{', '.join(names)}: {note}" for note, names in of_note.items()]
    notes += _setting_notes(records[0])
    if published is not None:
        more, about = _published_blocks(rows, tasks, published)
        blocks += more
        notes += about
    return Comparison(columns, blocks, notes)


def _average(scores: dict[str, Score]) -> dict[str, Score]:
    """Return the mean over shares of right answers, if any, with independent errors of tasks."""
    shares = [score for column, score in scores.items() if column != LOSS and score.percent]
    if not shares:
        return {}
    count = len(shares)
    error = math.sqrt(sum(score.error**2 for score in shares)) / count
    return {AVERAGE: Score(sum(score.value for score in shares) / count, error)}


def difference(row: Row, reference: Row) -> Row:
    """Return `row - reference` in every column that both have, paired over the same items."""
    scores: dict[str, Score] = {}
    for column, score in row.scores.items():
        other = reference.scores.get(column)
        if other is None or column == AVERAGE:
            continue
        value, error = score.value - other.value, _difference_error(score, other)
        scores[column] = replace(score, value=value, error=error, digits=other.digits)
    if AVERAGE in row.scores and AVERAGE in reference.scores:
        scores |= _average(scores)
    return replace(row, scores=scores)


def _difference_error(score: Score, other: Score) -> float:
    if score.items and len(score.items) == len(other.items):
        pairs = np.array([list(score.items), list(other.items)]).astype(int)
        gaps = 100.0 * (pairs[0] - pairs[1])
        return float(gaps.std(ddof=1) / math.sqrt(gaps.size)) if gaps.size > 1 else math.nan
    if math.isnan(other.error):  # a published number
        return score.error
    return math.hypot(score.error, other.error)


def _joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of a row's tasks: the first task's `metis`, and the values per task."""
    ours = [one["metis"] for one in results]
    sections = ("results", "higher_is_better", "items")
    return {
        **ours[0],
        **{name: union(one[name] for one in results) for name in sections},
        "nonfinite": union(one["nonfinite"] for one in ours),
        "limits": {one["settings"]["task"]: one["settings"]["limit"] for one in ours},
        **{name: sum(one[name] for one in ours) for name in TRUNCATED},
        **{name: next((o[name] for o in ours if o[name] is not None), None) for name in HELD_OUT},
    }


def _measured(record: dict[str, Any], tasks: Sequence[str], metrics: Mapping[str, str]) -> Row:
    scores: dict[str, Score] = {}
    if record["held_out_loss"] is not None:
        scores[LOSS] = Score(
            record["held_out_loss"], metric="loss", percent=False, lower_is_better=True
        )
    scores |= {title(task): _score(record, task, metrics) for task in tasks}
    scores |= _average(scores)
    converted = record["settings"]["conversion"] is not None
    return Row(
        row_name(record["label"], record["scheme"], record["precision"], converted=converted),
        scores,
        record["label"],
        record["scheme"],
        record["precision"],
        paper.published_method(record["quantization_config"]),
    )


def row_name(label: str, scheme: str, precision: str, *, converted: bool) -> str:
    """Return the name of an evaluation in the first column: checkpoint, scheme, precision.

    The scheme is omitted if the label contains a directory of that name, unless the checkpoint is
    converted.
    """
    named = scheme in label.split("/") and not converted
    name = label if named else f"{label} {scheme}"
    return f"{name}, dense" if precision == "dense" and scheme not in BASES else name


def _score(record: dict[str, Any], task: str, metrics: Mapping[str, str]) -> Score:
    results = record["results"]
    wanted = metrics.get(task)
    if wanted is None and metrics.get("", "default") in metrics_of(results.get(task, {})):
        wanted = metrics[""]
    metric, value, error = headline(results, task, None if wanted == "default" else wanted)
    lower = record["higher_is_better"].get(task, {}).get(metric) is False
    percent = is_share(value, lower_is_better=lower)
    scale = 100 if percent else 1
    items = record["items"].get(task, {}).get(metric, "")
    return Score(scale * value, scale * error, metric, percent, lower, items)


def _control(rows: Sequence[Row], wanted: str | None) -> Row | None:
    if wanted is None:
        return next((row for base in BASES for row in rows if row.scheme == base), None)
    for row in rows:
        if wanted in (row.name, row.label):
            return row
    raise ValueError(
        f"control={wanted!r}; choose one of the rows: {', '.join(row.name for row in rows)}"
    )


def _published_blocks(
    rows: Sequence[Row], tasks: Sequence[str], model: str
) -> tuple[list[Block], list[str]]:
    published = paper.published_rows(model)
    methods = paper.shared_methods([(row.scheme, row.method) for row in rows], model)
    shown = {method: _published_row(published[method], tasks) for method in methods}
    differences = [
        difference(row, shown[row.method])
        for row in rows
        if row.method in shown and set(row.scores) & set(shown[row.method].scores)
    ]
    name = paper.paper_tables()["models"][model]
    about = paper.paper_tables()["notes"]
    keys = ["task_metrics", "precision", "training", "race", "boolq", "error_bars"]
    notes = [
        f"Rows of {name} are from the paper (arXiv 2509.00404). This evaluation repeats the "
        "paper's protocol as far as it is known, but not its numbers: the text and the length "
        "of training differ, and the model differs too unless its architecture is the same. "
        "Differences to these rows carry only the error of the measured score.",
        *(about[key] for key in keys),
    ]
    if any("average_recomputed" in published[method] for method in methods):
        notes.append(f"{about['averages']} Averages here are the means of the rows.")
    return [
        Block("published", f"Published: {name}", list(shown.values())),
        Block("difference to published", "Difference to the published row", differences),
    ], notes


def _published_row(row: dict[str, Any], tasks: Sequence[str]) -> Row:
    of_task = dict(zip(paper.paper_tables()["tasks"], row["scores"], strict=True))
    scores = {LOSS: Score(row["loss"], percent=False, lower_is_better=True, digits=2)}
    known = {title(task): Score(of_task[task]) for task in tasks if task in of_task}
    scores |= known
    if len(known) == len(tasks):
        scores |= _average(known)
    return Row(f"{row['method']} (published)", scores, method=row["method"])


def _metric_notes(
    rows: Sequence[Row], tasks: Sequence[str], metrics: Mapping[str, str]
) -> list[str]:
    of_metric: dict[str, list[str]] = {}
    for task in tasks:
        score = rows[0].scores[title(task)]
        of_metric.setdefault(score.metric, []).append(title(task))
    parts = [f"{metric} of {', '.join(columns)}" for metric, columns in of_metric.items()]
    notes = [f"Shown: {'; '.join(parts)}; in percent where it is a share of right answers."]
    wanted = metrics.get("", "default")
    lacking = [title(t) for t in tasks if rows[0].scores[title(t)].metric != wanted]
    if wanted != "default" and [t for t in tasks if t not in metrics] and lacking:
        notes.append(f"{', '.join(lacking)} does not have the requested metric {wanted}.")
    apart = [title(t) for t in tasks if not rows[0].scores[title(t)].percent]
    if apart and len(apart) < len(tasks):
        notes.append(f"The average leaves out {', '.join(apart)}: no share of right answers.")
    return notes


def _error_notes(reference: Row | None) -> list[str]:
    notes = ["± is one standard error over the items of a task, in points."]
    if reference is not None:
        paired = all(s.items for c, s in reference.scores.items() if s.percent and c != AVERAGE)
        notes.append(
            "The error of a difference comes from the paired differences over the same items; it "
            "does not hold the spread between training runs."
            if paired
            else "The error of a difference takes the two rows as independent where it is not "
            "known which items were right."
        )
    return notes


def _row_notes(record: dict[str, Any]) -> list[str]:
    notes = []
    for task, count in record["nonfinite"].items():
        if task == LOSS_TASK:
            notes.append("the held-out loss is NaN.")
        else:
            notes.append(
                f"{count} likelihoods of {title(task)} are NaN, so its score and the average are "
                "NaN too."
            )
    requests, tokens = (record[name] for name in TRUNCATED)
    if requests:
        notes.append(
            f"{requests} requests were longer than the context; {tokens} tokens at their "
            "beginning were cut off."
        )
    return notes


def _setting_notes(record: dict[str, Any]) -> list[str]:
    notes = [f"Batch size {record['settings']['batch_size']} for all rows."]
    if record["held_out_loss"] is not None:
        tokens = record["held_out_tokens"]
        notes.append(f"Loss is held-out, in nats per token; {tokens} tokens in the first row.")
    of_items: dict[int, list[str]] = {}
    for task, items in record["limits"].items():
        if items is not None:
            of_items.setdefault(items, []).append(title(task))
    if of_items:
        few = ": a smoke test, not a result" if min(of_items) < FEW_ITEMS else ""
        parts = [f"{items} of {', '.join(titles)}" for items, titles in of_items.items()]
        notes.append(f"Only the first {'; '.join(parts)}{few}.")
    return notes
