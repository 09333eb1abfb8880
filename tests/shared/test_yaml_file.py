"""YAML files of options: what is read, and how a file that is none is named."""

from __future__ import annotations

import pytest

from metis_hf.shared.yaml_file import read_yaml


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            b"seeds: [0, 1]\nmodel: {hidden_size: 64}\n",
            {"seeds": [0, 1], "model": {"hidden_size": 64}},
        ),
        (b"# nothing yet\n", {}),
        (b"seeds: [0\n", r"x\.yaml is not YAML: while parsing a flow sequence"),
        (b"- seeds\n", r"x\.yaml is not a mapping of names to values"),
        (b"\xff\xfe", r"x\.yaml is not UTF-8 text"),
        (None, r"there is no file .*x\.yaml"),
    ],
)
def test_read_yaml(data, expected, tmp_path):
    file = tmp_path / "x.yaml"
    if data is not None:
        file.write_bytes(data)
    if isinstance(expected, dict):
        assert read_yaml(file) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            read_yaml(file)


def nested_aliases(levels):
    """YAML of one line for each level, whose last alias stands for 9^levels values and more."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        one, other = chr(97 + level), chr(96 + level)
        lines.append(f"{one}: &{one} [{', '.join([f'*{other}'] * 9)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (nested_aliases(10), r"its aliases \(\*name\) expand to more than 10,000 values"),
        ("a: &a {" + ", ".join(f"k{i}: 0" for i in range(200)) + "}\nb:\n"
         + "".join(f"- {{<<: [{', '.join(['*a'] * 9)}]}}\n" for _ in range(9)), "expand to more"),
        ("a: &a [*a]", "is nested too deeply, or an alias contains itself"),
        ("a: " + "[" * 50_000, "is nested too deeply"),
        ("a: [" + "x," * 200_000 + "]", r"x\.yaml has 400,005 bytes; choose .* at most 262,144"),
    ],
)  # fmt: skip
def test_a_file_that_would_take_all_memory_is_refused_in_a_line(text, said, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        read_yaml(tmp_path / "x.yaml")
    assert len(str(refused.value)) < 400


def test_aliases_of_a_file_that_somebody_would_write(tmp_path):
    text = "t: &t {lr: 1}\nall: [" + ", ".join(["{<<: *t, seed: 1}"] * 1000) + "]\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_yaml(tmp_path / "x.yaml")["all"] == [{"lr": 1, "seed": 1}] * 1000
