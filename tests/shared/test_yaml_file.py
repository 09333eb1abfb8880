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
