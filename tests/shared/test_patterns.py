"""Patterns of module names: hostile ones end, what people write means what `re` says."""

from __future__ import annotations

import re
import sys

import pytest

from metis_hf.shared.patterns import ending_pattern, name_pattern

NAME = "a" * 40 + "!"
# `re` needs longer than anyone waits for these; each is answered at once.
HOSTILE = {
    "(a+)+$": False,
    "(.*)*x": False,
    "(.*a){25}!": True,
    "a?" * 40 + "a" * 40 + "!": True,
    ".*" * 60 + "z": False,
}


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_are_answered(pattern):
    assert bool(name_pattern(pattern).fullmatch(NAME)) is HOSTILE[pattern]
    assert bool(ending_pattern(f"{pattern}").match(f"b.{NAME}")) is HOSTILE[pattern]


NO_RE2 = "RE2, which matches in linear time, does not support it"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(((", "missing ), unterminated subpattern"),
        ("a)(b", "unbalanced parenthesis"),
        ("*", "nothing to repeat"),
        ("[z-a]", "bad character range"),
        ("a{99999999999999}", "repetition number is too large"),
        ("a" * 2001, "at most 2,000 are allowed"),
        (r"(a)\1", NO_RE2),
        ("^(?!.*visual).*q_proj", f"{NO_RE2} (invalid perl operator: (?!). Instead"),
        ("(((a{1,50}){1,50}){1,50}){1,50}", NO_RE2),
        ("(((){3000}){3000}){3000}", NO_RE2),
    ],
)
def test_what_is_refused(pattern, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        name_pattern(pattern)


def test_groups_nested_deeper_than_python_goes():
    limit = sys.getrecursionlimit()  # hypothesis raises it
    sys.setrecursionlimit(1000)
    try:
        with pytest.raises(ValueError, match="nested too deeply"):
            name_pattern("(" * 900 + ")" * 900)
    finally:
        sys.setrecursionlimit(limit)


NAMES = (
    *(f"model.layers.{i}.{n}" for i in (0, 1, 11) for n in ("self_attn.q_proj", "mlp.down_proj")),
    "transformer.h.3.attn.c_attn", "model.language_model.layers.2.mlp.experts.7.gate_proj",
    "lm_head", "visual.blocks.0.qkv", "Model.Layers", "",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        r".*attn.*(q|v)_proj$",
        r"^model\.layers\.[01]\..*",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|gate_proj).*?)",
        r"(?i:MODEL)\..*",
        r".*\bmlp\b.*",
        r"\w+(\.\w+){2,3}",
        r"[^.]+\.[^\W\d]\..*|lm_head",
        r"\Amodel.*\d$|.*proj",
    ],
)
def test_patterns_that_people_write(pattern):
    ours, theirs = name_pattern(pattern), re.compile(pattern)
    for name in NAMES:
        assert bool(ours.fullmatch(name)) is bool(theirs.fullmatch(name)), name
        assert bool(ours.match(name)) is bool(theirs.match(name)), name


def test_flags_of_a_pattern_end_with_it():
    around = name_pattern("(?i)Q_PROJ", r"(.*\.Self\.)?(", ")$")
    assert [bool(around.match(f"{name}.q_proj")) for name in ("a.Self", "a.self")] == [True, False]
