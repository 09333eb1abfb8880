"""YAML files of options: what is read, and how a file that is none is named."""

from __future__ import annotations

import pytest

from metis_hf.shared.yaml_file import read_yaml


def test_keys_and_values(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("seeds: [0, 1]\nmodel: {hidden_size: 64}\n")
    assert read_yaml(file) == {"seeds": [0, 1], "model": {"hidden_size": 64}}
    file.write_text("# nothing yet\n")
    assert read_yaml(file) == {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"seeds: [0\n", r"x\.yaml is not YAML: while parsing a flow sequence"),
        (b"- seeds\n", r"x\.yaml is not a mapping of names to values"),
        (b"\xff\xfe", r"x\.yaml is not UTF-8 text"),
        (None, r"there is no file .*x\.yaml"),
    ],
)
def test_what_is_no_such_file_is_named(data, message, tmp_path):
    if data is not None:
        (tmp_path / "x.yaml").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "x.yaml")
