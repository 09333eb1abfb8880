"""Tasks of a comparison: which are trained, where, by whom; their workers train nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from types import MappingProxyType

import pytest
import torch

from lab.compare.comparing import CONFIG, METIS_HF, fake_launcher, write_config
from lab.evaluate.eval_tools import DATA as EVAL_DATA
from metis_hf.cli.main import main
from metis_hf.lab.compare import command, dispatch, tasks
from metis_hf.lab.compare.command import compare_schemes
from metis_hf.lab.compare.dispatch import slot_environment
from metis_hf.lab.store import Store

pytestmark = pytest.mark.usefixtures("no_pictures")

MINE = {"mine": {"scheme": "nvfp4"}}
RUN = "runs/mine/seed-0"


@pytest.fixture
def out(tmp_path):
    """A comparison's directory that has its data, which would be made else."""
    (tmp_path / "out/data").mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture
def compare(out, tmp_path):
    """Compare with workers that write a result at once; returns the errors."""

    def call(share=None, times=False, **options):
        given = CONFIG | {"schemes": None, "variants": MINE, "seeds": [0]} | options
        launcher = fake_launcher(tmp_path, **given)
        return compare_schemes(given, out, launcher=launcher, share=share, times=times)

    return call


def begin(run):
    """Turn a finished run into one that was cut off after a checkpoint."""
    (run / "result.json").unlink()
    (run / "checkpoint-2").mkdir(exist_ok=True)


@pytest.mark.parametrize("changes", [{"scheme": "nvidia"}, {"precision_schedule": {"at": 3}}])
def test_a_run_of_another_variant_is_refused(changes, compare, out):
    changed = {"mine": MINE["mine"] | changes}
    assert compare() == []
    with pytest.raises(ValueError, match="another variant named 'mine'; choose"):
        compare(variants=changed)
    begin(out / RUN)
    with pytest.raises(ValueError, match="another variant named 'mine'; choose"):
        compare(variants=changed)
    (out / RUN / "checkpoint-2").rmdir()
    assert compare(variants=changed) == []  # nothing was trained


def test_checkpoints_that_a_finished_run_has_left_are_removed(compare, out):
    compare()
    (out / RUN / "checkpoint-4").mkdir()
    compare()
    assert not list((out / RUN).glob("checkpoint-*"))


def test_a_failed_run_is_shown_and_the_others_go_on(compare, out, capsys):
    (error,) = compare(variants=MINE | {"broken": {"scheme": "nvidia"}}, schemes=["bf16"])
    assert "1 of 3 runs failed; 2 are done, and the same command continues" in error
    assert "broken, seed 0 (exit code 1)" in error
    assert "it cannot be trained" in error  # the end of its log
    assert "| bf16 |" in (out / "table.md").read_text()


def test_half_a_result_is_named_and_trained_again(compare, out, capsys):
    compare()
    path = out / RUN / "result.json"
    whole = path.read_text()
    path.write_text(whole[:20])
    compare()
    said = " ".join(capsys.readouterr().out.split())
    assert "is not a valid JSON file" in said
    assert "training this run again" in said
    assert json.loads(path.read_text())["loss"] == json.loads(whole)["loss"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"of_a_newer_version": 1}, "is not a result of this version .*'of_a_newer_version'"),
        ({"store": {"format": 99, "name": "result", "key": ""}}, "result.json has format 99"),
        ({"store": None}, "is not the record of 'result'"),
    ],
)
def test_a_result_of_another_version_is_kept(content, message, compare, out):
    compare()
    path = out / RUN / "result.json"
    changed = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(changed)
    with pytest.raises(ValueError, match=message):
        compare()
    assert path.read_text() == changed


def test_a_result_of_an_earlier_version_is_read(compare, out):
    """It has the results of lm-eval too."""
    compare()
    path = out / RUN / "result.json"
    changed = json.dumps(json.loads(path.read_text()) | {"evaluation": {"results": {}}})
    path.write_text(changed)
    compare()
    assert path.read_text() == changed


def test_a_record_says_how_many_ran_side_by_side(compare, out):
    def jobs():
        return json.loads((out / "compare.json").read_text())["jobs"]

    compare()
    assert jobs() == 1
    assert "s/step" in (out / "table.md").read_text()
    spec = out / RUN / "run.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | {"jobs": 2}))
    begin(out / RUN)
    compare()  # what its steps took until the checkpoint was measured beside another run
    assert jobs() == 2
    assert "s/step" not in (out / "table.md").read_text()


def test_a_variant_that_cannot_be_converted_is_refused_before_training(compare, out):
    with pytest.raises(ValueError, match=r"variant 'broken': .*choose at most 16"):
        compare(variants={**MINE, "broken": {"scheme": "metis", "rank": 90}})
    assert [path.name for path in out.iterdir()] == ["data"]


def test_times_take_nothing_with_them(compare, out, monkeypatch):
    """One variant failed, and the others do not fit into memory at once."""
    timed = []

    def measure(plan, data, path):
        timed.extend(variant.name for variant in plan.variants)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(command, "measure_times", measure)
    errors = compare(variants=MINE | {"broken": {"scheme": "nvidia"}}, times=True)
    assert "1 of 2 runs failed" in errors[0]
    assert errors[1] == "--times could not time the steps: out of memory"
    assert timed == ["mine"]
    assert "| mine |" in (out / "table.md").read_text()


def test_runs_share_the_accelerators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for expected in (["0", "1", "0"], ["2", "5", "2"]):
        found = [slot_environment(slot, 3) for slot in range(3)]  # more of them than devices
        assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")


def test_runs_share_the_threads_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(dispatch.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [slot_environment(0, slots)["OMP_NUM_THREADS"] for slots in (1, 3, 8, 9)]
    assert threads == ["8", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert slot_environment(0, 3) == {"OMP_NUM_THREADS": "5"}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert slot_environment(0, 3) == {}  # of another kind than CUDA


@pytest.mark.slow
def test_a_run_remembers_all_code_that_trained_it(compare, out, monkeypatch, capsys):
    for code, expected in (("a", "a"), ("b", "a+b"), ("c", "a+b+c")):
        monkeypatch.setattr(tasks, "numerics_digest", lambda code=code: code)
        if code != "a":
            begin(out / RUN)
        compare()
        found = json.loads((out / "compare.json").read_text())["runs"][0]["code"]["sha256"]
        assert found == expected
    assert (
        "mine, seed 0 was started with another version of the code or torch"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(tasks, "numerics_digest", lambda: "d")
    compare(schemes=["bf16"])  # beside it
    assert "Runs of different code or torch" in (out / "table.md").read_text()


@pytest.mark.slow
def test_a_changed_file_of_a_scheme_is_refused(compare, out, monkeypatch):
    for digest in ("1", "1", "2"):
        monkeypatch.setattr(tasks, "source_digests", lambda *_, digest=digest: {"own": digest})
        if digest == "1":
            compare()
    with pytest.raises(ValueError, match="contains a run of 'own' from before its file changed"):
        compare()
    begin(out / RUN)
    with pytest.raises(ValueError, match="contains a run of 'own' from before its file changed"):
        compare()
    (out / RUN / "checkpoint-2").rmdir()
    compare()  # nothing was trained: the file may have been mended


def test_task_data_that_changed_is_refused(compare, tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("piqa.jsonl", "race.jsonl"):
        (folder / name).write_bytes((EVAL_DATA / name).read_bytes())
    compare(tasks=["piqa"], tasks_dir=str(folder))
    (folder / "piqa.jsonl").write_bytes((EVAL_DATA / "piqa.jsonl").read_bytes() * 2)
    with pytest.raises(ValueError, match=rf"{folder} changed after"):
        compare(tasks=["piqa"], tasks_dir=str(folder))


def test_a_directory_of_another_comparison_is_refused(compare):
    compare()
    with pytest.raises(ValueError, match=r"training.max_steps: 6 there, 7 now"):
        compare(training={"max_steps": 7, "save_steps": 2})


def test_curves_may_go_elsewhere_later(compare, out):
    """Where a run reports to decides no result."""
    compare()
    written = (out / RUN / "result.json").stat().st_mtime_ns
    training = CONFIG["training"] | {"report_to": "tensorboard", "project": "fp4"}
    assert compare(training=training) == []
    assert (out / RUN / "result.json").stat().st_mtime_ns == written


PLAN = MappingProxyType({"schemes": ["bf16"], "seeds": [0, 1]})  # four runs with MINE
SHARES = (["bf16/seed-0", "mine/seed-1"], ["mine/seed-0"], ["bf16/seed-1"])


class TestArray:
    """`--task K/N`: processes that share a directory, each with its part of the runs."""

    def done(self, out):
        found = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/*/result.json")}
        return {str(path.parent.relative_to(out / "runs")): time for path, time in found.items()}

    def test_each_trains_its_share_and_the_last_writes_the_tables(self, compare, out, capsys):
        expected: set[str] = set()
        for number, share in ((3, 2), (1, 0), (2, 1)):
            before = self.done(out)
            assert not (out / "table.md").exists()
            assert compare(share=(number, 3), **PLAN) == []
            expected |= set(SHARES[share])
            assert self.done(out).keys() == expected
            assert before.items() <= self.done(out).items()
        assert "3 of 4 runs are done; the last process to finish writes" in (
            " ".join(capsys.readouterr().out.split())
        )
        assert "| mine |" in (out / "table.md").read_text()
        before = self.done(out)
        assert compare(share=(2, 3), **PLAN) == []  # once more: nothing to do
        assert self.done(out) == before

    def test_the_last_process_times_the_steps(self, compare, monkeypatch):
        timed: list = []
        monkeypatch.setattr(command, "measure_times", lambda *given: timed.append(given))
        for number in (1, 2):
            assert timed == []
            assert compare(share=(number, 2), times=True, **PLAN) == []
        assert len(timed) == 1

    def test_the_whole_command_trains_the_rest(self, compare, out):
        assert compare(share=(1, 3), **PLAN) == []
        before = self.done(out)
        assert compare(**PLAN) == []
        assert before.items() <= self.done(out).items()
        assert len(json.loads((out / "compare.json").read_text())["runs"]) == 4

    def test_two_writers_of_one_run_are_refused(self, compare, out):
        run = out / "runs/mine/seed-0"
        with Store(run).hold():
            for share in ((2, 3), None):
                refused = pytest.raises(ValueError, match=rf"{run} is in use by process \d+ on")
                with refused:
                    compare(share=share, **PLAN)
            assert self.done(out) == {}
            assert compare(share=(1, 3), **PLAN) == []  # whose runs are others

    def test_other_settings_and_numerics_are_refused(self, compare, out, monkeypatch):
        compare(share=(1, 3), **PLAN)
        before = self.done(out)
        with pytest.raises(ValueError, match="global_batch: 4 there, 8 now"):
            compare(share=(2, 3), global_batch=8, **PLAN)
        monkeypatch.setattr(tasks, "numerics_digest", lambda: "another")
        with pytest.raises(ValueError, match=r"this installation \(numerics of .* changed after"):
            compare(share=(2, 3), **PLAN)
        assert self.done(out) == before

    @pytest.mark.slow
    def test_three_processes_at_once(self, out, tmp_path):
        options = CONFIG | PLAN | {"variants": MINE}
        config, launcher = write_config(tmp_path, **options), fake_launcher(tmp_path, **options)
        command = [*METIS_HF, "compare", "--config", str(config), "--out", str(out)]
        command += ["--launcher", launcher, "--task"]
        at_work = [
            subprocess.Popen([*command, f"{k}/3"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for k in (1, 2, 3)
        ]
        printed = [process.communicate()[0].decode() for process in at_work]
        assert [process.returncode for process in at_work] == [0, 0, 0], printed
        assert self.done(out).keys() == {name for share in SHARES for name in share}
        record = json.loads((out / "compare.json").read_text())
        assert [(r["scheme"], r["seed"]) for r in record["runs"]] == [
            ("bf16", 0), ("mine", 0), ("bf16", 1), ("mine", 1)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare --schemes metsi", "scheme 'metsi' is not registered; did you mean 'metis'?"),
        ("compare --seeds 0,one", "--seeds 0,one: expected whole numbers"),
        ("compare --size 130m", "size 130m needs data: give --data DIR"),
        ("compare --schemes bf16 --jobs 2 --launcher accelerate", "one run at a"),
        ("compare --data nowhere", "nowhere has no meta.json"),
        ("compare --validation nowhere", "/nowhere without data: the standard library's"),
        ("compare --jobs 0", "jobs=0; expected at least 1"),
        ("compare --tasks boolq --tasks-dir nowhere", "/nowhere is not a directory"),
        ("compare --tasks boolq,boolq", "tasks named twice: boolq"),
        ("compare --task 0/3", "--task 0/3; expected K/N with K from 1 to N"),
        ("compare --task 3", "--task 3: expected K/N, for example 1/3 for the first of three"),
        ("demo --quick --steps 0", "max_steps: 0; expected a whole number, at least 1"),
        ("demo --quick --seed -1", "seeds: -1; expected a whole number, from 0 to 4294967295"),
        ("demo --quick --schemes ,", "schemes: the list is empty"),
    ],
)
def test_bad_input_is_one_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["metis-hf", *command.split(), "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("given", "expected", "steps"),
    [
        ([], "runs/demo", 220),
        (["--quick"], "runs/quick", 12),
        (["--quick", "--steps", "5", "--out", "runs/mine"], "runs/mine", 5),
    ],
)
def test_demo_is_a_preset_of_compare(given, expected, steps, monkeypatch):
    asked = []
    monkeypatch.setattr(
        command, "compare_schemes", lambda options, out, **_: asked.append((options, out)) or []
    )
    monkeypatch.setattr(sys, "argv", ["metis-hf", "demo", *given])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    ((options, out),) = asked
    plan, preset = command.make_plan(**options), command.make_plan(preset="demo")
    assert str(out) == expected
    assert plan.experiment.steps == steps
    assert (plan.variants, plan.seeds) == (preset.variants, preset.seeds)
    if not given:
        assert plan == preset
