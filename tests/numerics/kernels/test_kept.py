"""Compiled programs on disk: loaded without tracing, equal to the bit, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from metis_hf import noise
from metis_hf.numerics.kernels import compiled, kept
from metis_hf.numerics.kernels.compiled import Program
from metis_hf.numerics.kernels.formulation import Specialization


def program(**options) -> Program:
    variant = Specialization("quantize", (1,), True, **options)
    return Program(variant, 2, torch.float32, torch.device("cpu"), torch.get_num_threads())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A machine that keeps nothing, and a process that has compiled nothing."""
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_seconds", {})
    monkeypatch.setattr(kept, "directory", lambda: tmp_path)
    return tmp_path


def files(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.skipif(compiled.missing(torch.device("cpu")) is not None, reason="no C++ compiler")
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_later_process_traces_nothing(folder, monkeypatch, stochastic) -> None:
    one = program(stochastic=stochastic)
    key = noise.Key(3) if stochastic else None
    tensors = [torch.randn(blocks, 16) for blocks in (1, 7, 300)]
    first = [compiled.run(one.variant, key, x)[0] for x in tensors]
    assert kept.is_kept(one)
    assert [path.stat().st_size > 0 for path in files(folder)] == [True]
    compiled._kernels.clear()

    def build(one: Program) -> None:
        raise AssertionError(f"{one} is traced again")

    monkeypatch.setattr(compiled, "_build", build)
    second = [compiled.run(one.variant, key, x)[0] for x in tensors]
    for x, y in zip(first, second):
        assert torch.equal(x, y)
    assert first[1].abs().max() > 0


@pytest.mark.parametrize("content", [b"", b"cut short"])
def test_a_file_that_cannot_be_loaded_is_made_anew(folder, monkeypatch, content) -> None:
    kept.keep(program(), len)  # what has no `save` leaves an empty file
    (file,) = files(folder)
    assert not file.read_bytes()
    file.write_bytes(content)
    assert kept.is_kept(program())
    assert kept.load(program()) is None
    made = []
    monkeypatch.setattr(compiled, "_build", lambda one: made.append(one) or len)
    assert compiled.compile_program(program()) is len
    assert made == [program()]


def test_nothing_is_kept_for_other_code_processors_and_settings(folder, monkeypatch) -> None:
    import torch._inductor.config as inductor

    kept.keep(program(), len)
    assert kept.is_kept(program())
    assert not kept.is_kept(program(rows=True))
    with inductor.patch("cpp.simdlen", 0):
        assert not kept.is_kept(program())
    version = kept._version()
    kept._version.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert kept._version() != version
    assert not kept.is_kept(program())
    monkeypatch.undo()
    kept._version.cache_clear()
    assert kept._version() == version


def test_programs_for_other_numbers_of_threads_are_told_apart(monkeypatch) -> None:
    """In Inductor's cache too, whose own keys do not have the number in every version of torch."""
    import torch._inductor

    tags = []

    def compile_(*args, **options):
        tags.append(torch.compiler.config.cache_key_tag)
        return len

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_)
    before = torch.compiler.config.cache_key_tag
    for threads in (1, 2, 1):
        compiled._build(program()._replace(threads=threads))
    assert tags[0] == tags[2] != tags[1]
    assert all(tag.startswith(before) for tag in tags)
    assert torch.compiler.config.cache_key_tag == before


@pytest.mark.parametrize("text", ["flags\t: sse2 avx512f\n", None])
def test_processors_with_other_instructions_are_told_apart(text, tmp_path, monkeypatch) -> None:
    """Of one family, too: what is compiled for all of one's instructions ends on another."""
    (tmp_path / "before").write_text("flags\t: sse2 avx512f avx512_bf16\n")
    monkeypatch.setattr(kept, "_CPU_INFO", tmp_path / "before")
    before = kept._instructions()
    if text is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}")
    monkeypatch.setattr(kept, "_CPU_INFO", tmp_path / "cpuinfo")
    assert kept._instructions() != before
    assert kept._instructions().startswith(torch.backends.cpu.get_cpu_capability())


def test_nothing_is_kept_where_inductor_keeps_nothing(folder, monkeypatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(compiled, "_build", lambda one: len)
    with inductor.patch("force_disable_caches", True):
        compiled.compile_program(program())
    assert not files(folder)


def test_a_disk_that_takes_nothing(folder, monkeypatch) -> None:
    (folder / "file").touch()
    monkeypatch.setattr(kept, "directory", lambda: folder / "file")
    kept.keep(program(), len)
    assert not kept.is_kept(program())


def test_processes_of_one_number_write_files_of_their_own(folder) -> None:
    """Containers that share a disk have the same process numbers."""
    written = []

    class Saved:
        def save(self, *, path: str, format: str) -> None:
            written.append(path)
            Path(path).write_bytes(b"whole")

    kept.keep(program(), Saved())
    kept.keep(program(), Saved())
    (file,) = files(folder)
    assert len({*written, str(file)}) == 3


def test_what_fails_half_way_leaves_no_half(folder) -> None:
    class Broken:
        def save(self, *, path: str, format: str) -> None:
            assert format == "binary"
            Path(path).write_bytes(b"half")
            raise RuntimeError("not to be saved")

    kept.keep(program(), Broken())
    (file,) = files(folder)
    assert not file.suffix
    assert not file.read_bytes()
