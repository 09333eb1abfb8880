"""eval/studies/instructions.py: conversations whose answers stand in the text."""

from __future__ import annotations

import json
import re

import pytest
from texts import documents

STUDY = "instructions"
PARAGRAPH = (
    "The {n} valley lies between two hills. A river runs through it from north to south! "
    "Who was it that built the bridge over it? Nobody in the village remembers that anymore. "
    "Travellers still stop there in the evening, and look at its five arches in the water."
)


@pytest.fixture
def paragraphs():
    return [PARAGRAPH.format(n=name) for name in ("first", "second", "third", "fourth", "fifth")]


def test_answers_are_what_the_text_says(study, paragraphs):
    found = list(study.conversations(["\n\n".join(paragraphs)]))
    starts = ("Continue", "Which sentence", "Put these sentences", "Restore", "Quote")
    assert all(request.startswith(start) for start, (request, _) in zip(starts, found))
    goes_on, gap, order, restore, find = found
    assert f"{goes_on[0].split(chr(10))[-1]} {goes_on[1]}" == paragraphs[0]
    assert gap[0].split("\n")[-1].replace("[...]", gap[1]) == paragraphs[1]
    numbered = re.findall(r"^\d+\. (.*)$", order[0], re.MULTILINE)
    assert order[1] == paragraphs[2]
    assert sorted(numbered) == sorted(re.split(r"(?<=[.!?]) ", paragraphs[2]))
    assert restore[1] == paragraphs[3]
    assert not re.search(r"[A-Z.!?,]", restore[0].split("\n")[-1])
    word = re.search('"(.*)"', find[0])[1]
    assert word in find[1].lower()
    assert find[1] in paragraphs[4]


def test_files_are_conversations_and_always_the_same(study, paragraphs, tmp_path):
    source = tmp_path / "prose.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    assert study.write(source, tmp_path / "a.jsonl") == len(paragraphs)
    study.write(source, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles == ["user", "assistant"]
    assert study.write(source, tmp_path / "c.jsonl", characters=700) < len(paragraphs)


def test_text_without_paragraphs_is_refused(study, tmp_path):
    source = tmp_path / "short.jsonl"
    source.write_text(json.dumps({"text": documents()[0].text[:100]}) + "\n")
    with pytest.raises(ValueError, match="no paragraph of 3 to 8 sentences and 240 to 1200"):
        study.write(source, tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("out.jsonl"))


def test_a_word_to_find_is_whole(study):
    for part in ("couldn't", "couldn\u2019t", "fianc\u00e9e", "river's"):
        found = study.WORD.findall(f"nobody {part} arrives, or the bridge.")
        assert found == ["nobody", "arrives", "bridge"]


def test_a_first_conversation_that_is_too_long_is_named(study, paragraphs, tmp_path):
    source, target = tmp_path / "prose.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"text": paragraphs[0]}) + "\n")
    target.write_text("kept")
    message = r"first conversation of .* has \d+ .* more than --characters 10; raise"
    with pytest.raises(ValueError, match=message):
        study.write(source, target, characters=10)
    assert target.read_text() == "kept"
