"""Make instruction-style conversations from prose alone.

    python eval/studies/instructions.py prose.jsonl chat.jsonl --characters 3_000_000

Reads JSON lines with a `text` each, and writes JSON lines of `messages`: a request about a
paragraph, and the answer from the text itself. The kinds of request alternate from paragraph to
paragraph, in the order of the text. The same file gives the same conversations.

    continue   the beginning of a paragraph -> the rest of it
    gap        a paragraph without one of its sentences -> that sentence
    order      the sentences of a paragraph, shuffled and numbered -> the paragraph
    restore    a paragraph without capitals and punctuation -> the paragraph
    find       a paragraph and a word of it -> the sentence that has the word
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path

SHORTEST, LONGEST = 240, 1200  # characters of a paragraph
FEWEST, MOST = 3, 8  # sentences of a paragraph
_SENTENCE_END = re.compile(r'(?<=[.!?]["”\')])\s+|(?<=[.!?])\s+(?=["“\'(]?[A-Z])')
# Whole words: neither "couldn" of "couldn't" nor "fianc" of "fiancée".
WORD = re.compile(r"(?<![\w'\u2019])[a-z]{5,}(?![\w'\u2019])")
Conversation = tuple[str, str]


def conversations(texts: Iterable[str], seed: int = 0) -> Iterator[Conversation]:
    """Yield (request, answer) for each paragraph of three to eight sentences.

    An empty line separates paragraphs. Sentences, orders and words are drawn at random.
    """
    rng, kinds = random.Random(seed), cycle((_continue, _gap, _order, _restore, _find))
    for text in texts:
        for paragraph in text.split("\n\n"):
            joined = " ".join(paragraph.split())
            sentences = _SENTENCE_END.split(joined)
            if SHORTEST <= len(joined) <= LONGEST and FEWEST <= len(sentences) <= MOST:
                yield next(kinds)(sentences, rng)


def _continue(sentences: list[str], rng: random.Random) -> Conversation:
    first = rng.randint(1, len(sentences) - 1)
    return (
        f"Continue this passage:\n\n{' '.join(sentences[:first])}",
        " ".join(sentences[first:]),
    )


def _gap(sentences: list[str], rng: random.Random) -> Conversation:
    gone = rng.randrange(1, len(sentences) - 1)
    left = [*sentences[:gone], "[...]", *sentences[gone + 1 :]]
    return f"Which sentence could stand at [...] here?\n\n{' '.join(left)}", sentences[gone]


def _order(sentences: list[str], rng: random.Random) -> Conversation:
    shuffled = rng.sample(sentences, len(sentences))
    lines = "\n".join(f"{n}. {sentence}" for n, sentence in enumerate(shuffled, 1))
    return (
        f"Put these sentences in order, so that they make a paragraph:\n\n{lines}",
        " ".join(sentences),
    )


def _restore(sentences: list[str], rng: random.Random) -> Conversation:
    whole = " ".join(sentences)
    bare = " ".join(re.sub(r"[^\w\s]", " ", whole.lower()).split())
    return f"Restore capitals and punctuation:\n\n{bare}", whole


def _find(sentences: list[str], rng: random.Random) -> Conversation:
    whole = " ".join(sentences)
    words = [word for word in WORD.findall(whole.lower()) if whole.lower().count(word) == 1]
    if not words:
        return _continue(sentences, rng)
    word = rng.choice(words)
    answer = next(sentence for sentence in sentences if word in sentence.lower())
    return f'Quote the sentence that has the word "{word}":\n\n{whole}', answer


def write(source: Path, target: Path, characters: int | None = None) -> int:
    """Write the conversations of a file, and return their number.

    Args:
        source: JSON lines with a `text` each.
        target: JSON lines of `messages`.
        characters: limit on the total characters of requests and answers; None: no limit.

    Raises:
        ValueError: no paragraph has the required length and number of sentences, or the first
            conversation is longer than `characters`. Nothing is written.
    """
    texts = (json.loads(line)["text"] for line in source.read_text().splitlines() if line.strip())
    lines: list[str] = []
    used = 0
    for request, answer in conversations(texts):
        used += len(request) + len(answer)
        if characters is not None and used > characters:
            break
        messages = [
            {"role": "user", "content": request},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    if used and not lines:
        raise ValueError(
            f"the first conversation of {source} has {used:,} characters, more than --characters "
            f"{characters:,}; raise --characters"
        )
    if not lines:
        raise ValueError(
            f"{source} has no paragraph of {FEWEST} to {MOST} sentences and {SHORTEST} to "
            f"{LONGEST} characters; paragraphs are separated by an empty line"
        )
    target.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--characters", type=int, help="maximum number of characters in total")
    args = parser.parse_args()
    print(f"{write(args.source, args.target, args.characters):,} conversations in {args.target}")


if __name__ == "__main__":
    main()
