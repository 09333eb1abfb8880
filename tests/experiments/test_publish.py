"""eval/studies/publish.py: what goes into the repository, and what does not."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from design import thinned
from matplotlib.figure import Figure
from paths import ROOT

from metis_hf import MetisConfig
from metis_hf.experiments import tables
from metis_hf.experiments.demo.run import control_label
from metis_hf.experiments.finetune.measure import Measured
from metis_hf.experiments.finetune.report import Outcome, markdown_tables
from metis_hf.experiments.results import SchemeResult
from metis_hf.fidelity import result as fidelity_result
from metis_hf.noise import key_of
from metis_hf.numerics import fake_quantize, relative_error
from metis_hf.schemes import Scheme, build_scheme, registry
from metis_hf.shared.tables import markdown_table

RESULTS = ROOT / "eval/results"
NAMES = sorted(
    str(table.parent.relative_to(RESULTS))
    for table in RESULTS.rglob("table.md")
    if table.parent.with_suffix(".json").exists()
)
# Whose pictures are drawn too, by default.
PICTURED = thinned(NAMES, ("methods-tiny", "real-model/continued").__contains__)
# Records whose own table stands on no page: some stand in tables of gap_by_width.py and
# gap_by_tokens.py, one beside published losses, others in sentences of the pages.
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
}


@pytest.fixture
def publish(tmp_path, monkeypatch):
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
    page = (ROOT / "docs/finetuning.md").read_text()
    assert f"<!-- finetune deploy/smollm2 -->\n{table}<!-- end -->" in page
    tasks = (folder.parent / "smollm2-tasks/table.md").read_text()
    assert f"<!-- eval deploy/smollm2-tasks -->\n{tasks}<!-- end -->" in page


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


@pytest.mark.parametrize("name", RECORDS)
def test_fidelity_tables_are_their_records(name):
    record = json.loads((ROOT / "eval/results" / name / "results.json").read_text())
    schemes = [fidelity_result.SchemeResult(**row) for row in record["schemes"]]
    table = markdown_table(*fidelity_result.table(schemes))
    assert (ROOT / "eval/results" / name / "table.md").read_text() == table
    marked = f"<!-- fidelity {name} -->\n{table}<!-- end -->"
    assert any(marked in page.read_text() for page in (ROOT / "docs").glob("*.md"))


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


def test_a_comparison_goes_between_its_markers(publish, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("loss.png", "gap.png", "cost.png"):
        (run / name).write_bytes(b"png")
    (run / "table.md").write_text("| new |\n")
    plan = {"data": "/home/me/prose", "validation": None, "tasks_dir": None, "size": "tiny"}
    (run / "compare.json").write_text(json.dumps({"plan": plan}))
    publish.publish_compare(run, "x")
    expected = "a\n<!-- compare x -->\n| new |\n<!-- end -->\nb\n"
    assert (tmp_path / "README.md").read_text() == expected
    assert (tmp_path / "docs/method.md").read_text() == expected
    record = json.loads((tmp_path / "eval/results/x.json").read_text())
    assert record["plan"] == plan | {"data": "prose"}
    publish.publish_compare(run, "y")  # one that no page shows
    assert (tmp_path / "README.md").read_text() == expected
    assert not (tmp_path / "eval/results/x/published.md").exists()


def test_figures_that_were_not_drawn_do_not_stay(publish, tmp_path):
    run, target = tmp_path / "run", tmp_path / "eval/results/x"
    for folder, names in ((run, ("table.md", "loss.png")), (target, publish.COMPARE_FILES)):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(folder.name)
    plan = {"data": None, "validation": None, "tasks_dir": None}
    (run / "compare.json").write_text(json.dumps({"plan": plan}))
    publish.publish_compare(run, "x")
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "table.md": "run", "loss.png": "run"
    }  # fmt: skip


def test_seeds_join_those_of_a_record(publish, tmp_path):
    """Gaps get an interval; the runs that were there stay."""
    name = "real-model/continued-300k-second"
    old = json.loads((RESULTS / f"{name}.json").read_text())
    seeds = old["seeds"]
    target = tmp_path / "eval/results/x"
    target.parent.mkdir(parents=True)
    target.with_suffix(".json").write_text(json.dumps(old))
    run = tmp_path / "run"
    run.mkdir()

    def offer(**changes):
        moved = [{**each, "seed": 97, "loss": each["loss"] + 0.01} for each in old["runs"]]
        offered = {**old, "seeds": [97], "runs": moved} | changes
        (run / "compare.json").write_text(json.dumps(offered))
        publish.add_seeds(run, "x")

    with pytest.raises(ValueError, match=f"x has runs of seed {seeds[0]} already"):
        offer(seeds=seeds)
    with pytest.raises(ValueError, match="is of other variants than x"):
        offer(variants={})
    offer()
    record = json.loads(target.with_suffix(".json").read_text())
    assert record["seeds"] == [*seeds, 97]
    assert record["runs"][: len(old["runs"])] == old["runs"]
    assert record["findings"][0].endswith(f", {len(seeds) + 1} seeds")
    table = (target / "table.md").read_text()
    assert all(f"- {finding}\n" in table for finding in record["findings"])
    assert [len(s["losses"]) for s in record["summaries"]] == [len(seeds) + 1] * len(
        old["summaries"]
    )


def test_losses_beside_published_ones(publish, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in publish.COMPARE_FILES:
        (run / name).write_text("")
    (run / "compare.json").write_text(
        json.dumps({"plan": {"data": None, "validation": None, "tasks_dir": None}})
    )
    (run / "published.md").write_text("Ours is scaled.\n")
    page = tmp_path / "docs/compare.md"
    page.write_text("<!-- published x -->\nold\n<!-- end -->\n")
    publish.publish_compare(run, "x")
    assert page.read_text() == "<!-- published x -->\nOurs is scaled.\n<!-- end -->\n"
    assert (tmp_path / "eval/results/x/published.md").read_text() == "Ours is scaled.\n"


def test_missing_markers_are_named(publish, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in publish.DEMO_FILES:
        (run / name).write_text("")
    (run / "results.json").write_text('{"results": []}')
    with pytest.raises(ValueError, match=r"no page has '<!-- demo table -->'.*README.md"):
        publish.publish_demo(run)


@pytest.mark.parametrize("name", NAMES)
def test_committed_tables_are_their_records(name, publish):
    """Every loss of the table is that of the runs, and no path of a machine is in the record."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert "/" not in f"{record['plan']['data']}{record['plan']['validation']}"
    table = (RESULTS / name / "table.md").read_text()
    for summary in record["summaries"]:
        losses = [r["loss"] for r in record["runs"] if r["scheme"] == summary["name"]]
        assert losses == list(summary["losses"].values())
        assert f"{sum(losses) / len(losses):.4f}" in table
    publish.ROOT = ROOT
    shown = [page.read_text() for page in publish.pages()]
    marked = [text for text in shown if f"<!-- compare {name} -->" in text]
    assert all(table in text for text in marked)
    assert marked or name in UNSHOWN


@pytest.mark.parametrize("name", NAMES)
def test_committed_tables_are_drawn_from_their_records(name, publish, tmp_path, monkeypatch):
    """From the runs alone: statistics, costs, order, cells and findings."""
    if name not in PICTURED:
        monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: Path(file).write_text("drawn"))
    record, drawn = RESULTS / f"{name}.json", tmp_path / "eval/results" / name
    drawn.mkdir(parents=True)
    shutil.copy(record, drawn.parent)
    publish.draw_compare(name)
    table = (drawn / "table.md").read_text()
    assert table == (RESULTS / name / "table.md").read_text()
    assert all((drawn / file).stat().st_size for file in publish.COMPARE_FILES)
    assert all(f"- {finding}\n" in table for finding in json.loads(record.read_text())["findings"])


def test_the_renderer_gives_the_demo_table():
    record = json.loads((ROOT / "eval/results/demo/results.json").read_text())
    results = [SchemeResult(**result) for result in record["results"]]
    rows = tables.rows(results, control_label(record))
    text = f"{markdown_table(tables.header(results), rows)}\n{record['verdict']}\n"
    assert text == (ROOT / "eval/results/demo/table.md").read_text()
    assert tables.verdict(results, record["parameters"], record["tokens"]) == record["verdict"]


@pytest.fixture(autouse=True)
def eval_directory(monkeypatch):
    """Imports of one script by another, and schemes that a script registers, end with the test."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    sys.modules.pop("training_parts", None)  # so that it registers where it is imported again
    yield
    sys.modules.pop("training_parts", None)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"eval/studies/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def operand_study():
    return script("operand_study")


def test_tables_of_the_operand_study_are_its_record():
    study = operand_study()
    record = json.loads((ROOT / "eval/results/operand-study.json").read_text())
    asked = {question: list(variants) for question, variants in study.STUDIES.items()}
    assert {question: list(found) for question, found in record["studies"].items()} == asked
    page = study.PAGE.read_text()
    assert study.with_tables(page, record) == page
    with pytest.raises(ValueError, match="rank"):
        study.with_tables(page.replace("<!-- study: rank -->", ""), record)


def test_the_operand_study_measures_what_it_says():
    """Errors of one layer by hand, and zero where nothing is quantized."""
    study = operand_study()
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=False)
    x, dy = torch.randn(96, 64), torch.randn(96, 48)
    layer = study.Layer("a", linear, x, dy, torch.randn(96, 64))
    exact = study.scheme(qx=None, qw=None, qdy=None)
    nearest = study.scheme(qw=None, qdy=None)
    found = study.errors(study.register("test-nearest", nearest), [layer])
    x_hat = fake_quantize(x)
    assert found["x"] == pytest.approx(relative_error(x, x_hat).item())
    w = linear.weight.detach()
    assert found["y"] == pytest.approx(relative_error(x @ w.T, x_hat @ w.T).item(), rel=1e-4)
    # Rounding to nearest draws nothing: its whole error is bias.
    assert found["dw_bias"] == pytest.approx(found["dw"])
    assert found["dw"] > 0.05
    assert found["w"] == found["dy"] == 0
    nothing = study.errors(study.register("test-exact", exact), [layer])
    assert max(nothing.values()) < 1e-6  # fp32 products in another order


def test_a_warm_start_is_one_power_step_from_the_last_subspace():
    study = operand_study()
    x, before = torch.randn(200, 48), torch.randn(200, 48) * torch.linspace(3, 0.1, 48)
    key = key_of("warm start")
    warm = study.WarmStarted(4, sample_frac=1.0)
    first = warm.split(before, key=key)
    for found, expected in zip(first, study.Spectral(4, sample_frac=1.0).split(before, key=key)):
        assert torch.equal(found, expected)
    a, lam, v = warm.split(x, key=key)
    expected = torch.linalg.qr(x.T @ x @ first[2]).Q
    torch.testing.assert_close(v @ v.T, expected @ expected.T, rtol=0, atol=1e-5)
    torch.testing.assert_close((a * lam) @ v.T, x @ v @ v.T)
    assert study.WarmStarted(4) == study.WarmStarted(4)  # layers that share an input share a copy


@pytest.mark.parametrize("name", ["RotatedResidual", "Eden", "Factors", "MeanThenSplit"])
def test_variants_of_a_split_quantize_a_small_residual(name):
    """A matrix of low rank loses less than it would whole: the factors' errors are made up for."""
    study = operand_study()
    x = torch.randn(96, 4) @ torch.randn(4, 64) + 0.01 * torch.randn(96, 64)
    options = {"dim": -1, "key": key_of("variant")}
    found = getattr(study, name)(study.split(4))(x, study.NEAREST, **options)
    assert relative_error(x, found) < 0.2 * relative_error(x, fake_quantize(x))


def test_eden_of_the_study_is_unbiased_over_its_bases():
    study = operand_study()
    x = torch.randn(32, 64)
    options = {"dim": -1, "dtype": torch.float32}
    draws = [study.Eden()(x, study.STOCHASTIC, key=key_of("e", i), **options) for i in range(64)]
    assert relative_error(x, sum(draws) / 64) < 0.25 * relative_error(x, draws[0])


def test_split_effect_pairs_by_seed():
    study = script("split_effect")
    plan = {"size": "tiny"}

    def record(**losses):
        summaries = [{"name": n.replace("_", ", "), "losses": v} for n, v in losses.items()]
        return {"plan": plan, "summaries": summaries}

    dense = record(bf16={"0": 4.0, "1": 5.0}, a={"0": 4.4, "1": 5.6}, b={"0": 4.1})
    dense["summaries"].append({"name": "bf16-split", "losses": {"0": 4.2, "1": 5.0}})
    split = record(b={"0": 4.04}, a_split={"1": 5.5})
    rows = study.table(dense, split).splitlines()[2:]
    assert rows == [
        "| b |  | +1.00 | -3.81 |  | 1 |",  # stored split by itself: nothing to compare with
        "| a | +11.00 ± 12.71 | +10.00 | +10.00 | -1.79 | 1 |",
    ]
    with pytest.raises(ValueError, match="differ in size; train both alike"):
        study.table(dense, split | {"plan": {"size": "130m"}})


def test_table_of_the_split_effect_is_that_of_its_records():
    study = script("split_effect")
    records = [json.loads(path.read_text()) for path in (study.DENSE, study.SPLIT)]
    text = f"<!-- {study.MARK} -->\n{study.table(*records)}<!-- end -->"
    assert text in study.PAGE.read_text()


def test_two_devices_pair_runs_of_one_device(tmp_path):
    study = script("two_devices")
    path = tmp_path / "losses.csv"
    path.write_text('variant,seed 0,seed 1\nbf16,4.0,5.0\nnvfp4-rne,4.4,5.5\n"a, x",4.2,\nb,,5.2\n')
    gpu = study.losses_of_csv(path)
    assert gpu["a, x"] == {"0": 4.2}
    cpu = {"bf16": {"0": 2.0}, "nvfp4-rne": {"0": 2.1}, "a, x": {"0": 2.0}}
    assert study.table(cpu, gpu).splitlines()[2:] == [
        "| `nvfp4-rne` | +5.00 | +10.00 ± 0.00 | +8.33 ± 7.17 | 3 |  |  |",
        "| `a, x` | +0.00 | +5.00 | +2.50 ± 31.77 | 2 | -4.65 ± 1.38 | 2 |",
        "| `b` |  | +4.00 | +4.00 | 1 | -5.45 | 1 |",
    ]


def test_table_of_two_devices_is_that_of_its_losses():
    study = script("two_devices")
    text = study.table(study.losses_of_record(study.CPU), study.losses_of_csv(study.GPU))
    assert f"<!-- {study.MARK} -->\n{text}<!-- end -->" in study.PAGE.read_text()
    assert (study.GPU.parent / "table.md").read_text() == text


def test_variants_of_the_training_studies_can_be_built():
    compensation, refresh = script("compensation"), script("refresh")
    configs = [*compensation.VARIANTS.values(), *map(refresh.config_of, ("metis", "metis-paper"))]
    for config in configs:
        assert isinstance(build_scheme(config, 128, 128), Scheme)
    alone = build_scheme(MetisConfig(scheme="compensated"), 128, 128)
    assert alone.weight.is_split
    assert not alone.corrected


def test_losses_of_continued_pretraining_are_those_on_record():
    record = ROOT / "eval" / "results" / "real-model" / "continued" / "losses.csv"
    rows = list(csv.DictReader(record.open()))
    control = {row["text"]: row for row in rows if row["scheme"] == "bf16"}
    page = (ROOT / "docs" / "continued-pretraining.md").read_text()
    for row in rows:
        cells = [row["text"], row["scheme"]]
        for when in ("untouched", "trained"):
            loss = float(row[when]) if row[when] else None
            cells.append("" if loss is None else f"{loss:.4f}")
            gap = None if loss is None else loss / float(control[row["text"]][when]) - 1
            cells.append("" if not gap else f"+{100 * gap:.1f}")
        assert f"| {' | '.join(cells)} |" in page
