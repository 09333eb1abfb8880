"""What an experiment reads is remembered, and other contents under the same paths are refused."""

from __future__ import annotations

from metis_hf.shared.inputs import digest_of_path


def test_contents_and_names_and_sizes_count(tmp_path):
    data = tmp_path / "data"
    (data / "validation").mkdir(parents=True)
    (data / "a.parquet").write_bytes(b"one")
    (data / "validation" / "b.parquet").write_bytes(b"two")
    found = digest_of_path(data)
    assert digest_of_path(data) == found
    # What reading a directory, or importing from it, may leave there.
    (data / "__pycache__").mkdir()
    for name in (".lock", "cache-0123.arrow", "__pycache__/rows.cpython-311.pyc"):
        (data / name).write_bytes(b"left")
    assert digest_of_path(data) == found
    (data / "validation" / "b.parquet").write_bytes(b"owt")
    changed = digest_of_path(data)
    assert changed != found
    (data / "a.parquet").rename(data / "c.parquet")
    assert digest_of_path(data) not in (found, changed)


def test_large_files_are_sampled_to_their_end(tmp_path):
    """Trained weights change everywhere; one byte counts where a sample is, as at either end."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(10_000_000))
    before = digest_of_path(file)
    for place in (0, 5_000_000, 9_999_999):
        content = bytearray(10_000_000)
        content[place : place + 700_000] = b"x" * len(content[place : place + 700_000])
        file.write_bytes(content)
        assert digest_of_path(file) != before
