"""Records in every state of disorder: what is broken is left out and named, the rest is shown."""

from __future__ import annotations

import copy
import json
import math

import pytest
from design import full
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metis_hf.lab.run_report import figures, heatmaps
from metis_hf.lab.run_report.page import run_page, write_report
from metis_hf.lab.run_report.read import read_run
from metis_hf.training.run_record import (
    HEALTH_FILE,
    LOG_FILE,
    append_log,
    append_record,
    drop_after,
    parse_records,
)

LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
STATS = {"nonfinite": 0.0, "stable_rank": 9.0, "energy": 0.4, "narrowing": 1.3, "sqnr_db": 19.0,
         "zeroed": 0.07, "saturated": 0.03}  # fmt: skip
STATE = "trainer_state.json"


def health_line(step):
    tensors = {kind: dict(STATS) for kind in ("weight", "activation", "gradient")}
    tensors["weight"]["orthogonality"] = 1e-4
    moment = {"orthogonality": 1e-4, "narrowing": 1.2, "energy": 0.3}
    return {
        "step": step,
        "layers": {name: copy.deepcopy(tensors) for name in LAYERS},
        "noise": {name: [3.0, 1.0] for name in LAYERS},
        "refresh": {name: {"before": dict(moment), "after": dict(moment)} for name in LAYERS},
        "switch": {"scheme": "metis", "high_precision": ["forward"]},
    }


def log_entry(step):
    return {"step": step, "loss": 3.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-3,
            "step_seconds": 0.2}  # fmt: skip


def records():
    """File name -> its records; those of a *.jsonl file are lines."""
    log = [log_entry(step) for step in (1, 2, 3)]
    config = {"scheme": "metis", "seed": 0}
    return {
        HEALTH_FILE: [health_line(1), health_line(2)],
        LOG_FILE: [*log, {"step": 3, "eval_loss": 2.9}, {"step": 3, "train_runtime": 4.0}],
        STATE: {
            "global_step": 3,
            "max_steps": 3,
            "num_input_tokens_seen": 96,
            "log_history": log,
            "stateful_callbacks": {"MetisCallback": {"attributes": {"trained_config": config}}},
        },
        "result.json": {"config": config, "summary": "2 layers", "history": log},
        "metis_run.json": {
            "model": "Llama",
            "config": config,
            "summary": "2 layers",
            "max_steps": 3,
            "sequences_per_step": 4,
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
    for module in (figures, heatmaps):
        monkeypatch.setattr(module, "as_png", lambda figure: b"")


def health(change):
    """A directory whose health file's second line a function has changed."""

    def make(files):
        files[HEALTH_FILE][1] = change(files[HEALTH_FILE][1])

    return make


def at(*path, value):
    """Replaces what lies at a path of a line."""

    def change(line):
        target = line
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        return line

    return change


def log(**fields):
    def make(files):
        for name in (STATE, "result.json"):
            del files[name]
        files[LOG_FILE][1] |= fields

    return make


def elsewhere(name, *path, value):
    def make(files):
        at(*path, value=value)(files[name])

    return make


LAYER, OTHER = LAYERS
# What is broken -> (how, what the notes say of it).
KINDS = {
    "a step that is text": (health(at("step", value="2")), f"{HEALTH_FILE}: left out line 2"),
    "a step below zero": (health(at("step", value=-2)), "left out line 2 (no step"),
    "an infinite step": (health(at("step", value=math.inf)), "left out line 2 (no step"),
    "a step that is a list": (health(at("step", value=[2])), "left out line 2 (no step"),
    "a huge step": (health(at("step", value=10**30)), "left out line 2 (no step"),
    "no object": (health(lambda line: [line]), "line 2 (no JSON object)"),
    "nested too deep": (health(lambda line: "x"), "line 2"),
    "layers as a list": (health(at("layers", value=[1])), "layers in line 2 (it is list"),
    "no layers": (health(at("layers", value={})), "layers in line 2 (it has no layer)"),
    "a layer as a number": (health(at("layers", LAYER, value=3)), f"({LAYER} is 3, no object)"),
    "a statistic as text": (
        health(at("layers", LAYER, "weight", "sqnr_db", value="NaN")),
        f"({LAYER}, weight, sqnr_db is 'NaN', no number)",
    ),
    "a statistic beyond fp32": (
        health(at("layers", LAYER, "weight", "sqnr_db", value=10**400)), "beyond the range of fp32",
    ),
    "a layer without a name": (health(at("noise", " ", value=[1.0, 1.0])), "' ' is no name"),
    "a norm alone": (health(at("noise", LAYER, value=[1.0])), "noise in line 2"),
    "norms as text": (health(at("noise", LAYER, value="ab")), "is 'ab', no pair of norms"),
    "no noise at all": (health(at("noise", LAYER, value=[1.0, 0.0])), "a norm below 0, or no noi"),
    "a refresh of nothing": (health(at("refresh", value={})), "refresh in line 2"),
    "a refresh without its end": (
        health(at("refresh", LAYER, value={"before": {}})), f"({LAYER}, before lacks orthogonality",
    ),
    "a switch to a number": (health(at("switch", value=4)), "switch in line 2 (it is 4"),
    "passes as text": (health(at("switch", "high_precision", value="forward")), "high_precision"),
    "a loss as text": (log(loss="NaN"), "left out line 2 (loss is 'NaN', no number)"),
    "a loss of null": (log(grad_norm="x"), "grad_norm is 'x'"),
    "an entry without a step": (log(step=None), f"{LOG_FILE}: left out line 2 (no step"),
    "a log as a number": (elsewhere(STATE, "log_history", value=3), "log_history is no list"),
    "entries as text": (elsewhere(STATE, "log_history", value=["xloss"]), "'xloss', no object"),
    "steps seen as text": (elsewhere(STATE, "global_step", value="3"), "global_step is no count"),
    "callbacks as a list": (elsewhere(STATE, "stateful_callbacks", value=[1]), "is no object"),
    "a history as an object": (elsewhere("result.json", "history", value={"loss": 1}), "no list"),
    "a config as a list": (elsewhere("result.json", "config", value=["x"]), "config is no object"),
    "a summary as a number": (elsewhere("result.json", "summary", value=5), "summary is no text"),
    "a scheme as a list": (elsewhere("metis_run.json", "environment", value=[1]), "environment"),
    "a batch as text": (elsewhere("metis_run.json", "sequences_per_step", value="4"), "no count"),
}  # fmt: skip


@pytest.mark.usefixtures("undrawn")
class TestLeftOut:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_named_and_the_rest_stays(self, kind, tmp_path):
        make, said = KINDS[kind]
        files = records()
        make(files)
        run = read_run(write(tmp_path, files))
        assert any(said in note for note in run.notes), run.notes
        assert 1 in run.layers
        assert run.history[0]["loss"] == 2.9
        page = run_page(run).render()
        assert "Layers by risk" in page

    @pytest.mark.parametrize("broken", [b"\xff\xfe\x00", b'{"step": 2', b"[" * 10**5])
    def test_a_line_of_bytes(self, broken, tmp_path):
        """Binary, cut short, nested beyond what a parser can follow: at the end, or in between."""
        folder = write(tmp_path, records())
        for name in (HEALTH_FILE, LOG_FILE):
            whole = (folder / name).read_bytes()
            first, rest = whole.split(b"\n", 1)
            (folder / name).write_bytes(first + b"\n" + broken + b"\n" + rest + broken)
        run = read_run(folder)
        assert list(run.layers) == [1, 2]
        for name in (HEALTH_FILE, LOG_FILE):
            assert any(f"{name}: left out line 2 (" in note for note in run.notes)
            assert any(f"{name}: line" in n and "half-written, as a kil" in n for n in run.notes)
        run_page(run).render()

    @pytest.mark.parametrize("data", [b"", b"\xff", b"[1, 2]", b'"loss"', b"null", b"[" * 10**5])
    def test_a_whole_file(self, data, tmp_path):
        folder = write(tmp_path, records())
        for name in ("result.json", STATE, "metis_run.json"):
            (folder / name).write_bytes(data)
        run = read_run(folder)
        assert [e["step"] for e in run.history] == [1, 2, 3]
        assert sum("half-written or no JSON object" in note for note in run.notes) == 3

    def test_a_directory_in_a_files_place(self, tmp_path):
        folder = write(tmp_path, records())
        for name in (LOG_FILE, "result.json", HEALTH_FILE):
            (folder / name).unlink()
            (folder / name).mkdir()
        run = read_run(folder)
        assert [entry["step"] for entry in run.history] == [1, 2, 3]
        assert sum("left out" in note for note in run.notes) == 3


def test_real_pictures_of_odd_names_and_numbers(tmp_path):
    """Names that matplotlib would take for formulas, and numbers at the ends of fp32."""
    files = records()
    odd = r"model.0.$\bad$"
    for line in files[HEALTH_FILE]:
        for part in ("layers", "noise", "refresh"):
            line[part] = {odd: line[part][LAYER], "_x/y\x00": line[part][OTHER]}
        line["layers"][odd]["weight"] |= {"stable_rank": -1.0, "sqnr_db": math.inf, "zeroed": 3e38}
        line["noise"][odd] = [math.nan, math.nan]
        line["refresh"][odd]["before"] |= {"orthogonality": 0.0, "narrowing": math.nan}
    files[LOG_FILE] = [log_entry(1) | {"loss": 3e38}, log_entry(2) | {"loss": -3e38}]
    files[STATE]["log_history"] = files["result.json"]["history"] = []
    files["result.json"]["config"] = {"scheme": "$\ud800$"}
    run = read_run(write(tmp_path, files))
    assert run.notes == []
    page = run_page(run)
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("data:image/png") >= 7
    write_report([tmp_path, write(tmp_path / "again", files)], tmp_path / "both.html")


NASTY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["NaN", "-1", "1e999", 10**400, -1, 1e308, -0.0, "\ud800", "$x"]),
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
@settings(max_examples=60 if full() else 20, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
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
    try:
        run = read_run(folder)
    except FileNotFoundError:  # nothing was left of it
        return
    text = run_page(run).render()
    if len(run.notes) == 0:
        assert "Layers by risk" in text


class TestResume:
    def test_bytes_that_are_no_text(self, tmp_path):
        """A resumed run drops them; a step after the checkpoint too."""
        folder = write(tmp_path, records())
        for name in (HEALTH_FILE, LOG_FILE):
            with (folder / name).open("ab") as file:
                file.write(b"\xff\xfe\n[1]\n{}\n" + b'{"step": "1"}\n{"step": 7}\n{"st')
        drop_after(folder, 2)
        for name, steps in ((HEALTH_FILE, [1, 2]), (LOG_FILE, [1, 2])):
            found, faults = parse_records((folder / name).read_bytes())
            assert [record["step"] for record in found.values()] == steps
            assert faults == {}

    def test_is_replaced_as_a_whole(self, tmp_path, monkeypatch):
        folder = write(tmp_path, records())
        before = (folder / HEALTH_FILE).read_bytes()
        monkeypatch.setattr("pathlib.Path.replace", lambda self, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drop_after(folder, 1)
        assert (folder / HEALTH_FILE).read_bytes() == before

    def test_half_a_line_swallows_no_record(self, tmp_path):
        for name, append in ((HEALTH_FILE, append_record), (LOG_FILE, None)):
            (tmp_path / name).write_bytes(b'{"step": 1}\n{"ste\xff')
            if append:
                append(tmp_path, 2, {"switch": {}})
            else:
                append_log(tmp_path, {"step": 2, "loss": 1.5, "name": "x", "list": [1]})
            found, faults = parse_records((tmp_path / name).read_bytes())
            assert [record["step"] for record in found.values()] == [1, 2]
            assert list(faults) == [2]
        assert found[3] == {"step": 2, "loss": 1.5}
