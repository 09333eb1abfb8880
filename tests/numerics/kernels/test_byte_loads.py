"""Codes that are loaded by one instruction, in C++ for AVX2."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor.codegen import cpp
from torch._inductor.cpu_vec_isa import pick_vec_isa

from metis_hf.numerics.kernels import byte_loads, compiled, vector_units
from metis_hf.numerics.kernels.compiled import Program
from metis_hf.numerics.kernels.formulation import Specialization

CPU = torch.device("cpu")
METHOD = "_get_vec_load_line"
LINE = "at::vec::Vectorized<uint8_t>::loadu(in_ptr1 + static_cast<int64_t>({}), {})"


def avx2() -> bool:
    with vector_units.chosen():
        return type(pick_vec_isa()).__name__ == "VecAVX2"


needs_avx2 = pytest.mark.skipif(not avx2(), reason="needs AVX2")


@pytest.mark.parametrize(
    ("count", "instruction"), [("8", "_mm_loadl_epi64"), ("16L", "_mm_loadu_si128")]
)
def test_part_of_a_vector_is_one_instruction(count, instruction) -> None:
    written = LINE.format("x1 + 16L*x0", f"static_cast<int64_t>({count})")
    line = byte_loads.loaded_at_once(written)
    place = "reinterpret_cast<const __m128i*>(in_ptr1 + static_cast<int64_t>(x1 + 16L*x0))"
    assert line == (f"at::vec::Vectorized<uint8_t>(_mm256_castsi128_si256({instruction}({place})))")


@pytest.mark.parametrize(
    "line",
    [
        LINE.format("x0", "static_cast<int64_t>(32)"),  # a whole vector
        LINE.format("x0", "static_cast<int64_t>(ks0 + (-8L)*x0)"),  # the last of a row
        LINE.format("x0", "static_cast<int64_t>(8)").replace("uint8_t>", "float>"),
        "at::vec::VecMask<float,1>::from(in_ptr1, static_cast<int64_t>(8))",
    ],
)
def test_other_lines_stay(line) -> None:
    assert byte_loads.loaded_at_once(line) == line


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What torch has written to load vectors since."""
    written = getattr(cpp.CppVecKernel, METHOD, None)
    if written is None or compiled.missing(CPU):
        pytest.skip("needs a torch that is known, and a C++ compiler")
    found: list[str] = []

    def record(*args, **options) -> str:
        found.append(written(*args, **options))
        return found[-1]

    monkeypatch.setattr(cpp.CppVecKernel, METHOD, record)
    return found


@needs_avx2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_writes_the_lines_that_are_known(dtype, lines) -> None:
    """All loads of codes in a program that unpacks; after the block torch's are in force again."""
    record = cpp.CppVecKernel._get_vec_load_line
    variant = Specialization("unpack", (2,), True, dtype=dtype)
    with inductor.patch("force_disable_caches", True), vector_units.chosen(), byte_loads.at_once():
        assert cpp.CppVecKernel._get_vec_load_line is not record
        unpack = compiled._compiled(Program(variant, 2, torch.uint8, CPU, 1))
    assert cpp.CppVecKernel._get_vec_load_line is record
    of_codes = [line for line in lines if "uint8_t" in line]
    assert of_codes
    assert all(byte_loads.loaded_at_once(line) != line for line in of_codes)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.ones(16, 2, 1).to(torch.float8_e4m3fn)
    (values,) = unpack(codes, scale, torch.ones(()))
    assert set(values.abs().unique().tolist()) == {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}


@pytest.mark.slow
@needs_avx2
def test_code_of_a_cache_that_torch_has_filled_is_not_taken(lines, monkeypatch, tmp_path) -> None:
    """As of an earlier version of this package, with the same graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    variant = Specialization("unpack", (2,), True, dtype=torch.float32)
    program = Program(variant, 2, torch.uint8, CPU, 1)
    with vector_units.chosen():
        compiled._compiled(program)
        assert lines
        lines.clear()
        compiled._compiled(program)
        assert not lines  # it is read from the cache
        with byte_loads.at_once():
            compiled._compiled(program)
        assert lines


@needs_avx2
def test_other_threads_have_the_lines_of_torch(monkeypatch) -> None:
    """They may compile something for other vector units."""
    written = LINE.format("x0", "static_cast<int64_t>(8)")
    monkeypatch.setattr(cpp.CppVecKernel, METHOD, lambda *args: written, raising=False)
    found: list[str] = []

    def ask() -> None:
        found.append(cpp.CppVecKernel._get_vec_load_line(None))

    with vector_units.chosen(), byte_loads.at_once():
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found == [byte_loads.loaded_at_once(written), written]


@pytest.mark.parametrize("name", [METHOD, "CppVecKernel"])
def test_another_version_of_torch_is_left_alone(name, monkeypatch) -> None:
    if name == "CppVecKernel":
        monkeypatch.delattr(cpp, name, raising=False)
    else:
        monkeypatch.delattr(cpp.CppVecKernel, name, raising=False)
    with vector_units.chosen(), byte_loads.at_once():
        assert not hasattr(cpp, "CppVecKernel") or not hasattr(cpp.CppVecKernel, name)
