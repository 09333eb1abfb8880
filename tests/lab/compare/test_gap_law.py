"""eval/studies/gap_law.py and beside_paper.py: known laws are found, the page is the records."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT

from metis_hf.lab.compare.published import grid

STUDIES = ("publish", "regression", "gap_law_figure", "gap_law", "beside_paper")


@pytest.fixture(autouse=True)
def studies(monkeypatch):
    """Scripts that import one another, forgotten after the test."""
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    for name in STUDIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in STUDIES:
        sys.modules.pop(name, None)


@pytest.fixture
def law():
    return importlib.import_module("gap_law")


@pytest.fixture
def beside():
    return importlib.import_module("beside_paper")


def synthetic(law, exponents, noise=0.0, curvature=(0.0, 0.0), seed=0):
    """Points at the grid's places, of a law that is known."""
    rng = np.random.default_rng(seed)
    points = []
    for model in grid()["models"].values():
        size, width = model["parameters"], model["width"]
        for tokens in model["tokens"]:
            x, n = math.log(tokens / size / 100), math.log(size / 1e8)
            log_gap = 0.7 + exponents[0] * x + exponents[1] * n
            log_gap += curvature[0] * x**2 + curvature[1] * x * n + noise * rng.standard_normal()
            points.append(law.Point("s", "s", size, width, tokens, math.exp(log_gap), math.nan))
    return points


def test_a_law_without_noise_is_found_exactly(law):
    found = law.fit(synthetic(law, (0.15, -0.3)))
    np.testing.assert_allclose(found.coefficients, [0.7, 0.15, -0.3], atol=1e-10)
    curved = law.fit(synthetic(law, (0.15, -0.3), curvature=(-0.04, -0.07)), "curved")
    np.testing.assert_allclose(curved.coefficients, [0.7, 0.15, -0.3, -0.04, -0.07], atol=1e-10)


def test_intervals_hold_the_truth_as_often_as_they_say(law):
    truth, draws = (0.15, -0.05), 400
    held, predicted = np.zeros(2), 0
    for seed in range(draws):
        *points, new = synthetic(law, truth, noise=0.08, seed=seed)
        found = law.fit(points)
        for i, value in enumerate(truth):
            estimate = found.estimate(1 + i)
            held[i] += abs(estimate.value - value) <= estimate.half_width
        _, low, high = found.predict(law.design([new])[0])
        predicted += low <= new.gap <= high
    # 95 % of 400 with four standard deviations of a binomial.
    assert np.all(np.abs(held / draws - 0.95) < 0.045)
    assert abs(predicted / draws - 0.95) < 0.045


def test_one_exponent_is_that_of_an_independent_regression(law):
    """With N held fixed the fit is a line: scipy's linregress, its error, its residual."""
    from scipy import stats

    points = [p for p in synthetic(law, (0.2, 0.0), noise=0.1) if p.width == 640]
    x, y = np.log([p.ratio / 100 for p in points]), np.log([p.gap for p in points])
    expected = stats.linregress(x, y)
    found = law.least_squares(np.array([np.ones(len(x)), x]).T, y).estimate(1)
    assert found.value == pytest.approx(expected.slope)
    half = stats.t.ppf(0.975, len(x) - 2) * expected.stderr
    assert found.half_width == pytest.approx(half)


def test_each_series_has_a_level_of_its_own(law):
    points = synthetic(law, (0.15, -0.1))
    series = ["a" if i % 2 else "b" for i in range(len(points))]
    scaled = [
        law.Point(p.source, p.scheme, p.parameters, p.width, p.tokens, gap, math.nan)
        for p, label in zip(points, series)
        for gap in [p.gap * (3 if label == "a" else 1)]
    ]
    found = law.fit(scaled, series=series)
    expected = [0.7, 0.7 + math.log(3), 0.15, -0.1]
    np.testing.assert_allclose(found.coefficients, expected, atol=1e-10)


def test_intervals_allow_for_errors_that_series_share_at_a_place(law):
    """Of all errors shared, a series more says nothing more: scheme by scheme the same interval."""
    places, held, draws = synthetic(law, (0.15, -0.05)), 0, 200
    for seed in range(draws):
        shared = 0.08 * np.random.default_rng(seed).standard_normal(len(places))
        points = [replace(p, gap=p.gap * math.exp(e)) for p, e in zip(places, shared)]
        one = law.fit(points, series=["a"] * len(points)).estimate(1)
        labels = [name for name in "abc" for _ in points]
        three = law.fit(points * 3, series=labels).estimate(3)
        assert three.value == pytest.approx(one.value)
        assert three.half_width == pytest.approx(one.half_width, rel=0.1)
        held += abs(three.value - 0.15) <= three.half_width
    assert abs(held / draws - 0.95) < 0.07


def test_curvature_is_told_from_noise(law):
    noise = {"noise": 0.03, "seed": 1}
    assert law.f_test(synthetic(law, (0.15, 0.0), curvature=(-0.04, -0.07), **noise)) < 1e-4
    values = [law.f_test(synthetic(law, (0.15, 0.0), noise=0.03, seed=s)) for s in range(200)]
    assert 0.01 < np.mean(np.array(values) < 0.05) < 0.11


def test_what_has_no_fit_is_refused(law):
    points = synthetic(law, (0.15, 0.0))
    with pytest.raises(ValueError, match="2 points cannot fit 3 coefficients"):
        law.fit(points[:2])
    with pytest.raises(ValueError, match="cannot fit 3 coefficients"):
        law.fit(points[:6])  # one size: no exponent of N
    below = law.Point("s", "better", 10, 10, 100, -0.5, math.nan)
    message = r"a gap of -0.500 % \(better of s\) has no logarithm; .* LEFT_OUT"
    with pytest.raises(ValueError, match=message):
        law.fit([*points, below])


def test_points_are_the_runs_on_record(law, monkeypatch):
    published = law.published_points()
    places = sum(len(model["tokens"]) for model in grid()["models"].values())
    assert len(published) == places * 5
    first = published[0]
    assert (first.scheme, first.parameters, first.tokens) == ("nvidia", 30482560, 749993984)
    assert first.gap == pytest.approx(100 * (3.477421 / 3.422645 - 1))
    ours = law.our_points()
    monkeypatch.setitem(law.LEFT_OUT, ("width-96", "nvidia"), "below its control")
    text = law.tables(law.study())["gap law"]
    assert text.endswith("|\n\n- Left out: `nvidia` of `width-96`: below its control\n")
    assert ("width-96", "nvidia") not in {(p.source, p.scheme) for p in law.our_points()}
    keys = [(point.scheme, point.parameters, point.tokens) for point in ours]
    assert len(keys) == len(set(keys))
    assert {"methods-tiny", "tiny-ablations", "width-384", "demo"} <= {p.source for p in ours}
    assert not {"bf16", "bf16-split"} & {point.scheme for point in ours}
    record = json.loads((ROOT / "eval/results/methods-tiny.json").read_text())
    gap = next(s["gap"] for s in record["summaries"] if s["name"] == "nvidia")
    nvidia = next(p for p in ours if p.scheme == "nvidia" and p.source == "methods-tiny")
    assert (nvidia.gap, nvidia.half_width) == pytest.approx((gap["mean"], gap["half_width"]))
    # Most seeds, the control's best learning rate, and `metis` as it is, come first.
    sources = {(p.scheme, p.width, p.tokens): p.source for p in ours}
    assert sources["nvfp4-rne", 384, 1200128] == "width-384-ten"
    assert sources["metis 6 %, dy 1.5 %", 96, 1200128] == "width-96-quarter"
    assert sources["metis", 96, 3194880] == "methods-tiny-metis"
    assert sources["metis, 32 directions, of weights too", 96, 3194880] == "methods-tiny"
    assert sources["metis, 32 directions", 96, 3194880] == "methods-tiny-newer"
    assert nvidia.seeds == gap["count"] == 3
    # All parameters but the embeddings, which are tied.
    model = record["plan"]["experiment"]["model"]
    embeddings = model["vocab_size"] * model["hidden_size"]
    assert nvidia.parameters == record["runs"][0]["parameters"] - embeddings


def test_the_law_on_the_page_is_that_of_the_records(law, tmp_path):
    record = json.loads((law.TARGET / "record.json").read_text())
    fresh = law.rounded(law.study())
    assert fresh.keys() == record.keys()
    assert law.tables(fresh) == law.tables(record)
    assert len(fresh["points"]) == len(record["points"])
    for mine, theirs in zip(fresh["points"], record["points"]):
        assert mine == pytest.approx(theirs)
    page = law.PAGE.read_text()
    assert law.with_tables(page, record) == page
    assert (law.TARGET / "table.md").read_text() == "\n".join(law.tables(record).values())
    with pytest.raises(ValueError, match="gap law local"):
        law.with_tables(page.replace("<!-- gap law local -->", ""), record)
    points = law.mean_points(law.published_points(), "mean")
    laws = law.law(points), law.law(points, "curved")
    law.gap_law_figure.draw(record, points, *laws, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes()[:4] == b"\x89PNG"


def test_what_the_page_says_of_the_law_is_in_the_record(law):
    """The sentences beside the tables: signs, what is told apart, and the ranges."""
    record = json.loads((law.TARGET / "record.json").read_text())
    schemes = [record["fits"][name] for name in grid()["schemes"].values() if name != "BF16"]
    assert {round(fit["D/N"]["value"], 2) for fit in schemes} <= {0.12, 0.15, 0.16, 0.17}
    assert all(law.Estimate(**fit["D/N"]).excludes_zero for fit in schemes)
    for key in ("N", "width"):
        assert not any(law.Estimate(**fit[key]).excludes_zero for fit in schemes)
    assert all(0.065 < fit["residual"] < 0.09 for fit in schemes)
    assert all(0.02 < fit["curved"]["residual"] < 0.035 for fit in schemes)
    assert law.Estimate(**record["fits"]["mean of 4, with ours as one law"]["N"]).excludes_zero
    alone = record["fits"]["ours alone"]
    assert law.Estimate(**alone["D/N"]).excludes_zero
    assert not law.Estimate(**alone["N"]).excludes_zero
    last = record["local exponents"][-1]
    assert last["value"] < last["half_width"]
    for row in record["extrapolated"].values():
        assert row["high"] < row["ours"] < row["high"] + row["half_width"]
        assert 1.4 < row["ours"] / row["law"] < 1.75


def test_the_papers_tables_on_the_page_are_those_of_the_records(beside):
    page = beside.PAGE.read_text()
    assert beside.with_tables(page) == page
    with pytest.raises(ValueError, match="paper ablation"):
        beside.with_tables(page.replace("<!-- paper ablation -->", ""))


def test_published_rows_stand_beside_the_control_of_their_size(beside):
    rows = {(row.method, row.run): row for row in beside.published("main")}
    row = rows["FP4", "published: GPT-2 (1.1B), 100B tokens"]
    assert (row.loss, row.gap, row.average_gap) == ("3.22", "+4.2", "-0.9")
    assert rows["BF16", "published: GPT-2 (1.1B), 100B tokens"].gap == ""
    first, *others = beside.published("ablation")
    assert (first.method, first.loss) == ("BF16", "2.44")
    assert len(others) == 5
    assert all(len(row.cells) == len(beside.HEADER) for row in rows.values())


def test_rows_of_ours_say_what_was_run(beside):
    record = {
        "tokens": 1_638_400,
        "runs": [{"parameters": 319_968}],
        "summaries": [
            {"name": "bf16", "losses": {"0": 4.0}, "mean": 4.0, "gap": None},
            {"name": "nvfp4", "losses": {"0": 4.1, "1": 4.3}, "mean": 4.2,
             "gap": {"mean": 5.0, "half_width": 1.5, "count": 2}},
        ],
    }  # fmt: skip
    names = {"BF16": ("bf16",), "FP4": ("nvfp4",)}
    control, direct = beside.compared(record, names)
    assert control.cells[:4] == [
        "BF16", "ours: `bf16`, Llama 320k, 1.64M tokens, 1 seed", "4.0000", "",
    ]  # fmt: skip
    assert direct.run.endswith("2 seeds")
    assert direct.gap == "+5.00 ± 1.50"
    with pytest.raises(ValueError, match="the record has no variant 'metis'; it has bf16, nvfp4"):
        beside.compared(record, {"FP4-Metis": ("metis",)})


def test_rows_of_one_method_stand_together(beside):
    rows = [beside.Row(method, run, "", "") for method, run in ("a1", "b1", "a2", "c1", "b2")]
    assert ["".join((r.method, r.run)) for r in beside.by_method(rows)] == [
        "a1", "a2", "b1", "b2", "c1",
    ]  # fmt: skip
