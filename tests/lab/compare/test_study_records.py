"""Studies of eval/studies: tables are records, measurements and schemes are what titles say."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys

import pytest
import torch
from paths import ROOT
from tensors import assert_same

from metis_hf.noise import key_of
from metis_hf.numerics import fake_quantize, relative_error
from metis_hf.schemes import Role, build_scheme

RESULTS = ROOT / "eval/results"
pytestmark = pytest.mark.usefixtures("eval_directory")


def script(name):
    """Return a script of eval/studies as a module."""
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
    assert_same(first, study.Spectral(4, sample_frac=1.0).split(before, key=key))
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
    split = record(b={"0": 4.04}, a_split={"1": 5.5}, new_split={"0": 4.8})
    rows = study.table(dense, split).splitlines()[2:]
    assert rows == [
        "| b |  | +1.00 | -3.81 |  | 1 |",  # stored split by itself: nothing to compare with
        "| a | +11.00 ± 12.71 | +10.00 | +10.00 | -1.79 | 1 |",
        "| new |  | +20.00 | +14.29 |  | 1 |",  # not trained dense
    ]
    with pytest.raises(ValueError, match="differ in size; train both with the same settings"):
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


# title -> (rank of x, w and dy; None: not split; corrected; directions of a stored split weight)
WIDTH = 128  # of the model that compensation.py trains: the smaller side of each of its layers
ALL = {Role.FPROP_INPUT, Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT}
COMPENSATION = {
    "published, rank 2 (metis-paper)": ((2, None, 2), set(), 2),
    "compensated, rank 2, stochastic everywhere": ((2, None, 2), set(), 2),
    "compensated, rank 16, nearest forward": ((16, None, 16), set(), 16),
    "the same, unit vectors": ((16, None, 16), set(), 16),
    "the same, weight dense and not split": (
        (16, None, 16), ALL - {Role.FPROP_INPUT}, None
    ),
    "metis: weight dense and split, both corrected, rank 32": ((32, 32, 32), ALL, None),
    "metis, contraction mode": ((32, 32, 32), ALL, None),
}  # fmt: skip


def test_titles_of_compensation_say_what_its_schemes_are():
    compensation = script("compensation")
    assert compensation.VARIANTS.keys() >= COMPENSATION.keys()
    for title, (ranks, corrected, stored) in COMPENSATION.items():
        scheme = build_scheme(compensation.VARIANTS[title], WIDTH, WIDTH)
        operands = (scheme.fprop_input, scheme.fprop_weight, scheme.dgrad_grad_output)
        found = [getattr(operand.conditioner, "rank", None) for operand in operands]
        assert tuple(found) == ranks, title
        assert scheme.corrected == corrected, title
        assert (scheme.weight.rank if scheme.weight.is_split else None) == stored, title
        stochastic = "stochastic" in title or "published" in title
        expected = "stochastic" if stochastic else "nearest"
        assert scheme.fprop_input.quantizer.rounding == expected, title
    for scheme in ("metis", "metis-paper"):
        assert build_scheme(script("refresh").config_of(scheme), WIDTH, WIDTH)


@pytest.mark.parametrize("name", ["compensation", "refresh"])
def test_results_of_other_settings_are_not_replaced(name, tmp_path, monkeypatch):
    study, out = script(name), tmp_path / "results.json"
    text = (RESULTS / f"{name}.json").read_text()
    out.write_text(text)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "7", "--out", str(out)])
    monkeypatch.setattr(study, "train", pytest.fail)
    with pytest.raises(
        SystemExit, match=r"contains results with other steps, .* choose another --out"
    ):
        study.main()
    assert out.read_text() == text


def test_results_of_the_same_settings_are_gone_on_with(tmp_path):
    """Tuples of settings are lists in the file."""
    out, settings = tmp_path / "results.json", {"steps": 7, "seeds": (0, 1)}
    kept = script("refresh").kept
    assert kept(out, settings) == {}
    found = json.loads(json.dumps({**settings, "runs": {"a": 1}}))
    out.write_text(json.dumps(found))
    assert kept(out, settings) == found


def test_losses_of_continued_pretraining_are_those_on_record():
    record = ROOT / "eval" / "results" / "real-model" / "continued" / "losses.csv"
    rows = list(csv.DictReader(record.open()))
    control = {row["text"]: row for row in rows if row["scheme"] == "bf16"}
    page = (ROOT / "eval" / "results" / "report" / "continued-pretraining.md").read_text()
    for row in rows:
        cells = [row["text"], row["scheme"]]
        for when in ("untouched", "trained"):
            loss = float(row[when]) if row[when] else None
            cells.append("" if loss is None else f"{loss:.4f}")
            gap = None if loss is None else loss / float(control[row["text"]][when]) - 1
            cells.append("" if not gap else f"+{100 * gap:.1f}")
        assert f"| {' | '.join(cells)} |" in page


def test_an_interrupted_operand_study_keeps_the_other_variants_of_a_question():
    kept = {"rank": {"rank 1": 1, "rank 2": 2}, "input": {"direct": 3}}
    found = {"rank": {"rank 1": 4}, "weight": {"split": 5}}
    assert operand_study().merged(kept, found) == {
        "rank": {"rank 1": 4, "rank 2": 2}, "input": {"direct": 3}, "weight": {"split": 5}
    }  # fmt: skip
