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

import pytest
import torch
from design import thinned
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import gpu
import report
import scaling
import step
import timing

from metis_hf.numerics.kernels import choice

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
PLOTS = ("quantizers", "layer", "step", "scaling", "roofline")


def run(script: str, out: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--out", str(out)]
    environment = os.environ | {"METIS_KERNELS": "reference", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


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


@pytest.mark.parametrize("script", RECORDS)
def test_committed_record_has_every_table(script):
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
    low, high = map(int, choice._REFERENCE_SLOWER.split(" to "))
    assert low - 0.5 <= min(ratios)
    assert max(ratios) <= high + 0.5


def test_every_target_is_answered_from_a_record():
    for target in report.TARGETS:
        value = target.measure()
        assert value is not None, target.what
        assert value > 0, target.what


def test_interleaved_rounds_run_each_in_turn():
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    times = timing.interleave(calls, 3, budget=60)
    assert order == ["a", "b"] * 4  # a warm-up, three rounds
    assert [len(found) for found in times] == [3, 3]


def test_rounds_stop_when_the_budget_is_spent():
    times = timing.interleave([lambda: None], 100, budget=0)
    assert len(times[0]) == 2


def test_the_warm_up_is_not_in_the_budget():
    calls = []

    def slow_at_first() -> None:
        calls.append(None)
        time.sleep(0.3 if len(calls) == 1 else 0)

    assert len(timing.interleave([slow_at_first], 20, budget=0.25)[0]) == 20


def test_one_round_has_quartiles():
    assert timing.quartiles([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("options", "folder"),
    [([], timing.RESULTS), (["--device", "cuda"], timing.RESULTS / "cuda"), (["--out", "x"], "x")],
)
def test_runs_on_a_gpu_leave_the_records_of_cpus_alone(options, folder, monkeypatch):
    monkeypatch.setattr(timing, "device_of", torch.device)
    monkeypatch.setattr(sys, "argv", ["layer.py", *options])
    assert timing.parse(timing.arguments("Measures.")).out == Path(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [timing.arguments("Measures."), gpu])
def test_a_device_that_is_not_there_is_no_traceback(options, capsys):
    with pytest.raises(SystemExit):
        getattr(options, "parse_args", gpu.arguments)(["--device", "cuda"])
    assert "device='cuda' cannot be used here" in capsys.readouterr().err


def test_bf16_units_of_arm_count(monkeypatch):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    for there in (True, False):
        probe = "_is_arm_bf16_supported"
        monkeypatch.setattr(torch.cpu, probe, lambda there=there: there, raising=False)
        assert timing.machine()["bf16_units"] == there


def test_every_part_of_a_layer_is_drawn(tmp_path, monkeypatch):
    drawn = []

    def figure(*sizes):
        drawn.append(timing.figure(*sizes))
        return drawn[-1]

    monkeypatch.setattr(scaling, "figure", figure)
    scaling.draw(report.read("scaling")["rows"], tmp_path / "scaling.png")
    ((_, axes),) = drawn
    lines = axes[0, 0].get_lines()
    assert [line.get_label() for line in lines] == list(scaling.THEORY)
    assert len({line.get_color() for line in lines}) == len(scaling.THEORY)


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
    row |= {"peak_bytes": None, "saved_bytes": 0, "saved_linear_bytes": 0}
    assert "| metis, recorded |" in step.markdown([row | {"recorded": True, "note": None}])
    refused = row | {"recorded": False, "note": "no memory"}
    assert "| metis, not recorded: no memory |" in step.markdown([refused])


def test_ratios_pair_the_rounds():
    # The machine slows down twofold in the middle; the ratio does not.
    row = timing.summary([2.0, 4.0, 4.0, 2.0], [1.0, 2.0, 2.0, 1.0])
    assert (row["ratio"], row["quartiles_ratio"]) == (2, [2, 2])
    assert row["ms"] == 3000


def test_slope_of_a_power_law():
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scaling.slope(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert scaling.slope(sizes, [0.0, 1.0, 1.0, 1.0]) is None
