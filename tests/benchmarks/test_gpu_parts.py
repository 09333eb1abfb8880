"""The parts of `make gpu`: what each measures, leaves out, and says where it cannot."""

from __future__ import annotations

import importlib.util
import os
import time

import gpu
import layer
import peers
import pytest
import quantizers
import torch
from on_gpu import kernels, large, page, parts, suite
from on_gpu import record as records
from on_gpu.record import Clock, CutOff, Entry
from paths import ROOT

from metis_hf import MetisConfig
from metis_hf.numerics import native
from metis_hf.schemes.registry import layer_rank


def context(quick: bool = True) -> gpu.Context:
    return gpu.Context(torch.device("cpu"), quick, Clock(None), lambda name: Entry(), ROOT)


def test_kernels_with_other_bits_are_named(monkeypatch):
    ours = quantizers.ours

    def wrong(x, name, kernels):
        call = ours(x, name, "reference")
        return call if kernels == "reference" else lambda: torch.where(x > 2, call() * 2, call())

    monkeypatch.setattr(quantizers, "ours", wrong)
    monkeypatch.setattr(quantizers, "available", lambda device: ["reference", "compiled"])
    found = kernels.equal_bits(["nvfp4"], torch.float32, torch.device("cpu"))
    assert [row["kernels"] for row in found["rows"] if row["differing"]] == ["compiled"]
    assert "zeros" not in found["rows"][1]["differing"]
    assert found[records.FAILURES][0].startswith("nvfp4, compiled: elements with other bits")


def test_a_kernel_that_does_not_compile_is_named_and_the_others_go_on(monkeypatch):
    ours = quantizers.ours

    def broken(x, name, kernels):
        def fail():
            raise RuntimeError("no code") from OSError("no compiler")

        return fail if kernels == "compiled" else ours(x, name, kernels)

    monkeypatch.setattr(quantizers, "ours", broken)
    monkeypatch.setattr(quantizers, "available", lambda device: ["compiled", "reference"])
    said = "nvfp4, compiled: RuntimeError: no code; from OSError: no compiler"
    found = kernels.equal_bits(["nvfp4"], torch.float32, torch.device("cpu"))
    assert found[records.FAILURES] == [said]
    assert [row["kernels"] for row in found["rows"]] == ["reference"]
    found = kernels.bandwidth(["nvfp4"], (64, 64), torch.float32, context())
    assert found[records.FAILURES] == [said]
    assert [row["kernels"] for row in found["rows"]] == ["torch", "reference"]


def test_bits_are_compared_on_tensors_that_round_in_every_way():
    tensors = kernels.hard_tensors()
    assert any(0 < x.abs().max() < torch.finfo(x.dtype).tiny for x in tensors.values())
    magnitudes = tensors["rows from 2^-40 to 2^40"].abs().amax(1).log2()
    assert magnitudes.max() - magnitudes.min() > 70
    assert tensors["33 x 48"].shape[0] % 16


def test_bandwidth_leaves_out_what_does_not_fit(monkeypatch):
    def large():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    row = {"name": "nvfp4", "kernels": "reference", "dtype": "float32"}
    monkeypatch.setattr(quantizers, "own_cases", lambda *_: [(row, large)])
    found = kernels.bandwidth(["nvfp4"], (64, 64), torch.float32, context())
    assert [row["name"] for row in found["rows"]] == ["copy"]
    assert found["without"] == [row | {"reason": "memory is too small"}]
    copy = found["rows"][0]
    assert copy["gb_per_s"] == pytest.approx(2 * 64 * 64 * 4 / (copy["ms"] / 1e3) / 1e9)


def test_what_is_around_gemms_is_timed_as_operations_and_in_one_launch(monkeypatch):
    """In a CPU's operations here: Triton's kernels are refused, by name, and the others go on."""
    monkeypatch.setattr(quantizers, "available", lambda d: ["reference", "compiled", "triton"])
    found = kernels.around_gemms((128, 64), context())
    names = [row["name"] for row in found["rows"] if row["kernels"] == "reference"]
    assert names[:3] == ["outer scale", "bias", "outer scale and bias"]
    assert names[3:] == ["sums of rows", "projection on 48 directions"]
    assert len(found[records.FAILURES]) == len(names)
    assert layer_rank(MetisConfig(), 768, 2304) == kernels.DIRECTIONS
    rows = {row["name"]: row for row in found["rows"] if row["kernels"] == "reference"}
    for name, passes in (("bias", 2), ("sums of rows", 1)):
        rate = passes * 128 * 64 * 2 / (rows[name]["ms"] / 1e3) / 1e9
        assert rows[name]["gb_per_s"] == pytest.approx(rate)
    assert all(", triton: RuntimeError: " in error for error in found[records.FAILURES])


def test_layers_are_timed_with_the_fastest_kernels_first(monkeypatch):
    monkeypatch.setattr(quantizers, "available", lambda d: ["reference", "compiled", "triton"])
    keys = [item.key for item in parts.layers(context(quick=False))]
    shapes = len(parts.layer_shapes(quick=False))
    assert [key.split(", ")[-1] for key in keys] == (
        ["triton"] * shapes + ["compiled"] * shapes + ["reference"]
    )
    assert keys[0] == "8192 x 4096 x 4096, triton"
    assert keys[-1] == "8192 x 4096 x 4096, reference"
    assert len(set(keys)) == len(keys)


def test_native_gemms_are_skipped_with_the_reason(monkeypatch):
    assert parts.native_obstacle(torch.device("cpu")) == "a cpu has no FP4 units"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = parts.native_obstacle(torch.device("cuda"))
    assert "no FP4 units: its compute capability is 9.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(native, "obstacle_of_device", lambda device, fmt: f"no GEMM of {fmt}")
    assert parts.native_obstacle(torch.device("cuda")) == "no GEMM of nvfp4"


def test_native_layers_name_what_cannot_run():
    """On a CPU nothing of it can: each scheme says so, and the emulated ones are timed."""
    found = parts.native_layers((64, 32, 32), context())
    emulated = {row["name"] for row in found["rows"] if row.get("backend") == "emulated"}
    without = {row["name"]: row["reason"] for row in found["without"]}
    assert emulated == without.keys() == set(parts.NATIVE_SCHEMES)
    assert found[records.FAILURES] == []
    assert all(without.values())


def test_layers_are_those_of_the_models():
    shapes = {shape for title, shape in parts.layer_shapes(quick=False) if title == "130m, "}
    assert shapes == {(8192, 768, 2304), (8192, 768, 3072), (8192, 3072, 768)}


SUITE = """
import pytest

@pytest.mark.gpu
class TestKernels:
    @pytest.mark.parametrize("n", [1, 2])
    def test_it(self, n):
        assert n == 1, "n is too large"

@pytest.mark.gpu
def test_skipped():
    pytest.skip("no Blackwell")  # torch.cuda.is_available() is not enough

@pytest.mark.gpu
def test_slow():
    import os, pathlib, time
    pathlib.Path("pids").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)

def test_without():
    pass
"""


FUNCTIONS = """
import pytest

pytestmark = pytest.mark.gpu

def test_a():
    pass

def test_b():
    pass
"""


def test_the_suite_uses_some_cores(monkeypatch):
    wanted = {1: [], 3: [], 4: ["-n", "2"], 16: ["-n", "8"], 64: ["-n", "8"]}
    assert {cores: suite.side_by_side(cores) for cores in wanted} == wanted
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert suite.side_by_side(16) == []


def running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_suite_is_run_in_groups(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = -q\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(SUITE)
    (tmp_path / "tests" / "test_two.py").write_text("import a_package_that_nobody_has")
    (tmp_path / "tests" / "test_three.py").write_text(FUNCTIONS)
    *found, last = suite.groups(tmp_path)
    functions = suite.run_group(last, Clock(None), tmp_path)
    assert (functions["passed"], functions["failed"]) == (2, 0)
    assert [name.split("::")[1] for name in found] == ["TestKernels", "test_skipped", "test_slow"]
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    kernels = suite.run_group(found[0], Clock(None), tmp_path)
    assert (kernels["passed"], kernels["failed"], kernels["skipped"]) == (1, 1, 0)
    assert kernels[records.FAILURES][0].startswith("test_it[2]: AssertionError: n is too large")
    skipped = suite.run_group(found[1], Clock(None), tmp_path)
    assert (skipped["skipped"], skipped["skipped_because"]) == (1, ["no Blackwell"])
    with pytest.raises(CutOff, match="it had not ended after"):
        suite.run_group(found[2], Clock(0.2), tmp_path)
    # A test that outlives its time would disturb what is timed next.
    left = (tmp_path / "pids").read_text().split()
    assert left
    for _ in range(1000):
        left = [pid for pid in left if running(pid)]
        if left:
            time.sleep(0.01)
    assert not left


def test_layers_of_other_libraries_are_timed_or_named(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()

    class Half(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("no FP4 here\ndetails")

    found = {
        "same": peers.Peer("broken", lambda path, linear: linear, torch.float32),
        "breaks": peers.Peer("broken", lambda path, linear: Half(32, 32)),
        "cannot be made": peers.Peer("broken", lambda path, linear: path.read_text()),
        "missing": peers.Peer("elsewhere", lambda path, linear: linear),
    }
    monkeypatch.setattr(peers, "LAYERS", found)
    measured = layer.measure_peers((64, 32, 32), 2, 0.0, torch.device("cpu"), tmp_path)
    assert [(row["name"], row["dtype"]) for row in measured["rows"]] == [
        ("nn.Linear", "bfloat16"), ("same", "float32"),
    ]  # fmt: skip
    assert measured["rows"][0]["ratio"] == 1
    reasons = {row["name"]: row["reason"] for row in measured["without"]}
    assert reasons["breaks"] == "RuntimeError: no FP4 here"
    assert reasons["cannot be made"].startswith("IsADirectoryError")
    assert reasons["missing"] == f"there is no folder {tmp_path / 'elsewhere'}"
    record = records.Record(tmp_path / "r.json", {"quick": True}, ())
    record.parts["layer"] = Entry(records.DONE, items={"64 x 32 x 32, peers": measured})
    table = page.page(record, "x", ["layer"])
    assert "- 64 x 32 x 32, peers: breaks: RuntimeError: no FP4 here" in table
    assert "| 64 x 32 x 32 | same | float32 |" in table


@pytest.mark.parametrize("part", [parts.layers, large.large])
def test_layers_and_a_whole_model_are_measured(part):
    """Quickly, so that no renamed function waits for a GPU to be found."""
    items = list(part(context()))
    assert items
    for item in items:
        for row in item.measure()["rows"]:
            assert row["ms"] > 0
