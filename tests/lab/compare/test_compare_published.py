"""The preset of Quartet II's public grid: its plan, what stands beside it, and --dry-run."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import transformers
from data.chunks import write_chunked
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lab.compare.comparing import run, write_config
from metis_hf.cli.main import main
from metis_hf.lab.compare import dry_run, published
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.statistics import summarize
from metis_hf.shared.numbers import si

PRESET = "quartet2-30m"
SMALL = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
SMALL_PARAMETERS = 4 * 64**2 + 3 * 64 * 176 + 3 * 64
VOCAB, LENGTH, TOKENS = 300, 64, 64 * 1024  # of what `data` holds
CLIPPING = ("nvidia", "four-over-six")  # without the rule of the grid's code
NVIDIA, FOUR_OVER_SIX = "nvidia-unbiased", "four-over-six-unbiased"
# From the public grid, tokens -> (loss of BF16, gaps in percent to two digits).
PUBLISHED = {
    0.75e9: (3.4226, {NVIDIA: 1.60, FOUR_OVER_SIX: 1.65, "tetrajet2": 1.58, "quartet2": 1.26}),
    3e9: (3.2116, {NVIDIA: 2.45, FOUR_OVER_SIX: 2.33, "tetrajet2": 2.23, "quartet2": 1.84}),
    24e9: (3.0577, {NVIDIA: 3.42, FOUR_OVER_SIX: 3.27, "tetrajet2": 2.86, "quartet2": 2.45}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chunked tokens without a pattern, and as many held-out ones."""
    folder = tmp_path_factory.mktemp("given") / "data"
    for place, seed in ((folder, 0), (folder / "validation", 1)):
        tokens = np.random.default_rng(seed).integers(0, VOCAB, TOKENS, np.int32)
        write_chunked(place, [tokens], LENGTH, VOCAB)
    words = WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def plan_of(**options):
    return make_plan(**{"preset": PRESET, "needs_data": False, **options})


def scaled(each=25.0, **options):
    """A plan of the small model with so many tokens a parameter."""
    given = {"model": SMALL, "sequence_length": 64, "global_batch": 8, **options}
    return plan_of(tokens=each * SMALL_PARAMETERS, **given)


def summaries_of(losses):
    return summarize(
        [
            SchemeResult(name, {}, "", loss, {}, 0.1, [], seed=0, peak_memory=1, parameters=5)
            for name, loss in losses.items()
        ]
    )


class TestPlan:
    def test_is_what_the_grid_trained(self):
        plan = plan_of()
        assert [variant.name for variant in plan.variants] == [
            "bf16", "nvidia-unbiased", "four-over-six-unbiased", "tetrajet2", "quartet2", "metis"
        ]  # fmt: skip
        assert plan.seeds == (0,)
        assert (plan.experiment.steps, plan.tokens) == (2861, 2861 * 512 * 512)
        config = transformers.AutoConfig.for_model(**plan.experiment.model)
        per_layer = 4 * 640 * 640 + 3 * 640 * 1792 + 2 * 640
        assert published.body_parameters(config) == 6 * per_layer + 640 == 30_482_560
        assert plan.experiment.one_cycle is not None

    def test_what_is_asked_for_wins(self):
        assert plan_of(seeds=[0, 1]).seeds == (0, 1)
        tiny = plan_of(size="tiny")
        assert (tiny.size, tiny.seeds) == ("tiny", (0,))
        assert tiny.experiment.one_cycle is None
        assert published.match(tiny) is None
        linear = plan_of(training={"lr_scheduler_type": "linear"})
        assert linear.experiment.one_cycle is None
        assert not linear.experiment.decay_embeddings
        assert "one_cycle" not in linear.settings()["experiment"]

    def test_a_run_needs_data(self):
        with pytest.raises(ValueError, match="size quartet2-30m needs data: give --data DIR"):
            make_plan(preset=PRESET)

    def test_directories_of_other_sizes_are_as_before(self):
        """A directory is refused where any key of its settings is another."""
        settings = make_plan().settings()
        assert settings.keys() == {
            "experiment", "size", "global_batch", "eval_sequences", "data", "validation", "tasks",
            "tasks_dir",
        }  # fmt: skip
        assert settings["experiment"].keys() == {
            "model", "training", "sequence_length", "health_interval"
        }  # fmt: skip

    def test_what_is_beyond_transformers_decides_its_directory(self):
        held = plan_of().settings()["experiment"]
        beyond = SIZES[PRESET].beyond
        assert {name: held[name] for name in beyond} == beyond


class TestBeside:
    @pytest.mark.parametrize("tokens", PUBLISHED)
    def test_same_model_and_tokens(self, tokens):
        beside = published.match(plan_of(tokens=tokens))
        loss, gaps = PUBLISHED[tokens]
        assert beside.exact
        assert beside.published_tokens == pytest.approx(tokens, rel=1e-4)
        assert abs(beside.tokens - beside.published_tokens) <= 512 * 512  # a step: theirs are cut
        assert beside.losses[beside.names["bf16"]] == pytest.approx(loss, abs=5e-5)
        found = {name: beside.gap(beside.names[name]) for name in gaps}
        assert found == pytest.approx(gaps, abs=5.1e-3)
        assert "metis" not in beside.names
        assert not any("Trained otherwise" in text for text in beside.differences)

    def test_rows_have_losses_and_gaps(self):
        beside = published.match(plan_of())
        cells = published.rows(beside, summaries_of({"bf16": 3.4, NVIDIA: 3.468, "metis": 3.417}))
        by_name = {row[0]: row[1:] for row in cells if row[0]}
        assert by_name == {
            "bf16": ["BF16", "3.4000", "3.4226", "", "", ""],
            "nvidia-unbiased": ["NVIDIA's recipe", "3.4680", "3.4774", "+2.00", "+1.60", "+0.40"],
            "metis": ["", "3.4170", "", "+0.50", "", ""],
        }
        # What is published and has no variant here, which is Quartet II without 4/6.
        assert [row for row in cells if not row[0]] == [
            ["", "Quartet II", "", "3.4671", "", "+1.30", ""]
        ]

    @pytest.mark.parametrize(("each", "place"), [(26.5, 0), (46, 1)])
    def test_a_scaled_model_has_the_gaps_of_its_tokens_per_parameter(self, each, place):
        beside = published.match(scaled(each))
        grid = published.grid()["models"]["30m"]
        assert not beside.exact
        assert beside.parameters == SMALL_PARAMETERS
        assert beside.published_tokens == grid["tokens"][place]
        theirs = grid["losses"]["nvidia"][place] / grid["losses"]["bf16"][place]
        cells = published.rows(beside, summaries_of({"bf16": 4.0, "nvidia-unbiased": 4.08}))
        gap = 100 * (theirs - 1)
        assert cells[1] == [
            NVIDIA, "NVIDIA's recipe", "4.0800", "+2.00", f"{gap:+.2f}", f"{2 - gap:+.2f}"
        ]  # fmt: skip
        assert "Published loss" not in published.header(beside)
        assert "losses are not comparable" in published.describe(beside)

    @pytest.mark.parametrize("each", [5, 35])
    def test_nothing_at_other_tokens_per_parameter(self, each):
        beside = published.match(scaled(each))
        assert (beside.published_tokens, beside.losses, beside.names) == (None, {}, {})
        text = published.markdown(beside, summaries_of({"bf16": 4.0}))
        assert "Nothing is published at" in text
        assert "there are published runs at 25, 49, 98, 197, 394, 787" in text
        assert "|" not in text

    def test_another_experiment_is_not_exact(self):
        for name, value in (
            ("global_batch", 256), ("sequence_length", 256), ("model", {"vocab_size": 400}),
        ):  # fmt: skip
            beside = published.match(plan_of(**{name: value}))
            assert not beside.exact, name
            assert beside.losses

    def test_only_schemes_as_they_are_stand_beside_published_ones(self):
        variants = {
            "wide": {"scheme": "nvidia", "target_modules": ["q_proj"]},
            "late": {"scheme": "quartet2", "precision_schedule": {"at": 0.9}},
            "same": {"scheme": "nvidia"},
        }
        plan = replace(plan_of(), variants=make_plan(variants=variants).variants)
        assert published.match(plan).names == {"same": "nvidia"}

    def test_differences_name_what_was_trained_otherwise(self):
        training = {"learning_rate": 1e-3, "per_device_train_batch_size": 64, "logging_steps": 1}
        beside = published.match(plan_of(training=training, schemes=["mxfp4", *CLIPPING]))
        assert beside.differences[0] == (
            "Trained otherwise than there: per_device_train_batch_size=64, learning_rate=0.001."
        )
        assert beside.names["nvidia-unbiased"] == beside.names["nvidia"] == "nvidia"
        assert beside.names["four-over-six-unbiased"] == beside.names["four-over-six"]
        text = " ".join(beside.differences)
        grid = published.grid()
        for scheme in grid["differences of schemes"]:
            assert f"{scheme}: " in text
        few = published.match(plan_of(preset=None, size=PRESET, schemes=["bf16", "nvidia"]))
        assert few.differences[:-1] == tuple(grid["differences"])
        assert few.differences[-1].startswith("nvidia: there gradients are scaled to 16/17")


class TestDryRun:
    @pytest.mark.slow
    def test_on_the_command_line(self, monkeypatch, capsys, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["metis-hf", "compare", "--preset", PRESET, "--dry-run"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0
        printed = capsys.readouterr().out
        for text in (
            "71,442,560 parameters, 30,482,560 without embeddings and head",
            "749,993,984, 24.6 per parameter without embeddings and head",
            "2,861 of 512 sequences x 512 tokens, in micro-batches of 128 on one device",
            "6 variants x 1 seed (0)",
            "none; a run needs --data DIR",
            "The same model and 0.75B tokens",
            "All 6 runs take about",
            "on one H200.",
            "benchmarks/gpu-nvidia-h200.md",
            "Nothing was trained.",
        ):
            assert text in printed
        (row,) = (line for line in printed.splitlines() if "│ nvidia-unbiased " in line)
        assert [cell.strip() for cell in row.split("│")[4:-1]] == [
            "NVIDIA's recipe", "3.4774", "+1.60"
        ]  # fmt: skip
        assert list(tmp_path.iterdir()) == []

    def test_flops_are_those_of_the_model(self):
        """Three GEMMs for each weight and token, and products of attention: 2 FLOPs each."""
        plan = plan_of()
        config = transformers.AutoConfig.for_model(**plan.experiment.model)
        weights = 6 * (4 * 640 * 640 + 3 * 640 * 1792) + 640 * 32_000
        attention = 6 * 2 * 512 * 640  # scores and values of one token against all of its sequence
        expected = plan.tokens * 6 * (weights + attention)
        assert f"Model FLOPs per run: {si(expected, 'FLOP')}" in dry_run.describe(plan, config)

    def test_times_and_memory_of_a_long_comparison(self):
        plan = make_plan(schemes=["bf16", "nvfp4-rne", "metis"], size="130m", needs_data=False)
        console = Console(width=80, record=True, file=io.StringIO())
        dry_run.show_plan(replace(plan, seeds=tuple(range(20))), console, device="h100")
        text = console.export_text()
        rows = {cells[1].strip(): cells[2:-1] for line in text.splitlines()
                if len(cells := line.split("│")) > 3}  # fmt: skip
        times = {name: [float(cell.split()[0]) for cell in cells[:2]]
                 for name, cells in rows.items()}  # fmt: skip
        # Recorded and by Python: as benchmarks/gpu-nvidia-h200.md, 1.3 and 2.2, 2.9 and 10 times.
        assert all(recorded <= python for recorded, python in times.values())
        assert times["bf16"][0] < times["nvfp4-rne"][0] < times["metis"][0] < times["metis"][1]
        assert "Memory per run: about 27" in text
        assert "no step was measured on an H100" in " ".join(text.split())
        assert "Warning: the runs take more than a week" in text
        assert "CUDA graphs" in text

    def test_memory_that_a_device_has_not(self):
        plan = make_plan(schemes=["bf16"], size="8b", needs_data=False)
        console = Console(width=80, record=True, file=io.StringIO())
        dry_run.show_plan(plan, console, device="h100")
        assert (
            "Warning: one H100 has 79.6 GiB, which is too little for a run."
            in console.export_text()
        )

    def test_of_a_comparison_that_nothing_is_published_of(self, data):
        """Data and a precision that switches are named; no published column."""
        variants = {"late": {"scheme": "nvfp4", "precision_schedule": {"at": 0.9}}}
        plan = make_plan(schemes=["bf16"], variants=variants, data=str(data))
        console = Console(width=200, record=True, file=io.StringIO())
        dry_run.show_plan(plan, console)
        text = console.export_text()
        assert f"Data: {data}, {TOKENS:,} tokens: a run reads them 48.8 times" in text
        assert "switches precision, the estimate ignores the switch" in text
        assert "ublished" not in text
        # A run refuses data that are not there; its costs can be asked for.
        plan = make_plan(schemes=["bf16"], data=str(data / "typo"))
        dry_run.show_plan(plan, console)
        assert "typo, which is not a directory on this machine" in console.export_text()


@pytest.mark.slow
def test_a_scaled_comparison_on_the_command_line(data, tmp_path):
    """Two schemes at the published tokens per parameter: published.md has both numbers."""
    parameters = 4 * 16**2 + 3 * 16 * 32 + 3 * 16
    config = write_config(
        tmp_path,
        size=PRESET,
        schemes=["bf16", "nvidia"],
        seeds=[0],
        model={
            "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 1,
        },
        sequence_length=LENGTH,
        global_batch=84,
        tokens=24.6 * parameters,  # 12 steps
        training={"per_device_train_batch_size": 42, "logging_steps": 1},
        data=str(data),
    )  # fmt: skip
    out = tmp_path / "out"
    done = run("--config", config, "--out", out)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "compare.json").read_text())
    assert [r["curve"]["step"][-1] for r in record["runs"]] == [12, 12]
    losses = {r["scheme"]: r["loss"] for r in record["runs"]}
    gap = 100 * (losses["nvidia"] / losses["bf16"] - 1)
    text = (out / "published.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| nvidia |"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "nvidia", "NVIDIA's recipe", f"{losses['nvidia']:.4f}", f"{gap:+.2f}", "+1.60",
        f"{gap - 100 * (3.477421 / 3.422645 - 1):+.2f}",
    ]  # fmt: skip
    assert f"Ours is scaled: {parameters:,} parameters" in text
    assert "- Trained otherwise than there: per_device_train_batch_size=42." in text
    assert "published.md" in done.stdout
    assert "Beside published numbers" in done.stdout
