"""Three small lm-eval tasks built from held-out documents, as YAML and JSONL in one directory.

`demo_loss` is the rolling log-likelihood of documents, `demo_cloze` predicts the last word of a
passage (after LAMBADA), `demo_choice` picks the lines that really follow (after HellaSwag). The
directory also works on lm-eval's command line: `--include_path DIR --tasks demo_cloze`.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis_hf.data.corpus import Document

TASK_NAMES = ("demo_loss", "demo_cloze", "demo_choice")

LOSS_DOCUMENTS = 60
LOSS_CHARACTERS = 3000

CLOZE_CHARACTERS = 500  # 150 to 200 tokens of a small code vocabulary
CLOZE_SHARE = 0.05  # of the items may have the same answer: what a constant guess scores at most
CLOZE_PER_PAIR = 6  # items whose answer follows the same two words
CLOZE_PRIOR = 10  # occurrences that a pair needs before its statistics count
REFERENCE_CHARACTERS = 3_000_000

CONTEXT_CHARACTERS = (200, 300)
CHOICE_CHARACTERS = (40, 120)
CHOICE_LINES = 3
CHOICE_SLACK = 0.2  # the four choices differ in length by at most this share
DISTRACTORS = 3

# A word in the middle of a line, after one space: the byte-level pre-tokenizer splits before that
# space, so context and target together tokenize to the tokens of each.
_CLOZE_TARGET = re.compile(r"(?<=\S) ([A-Za-z_][A-Za-z0-9_]+)(?![A-Za-z0-9_'])")

_WORD = re.compile(r"[A-Za-z_]\w*|\d+|[^\w\s]")

_YAML = """\
# {doc}
task: {task}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
{body}metadata:
  version: 1.0
"""

_LOSS_BODY = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""

_CLOZE_BODY = """\
output_type: loglikelihood
doc_to_text: context
doc_to_target: target
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""

_CHOICE_BODY = """\
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: "\\n"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
  - metric: acc_mutual_info
    aggregation: mean
    higher_is_better: true
"""


def write_tasks(
    documents: Sequence[Document],
    directory: str | Path,
    *,
    reference: Sequence[Document],
    items: int = 250,
    seed: int = 0,
) -> list[str]:
    """Write the three tasks; the same arguments write the same files.

    Args:
        documents: Held-out documents. Choices are drawn evenly over them, in their order.
        directory: Where `<task>.yaml` and `<task>.jsonl` go; created if missing. The YAML files
            hold absolute paths: lm-eval resolves relative ones against the working directory.
        reference: Training documents; the cloze words are guessable for who has read them.
        items: Number of items of `demo_cloze` and of `demo_choice`.
        seed: Chooses the passages, the distractors and where the right answer stands.

    Returns:
        The task names: `["demo_loss", "demo_cloze", "demo_choice"]`.

    Raises:
        ValueError: If the documents cannot supply that many items.
    """
    if items < 1:
        raise ValueError(f"items={items}; ask for at least 1")
    if not documents:
        raise ValueError(
            f"items={items} were asked, but there are no documents; pass held-out ones"
        )
    folder = Path(directory).resolve()
    tasks = {
        "demo_loss": (
            "Rolling log-likelihood of the beginnings of held-out standard library files.",
            _LOSS_BODY,
            loss_items(documents),
        ),
        "demo_cloze": (
            "LAMBADA style: the last word of a passage, guessable from its training text.",
            _CLOZE_BODY,
            cloze_items(documents, reference, items, seed),
        ),
        "demo_choice": (
            "HellaSwag style: which lines follow, with distractors from other files.",
            _CHOICE_BODY,
            choice_items(documents, items, seed),
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for task, (doc, body, rows) in tasks.items():
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        # A JSON string is a YAML string, whatever characters the path has.
        text = _YAML.format(doc=doc, task=task, data=json.dumps(str(data)), body=body)
        (folder / f"{task}.yaml").write_text(text, encoding="utf-8")
    return list(TASK_NAMES)


def loss_items(documents: Sequence[Document]) -> list[dict[str, str]]:
    """Return the first documents, each cut at the last line end before `LOSS_CHARACTERS`.

    Returns:
        Rows with `path` and `text`. Texts keep their start, since a document's start after the
        end-of-text token is what the model saw in training and what lm-eval's prefix token means.
    """
    rows = []
    for document in documents[:LOSS_DOCUMENTS]:
        text = document.text[:LOSS_CHARACTERS]
        if len(document.text) > LOSS_CHARACTERS and "\n" in text:
            text = text[: text.rindex("\n") + 1]
        rows.append({"path": document.path, "text": text})
    return rows


def cloze_items(
    documents: Sequence[Document], reference: Sequence[Document], items: int, seed: int
) -> list[dict[str, str]]:
    """Return passages whose last word a reader of `reference` can guess, after LAMBADA's filter.

    A word counts as guessable by how often it follows the two words before it in the reference.
    The most guessable places are taken, each word and each pair before it a few times only, so
    that no constant answer scores.

    Returns:
        Rows with `path`, `context` (whole lines, then the start of the last one) and `target` (one
        space and a word).
    """
    following = _following_words(reference)
    found: list[tuple[float, str, tuple[str, str], dict[str, str]]] = []
    for document in documents:
        text = document.text
        for match in _CLOZE_TARGET.finditer(text):
            end = match.start()
            start = text.find("\n", max(0, end - CLOZE_CHARACTERS - 1)) + 1
            context = text[start:end]
            before = tuple(_WORD.findall(context[-80:])[-2:])
            counts = following.get(before)
            if counts is None or len(context) < CLOZE_CHARACTERS // 2:
                continue
            # Lidstone-like: a pair seen ten times that is always followed so scores one half.
            score = counts[match[1]] / (counts.total() + CLOZE_PRIOR)
            if score > 0:
                row = {"path": document.path, "context": context, "target": match[0]}
                found.append((score, match[1], before, row))
    random.Random(f"{seed}:demo_cloze").shuffle(found)
    found.sort(key=lambda entry: -entry[0])
    words: Counter[str] = Counter()
    pairs: Counter[tuple[str, ...]] = Counter()
    contexts: set[str] = set()
    rows: list[dict[str, str]] = []
    for _, word, before, row in found:
        if len(rows) == items:
            break
        most = max(1, int(CLOZE_SHARE * items))
        if words[word] < most and pairs[before] < CLOZE_PER_PAIR and row["context"] not in contexts:
            words[word] += 1
            pairs[before] += 1
            contexts.add(row["context"])
            rows.append(row)
    _require(rows, items, "demo_cloze", documents)
    return rows


def _following_words(reference: Sequence[Document]) -> dict[tuple[str, ...], Counter[str]]:
    """Count which word follows each pair of words how often, in the first documents."""
    following: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    characters = 0
    for document in reference:
        words = _WORD.findall(document.text)
        for first, second, third in zip(words, words[1:], words[2:]):
            following[first, second][third] += 1
        characters += len(document.text)
        if characters > REFERENCE_CHARACTERS:
            break
    return following


def choice_items(documents: Sequence[Document], items: int, seed: int) -> list[dict[str, Any]]:
    """Return contexts with four continuations, of which one is the real one.

    The distractors come from three other files. They too begin at a line start and are about as
    long, so that neither gives the answer away; their indentation is what it is in their file.

    Returns:
        Rows with `path`, `context` (whole lines, without the last line end), `choices` (four
        strings) and `label` (index of the right one).
    """
    passages = {document.path: _passages(document) for document in documents}
    pool: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for path, found in passages.items():
        for passage in found:
            pool[passage.length_class].append((path, passage.continuation))

    def candidates(document: Document) -> list[dict[str, Any]]:
        rows = []
        for passage in passages[document.path]:
            rng = random.Random(f"{seed}:{document.path}:{passage.context}")
            wrong = _distractors(
                pool[passage.length_class], document.path, passage.continuation, rng
            )
            if wrong is None:
                continue
            label = rng.randrange(DISTRACTORS + 1)
            choices = [*wrong[:label], passage.continuation, *wrong[label:]]
            rows.append(
                {
                    "path": document.path,
                    "context": passage.context,
                    "choices": choices,
                    "label": label,
                }
            )
        return rows

    return _draw_evenly(documents, candidates, items, f"{seed}:demo_choice")


@dataclass(frozen=True)
class _Passage:
    context: str
    continuation: str

    @property
    def length_class(self) -> int:
        """Return what the four choices of an item have in common.

        Classes make the four exchangeable. Were distractors drawn around the right length instead,
        the right one would be the shortest too rarely, because long continuations are commoner.
        """
        return int(math.log(len(self.continuation) / CHOICE_CHARACTERS[0], 1 + CHOICE_SLACK))


def _passages(document: Document) -> list[_Passage]:
    """Yield non-overlapping contexts with the few lines that follow each."""
    lines = document.text.split("\n")
    passages: list[_Passage] = []
    first_free = 0  # line where the next passage may begin
    for index in range(1, len(lines)):
        before, after = lines[index - 1], lines[index]
        if not after.strip() or not before.strip() or before != before.rstrip():
            continue
        context = _lines_before(lines, index, first_free)
        continuation = _lines_after(lines, index)
        if context is None or continuation is None:
            continue
        passages.append(_Passage(context, continuation))
        first_free = index + continuation.count("\n") + 1
    return passages


def _lines_before(lines: list[str], index: int, first_free: int) -> str | None:
    low, high = CONTEXT_CHARACTERS
    start = index
    while start > first_free:
        start -= 1
        context = "\n".join(lines[start:index])
        if len(context) > high:
            return None
        if len(context) >= low and lines[start].strip():
            return context
    return None


def _lines_after(lines: list[str], index: int) -> str | None:
    """Return the lines that fit, up to the first blank one, or None if they are too short."""
    low, high = CHOICE_CHARACTERS
    chosen: list[str] = []
    for line in lines[index : index + CHOICE_LINES]:
        if not line.strip() or len("\n".join([*chosen, line])) > high:
            break
        chosen.append(line)
    text = "\n".join(chosen)
    enough = sum(character.isalpha() for character in text) >= low // 2
    return text if enough and low <= len(text) and text == text.rstrip() else None


def _distractors(
    entries: list[tuple[str, str]], path: str, right: str, rng: random.Random
) -> list[str] | None:
    """Return three continuations from three other files, or `None`.

    Args:
        entries: (path, text) of all continuations of the right one's length class.
        path: The file of the right continuation.
        right: The right continuation.
        rng: Decides which are taken, and their order.
    """
    chosen: dict[str, str] = {}
    for other, text in rng.sample(entries, len(entries)):
        if other != path and other not in chosen and text not in (right, *chosen.values()):
            chosen[other] = text
            if len(chosen) == DISTRACTORS:
                return list(chosen.values())
    return None


def _draw_evenly(
    documents: Sequence[Document],
    candidates: Callable[[Document], Iterable[dict[str, Any]]],
    items: int,
    seed: str,
) -> list[dict[str, Any]]:
    """Take one candidate from each document in turn until there are enough."""
    queues = []
    for document in documents:
        rows = list(candidates(document))
        random.Random(f"{seed}:{document.path}").shuffle(rows)
        queues.append(rows)
    drawn: list[dict[str, Any]] = []
    contexts: set[str] = set()
    while any(queues) and len(drawn) < items:
        for rows in queues:
            if rows and len(drawn) < items:
                row = rows.pop()
                if row["context"] not in contexts:
                    contexts.add(row["context"])
                    drawn.append(row)
    _require(drawn, items, seed.split(":")[1], documents)
    return drawn


def _require(rows: Sequence[Any], items: int, task: str, documents: Sequence[Document]) -> None:
    if len(rows) < items:
        raise ValueError(
            f"items={items} of {task} were asked, but {len(documents)} documents supply "
            f"{len(rows)}; pass more held-out text or ask for fewer items"
        )
