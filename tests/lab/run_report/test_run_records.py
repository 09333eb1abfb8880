"""Records of runs as they are read: complete, resumed, half-written, malformed."""

from __future__ import annotations

import copy as copies
import json
import math
import re

import pytest
from design import full
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metis_hf.lab import health_page
from metis_hf.lab.health_page import run_page, write_report
from metis_hf.lab.run_records import RunRecord, read_run
from metis_hf.training.run_record import (
    HEALTH_FILE,
    LOG_FILE,
    RUN_FILE,
    append_log,
    append_record,
    drop_after,
    parse_records,
)

MEASURED = [1, 3, 6, 9, 12]
LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
STATS = {"nonfinite": 0.0, "stable_rank": 9.0, "energy": 0.4, "narrowing": 1.3, "sqnr_db": 19.0,
         "zeroed": 0.07, "saturated": 0.03}  # fmt: skip


@pytest.mark.slow
class TestRealRun:
    def test_is_what_the_trainer_has(self, trained):
        folder, trainer = trained
        run = read_run(folder)
        logged = [e for e in trainer.state.log_history if "loss" in e]
        assert run.series("loss") == ([e["step"] for e in logged], [e["loss"] for e in logged])
        assert run.series("eval_loss")[0] == [6, 12]
        assert (run.name, run.max_steps, run.last_step) == ("metis", 12, 12)
        assert run.config["refresh_interval"] == 4
        assert list(run.layers) == list(run.noise) == MEASURED
        assert list(run.refreshes) == [4, 8, 12]
        assert run.switches == {11: {"scheme": "metis", "high_precision": ["forward"]}}
        assert run.notes == []
        assert run.noise_series() == run.series("metis/noise/ratio")
        for layers in run.refreshes.values():
            for moments in layers.values():
                assert moments["before"]["orthogonality"] > 1e-4
                assert moments["after"]["orthogonality"] < 1e-5

    @pytest.mark.slow
    def test_resumed_has_each_step_once(self, trained, train, tmp_path):
        """Killed after step 8 (refreshed and measured), resumed from the checkpoint of step 6."""
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, stop=8)
        with (tmp_path / HEALTH_FILE).open("a") as file:
            file.write('{"step": 8, "layers": {"mod')
        train(tmp_path, resume=str(tmp_path / "checkpoint-6"))
        run, whole = read_run(tmp_path), read_run(trained[0])
        assert run.notes == []
        assert run.series("loss") == whole.series("loss")
        for part in ("layers", "noise", "refreshes", "switches"):
            assert getattr(run, part) == getattr(whole, part)

    def test_half_written_last_line_is_noted(self, copy, monkeypatch):
        monkeypatch.setattr(health_page, "heat_map_of", lambda run, panel: None)
        text = (copy / HEALTH_FILE).read_text()
        lines = text.splitlines()
        (copy / HEALTH_FILE).write_text(text[: -len(lines[-1]) // 2])
        run = read_run(copy)
        assert list(run.layers) == MEASURED[:-1]
        (note,) = run.notes
        assert f"{HEALTH_FILE}: line {len(lines)} is incomplete" in note
        assert note in run_page(run).render()

    def test_losses_or_health_alone(self, copy):
        kept = (copy / HEALTH_FILE).rename(copy / "elsewhere")
        run = read_run(copy)
        assert (len(run.series("loss")[0]), run.layers) == (12, {})
        assert any("No spectral health" in note for note in run.notes)
        kept.rename(copy / HEALTH_FILE)
        (copy / LOG_FILE).unlink()
        run = read_run(copy)
        assert (run.series("loss"), list(run.layers)) == (([], []), MEASURED)
        assert any("No training loss" in note for note in run.notes)


def health_line(step):
    tensors = {kind: dict(STATS) for kind in ("weight", "activation", "gradient")}
    tensors["weight"]["orthogonality"] = 1e-4
    moment = {"orthogonality": 1e-4, "narrowing": 1.2, "energy": 0.3}
    return {
        "step": step,
        "layers": {name: copies.deepcopy(tensors) for name in LAYERS},
        "noise": {name: [3.0, 1.0] for name in LAYERS},
        "refresh": {name: {"before": dict(moment), "after": dict(moment)} for name in LAYERS},
        "switch": {"scheme": "metis", "high_precision": ["forward"]},
    }


def records():
    """File name -> its records; those of a *.jsonl file are lines."""
    log = [{"step": step, "loss": 3.0 - step / 10, "grad_norm": 1.0} for step in (1, 2, 3)]
    return {
        HEALTH_FILE: [health_line(1), health_line(2)],
        LOG_FILE: [*log, {"step": 3, "eval_loss": 2.9}, {"step": 5, "train_runtime": 4.0}],
        RUN_FILE: {
            "model": "Llama",
            "config": {"scheme": "metis", "seed": 0},
            "summary": "2 layers",
            "conversion": {"flops_share": 0.9},
            "max_steps": 3,
            "environment": {"versions": {"torch": "2"}, "device": "CPU"},
        },
    }


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        lines = data if name.endswith("jsonl") else [data]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Saving pictures takes most of the time of a page."""
    monkeypatch.setattr("metis_hf.lab.health_maps.as_png", lambda figure: b"")


def put(value, file, *path):
    """Replaces what lies at a path of the second line of a file, or of the whole file."""

    def change(files):
        target = files[file]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


def health(value, *path):
    return put(value, HEALTH_FILE, 1, *path)


LAYER, OTHER = LAYERS
# What is broken -> (how, what the notes say about it).
KINDS = {
    "a step that is text": (health("2", "step"), f"{HEALTH_FILE}: left out line 2"),
    "a step below zero": (health(-2, "step"), "left out line 2 (no step"),
    "an infinite step": (health(math.inf, "step"), "left out line 2 (no step"),
    "a huge step": (health(10**30, "step"), "left out line 2 (no step"),
    "no object": (put([1], HEALTH_FILE, 1), "line 2 (not a JSON object)"),
    "layers as a list": (health([1], "layers"), "layers in line 2 (it is list"),
    "no layers": (health({}, "layers"), "layers in line 2 (it has no layers)"),
    "a layer as a number": (health(3, "layers", LAYER), f"({LAYER} is 3, not an object)"),
    "a statistic as text": (
        health("NaN", "layers", LAYER, "weight", "sqnr_db"),
        f"({LAYER}, weight, sqnr_db is 'NaN', not a number)",
    ),
    "a statistic beyond fp32": (
        health(10**400, "layers", LAYER, "weight", "sqnr_db"), "beyond the range of fp32",
    ),
    "a norm alone": (health([1.0], "noise", LAYER), "noise in line 2"),
    "norms as text": (health("ab", "noise", LAYER), "is 'ab', not a pair of norms"),
    "no noise at all": (health([1.0, 0.0], "noise", LAYER), "with a negative norm or no noise"),
    "a refresh of nothing": (health({}, "refresh"), "refresh in line 2"),
    "a refresh without its end": (
        health({"before": {}}, "refresh", LAYER), f"({LAYER} lacks the orthogonality",
    ),
    "a switch to a number": (health(4, "switch"), "switch in line 2 (it is 4"),
    "passes as text": (health("forward", "switch", "high_precision"), "high_precision is 'forwa"),
    "a loss as text": (
        put("x", LOG_FILE, 1, "loss"), "left out line 2 (loss is 'x', not a number)",
    ),
    "an entry without a step": (
        put(None, LOG_FILE, 1, "step"), f"{LOG_FILE}: left out line 2 (no step",
    ),
    "a config as a list": (put(["x"], RUN_FILE, "config"), "config is list and was left out"),
    "a summary as a number": (put(5, RUN_FILE, "summary"), "summary is 5"),
    "steps as text": (put("3", RUN_FILE, "max_steps"), "max_steps is '3'"),
}  # fmt: skip


@pytest.mark.usefixtures("undrawn")
class TestLeftOut:
    def test_is_named_and_the_rest_stays(self, tmp_path):
        for kind, (change, said) in KINDS.items():
            files = records()
            change(files)
            run = read_run(write(tmp_path, files))
            assert any(said in note for note in run.notes), (kind, run.notes)
            assert 1 in run.layers
            assert run.log[1]["loss"] == 2.9
        assert "Layers over time" in run_page(run).render()

    def test_a_line_of_bytes(self, tmp_path):
        """Binary, cut short, nested beyond what a parser can follow: at the end, or in between."""
        for broken in (b"\xff\xfe\x00", b'{"step": 2', b"[" * 10**5):
            folder = write(tmp_path, records())
            for name in (HEALTH_FILE, LOG_FILE):
                first, rest = (folder / name).read_bytes().split(b"\n", 1)
                (folder / name).write_bytes(first + b"\n" + broken + b"\n" + rest + broken)
            run = read_run(folder)
            assert list(run.layers) == [1, 2]
            said = " ".join(run.notes)
            for name in (HEALTH_FILE, LOG_FILE):
                assert f"{name}: left out line 2 (" in said
                assert re.search(
                    rf"{name}: line \d is incomplete, probably because the run was kil", said
                )

    def test_a_whole_file(self, tmp_path):
        """Its bytes, or a directory in its place."""
        for data in (b"", b"\xff", b"[1, 2]", b"null", b"[" * 10**5, None):
            folder = write(tmp_path, records())
            (folder / RUN_FILE).unlink()
            if data is None:
                (folder / RUN_FILE).mkdir()
            else:
                (folder / RUN_FILE).write_bytes(data)
            run = read_run(folder)
            assert run.series("loss")[0] == [1, 2, 3]
            (note,) = run.notes
            assert note == f"{RUN_FILE} is incomplete or not a JSON object and was left out."


def test_last_step_and_switches(tmp_path):
    """The last entry says how far a run has come; a resumed run makes its switch again."""
    run = read_run(write(tmp_path, records()))
    assert run.last_step == 5
    assert list(run.switches) == [1]


@pytest.mark.slow
def test_real_pictures_of_odd_names_and_numbers(tmp_path):
    """Names that matplotlib would take for formulas, and numbers at the ends of fp32."""
    files = records()
    odd = r"model.0.$\bad$"
    for line in files[HEALTH_FILE]:
        for part in ("layers", "noise", "refresh"):
            line[part] = {odd: line[part][LAYER], "_x/y\x00\ud800": line[part][OTHER]}
        line["layers"][odd]["weight"] |= {"stable_rank": -1.0, "sqnr_db": math.inf, "zeroed": 3e38}
        line["noise"][odd] = [math.nan, math.nan]
        line["refresh"][odd]["before"] |= {"orthogonality": 0.0, "narrowing": math.nan}
    files[LOG_FILE] = [{"step": 1, "loss": 3e38}, {"step": 2, "loss": -3e38}]
    files[RUN_FILE]["config"] = {"scheme": "$\ud800$"}
    run = read_run(write(tmp_path, files))
    assert run.notes == []
    page = write_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 8


NASTY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["NaN", "-1", 10**400, -1, 1e308, -0.0, "\ud800", "$x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=2),
    max_leaves=4,
)  # fmt: skip


def paths(data, prefix=()):
    """Every place in nested lists and dicts."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*prefix, key))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@given(data=st.data())
@settings(max_examples=60 if full() else 20, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture,
                                 HealthCheck.too_slow])  # fmt: skip
def test_no_record_breaks_a_page(data, tmp_path_factory):
    """Any value anywhere, a missing key, a file cut short, a byte from elsewhere."""
    files = records()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(paths(files), key=repr)))
        if len(path) == 1:
            continue
        target = files
        for key in path[:-1]:
            target = target[key]
        if data.draw(st.booleans()):
            target[path[-1]] = data.draw(NASTY)
        else:
            del target[path[-1]]
    folder = write(tmp_path_factory.mktemp("run"), files)
    name = data.draw(st.sampled_from(sorted(files)))
    whole = (folder / name).read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / name).write_bytes(whole[:cut] + data.draw(st.binary(max_size=3)))
    run_page(read_run(folder)).save(folder / "page.html")


def test_share_of_the_flops_in_fp4(tmp_path):
    for scheme, share in (("bf16", 0), ("bf16-split", 0), ("nvfp4", 0.9), (None, 0.9)):
        config = {"scheme": scheme} if scheme else {}
        run = RunRecord(tmp_path, config=config, conversion={"flops_share": 0.9})
        assert run.fp4_share == share


class TestErrors:
    def test_no_directory(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
            read_run(tmp_path / "nowhere")

    def test_no_record_names_what_was_looked_for(self, tmp_path):
        looked = r"no record of a run; looked for metis_log\.jsonl, metis_health\.jsonl$"
        with pytest.raises(FileNotFoundError, match=looked):
            read_run(tmp_path)

    def test_directory_of_runs_names_them(self, tmp_path):
        inside = ["bf16", "runs/metis/seed-0"]
        for name in inside:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / LOG_FILE).write_text("{}")
        with pytest.raises(FileNotFoundError, match=f"contains the runs {', '.join(inside)}; give"):
            read_run(tmp_path)


class TestResume:
    """What a resumed run does to the files before it goes on."""

    def test_bytes_that_are_no_text(self, tmp_path):
        """They are dropped; a step after the checkpoint too."""
        folder = write(tmp_path, records())
        for name in (HEALTH_FILE, LOG_FILE):
            with (folder / name).open("ab") as file:
                file.write(b"\xff\xfe\n[1]\n{}\n" + b'{"step": "1"}\n{"step": 7}\n{"st')
        drop_after(folder, 2)
        for name in (HEALTH_FILE, LOG_FILE):
            found, faults = parse_records((folder / name).read_bytes())
            assert [record["step"] for record in found.values()] == [1, 2]
            assert faults == {}

    def test_is_replaced_as_a_whole(self, tmp_path, monkeypatch):
        folder = write(tmp_path, records())
        before = (folder / HEALTH_FILE).read_bytes()
        monkeypatch.setattr("os.replace", lambda source, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drop_after(folder, 1)
        assert (folder / HEALTH_FILE).read_bytes() == before

    def test_half_a_line_swallows_no_record(self, tmp_path):
        for name in (HEALTH_FILE, LOG_FILE):
            (tmp_path / name).write_bytes(b'{"step": 1}\n{"ste\xff')
        append_record(tmp_path, 2, {"switch": {}})
        append_log(tmp_path, {"step": 2, "loss": 1.5, "name": "x", "list": [1]})
        for name, line in ((HEALTH_FILE, {"switch": {}}), (LOG_FILE, {"loss": 1.5})):
            found, faults = parse_records((tmp_path / name).read_bytes())
            assert found == {1: {"step": 1}, 3: {"step": 2, **line}}
            assert list(faults) == [2]
