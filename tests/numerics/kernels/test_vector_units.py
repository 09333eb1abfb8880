"""Vector units that Inductor takes for good inside a block, and tries out outside of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor import cpu_vec_isa

from metis_hf.numerics.kernels import compiled, vector_units
from metis_hf.numerics.kernels.compiled import Program
from metis_hf.numerics.kernels.formulation import Specialization

CPU = torch.device("cpu")
PROGRAM = Program(Specialization("quantize", (1,), True), 2, torch.float32, CPU, 1)

pytestmark = pytest.mark.skipif(
    inductor.cpp.vec_isa_ok is not None, reason="the environment says what vector units are"
)


@pytest.fixture
def tried(monkeypatch) -> Iterator[list[str]]:
    """The vector units that Inductor has tried out since: all of them fail."""
    found: list[str] = []

    def works(isa: cpu_vec_isa.VecISA) -> bool:  # Inductor's own remembers its answers
        if inductor.cpp.vec_isa_ok is None:
            found.append(str(isa))
        return bool(inductor.cpp.vec_isa_ok)

    for isa in cpu_vec_isa.supported_vec_isa_list:
        monkeypatch.setattr(type(isa), "__bool__", works)

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield found
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


@pytest.mark.skipif(not cpu_vec_isa.valid_vec_isa_list(), reason="no vector units")
def test_they_are_tried_outside_of_the_block_alone(tried) -> None:
    with vector_units.chosen():
        assert cpu_vec_isa.valid_vec_isa_list()
    assert not tried
    assert not cpu_vec_isa.valid_vec_isa_list()
    assert tried


def test_no_program_is_built_to_try_them_out(monkeypatch) -> None:
    """Not for the extensions of wider ones either, of which Inductor asks beside the option."""
    built = []
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: built.append(isa))
    known = list(cpu_vec_isa.supported_vec_isa_list)
    for isa in known:
        getattr(type(isa).__bool__, "cache_clear", lambda: None)()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with vector_units.chosen():
        cpu_vec_isa.pick_vec_isa()
    assert not built
    assert cpu_vec_isa.supported_vec_isa_list == known


@pytest.fixture
def attempts(monkeypatch) -> list[bool | None]:
    """What compiling found the option to be, each time; while it is True, compiling fails."""
    found: list[bool | None] = []

    def build(program: Program) -> object:
        found.append(inductor.cpp.vec_isa_ok)
        if inductor.cpp.vec_isa_ok:
            raise RuntimeError("the compiler does not know these vector units")
        return len

    monkeypatch.setattr(compiled, "_compiled", build)
    return found


def test_what_fails_to_compile_is_compiled_with_units_that_were_tried(attempts) -> None:
    assert compiled._build(PROGRAM) is len
    assert attempts == [True, None]


def test_what_the_user_has_set_is_left_alone(attempts) -> None:
    with inductor.patch("cpp.vec_isa_ok", False):
        compiled._build(PROGRAM)
    assert attempts == [False]
    with inductor.patch("cpp.vec_isa_ok", True), pytest.raises(RuntimeError, match="vector units"):
        compiled._build(PROGRAM)
    assert attempts == [False, True]


@pytest.mark.parametrize(
    ("capability", "bits"), [("AVX512", 256), ("AVX2", None), ("SVE256", None)]
)
def test_wide_vectors_are_not_used(monkeypatch, capability, bits) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for tried in (False, True):
        with vector_units.chosen(tried=tried):
            assert inductor.cpp.simdlen == bits
    with inductor.patch("cpp.simdlen", 512), vector_units.chosen():
        assert inductor.cpp.simdlen == 512
    assert inductor.cpp.simdlen is None


def test_an_option_that_torch_does_not_have_changes_nothing(attempts, monkeypatch) -> None:
    monkeypatch.setattr(vector_units, "_KNOWN", "cpp.an_option_of_another_version")
    with vector_units.chosen():
        assert inductor.cpp.vec_isa_ok is None
    assert compiled._build(PROGRAM) is len
    assert attempts == [None]
