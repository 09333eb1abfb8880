"""Gap against tokens per parameter: what it is worth, and that the page is the records."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

STUDY = "gap_by_tokens"


def record(tokens, losses, width=64, seeds=(0,)):
    """A comparison whose seeds do not differ: losses, and dense ones .01 below, by variant."""
    experiment = {
        "model": {"hidden_size": width},
        "sequence_length": 128,
        "training": {"learning_rate": 0.01, "max_steps": tokens // 4096},
    }
    runs = [
        {"scheme": name, "seed": seed, "loss": x, "loss_dense": x - 0.01, "parameters": 1000}
        for name, x in losses.items()
        for seed in seeds
    ]
    return {"plan": {"experiment": experiment}, "tokens": tokens, "runs": runs}


@given(st.floats(0.05, 40), st.floats(0.01, 1))
def test_a_loss_is_worth_the_tokens_that_give_it(study, millions, slope):
    """On a control whose loss is linear in the logarithm everywhere, beyond its runs too."""

    def loss(tokens):
        return 5 - slope * math.log(tokens / 1e6)

    control = {count: loss(count) for count in (1_000_000, 2_000_000, 8_000_000)}
    assert study.worth(loss(millions * 1e6), control) == pytest.approx(millions * 1e6, rel=1e-6)


def test_between_two_runs_their_own_slope_counts(study):
    control = {1000: 5.0, 2000: 4.0, 4000: 3.9}
    assert study.worth(3.95, control) == pytest.approx(2000 * math.sqrt(2))
    assert study.worth(4.5, control) == pytest.approx(1000 * math.sqrt(2))
    assert study.worth(4.0, control) == pytest.approx(2000)
    assert study.worth(5.5, control) == pytest.approx(1000 / math.sqrt(2))


def test_a_table_of_records(records):
    study = records(
        long=record(40_000, {"bf16": 4.0, "a": 4.1}), short=record(10_000, {"bf16": 5.0, "a": 5.1})
    )
    lengths = study.read()
    assert [length.ratio for length in lengths] == [10, 40]
    slope = 1 / math.log(4)
    lost = 100 * (1 - math.exp(-0.1 / slope))
    assert study.saved(lengths, lengths[1], "a").mean == pytest.approx(lost)
    rows = study.tables(lengths).splitlines()
    assert rows[0] == "| Tokens per parameter | 10 | 40 |"
    assert rows[2:] == [
        "| tokens | 0.01M | 0.04M |",
        "| loss of `bf16` | 5.0000 | 4.0000 |",
        "| `a`: gap, % | +2.00 | +2.50 |",
        "| `a`: gap dense, % | +1.80 | +2.25 |",
        f"| `a`: worth, % of the tokens | +{lost:.2f} | +{lost:.2f} |",
    ]


def test_seeds_and_variants_that_one_record_lacks_count_in_none(records):
    losses = {"bf16": 5.0, "a": 5.1, "b": 5.2}
    study = records(
        short=record(10_000, losses, seeds=(0, 1, 2)),
        long=record(40_000, {"bf16": 4.0, "a": 4.1}, seeds=(2, 0)),
    )
    lengths = study.read()
    assert [length.gap("a").count for length in lengths] == [2, 2]
    assert [study.saved(lengths, length, "a").count for length in lengths] == [2, 2]
    assert study.variants(lengths) == ["a"]
    study = records(short=record(10_000, losses, seeds=(1,)), long=record(40_000, losses))
    with pytest.raises(ValueError, match="no seed of bf16 is in all of the records short, long"):
        study.read()


def test_a_control_that_more_tokens_do_not_help_is_refused(study):
    with pytest.raises(ValueError, match=r"4\.0000 with 1,000 tokens and of 4\.1000 with"):
        study.worth(4.05, {1000: 4.0, 2000: 4.1, 4000: 3.9})


def test_records_of_other_models(records):
    study = records(one=record(10_000, {"bf16": 5.0}), two=record(40_000, {"bf16": 4.0}, width=96))
    with pytest.raises(ValueError, match="two differs from another record in model"):
        study.read()


def test_the_page_is_the_records(study, tmp_path):
    lengths = study.read()
    page = study.PAGE.read_text()
    assert f"<!-- {study.MARK} -->\n{study.tables(lengths)}<!-- end -->" in page
    assert (study.OUT / "table.md").read_text() == study.tables(lengths)
    study.draw(lengths, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").stat().st_size > 10_000
