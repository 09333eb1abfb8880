"""eval/studies/publish.py: what goes into the repository, and what does not."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections import Counter
from dataclasses import asdict

import pytest
from design import some_slow, thinned
from matplotlib.figure import Figure
from paths import ROOT

from lab.show.undrawn import save_nothing
from metis_hf.lab.compare import outputs
from metis_hf.lab.fidelity import scheme_fidelity
from metis_hf.lab.finetune_table import Measured, Outcome, markdown_tables
from metis_hf.lab.show.table import markdown_table

RESULTS = ROOT / "eval/results"
PAGES = [*(ROOT / "docs").glob("*.md"), *(RESULTS / "report").glob("*.md")]
NAMES = sorted(
    str(table.parent.relative_to(RESULTS))
    for table in RESULTS.rglob("table.md")
    if table.parent.with_suffix(".json").exists()
)
# Whose pictures are drawn too, by default.
PICTURED = thinned(NAMES, ("demo", "methods-tiny").__contains__)
# Small ones: of one seed and of several, of a width, of a token count, beside published losses.
QUICK = ("demo", "methods-tiny-averis", "methods-tiny-switch", "quartet2-scaled", "tokens-5",
         "width-384-ten", "width-96-quarter")  # fmt: skip
# Records whose own table stands on no page: some stand in tables of gap_by_width, gap_by_tokens
# and gap_by_batch, one beside published losses, others in sentences of the pages.
UNSHOWN = {
    "methods-tiny-split",
    "tiny-ablations",
    "width-192",
    "width-192-directions",
    "width-384",
    "quartet2-scaled",
    "real-model/continued-300k",
    *(f"width-96{end}" for end in ("", "-quarter", "-searched", "-lr-4e-3", "-lr-16e-3")),
    *(f"width-384{end}" for end in ("-quarter", "-switch", "-end", "-middle", "-fresh")),
    *(f"tokens-{count}" for count in (5, 10, 20, 40)),
    *(f"batch-size/{width}{count}" for width in ("", "192-") for count in ("2k", "8k", "32k")),
}


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    """Records share models and schemes: count what a scheme adds to a model once for all."""
    counted = {}
    count = outputs.model_overhead

    def overhead(config, metis):
        key = config.to_json_string(), metis.to_json()
        if key not in counted:
            counted[key] = count(config, metis)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "model_overhead", overhead)
        yield


@pytest.fixture
def publish(tmp_path, monkeypatch, eval_directory):
    spec = importlib.util.spec_from_file_location("publish", ROOT / "eval/studies/publish.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "eval/results")
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/method.md"):
        (tmp_path / page).write_text("a\n<!-- compare x -->\nold\n<!-- end -->\nb\n")
    return module


def finetuning_of(folder, seed, loss):
    """The files of a run whose numbers have more digits than a record keeps."""
    run = folder / f"seed-{seed}"
    run.mkdir()
    outcomes = [
        Outcome("exact", {"prose": Measured(2.0)}),
        Outcome("ptq", {"prose": Measured(2.2, 0.3)}, directory=str(run / "export/ptq")),
        Outcome("qad", {"prose": Measured(loss, 0.1)}, 1000, 7, str(run / "export/qad")),
    ]
    arguments = {
        "model": "/somewhere/model-a", "export": "/elsewhere", "held_out": "/texts/prose.jsonl"
    }  # fmt: skip
    record = {"arguments": arguments, "seed": seed, "outcomes": [asdict(one) for one in outcomes]}
    (run / "results.json").write_text(json.dumps(record))
    return run


def test_a_finetuning_goes_between_its_markers(publish, tmp_path):
    runs = [finetuning_of(tmp_path, 0, 2.05123456), finetuning_of(tmp_path, 1, 2.03)]
    (tmp_path / "README.md").write_text("<!-- finetune deploy/a -->\nold\n<!-- end -->\n")
    publish.publish_finetune(runs, "deploy/a")
    shown = (tmp_path / "README.md").read_text()
    table = (tmp_path / "eval/results/deploy/a/table.md").read_text()
    assert shown == f"<!-- finetune deploy/a -->\n{table}<!-- end -->\n"
    assert "| qad | 1,000 | 7 | 2.0406 ± 0.1347 |" in table
    found = json.loads((tmp_path / "eval/results/deploy/a/results.json").read_text())
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    first = found["runs"][0]
    assert first["arguments"] == {"model": "model-a", "export": None, "held_out": ["prose.jsonl"]}
    assert first["outcomes"][2]["texts"] == {"prose": {"loss": 2.0512, "kl": 0.1, "exported": None}}
    assert first["outcomes"][2]["directory"] == "qad"
    assert str(tmp_path) not in json.dumps(found)


def test_the_finetuning_on_record_is_its_table():
    folder = ROOT / "eval/results/deploy/smollm2"
    records = json.loads((folder / "results.json").read_text())["runs"]
    runs = [[Outcome.of(outcome) for outcome in record["outcomes"]] for record in records]
    table = markdown_tables(*runs)
    assert (folder / "table.md").read_text() == table
    page = (ROOT / "docs/deploy-methods.md").read_text()
    assert f"<!-- finetune deploy/smollm2 -->\n{table}<!-- end -->" in page


def test_an_evaluation_goes_between_its_markers(publish, tmp_path):
    run = tmp_path / "eval"
    run.mkdir()
    (run / "table.md").write_text("| new |\n")
    (run / "table.csv").write_text("new\n")
    (tmp_path / "README.md").write_text("<!-- eval deploy/a-tasks -->\nold\n<!-- end -->\n")
    publish.publish_eval(run, "deploy/a-tasks")
    shown = (tmp_path / "README.md").read_text()
    assert shown == "<!-- eval deploy/a-tasks -->\n| new |\n<!-- end -->\n"
    assert (tmp_path / "eval/results/deploy/a-tasks/table.csv").read_text() == "new\n"


RECORDS = ("real-model/prose", "real-model/prose-a", "real-model/prose-b", "real-model/prose-c")
RECORDS += ("real-model/parts", "real-model/tokens-twice", "tiny-model")
RECORDS += ("real-model/gradient-directions", "real-model/hot-channel")


def test_fidelity_tables_are_their_records():
    shown = "".join(page.read_text() for page in PAGES)
    for name in RECORDS:
        record = json.loads((RESULTS / name / "results.json").read_text())
        schemes = [scheme_fidelity.SchemeFidelity(**row) for row in record["schemes"]]
        table = markdown_table(*scheme_fidelity.table(schemes))
        assert (RESULTS / name / "table.md").read_text() == table, name
        assert f"<!-- fidelity {name} -->\n{table}<!-- end -->" in shown, name


def test_a_fidelity_measurement_goes_between_its_markers(publish, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "cost.png").write_bytes(b"png")
    (run / "table.md").write_text("| new |\n")
    settings = {"model": "/home/me/SmolLM2", "text": "prose.txt", "length": 256}
    record = {"settings": settings, "schemes": [{"batches": [{"loss": 3.123456789}]}]}
    (run / "results.json").write_text(json.dumps(record))
    (tmp_path / "README.md").write_text("<!-- fidelity real/a -->\nold\n<!-- end -->\n")
    publish.publish_fidelity(run, "real/a")
    shown = (tmp_path / "README.md").read_text()
    assert shown == "<!-- fidelity real/a -->\n| new |\n<!-- end -->\n"
    written = json.loads((tmp_path / "eval/results/real/a/results.json").read_text())
    assert written["settings"] == settings | {"model": "SmolLM2"}
    assert written["schemes"] == [{"batches": [{"loss": 3.1235}]}]


def finished_run(folder, *names, **plan):
    """The directory of a comparison that has left files of these names."""
    run = folder / "run"
    run.mkdir()
    for name in names:
        (run / name).write_text("| new |\n")
    plan = {"data": None, "validation": None, "tasks_dir": None, **plan}
    (run / "compare.json").write_text(json.dumps({"plan": plan}))
    return run


def test_a_comparison_goes_between_its_markers(publish, tmp_path):
    run = finished_run(tmp_path, *publish.COMPARE_FILES, data="/home/me/prose", size="tiny")
    publish.publish_compare(run, "x")
    expected = "a\n<!-- compare x -->\n| new |\n<!-- end -->\nb\n"
    assert (tmp_path / "README.md").read_text() == expected
    assert (tmp_path / "docs/method.md").read_text() == expected
    record = json.loads((tmp_path / "eval/results/x.json").read_text())
    assert (record["plan"]["data"], record["plan"]["size"]) == ("prose", "tiny")
    publish.publish_compare(run, "y")  # one that no page shows
    assert (tmp_path / "README.md").read_text() == expected
    assert not (tmp_path / "eval/results/x/published.md").exists()
    (run / "published.md").write_text("Ours is scaled.\n")
    page = tmp_path / "docs/compare.md"
    page.write_text("<!-- published x -->\nold\n<!-- end -->\n")
    publish.publish_compare(run, "x")
    assert page.read_text() == "<!-- published x -->\nOurs is scaled.\n<!-- end -->\n"
    assert (tmp_path / "eval/results/x/published.md").read_text() == "Ours is scaled.\n"


def test_figures_that_were_not_drawn_do_not_stay(publish, tmp_path):
    run, target = finished_run(tmp_path, "table.md", "loss.png"), tmp_path / "eval/results/x"
    target.mkdir(parents=True)
    for name in publish.COMPARE_FILES:
        (target / name).write_text("old")
    publish.publish_compare(run, "x")
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "table.md": "| new |\n", "loss.png": "| new |\n"
    }  # fmt: skip


def test_runs_join_those_of_a_record(publish, tmp_path, monkeypatch):
    """Gaps get an interval; the runs that were there stay."""
    monkeypatch.setattr(outputs, "count_extra", lambda model, results: {})  # takes seconds
    monkeypatch.setattr(Figure, "savefig", save_nothing)
    name = "real-model/continued-301k"
    old = json.loads((RESULTS / f"{name}.json").read_text())
    seeds = old["seeds"]
    target = tmp_path / "eval/results/x"
    target.parent.mkdir(parents=True)
    target.with_suffix(".json").write_text(json.dumps(old))
    run = tmp_path / "run"
    run.mkdir()

    def offer(**changes):
        first = [each for each in old["runs"] if each["seed"] == seeds[0]]
        moved = [{**each, "seed": 97, "loss": each["loss"] + 0.01} for each in first]
        offered = {**old, "seeds": [97], "runs": moved} | changes
        (run / "compare.json").write_text(json.dumps(offered))
        publish.add_runs(run, "x")

    with pytest.raises(ValueError, match=r"x already has all runs of .*run"):
        offer(seeds=seeds, runs=old["runs"])
    with pytest.raises(ValueError, match=f"x already has a different run of .*, seed {seeds[0]}"):
        offer(seeds=seeds, runs=[each | {"loss": each["loss"] + 0.01} for each in old["runs"]])
    with pytest.raises(ValueError, match="and x differ in variants"):
        offer(variants={"metis": {"scheme": "nvfp4"}})
    for key, value in (
        ("data", "/texts/code"), ("validation", None), ("eval_sequences", 7),
        ("global_batch", 999), ("experiment", old["plan"]["experiment"] | {"sequence_length": 8}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"and x differ in {key}"):
            offer(plan=old["plan"] | {key: value})
    checkpoint = old["plan"]["experiment"]["checkpoint"]
    (run / "inputs.json").write_text(json.dumps({checkpoint: "a"}))
    target.with_suffix(".json").write_text(json.dumps({**old, "weights": "b"}))
    with pytest.raises(ValueError, match="started from other weights than x"):
        offer()
    later = [each for each in old["runs"] if each["scheme"] != "nvidia"]  # which came after these
    known = {name: config for name, config in old["variants"].items() if name != "nvidia"}
    target.with_suffix(".json").write_text(json.dumps({**old, "variants": known, "runs": later}))
    offer(seeds=seeds, runs=old["runs"])
    whole = json.loads(target.with_suffix(".json").read_text())
    assert (whole["seeds"], whole["variants"]) == (seeds, old["variants"])
    assert sorted(map(json.dumps, whole["runs"])) == sorted(map(json.dumps, old["runs"]))
    target.with_suffix(".json").write_text(json.dumps(old))
    one = [each for each in old["runs"] if each["seed"] == seeds[0]]
    target.with_suffix(".json").write_text(
        json.dumps({**old, "seeds": seeds[:1], "variants": known, "runs": one[:-1]})
    )
    offer(seeds=seeds[:1], runs=one)
    whole = json.loads(target.with_suffix(".json").read_text())
    assert whole["findings"][0].endswith(", 1 seed")
    offer(plan=old["plan"] | {"data": "/texts/prose"})
    target.with_suffix(".json").write_text(json.dumps(old))
    command = ["publish", "compare", "--run", str(run), "--name", "x", "--add"]
    monkeypatch.setattr(sys, "argv", command)
    publish.main()
    record = json.loads(target.with_suffix(".json").read_text())
    assert record["seeds"] == [*seeds, 97]
    assert record["runs"][: len(old["runs"])] == old["runs"]
    assert record["findings"][0].endswith(f", {len(seeds) + 1} seeds")
    table = (target / "table.md").read_text()
    assert all(f"- {finding}\n" in table for finding in record["findings"])
    counts = Counter(each["scheme"] for each in record["runs"])
    assert {s["name"]: len(s["losses"]) for s in record["summaries"]} == counts


def test_committed_tables_are_on_pages_without_paths_of_a_machine():
    shown = "".join(page.read_text() for page in [*PAGES, ROOT / "README.md"])
    for name in NAMES:
        plan = json.loads((RESULTS / f"{name}.json").read_text())["plan"]
        assert "/" not in f"{plan['data']}{plan['validation']}"
        table = (RESULTS / name / "table.md").read_text()
        places = shown.count(f"<!-- compare {name} -->")
        assert shown.count(f"<!-- compare {name} -->\n{table}<!-- end -->") == places, name
        assert places or name in UNSHOWN, name
        if (beside := RESULTS / name / "published.md").exists():
            assert f"<!-- published {name} -->\n{beside.read_text()}<!-- end -->" in shown


@pytest.mark.parametrize("name", some_slow(NAMES, [name for name in NAMES if name not in QUICK]))
def test_committed_tables_are_drawn_from_their_records(name, publish, tmp_path, monkeypatch):
    """From the runs alone: losses, statistics, costs, order, cells and findings."""
    if name not in PICTURED:
        monkeypatch.setattr(Figure, "savefig", save_nothing)
    record, drawn = RESULTS / f"{name}.json", tmp_path / "eval/results" / name
    drawn.mkdir(parents=True)
    shutil.copy(record, drawn.parent)
    publish.draw_compare(name)
    table = (drawn / "table.md").read_text()
    assert table == (RESULTS / name / "table.md").read_text()
    assert all((drawn / file).stat().st_size for file in publish.COMPARE_FILES)
    for beside in (RESULTS / name).glob("published.md"):
        assert (drawn / "published.md").read_text() == beside.read_text()
    old, new = (json.loads(path.read_text()) for path in (record, drawn.with_suffix(".json")))
    assert all(f"- {finding}\n" in table for finding in old["findings"])
    losses = [[summary["losses"] for summary in each["summaries"]] for each in (old, new)]
    assert losses[0] == losses[1]
