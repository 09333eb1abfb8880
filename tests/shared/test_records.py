"""What a record says of the machine and the code that it is of."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from metis_hf.shared import records

CPU = torch.device("cpu")


@pytest.fixture
def accelerator(monkeypatch):
    """Make a machine seem to have an accelerator of a kind."""

    def make(kind, **functions):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device(kind)
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(**functions))

    return make


def test_a_run_on_the_cpu_is_not_of_the_gpu_that_is_there(accelerator, monkeypatch):
    accelerator("cuda", get_device_name=lambda device: "a GPU")
    assert records.device_name() == "a GPU"
    assert " CPU with" in records.device_name(CPU)
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    assert " CPU without bf16 units, " in records.environment(CPU)["device"]
    assert records.environment()["device"] == "a GPU"


def test_other_accelerators_are_named(accelerator):
    for functions, name in (
        ({}, " xpu"),
        ({"get_device_name": lambda device: "Data Center GPU Max"}, "Data Center GPU Ma"),
    ):
        accelerator("xpu", **functions)
        assert name in records.device_name()
        assert "CPU" not in records.device_name()
        assert records.bf16_units()


def test_json_holds_a_file_name_that_is_not_utf8(tmp_path):
    path, data = tmp_path / "a.json", {"caf\udce9": ["é", "\ud83d", "\U0001f600"]}
    records.write_json(path, data)
    assert records.read_json(path) == data
    assert "é" in path.read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": ', r"a\.json is not a valid JSON file"),
        ("[" * 100_000, r"a\.json is JSON that is nested too deeply"),
        ("9" * 5000, r"a\.json is not a valid JSON file"),
        (None, r"a\.json has 67,108,865 bytes; choose .* at most 67,108,864 bytes"),
    ],
)
def test_json_that_is_not_read_is_named_in_a_line(text, said, tmp_path):
    path = tmp_path / "a.json"
    if text is None:
        with open(path, "wb") as file:
            file.truncate((1 << 26) + 1)  # a file of holes
    else:
        path.write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        records.read_json(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < len(str(path)) + 300


def test_json_from_a_pipe_is_refused(tmp_path):
    """It may have no end."""
    path = tmp_path / "a.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"a\.json is not a file"):
        records.read_json(path)


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    records.write_json(path, [1])

    def fail(file):
        file.write(b"[")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        records.write_atomically(path, fail)
    assert list(tmp_path.iterdir()) == [path]
    assert records.read_json(path) == [1]


class TestCommit:
    @pytest.fixture
    def git(self, tmp_path):
        """Run git in a repository of somebody's, which has one commit."""

        def run(*arguments):
            command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
            done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
            return done.stdout.strip()

        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        run("init", "-q")
        run("commit", "-q", "--allow-empty", "-m", "x")
        return run

    def test_an_installed_package_has_none_of_the_repository_around_it(
        self, git, tmp_path, monkeypatch
    ):
        """As in a virtual environment within a repository of the user's."""
        file = tmp_path / ".venv" / "metis_hf" / "shared" / "records.py"
        file.parent.mkdir(parents=True)
        file.write_text("")
        monkeypatch.setattr(records, "__file__", str(file))
        assert records.commit() is None
        git("add", "-f", ".")
        git("commit", "-q", "-m", "a checkout")
        assert records.commit() == git("rev-parse", "--short", "HEAD")

    def test_a_machine_without_git(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        assert records.commit() is None
