"""Programs that are compiled side by side: shared out, read back, and missed by nobody."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack

import pytest
import torch

from metis_hf.numerics.kernels import ahead, compiled, kept, layout
from metis_hf.numerics.kernels.compiled import Program
from metis_hf.numerics.kernels.formulation import Specialization
from metis_hf.numerics.scaling import ScaleRule


def program(number: int = 0, rule: ScaleRule = ScaleRule.ABSMAX) -> Program:
    variant = Specialization("quantize", (1,), True, rule=rule)
    return Program(variant, 2, torch.float32, torch.device("cpu"), number + 1)


class Rehearsal:
    """Notes the programs that it is given."""

    def __init__(self, *programs: Program) -> None:
        self.programs = programs
        self.now: object = "training"
        self.runs = 0

    def mode(self):
        return self.now

    def run(self, mode) -> None:
        self.runs += 1
        for one in self.programs:
            assert ahead.note(one)


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A process that has compiled nothing, on a machine that keeps nothing; what it compiles."""
    made: list[Program] = []
    for name in ("_rehearsals", "_kernels", "_seconds"):
        monkeypatch.setattr(ahead if name == "_rehearsals" else compiled, name, {})
    monkeypatch.setattr(ahead, "_rehearsed", set())
    monkeypatch.setattr(compiled, "_noticed", False)
    monkeypatch.setattr(compiled, "_build", lambda one: made.append(one) or len)
    monkeypatch.setattr(kept, "directory", lambda: tmp_path)
    monkeypatch.setattr(ahead, "processes", lambda: 2)
    return made


HELPER = """
import pickle, sys
programs = []
for _ in range({takes}):
    print(flush=True)
    try:
        programs.append(pickle.load(sys.stdin.buffer))
    except EOFError:
        break
with open({file!r}, "wb") as file:
    pickle.dump(programs, file)
"""


@pytest.mark.parametrize(("count", "takes"), [(6, 9), (6, 2), (6, 0)])
def test_each_program_is_of_one_process(count, takes) -> None:
    """Whether a helper takes all of them, some, or ends before it takes one."""
    waiting = deque(program(number) for number in range(count))
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "taken")
        command = [sys.executable, "-c", HELPER.format(takes=takes, file=file)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ahead._serve(process, waiting)
        with open(file, "rb") as taken:
            found = pickle.load(taken)
    assert len(found) == min(count, takes)
    assert [*found, *waiting] == [program(number) for number in range(count)]


def test_outside_a_rehearsal_nothing_is_noted() -> None:
    assert not ahead.note(program())
    assert ahead.rehearse(Rehearsal(program(1), program(2), program(1)), None) == [
        program(1),
        program(2),
    ]
    assert not ahead.note(program())


def test_a_rehearsal_that_fails_is_none(caplog) -> None:
    class Fails(Rehearsal):
        def run(self, mode) -> None:
            super().run(mode)
            raise RuntimeError("no such layer")

    assert ahead.rehearse(Fails(program(1)), None) == [program(1)]
    assert not caplog.messages  # nothing is lost: calls compile what they lack


def test_what_is_missing_is_compiled_by_others_too(empty, monkeypatch, caplog) -> None:
    given_away: list[Program] = []

    def helper(waiting, stack) -> threading.Thread:
        given_away.append(waiting.pop())
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread

    monkeypatch.setattr(ahead, "_helper", helper)
    ahead.expect("layer", Rehearsal(*(program(number) for number in range(1, 9))))
    ahead.prepare(program(0)._replace(threads=7))
    # The threads are the caller's: all nine are one program, and one alone is left to its call.
    assert not empty
    assert not given_away
    variants = [Specialization("quantize", (1,), True, dtype=d) for d in layout.DTYPES]
    programs = [program()._replace(variant=variant) for variant in variants]
    ahead.expect("other layer", Rehearsal(*programs))
    ahead.prepare(programs[0])
    # What the helper took and never left on disk comes last.
    assert given_away == empty[-1:]
    assert sorted(empty, key=repr) == sorted(programs, key=repr)
    assert all(map(kept.is_kept, programs))
    assert not kept.is_kept(program(5))
    started, ended = caplog.messages
    assert started.startswith("compiling 3 quantizers for this machine, 2 at a time, once")
    assert ended.startswith("compiled them in")


def test_what_is_on_disk_is_read_at_once(empty, monkeypatch) -> None:
    """Programs of small tensors too, which calls ask for the thousandth time only."""
    on_disk = [program()._replace(dtype=dtype) for dtype in layout.DTYPES]
    read: list[Program] = []

    def load(one: Program) -> object:
        read.append(one)
        return len if one in on_disk else None

    monkeypatch.setattr(kept, "is_kept", on_disk.__contains__)
    monkeypatch.setattr(kept, "load", load)
    monkeypatch.setattr(kept, "keeps_code", lambda: True)
    ahead.expect("layer", Rehearsal(*on_disk))
    ahead.prepare(on_disk[-1])
    assert read == [on_disk[-1], *on_disk[:-1]]
    assert all(map(compiled.is_compiled, on_disk))
    assert not empty


def test_one_that_is_missing_beside_what_is_read_is_compiled(empty, monkeypatch, caplog) -> None:
    """Its call may be of a small tensor, and would wait for it a thousand times."""
    there, missing = program(), program(0, ScaleRule.SEARCH)
    monkeypatch.setattr(kept, "is_kept", [there].__contains__)
    monkeypatch.setattr(kept, "load", lambda one: len if one == there else None)
    monkeypatch.setattr(kept, "keeps_code", lambda: True)
    ahead.expect("layer", Rehearsal(missing))
    ahead.prepare(there)
    assert empty == [missing]
    assert not caplog.messages


def test_files_that_cannot_be_read_are_left_to_their_calls(empty, monkeypatch) -> None:
    """Not compiled one after the other for layers that may never need them."""
    programs = [program()._replace(dtype=dtype) for dtype in layout.DTYPES]
    monkeypatch.setattr(kept, "keeps_code", lambda: True)
    for one in programs:
        file = kept._file(one)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"" if one == programs[0] else b"broken")
    ahead.expect("layer", Rehearsal(*programs))
    ahead.prepare(programs[0])
    assert not empty
    assert not any(map(compiled.is_compiled, programs))
    assert compiled.compile_program(programs[1]) is len
    assert empty == [programs[1]]


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/python"])
def test_a_process_that_fails_is_made_up_for(empty, monkeypatch, executable) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    programs = [program()._replace(dtype=dtype) for dtype in layout.DTYPES]
    ahead.expect("layer", Rehearsal(*programs))
    ahead.prepare(programs[0])
    assert set(empty) == set(programs)


def test_processes_run_nothing_of_the_current_directory(empty, monkeypatch, tmp_path) -> None:
    """Whatever lies there may have the name of one of Python's own modules."""
    for name in ("random", "torch", "metis_hf"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close(); raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(ahead, "_next", lambda waiting: asked.append(waiting))
    with ExitStack() as stack:
        ahead._helper(deque(), stack).join()
    assert asked == [deque()]
    assert not (tmp_path / "ran").exists()


def test_the_longest_come_first(empty, monkeypatch) -> None:
    monkeypatch.setattr(ahead, "processes", lambda: 1)
    programs = [program(0), program(0, ScaleRule.SEARCH)]
    ahead._compile_side_by_side(programs[:1] + programs)
    assert empty[0] == programs[1]


def test_a_mode_is_rehearsed_once(empty) -> None:
    one, two = Rehearsal(program()), Rehearsal(program())
    ahead.expect("a", one)
    ahead.expect("b", two)
    two.now = None  # its layer is gone
    ahead.prepare(program())
    ahead.prepare(program())
    one.now = "evaluation"
    ahead.prepare(program())
    assert (one.runs, two.runs) == (2, 0)


STEP = """
import logging, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from torch import nn
from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
torch.set_num_threads(2)
layer = convert_linear(nn.Linear(512, 512), MetisConfig(scheme="nvfp4-rne"), name="layer").train()
layer(torch.randn(512, 512)).square().mean().backward()
print(sum(p.grad.double().sum().item() for p in layer.parameters()))
"""


@pytest.mark.slow
def test_the_first_step_on_a_machine(tmp_path) -> None:
    """Real processes: the next one reads what they left, and compiles and says nothing."""
    if compiled.missing(torch.device("cpu")) or ahead.processes() < 2:
        pytest.skip("needs a C++ compiler and two cores")
    environment = {name: value for name, value in os.environ.items() if name != "METIS_KERNELS"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)

    def step() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", STEP],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr

    _, said = step()
    assert "2 at a time, once: later runs read them from" in said
    assert "compiled them in" in said
    _, said = step()
    assert "at a time" not in said


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("", 8), (None, 8)],
)
def test_no_more_processes_than_a_container_has_time_for(quota, expected, tmp_path, monkeypatch):
    """It may see all cores of its machine; each process imports torch anew."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(ahead, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert ahead.processes() == expected
