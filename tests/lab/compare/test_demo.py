"""`metis-hf demo` as a user runs it: quick mode, outputs, resume, bad input."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import transformers
from conftest import hear_interrupts
from design import full, full_only
from paths import ROOT
from rich.console import Console

from lab.compare import kills
from metis_hf.cli.main import main
from metis_hf.lab.compare import tasks_table as tables
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.demo import QUICK_TIME
from metis_hf.lab.demo import run as demo
from metis_hf.lab.demo.run import SCHEMES
from metis_hf.shared.records import write_json

METIS_HF = [sys.executable, "-m", "metis_hf.cli.main"]
# All schemes of the demo take a minute and a half on two idle cores.
CHOSEN = SCHEMES if full() else ("bf16", "metis")


def run(*args, **kwargs):
    environment = os.environ | {"OMP_NUM_THREADS": "2", "COLUMNS": "120"}
    return subprocess.run(
        [*METIS_HF, *args], capture_output=True, text=True, env=environment, check=False, **kwargs
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The directory and printed text of one quick demo."""
    out = tmp_path_factory.mktemp("demo") / "quick"
    done = run("demo", "--quick", "--out", str(out), "--schemes", ",".join(CHOSEN))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_quick_demo_writes_what_it_says(quick):
    out, printed = quick
    record = json.loads((out / "results.json").read_text())
    assert [result["scheme"] for result in record["results"]] == list(CHOSEN)
    assert record["experiment"]["seed"] == 0
    assert {"torch", "transformers", "lm_eval"} <= set(record["versions"])
    for result in record["results"]:
        steps = [entry["step"] for entry in result["history"]]
        assert steps == list(range(1, record["experiment"]["training"]["max_steps"] + 1))
        assert math.isfinite(result["loss"])
        assert set(result["tasks"]) == {"demo_cloze", "demo_choice"}
        assert f"{result['loss']:.4f}" in (out / "table.md").read_text()
        assert f"{result['loss']:.4f}" in printed
    assert record["verdict"] in (out / "table.md").read_text()
    for name in ("loss.png", "spectra.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    # Same data and initialization: before the first update only the forward pass differs, and
    # operands that are wrong by 10 % or so change the loss of an untrained model little.
    first = {r["scheme"]: r["history"][0]["loss"] for r in record["results"]}
    assert max(first.values()) < 1.03 * min(first.values())
    assert len({r["loss"] for r in record["results"]}) == len(CHOSEN)


@pytest.mark.slow
def test_checkpoints_are_hugging_face_directories(quick):
    import metis_hf

    out, _ = quick
    for scheme in CHOSEN:
        model = transformers.AutoModelForCausalLM.from_pretrained(out / scheme / "model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / scheme / "model")
        assert next(metis_hf.metis_layers(model))[1].config.scheme == scheme
        ids = tokenizer("def f(x):\n", return_tensors="pt")
        text = model.generate(**ids, max_new_tokens=4, do_sample=False)
        assert tokenizer.decode(text[0]).startswith("def f(x):\n")
        assert not list((out / scheme).glob("checkpoint-*"))


@pytest.mark.slow
def test_a_finished_demo_is_shown_again_without_training(quick):
    out, printed = quick
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/result.json")}
    again = run("demo", "--quick", "--out", str(out), "--schemes", ",".join(CHOSEN))
    assert again.returncode == 0, again.stderr
    assert "step 1/" not in again.stdout
    assert before == {p: p.stat().st_mtime_ns for p in out.glob("*/result.json")}
    # The same rows, as the results were read back.
    assert [x for x in printed.splitlines() if "│" in x] == [
        x for x in again.stdout.splitlines() if "│" in x
    ]


@full_only
@pytest.mark.slow
def test_interrupted_demo_resumes_to_the_same_result(quick, tmp_path):
    """Killed in the middle of a scheme and run again: the numbers of an undisturbed run."""
    out, _ = quick
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = ["demo", "--quick", "--schemes", "metis", "--out", str(tmp_path)]
    file = tmp_path / "pid"
    held = [sys.executable, kills.__file__, "stay_in_save", str(file), *METIS_HF[1:], *command]
    process = subprocess.Popen(
        held, env=environment, stdout=subprocess.DEVNULL, preexec_fn=hear_interrupts
    )
    deadline = time.monotonic() + 600  # of a busy machine
    while not file.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert sorted(path.name for path in tmp_path.glob("metis/checkpoint-*")) == [
        "checkpoint-2", "checkpoint-4"
    ]  # fmt: skip
    resumed = run(*command)
    assert resumed.returncode == 0, resumed.stderr
    mine, whole = (json.loads((d / "metis" / "result.json").read_text()) for d in (tmp_path, out))
    assert [e["loss"] for e in mine["history"]] == [e["loss"] for e in whole["history"]]
    assert mine["loss"] == whole["loss"]
    assert mine["tasks"] == whole["tasks"]


def refused(monkeypatch, capsys, *args):
    """What the command prints as its one line of error."""
    monkeypatch.setattr(sys, "argv", ["metis-hf", "demo", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_other_settings_in_the_same_directory_are_refused(quick, monkeypatch, capsys):
    out, _ = quick
    line = refused(monkeypatch, capsys, "--quick", "--steps", "5", "--out", str(out))
    assert "training.max_steps: 12 there, 5 now" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schemes", "metsi"], "scheme 'metsi' is not registered; did you mean 'metis'?"),
        (["--steps", "0"], "steps=0; expected at least 1"),
        (["--seed", "-1"], "seed=-1; expected a whole number from 0 to 4294967295"),
        (["--schemes", ","], "no scheme"),
        (["--schemes", "bf16,nvfp4,nvfp4"], "scheme named twice: nvfp4"),
    ],
)
def test_bad_input_is_one_line(args, message, tmp_path, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, "--out", str(tmp_path / "x"), *args)
    assert not (tmp_path / "x").exists()


def test_help_says_how_long_the_quick_demo_takes():
    """In the words of the documentation."""
    assert QUICK_TIME in " ".join((ROOT / "docs/quickstart.md").read_text().split())
    shown = run("demo", "--help").stdout
    assert QUICK_TIME in " ".join(shown.split())


def result(scheme, loss, value=0.5, stderr=0.03):
    tasks = {"demo_cloze": {"metric": "acc", "value": value, "stderr": stderr}}
    return SchemeResult(scheme, {}, "", loss, tasks, 0.1, [])


def test_table_and_verdict():
    results = [result("bf16", 2.0), result("nvfp4", 2.1, 0.4), result("metis", 2.01)]
    rows = tables.rows(results, "bf16 (run in fp32)")
    assert rows[0] == ["bf16 (run in fp32)", "2.0000", "", "50.0", "50.0", "0.10"]
    assert rows[1][2] == "+5.00 %"
    assert rows[2][2] == "+0.50 %"
    sentence = tables.verdict(results, 1_000_000, 500_000)
    assert "metis" in sentence
    assert "+0.50 %" in sentence
    assert "nvfp4 worst (+5.00 %)" in sentence
    assert "one seed" in sentence


def test_nan_is_shown_not_averaged_away():
    results = [result("bf16", 2.0), result("nvfp4", math.nan, math.nan)]
    row = tables.rows(results)[1]
    assert row[1] == "nan"
    assert row[4] == "nan"
    assert "diverged: nvfp4" in tables.verdict(results, 1, 1)
    results = [result("bf16", math.nan), result("nvfp4", 2.1), result("metis", 2.0)]
    assert tables.verdict(results, 1, 1).startswith("No comparison without a finite control")


@pytest.mark.parametrize(
    ("given", "out"),
    [
        ([], "runs/demo"),
        (["--quick"], "runs/quick"),
        (["--quick", "--out", "runs/demo"], "runs/demo"),
    ],
)
def test_the_directory_is_the_one_asked_for(given, out, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "run_demo", lambda **options: asked.append(str(options["out"])))
    monkeypatch.setattr(sys, "argv", ["metis-hf", "demo", *given])
    with pytest.raises(SystemExit):
        main()
    assert asked == [out]


def test_the_table_says_when_the_control_ran_in_fp32(monkeypatch):
    from metis_hf.shared import records

    monkeypatch.setattr(records, "bf16_units", lambda device: False)
    where = records.environment()
    assert where["precision"] == "fp32"
    assert "without bf16 units" in where["device"] or "CPU" not in where["device"]
    assert demo.control_label(where) == "bf16 (run in fp32)"
    assert demo.control_label(where | {"precision": "bf16"}) == "bf16"


@pytest.mark.parametrize(
    "missing", [(), ("checkpoint", "one_cycle", "decay_embeddings", "scaled_residuals")]
)
def test_a_directory_of_other_versions_goes_on(missing, tmp_path, monkeypatch):
    """Which named all settings, or not all that there are."""
    monkeypatch.setattr(demo, "_run", lambda *_: [])
    settings = asdict(demo.demo_experiment(None, 0, quick=True))
    for name in missing:
        del settings[name]
    write_json(tmp_path / "settings.json", settings)
    assert demo.run_demo(out=tmp_path, quick=True) == []
    with pytest.raises(ValueError, match="seed: 0 there, 1 now"):
        demo.run_demo(out=tmp_path, quick=True, seed=1)


def test_a_changed_file_of_a_scheme_is_refused(tmp_path, monkeypatch):
    class Begun(Exception):
        """Stands for all that follows."""

    def begin(documents):
        raise Begun

    monkeypatch.setattr(demo, "stdlib_documents", list)
    monkeypatch.setattr(demo, "split_documents", begin)
    for digest, expected in (("1", Begun), ("1", Begun), ("2", ValueError)):
        monkeypatch.setattr(demo, "source_digests", lambda names, digest=digest: {"mine": digest})
        with pytest.raises(expected) as raised:
            demo.run_demo(out=tmp_path, quick=True, schemes=["bf16"])
    assert str(raised.value).startswith("scheme mine changed after ")


def test_a_demo_that_goes_on_knows_the_code_that_began_it(tmp_path, monkeypatch):
    """As long as there is a checkpoint of it."""
    for code, earlier in (("a", []), ("b", []), ("c", ["b"]), ("c", ["b", "c"])):
        monkeypatch.setattr(demo, "code_digest", lambda code=code: code)
        assert demo._earlier_code(tmp_path / "metis") == earlier
        if code == "b":
            (tmp_path / "metis/checkpoint-5").mkdir()


def test_results_of_different_code_are_named(tmp_path, monkeypatch):
    for name in ("plot_curves", "plot_spectra"):
        monkeypatch.setattr(demo.figures, name, lambda *_: None)
    results = [
        replace(result(name, 2.0), code={"sha256": code, "commit": None}, parameters=1000)
        for name, code in (("bf16", "a"), ("metis", "b"))
    ]
    said = io.StringIO()
    console = Console(file=said, width=200)
    experiment = demo.demo_experiment(None, 0, quick=True)
    demo._report(experiment, results, tmp_path, {"precision": "fp32"}, 1000, console)
    for text in (said.getvalue(), (tmp_path / "table.md").read_text()):
        assert "Runs of different code or torch" in text
        assert "a: bf16; b: metis" in text
