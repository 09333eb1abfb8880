"""Which kernels run: the automatic choice, and what happens where nothing can be compiled."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import choice, cpu, cpu_library, use_kernels
from numerics.cases import assert_same_bits
from numerics.helpers import seeded


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A process in which nothing was chosen, has failed or was said."""
    choice.forget_failures()
    with use_kernels(None):
        yield
    choice.forget_failures()


def large() -> Tensor:
    return torch.randn(256, 256, generator=seeded(0))


def test_automatic_choice(monkeypatch) -> None:
    monkeypatch.setattr(cpu_library, "missing", lambda: None)
    monkeypatch.setattr(cpu_library, "load", lambda: None)
    ran: list[str] = []

    def run(task, *others, **tensors):
        ran.append(task)

    monkeypatch.setattr(cpu, "run", run)

    def compiled(quantizer: Quantizer, x: Tensor | None = None) -> bool:
        ran.clear()
        quantizer(large() if x is None else x)
        return bool(ran)

    assert compiled(Quantizer())
    assert compiled(Quantizer(), torch.zeros(1, 16))
    assert compiled(Quantizer(scale_rule="four-over-six"))
    assert not compiled(Quantizer("mxfp4"))
    with use_kernels("reference"):
        assert not compiled(Quantizer())
        with use_kernels("compiled"):
            assert compiled(Quantizer())


@pytest.mark.parametrize(
    ("device", "lacks", "wanted"),
    [
        ("cuda", None, "triton"),
        ("cuda", "triton 3.6", "reference"),
        ("cpu", None, "compiled"),
        ("xpu", None, "reference"),
    ],
)
@pytest.mark.filterwarnings("ignore:quantizers run uncompiled")
def test_the_choice_by_device(device, lacks, wanted, monkeypatch) -> None:
    monkeypatch.setattr(choice, "missing", lambda kernels, device: lacks)
    assert choice.fastest(torch.device(device)) == wanted


def test_tensors_without_storage_are_left_to_the_reference() -> None:
    """Nor is there anything slow to warn of."""
    x = torch.zeros(1024, 1024, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Quantizer()(x).is_meta
    with use_kernels("compiled"):
        assert Quantizer()(x).is_meta


def falls_back(message: str) -> None:
    """The reference runs, which is said once; compiled kernels that are asked for raise."""
    with use_kernels("reference"):
        wanted = Quantizer()(large())
    with pytest.warns(UserWarning, match=message) as warned:
        found = [Quantizer()(large()) for _ in range(2)]
    assert len(warned) == 1
    for actual in found:
        assert_same_bits(actual, wanted)
    with use_kernels("compiled"), pytest.raises(RuntimeError, match=message):
        Quantizer()(large())


def test_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setattr(cpu_library, "compiler", lambda: None)
    falls_back(r"C\+\+ compiler.*install one")


def program(folder, text: str) -> str:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails(monkeypatch, tmp_path) -> None:
    compiler = program(tmp_path, "echo cc1plus: out of memory >&2; exit 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_library, "compiler", lambda: compiler)
    monkeypatch.setattr(cpu_library, "load", cpu_library.load.__wrapped__)
    falls_back("cc1plus: out of memory")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_that_is_damaged(monkeypatch, tmp_path) -> None:
    compiler = program(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo text > "$2"')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_library, "compiler", lambda: compiler)
    monkeypatch.setattr(cpu_library, "load", cpu_library.load.__wrapped__)
    falls_back(r"could not be compiled or loaded.*\.so")


PROGRAM = """
import torch
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import use_kernels
x = torch.randn(64, 64)
with use_kernels("compiled"):
    found = Quantizer()(x)
with use_kernels("reference"):
    assert torch.equal(found, Quantizer()(x))
"""


@pytest.mark.slow
@pytest.mark.skipif(cpu_library.missing() is not None, reason="no C++ compiler")
def test_processes_share_one_library(monkeypatch, tmp_path) -> None:
    """Started together; over a damaged one; and where the folder for it cannot be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (file,) = (tmp_path / "metis_hf").iterdir()
    before = file.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    assert file.stat().st_mtime_ns == before
    file.write_text("damaged")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    assert file.stat().st_size > 10_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of reference, compiled"), use_kernels("fast"):
        pass


@pytest.mark.slow
def test_an_unknown_name_in_the_environment_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("METIS_KERNELS", "fast")
    code = "import torch; from metis_hf.numerics import Quantizer; Quantizer()(torch.zeros(16, 16))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ValueError: kernels 'fast' do not exist" in done.stderr
    assert "METIS_KERNELS" in done.stderr
