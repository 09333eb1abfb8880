"""Which kernels run: the automatic choice, and what happens where nothing can be compiled."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import cache_dir
from torch._inductor.exc import InductorError

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import ahead, choice, compiled, use_kernels
from metis_hf.numerics.kernels.formulation import BLOCK, Specialization
from numerics.cases import assert_same_bits
from numerics.helpers import seeded


def chosen(x: Tensor, quantizer: Quantizer | None = None) -> str:
    """What runs for a tensor; "compiled" if it would be compiled now."""
    ran = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ahead, "prepare", lambda program: None)  # it reads what is on disk
        patched.setattr(compiled, "run", lambda *args: ran.append("compiled") or (x.view(-1, 16),))
        (quantizer or Quantizer())(x)
    return ran[0] if ran else "reference"


def test_a_graph_names_its_mode_as_older_compilers_look_for_it(monkeypatch) -> None:
    """Torch 2.8 takes the mode of a graph from "example_value" of its results."""
    import torch._inductor
    from torch._subclasses.fake_tensor import FakeTensor

    found = []

    def compile_(graph, examples, **_):
        for node in graph.graph.output_node().args[0]:
            value = node.meta["example_value"]
            assert isinstance(value, FakeTensor)
            found.append(value.fake_mode is examples[0].fake_mode)
        return lambda *args: args

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_)
    for two_level in (True, False):
        variant = Specialization("quantize", (1,), two_level, dtype=torch.float32)
        compiled._build(compiled.program_of(variant, torch.zeros(32, 16)))
    assert found
    assert all(found)


def test_automatic_choice(monkeypatch) -> None:
    large, small = torch.zeros(256, 256), torch.zeros(16, 16)
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(compiled, "missing", lambda device: None)
    monkeypatch.setattr(compiled, "_kernels", {})
    assert chosen(large) == "compiled"
    assert chosen(small) == "reference"
    for two_level in (True, False):  # what is compiled already serves small tensors too
        variant = Specialization("quantize", (1,), two_level)
        compiled._kernels[compiled.program_of(variant, small)] = lambda *args: None
    assert chosen(small) == "compiled"
    assert chosen(large, Quantizer("mxfp4")) == "reference"
    assert chosen(large, Quantizer(scale_rule="four-over-six")) == "compiled"
    with use_kernels("compiled"):
        assert chosen(small) == "compiled"
        with use_kernels("reference"):
            assert chosen(large) == "reference"
        assert chosen(small) == "compiled"


@pytest.mark.parametrize(
    ("device", "lacks", "wanted"),
    [("cuda", None, "triton"), ("cuda", "triton 3.6", "compiled"), ("cpu", None, "compiled")],
)
def test_triton_s_kernels_are_chosen_on_gpus(device, lacks, wanted, monkeypatch) -> None:
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(compiled, "missing", lambda device: None)
    monkeypatch.setattr(choice, "_missing", lambda kernels, device: lacks)
    there = SimpleNamespace(device=torch.device(device), numel=lambda: 10)
    assert choice._automatic(there) == wanted


def test_small_tensors_are_compiled_after_many_calls(monkeypatch) -> None:
    """Each program counts for itself, and only where the choice is automatic."""
    small, other = torch.zeros(16, 16), torch.zeros(16, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(choice, "_small_calls", Counter())
    monkeypatch.setattr(choice, "_CALLS_WORTH_COMPILING", 3)
    monkeypatch.setattr(compiled, "missing", lambda device: None)
    monkeypatch.setattr(compiled, "_kernels", {})
    assert [chosen(small) for _ in range(5)] == ["reference"] * 3 + ["compiled"] * 2
    assert chosen(other) == "reference"
    with use_kernels("reference"):
        assert [chosen(other) for _ in range(5)] == ["reference"] * 5
    program = compiled.program_of(Specialization("quantize", (1,), True), small)
    elsewhere = torch.zeros(16, 16, device="meta")
    assert not any(choice.worth_it(program, elsewhere) for _ in range(5))


def test_tensors_without_storage_are_none_to_compile_for(monkeypatch) -> None:
    """Nor is there anything slow to warn of."""
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(choice, "_warned", set())
    x = torch.zeros(1024, 1024, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Quantizer()(x).is_meta
    with use_kernels("compiled"):
        assert Quantizer()(x).is_meta


def test_without_a_compiler_the_reference_runs_and_says_so_once(monkeypatch) -> None:
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(choice, "_warned", set())
    monkeypatch.setattr(compiled, "_cpp_compiler", lambda: None)
    x = torch.randn(256, 256, generator=seeded(0))
    with pytest.warns(UserWarning, match=r"times slower.*C\+\+ compiler.*install one"):
        actual = Quantizer()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(Quantizer()(x), actual)
    with use_kernels("compiled"), pytest.raises(RuntimeError, match="'compiled' were asked for"):
        Quantizer()(x)


@pytest.fixture
def keeps_nothing(monkeypatch) -> None:
    """A disk on which no program is found, and none is left."""
    monkeypatch.setattr(compiled.kept, "load", lambda program: None)
    monkeypatch.setattr(compiled.kept, "keep", lambda program, kernel: None)


def test_a_failing_compilation_leaves_the_reference(monkeypatch, keeps_nothing) -> None:
    def fail(program):
        raise RuntimeError("cc1plus: out of memory")

    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(choice, "_warned", set())
    monkeypatch.setattr(compiled, "_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(compiled, "_build", fail)
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(choice, "_failed", set())
    x = torch.randn(256, 256, generator=seeded(0))
    with use_kernels("reference"):
        wanted = Quantizer()(x)
    with pytest.warns(UserWarning, match="cc1plus: out of memory"):
        assert_same_bits(Quantizer()(x), wanted)
    assert chosen(x) == "reference"  # and is not tried again
    with use_kernels("compiled"), pytest.raises(RuntimeError, match="out of memory"):
        Quantizer()(x)


def test_without_a_folder_for_compiled_code_the_reference_runs(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(choice, "_warned", set())
    monkeypatch.setattr(choice, "_failed", set())
    monkeypatch.setattr(ahead, "_rehearsals", {})
    monkeypatch.setattr(compiled, "missing", lambda device: None)
    monkeypatch.setattr(compiled, "_kernels", {})
    x = torch.randn(256, 256, generator=seeded(0))
    with use_kernels("reference"):
        wanted = Quantizer()(x)
    with pytest.warns(UserWarning, match=r"Not a directory.*set TORCHINDUCTOR_CACHE_DIR") as warned:
        found = [Quantizer()(x) for _ in range(2)]
    assert len(warned) == 1
    for actual in found:
        assert_same_bits(actual, wanted)
    with use_kernels("compiled"), pytest.raises(compiled.CompilationError, match="Not a directory"):
        Quantizer()(x)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_folder_that_cannot_be_written_to_is_named(wrapped, monkeypatch) -> None:
    error = PermissionError(13, "Permission denied", "/cache/73")

    def fail(program):
        raise InductorError(error, None) if wrapped else error

    monkeypatch.setattr(compiled, "_build", fail)
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled.kept, "load", lambda program: None)
    program = compiled.program_of(Specialization("quantize", (1,), True), torch.ones(2, BLOCK))
    with pytest.raises(compiled.CompilationError, match=r"/cache/73.*set TORCHINDUCTOR_CACHE_DIR"):
        compiled.compile_program(program)


def test_a_long_compilation_says_so_once(monkeypatch, caplog, keeps_nothing) -> None:
    """Where the code is kept too; what takes a moment says nothing."""
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record) -> None:
            said.set()

    def compile_for(program, seconds, build) -> None:
        monkeypatch.setattr(compiled, "_NOTICE_AFTER", seconds)
        monkeypatch.setattr(compiled, "_build", build)
        compiled.compile_program(program)

    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_seconds", {})
    monkeypatch.setattr(compiled, "_noticed", False)
    # After pytest's own handler, which then has the message when the compilation goes on.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, Listener()])
    one, two, three = (
        compiled.program_of(Specialization("quantize", dims, True), torch.ones(2, BLOCK))
        for dims in ((0,), (1,), (0, 1))
    )
    compile_for(one, 1e6, lambda program: len)
    assert not caplog.messages
    compile_for(two, 0.0, lambda program: said.wait(60) and len)  # until it has been said
    compiled.announce("something else")
    compile_for(three, 0.0, lambda program: len)
    (message,) = caplog.messages
    assert message.startswith("compiling quantizers for this machine")
    assert message.endswith(cache_dir())


def test_unknown_names_are_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="choose one of reference, compiled"), use_kernels("fast"):
        pass
    monkeypatch.setattr(choice, "_chosen", "fast")  # as from the environment
    with pytest.raises(ValueError, match="METIS_KERNELS"):
        Quantizer()(torch.zeros(16, 16))
