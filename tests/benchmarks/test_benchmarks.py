"""Every benchmark runs at its quick size and writes what the report reads; pages are its tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import first_step
import gpu
import imports
import layer
import pytest
import report
import roofline
import scaling
import step
import timing
import torch
from design import thinned
from forked import python
from paths import ROOT

from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.numerics.kernels import choice
from metis_hf.operands import Spectral

BENCHMARKS = Path(report.__file__).parent

# script -> its tables, and the keys of their rows
RECORDS = {
    "quantizers": {"rows": {"name", "dtype", "shape", "ms", "quartiles_ms", "ratio"}},
    "layer": {"rows": {"name", "dtype", "kernels", "shape", "ms", "ratio", "quartiles_ratio"}},
    "step": {
        "rows": {"model", "name", "dtype", "ratio", "tokens_per_s", "peak_bytes", "saved_bytes"}
    },
    "scaling": {
        "rows": {"sweep", "value", "tokens", "width", "rank", "parts_ms", "flops"},
        "slopes": {"sweep", "part", "slope", "theory"},
    },
    "roofline": {
        "traffic": {"operand", "kernels", "over_copy"},
        "bandwidth": {"name", "kernels", "gb_per_s", "share_of_copy"},
        "rates": {"scheme", "flops", "gb_per_s"},
        "predictions": {"scheme", "shape", "machine", "ms", "ratio"},
    },
    "imports": {"rows": {"name", "ms"}},
    "first_step": {"rows": {"name", "ms"}},
}
TIMED = {"ms": 3000.0, "quartiles_ms": [2500.0, 3500.0], "ratio": 3.0, "quartiles_ratio": [2, 4]}
PLOTS = ("quantizers", "layer", "step", "scaling", "roofline")


def run(script: str, out: Path) -> str:
    environment = os.environ | {"METIS_KERNELS": "reference", "OMP_NUM_THREADS": "1"}
    return python(BENCHMARKS / f"{script}.py", "--quick", "--out", out, env=environment)


def check(record: dict, script: str) -> None:
    assert record["machine"]["threads"] >= 1
    for name, keys in RECORDS[script].items():
        assert record[name], name
        for row in record[name]:
            assert keys <= row.keys()
            numbers = [row[key] for key in ("ms", "ratio", "over_copy") if key in row]
            assert all(value > 0 for value in numbers), row


@pytest.mark.slow
@pytest.mark.parametrize("script", thinned(RECORDS, ("quantizers", "layer").__contains__))
def test_quick_run_writes_record_table_and_plot(script, tmp_path):
    printed = run(script, tmp_path)
    assert printed.startswith("| ")
    record = json.loads((tmp_path / f"{script}.json").read_text())
    check(record, script)
    if script in PLOTS:
        assert (tmp_path / f"{script}.png").read_bytes().startswith(b"\x89PNG")


def test_committed_records_have_every_table():
    for script in RECORDS:
        check(report.read(script), script)
        assert (BENCHMARKS / "results" / f"{script}.png").exists() == (script in PLOTS)


def test_pages_are_written_from_the_records():
    tables = report.tables()
    for page in report.PAGES:
        text = page.read_text()
        assert text == report.with_tables(text, tables)
    text = "".join(page.read_text() for page in report.PAGES)
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(tables)


def test_what_the_warning_says_of_the_reference():
    """The times by which it is slower are those of the record, rounded outwards."""
    rows = report.read("quantizers")["rows"]
    of_size = [row for row in rows if row["shape"] == report.QUANTIZED_SHAPE]
    ms = {(row["name"], row["dtype"], row.get("kernels")): row["ms"] for row in of_size}
    ratios = [
        ms[name, dtype, "reference"] / time
        for (name, dtype, kernels), time in ms.items()
        if kernels == "compiled" and dtype == "float32"
    ]
    low, high = map(int, choice.REFERENCE_SLOWER.split(" to "))
    assert low - 0.5 <= min(ratios)
    assert max(ratios) <= high + 0.5


def test_every_target_is_answered_from_a_record():
    """But that of imports, whose record is of a narrower measure and holds another name."""
    for target in report.TARGETS:
        found = target.measure()
        if target.measure is report.import_seconds:
            assert (found is None) == (report.read("imports")["rows"][0]["name"] != imports.NAME)
        else:
            assert found is not None, target.what
        if found is not None:
            assert found.value > 0, target.what


def test_rounds_stand_beside_what_was_timed(monkeypatch):
    """Of a layer as of its target; bytes are counted, and have none."""
    rows = [{**TIMED, "rounds": 2, "shape": report.LAYER_SHAPE, "name": "metis", "dtype": "float32",
             "kernels": "compiled"}]  # fmt: skip
    assert "| compiled | 2 | 3000 (" in layer.markdown(rows)
    monkeypatch.setattr(report, "layer_row", lambda name: rows[0])
    assert report.layer_ratio("metis")() == (3.0, 2)
    assert report.moved("direct")().rounds is None
    assert report.step_value("saved_over_bf16", "float32")().rounds is None


def test_rounds_run_each_in_turn_while_the_budget_lasts():
    """The warm-up is not in it."""
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    times = timing.interleave(calls, 3, budget=60)
    assert order == ["a", "b"] * 4  # a warm-up, three rounds
    assert [len(found) for found in times] == [3, 3]
    assert len(timing.interleave([lambda: None], 100, budget=0)[0]) == 2
    calls = []

    def slow_at_first() -> None:
        calls.append(None)
        time.sleep(0.3 if len(calls) == 1 else 0)

    assert len(timing.interleave([slow_at_first], 20, budget=0.25)[0]) == 20


def test_few_rounds_are_shown_with_their_range():
    """Quartiles of two or three are interpolated, and narrower than what was measured."""
    for times, shown in (
        ([3.0], "3.00 (3.00-3.00)"),
        ([2.0, 4.0], "3.00 (2.00-4.00)"),
        ([9.0, 2.0, 4.0], "4.00 (2.00-9.00)"),
        ([2.0, 4.0, 6.0, 8.0], "5.00 (3.50-6.50)"),
    ):
        assert timing.spread(timing.summary(times, [1.0] * len(times))) == shown


@pytest.mark.slow
def test_a_predicted_step_holds_the_rounds_of_the_measured_one():
    """And the rates that it is predicted from."""
    sizes = roofline.Sizes((64, 64, 64), (64, 64, 64), ())
    rates, found = roofline.predictions(sizes, "reference", 3, torch.device("cpu"))
    assert {row["rounds"] for row in rates} == {3}
    assert {row["rounds"] for row in found if "measured_ms" in row} == {3}


def test_what_is_busy_is_others_work_of_the_second_before(tmp_path, monkeypatch):
    """The load average would hold the benchmark that has just ended."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(timing, "STAT", stat)
    assert timing.busy_share(0) is None  # a system without it
    # user, nice, system, idle, waiting for disks, two kinds of interrupts, stolen; guests are users
    stat.write_text("cpu  100 0 50 1000 10 0 0 0 7 7\ncpu0 1 2 3\n")
    later = "cpu  120 0 60 1060 20 0 0 0 9 9\n"
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: stat.write_text(later))
    assert timing.before_start()["busy"] == 0.3


def test_machines_show_what_a_record_holds_of_other_work(monkeypatch):
    rows = {name: timing.machine() | {"busy": 0.25} for name in RECORDS}
    rows["layer"] = timing.machine() | {"load": [1.2, 1.0, 1.0]}
    monkeypatch.setattr(report, "read", lambda name: {"machine": rows[name]})
    lines = dict(line.split(" | ", 1) for line in report.machines_markdown().splitlines()[2:])
    assert lines["| layer"].endswith("| load 1.2 |")
    assert lines["| step"].endswith("| 25 % |")


def test_runs_on_a_gpu_leave_the_records_of_cpus_alone(monkeypatch):
    monkeypatch.setattr(timing, "device_of", torch.device)
    own, on_gpu = timing.RESULTS, timing.RESULTS / "cuda"
    for options, out in (([], own), (["--device", "cuda"], on_gpu), (["--out", "x"], Path("x"))):
        monkeypatch.setattr(sys, "argv", ["layer.py", *options])
        assert timing.parse(timing.arguments("Measures.")).out == out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [timing.arguments("Measures."), gpu])
def test_a_device_that_is_not_there_is_no_traceback(options, capsys):
    with pytest.raises(SystemExit):
        getattr(options, "parse_args", gpu.arguments)(["--device", "cuda"])
    assert "device='cuda' cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize("script", [imports, first_step])
def test_times_of_programs_take_no_option_that_they_would_ignore(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", "--quick", "--threads", "2"])
    with pytest.raises(SystemExit):
        script.main()
    assert "unrecognized arguments: --threads 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "left_out"),
    [("", set()), ("--quick --out x", set()), ("--device cuda", {"imports", "first_step"})],
)
def test_make_bench_gives_options_to_those_that_take_them(options, left_out, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\n')
    python.chmod(0o755)
    (tmp_path / ".peers").touch()
    command = ["make", "-s", "-C", ROOT, "bench", f"VENV={tmp_path}", f"BIN={tmp_path}"]
    command += ["-o", tmp_path / ".peers", f"ARGS={options}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ran = dict(re.findall(r"^ran benchmarks/(\w+)\.py ?(.*)$", done.stdout, re.MULTILINE))
    assert ran.keys() == RECORDS.keys() - left_out | {"report"}
    assert all(given.endswith(options) for name, given in ran.items() if name != "report")


def test_of_a_timed_program_the_last_line_counts_and_what_it_dies_of_is_told():
    assert timing.printed_seconds("print('compiling\\n2.5')") == 2.5
    with pytest.raises(RuntimeError, match=r"(?s)status 1; .*ValueError: no such model"):
        timing.printed_seconds("raise ValueError('no such model')")


def test_bf16_units_of_arm_count(monkeypatch):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    for there in (True, False):
        probe = "_is_arm_bf16_supported"
        monkeypatch.setattr(torch.cpu, probe, lambda there=there: there, raising=False)
        assert timing.machine()["bf16_units"] == there


def test_memory_is_measured_with_the_optimizer_s_state_in_all(monkeypatch):
    """Also where two cases share a model."""
    found, states = [], []

    def cases(shape, device):
        found.extend(step_cases(shape, device))
        return found

    @contextlib.contextmanager
    def peak_memory(device):
        states.append(len(found[len(states)].optimizer.state) > 0)
        yield {"bytes": 1}

    step_cases = step.cases
    monkeypatch.setattr(step, "cases", cases)
    monkeypatch.setattr(step, "peak_memory", peak_memory)
    shape = step.QUICK_SHAPES["Llama"]._replace(schemes=(), autocast=(step.PLAIN,))
    step.measure("Llama", shape, 2, 0.0, torch.device("cpu"))
    assert states == [True, True]


def test_a_step_that_was_not_recorded_says_why():
    row = {"model": "m", "batch": [1, 2], "name": "metis", "dtype": "bfloat16", "tokens_per_s": 1.0}
    row |= {"ms": 1.0, "quartiles_ms": [1.0, 1.0], "ratio": 1.0, "quartiles_ratio": [1.0, 1.0]}
    row |= {"peak_bytes": None, "saved_bytes": 0, "saved_linear_bytes": 0, "rounds": 5}
    assert "| metis, recorded |" in step.markdown([row | {"recorded": True, "note": None}])
    refused = row | {"recorded": False, "note": "no memory"}
    assert "| metis, not recorded: no memory |" in step.markdown([refused])


def test_each_step_of_a_layer_has_an_input_of_its_own(monkeypatch):
    """A layer keeps what it encoded last: the same tensor again would cost it nothing."""
    encoded = []
    encode = Spectral.encode
    monkeypatch.setattr(
        Spectral, "encode", lambda *args, **kw: encoded.append(args[1]) or encode(*args, **kw)
    )
    module = convert_linear(torch.nn.Linear(64, 64), MetisConfig(scheme="metis"), name="layer")
    step = layer.step_of(module.train(), torch.randn(64, 64), torch.randn(64, 64), "reference")
    step()
    step()
    assert len(encoded) == 2


def test_a_layer_that_is_not_taken_apart_has_no_parts():
    """The GEMMs of `bf16` are torch's: all of it would be the rest. Older records hold that."""
    split = dict.fromkeys(layer.parts.NAMES, 1.0)
    rows = [{**TIMED, "rounds": 7, "shape": [1, 1, 1], "dtype": "float32", "kernels": "compiled",
             "name": name, "parts_ms": split} for name in ("bf16", "metis")]  # fmt: skip
    *_, plain, metis = layer.markdown(rows).splitlines()
    assert ("%" in plain, "%" in metis) == (False, True)


def test_ratios_pair_the_rounds():
    # The machine slows down twofold in the middle; the ratio does not.
    row = timing.summary([2.0, 4.0, 4.0, 2.0], [1.0, 2.0, 2.0, 1.0])
    assert (row["ratio"], row["quartiles_ratio"]) == (2, [2, 2])
    assert row["ms"] == 3000


def test_slope_of_a_power_law():
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scaling.slope(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert scaling.slope(sizes, [0.0, 1.0, 1.0, 1.0]) is None
