"""Patterns give the answers of `re`, and none of them takes for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metis_hf.shared.patterns import MAX_LENGTH, NamePattern, name_pattern

# `re` needs longer than anyone waits for most of these; here each is answered at once.
HOSTILE = {
    "(a+)+$": False,
    "(a|a)*b": False,
    "(a|aa)+$": False,
    "(.*)*x": False,
    "(.*a){25}!": True,
    r"([a-z]+)+\.": False,
    "(x+x+)+y": False,
    "(a*)*b": False,
    "(a|b|ab)*c": False,
    "((a?){9}){9}!": True,
    "a?" * 40 + "a" * 40 + "!": True,
    ".*" * 60 + "z": False,
    "(?=(a+)+b).*": False,
    "(?!(a+)+b).*": True,
    r"(?<!\.)(a+)+b": False,
}
NAME = "a" * 40 + "!"


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_are_answered(pattern):
    assert NamePattern(pattern).fullmatch(NAME) is HOSTILE[pattern]
    assert NamePattern(rf"(.*\.)?({pattern})").fullmatch(f"b.{NAME}") is HOSTILE[pattern]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(((", "missing ), unterminated subpattern"),
        ("*", "nothing to repeat"),
        ("[z-a]", "bad character range"),
        ("(?<=a*)b", "look-behind requires fixed-width"),
        (r"(a)\1", "a backreference"),
        (r"(?P<x>a)(?P=x)", "a backreference"),
        ("(a)?(?(1)b|c)", "a condition on a group"),
        ("a{99999999999999}", "repetition number is too large"),
        ("(" * 900 + ")" * 900, "nested too deeply"),
        ("(" * 51 + ")" * 51, "nested too deeply"),
        ("(((a{1,50}){1,50}){1,50}){1,50}", "needs more than 4,000 states"),
        ("(){0,4000000000}", "needs more than 4,000 states"),
        ("(((){3000}){3000}){3000}", "needs more than 4,000 states"),
        ("a" * (MAX_LENGTH + 1), "at most 2,000 are allowed"),
    ],
)
def test_what_is_refused(pattern, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        NamePattern(pattern)


NAMES = (
    *(f"model.layers.{i}.{n}" for i in (0, 1, 11) for n in ("self_attn.q_proj", "mlp.down_proj")),
    "transformer.h.3.attn.c_attn", "model.language_model.layers.2.mlp.experts.7.gate_proj",
    "lm_head", "visual.blocks.0.qkv", "Model.Layers", "a.b\n", "",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k|v)_proj",
        r".*layers\.(\d+)\.mlp.*",
        r".*attn.*(q|v)_proj$",
        r"^model\.layers\.[01]\..*",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|gate_proj).*?)",
        r"^(?!.*visual).*(?:q_proj|down_proj|qkv).*",
        r".*(?<!\.11)\.mlp\.down_proj",
        r"(?i)model\.layers.*",
        r"(?i:MODEL)\..*",
        r".*\bmlp\b.*",
        r"\w+(\.\w+){2,3}",
        r"[^.]+\.[^\W\d]\..*|lm_head",
        r"(?s).*",
        r"(?m)^a\.b$",
        r"\Amodel.*\d\Z|.*proj",
        r"(?x) model \. layers \. .*  # all blocks",
    ],
)
def test_patterns_that_people_write(pattern):
    ours, theirs = NamePattern(pattern), re.compile(pattern)
    for name in NAMES:
        assert ours.fullmatch(name) is bool(theirs.fullmatch(name)), name
        assert ours.match(name) is bool(theirs.match(name)), name


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)Q_PROJ",
        "(?i)(?s).ELF_ATTN.*|lm_head",
        "(?x) (q | k) _proj  # of attention",
        "(?i:Q)_proj",
    ],
)
def test_flags_of_a_pattern_within_another_are_its_own(pattern):
    """As patterns of ranks and schemes are: a suffix of a name."""
    ours = name_pattern(pattern, r"(.*\.)?(", ")$")
    theirs = re.compile(pattern)
    for name in NAMES:
        parts = name.split(".")
        suffixes = [".".join(parts[n:]) for n in range(len(parts))]
        assert ours.match(name) is any(theirs.fullmatch(each) for each in suffixes), name
    around = name_pattern("(?i)Q_PROJ", r"(.*\.Self\.)?(", ")$")  # which keeps its case
    assert [around.match(f"{name}.q_proj") for name in ("a.Self", "a.self")] == [True, False]


ATOMS = st.sampled_from(
    [*"abA.", r"\.", r"\d", r"\w", r"\W", r"\b", r"\B", "^", "$", "[ab]", "[^a.]", "[a-c0-9]", "()",
     "(?!)"]
)  # fmt: skip


REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?"])


def compound(inner):
    """Larger patterns of smaller ones."""
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from(["(?=", "(?!", "(?i:", "(?-s:"]), inner).map(
            lambda pair: f"{pair[0]}{pair[1]})"
        ),
        st.sampled_from([r"(?<=a)", r"(?<!\.b)", "(?<=[ab].)"]),
    )  # fmt: skip


@given(
    st.recursive(ATOMS, compound, max_leaves=8),
    st.lists(st.text("abAB.0_\n", max_size=7), min_size=1, max_size=6),
)
@example("(a|ab)(c|bcd)(d*)", ["abcd"])
@example("(?:a?)*?b", ["aab"])
@example("(?:^a|b$)+", ["ab", "a\n"])
@settings(max_examples=150, deadline=None)
def test_answers_are_those_of_re(pattern, names):
    ours, theirs = NamePattern(pattern), re.compile(pattern)
    for name in names:
        assert ours.fullmatch(name) is bool(theirs.fullmatch(name))
        assert ours.match(name) is bool(theirs.match(name))


@given(st.text("ab._-1", max_size=8), st.text("ab._-1", max_size=12))
@settings(max_examples=50, deadline=None)
def test_plain_names_take_the_short_way(text, name):
    ours = name_pattern(text, r"(.*\.)?(", ")$")
    assert isinstance(ours, re.Pattern)
    assert bool(ours.match(name)) is NamePattern(rf"(.*\.)?({text})$").match(name)


def test_what_is_remembered_stays_bounded():
    """Answers stay right where the memory of steps is thrown away again and again."""
    pattern = "(.*a){20}b?"
    ours = NamePattern(pattern)
    for count in range(150):
        name = ("ab" * count + "c" * (count % 7))[-90:] + "a" * (count % 25)
        body = name.removesuffix("b")
        assert ours.fullmatch(name) is (body.endswith("a") and body.count("a") >= 20)
        assert ours._automaton._remembered <= 10_000 + 200
