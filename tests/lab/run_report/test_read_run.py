"""Records of runs as they are read: complete, resumed, half-written, of several processes."""

from __future__ import annotations

import html
import json
import math
import shutil
from pathlib import Path

import pytest
import transformers

from lab.run_report.runs import MEASURED, REFRESHED, STEPS, train
from metis_hf import PrecisionSchedule
from metis_hf.lab.run_report.page import _cards, run_page, write_report
from metis_hf.lab.run_report.read import read_run
from metis_hf.lab.run_report.run import RunRecord
from metis_hf.training.gradient_noise import find_crossing, noise_ratios
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE


class TestRead:
    @pytest.mark.slow
    def test_is_what_the_trainer_has(self, trained):
        folder, trainer = trained
        run = read_run(folder)
        logged = [e for e in trainer.state.log_history if "loss" in e]
        assert run.history == logged[:STEPS]
        assert [e["eval_loss"] for e in run.evaluations] == [
            e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e
        ]
        assert (run.name, run.max_steps, run.last_step) == ("metis", STEPS, STEPS)
        assert run.config["refresh_interval"] == 4
        assert list(run.layers) == list(run.noise) == MEASURED
        assert list(run.refreshes) == REFRESHED
        assert run.switches == {11: {"scheme": "metis", "high_precision": ["forward"]}}
        assert run.notes == []
        steps, ratios = run.noise_series()["all"]
        assert (steps, ratios) == run.series("metis/noise/ratio")
        assert find_crossing(steps, ratios).step is None

    def test_refresh_restores_orthogonality(self, trained):
        """Adam steps of 1e-3 move the factors off; a refresh brings them back to fp32 rounding."""
        for layers in read_run(trained[0]).refreshes.values():
            for moments in layers.values():
                assert moments["before"]["orthogonality"] > 1e-4
                assert moments["after"]["orthogonality"] < 1e-5
                assert moments["after"]["energy"] >= moments["before"]["energy"] - 1e-6

    @pytest.mark.slow
    def test_resumed_run_has_each_step_once(self, trained, tmp_path):
        """Killed after step 8 (refreshed and measured), resumed from the checkpoint of step 6."""

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 8:
                    raise KeyboardInterrupt

        broken = pytest.MonkeyPatch()
        with broken.context() as patch:
            patch.setattr(PrecisionSchedule, "on_step_end", Stop.on_step_end)
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path)
        with (tmp_path / HEALTH_FILE).open("a") as file:
            file.write('{"step": 8, "layers": {"mod')
        train(tmp_path, resume=str(tmp_path / "checkpoint-6"))
        run, whole = read_run(tmp_path), read_run(trained[0])
        assert run.notes == []
        assert run.history == whole.history
        assert run.layers == whole.layers
        assert run.noise == whole.noise
        assert run.refreshes == whole.refreshes
        assert run.switches == whole.switches

    def test_a_resumed_switch_is_one_switch(self, copy):
        with (copy / HEALTH_FILE).open("a") as file:
            again = {"scheme": "metis", "high_precision": ["forward"]}
            file.write(json.dumps({"step": 12, "switch": again}) + "\n")
        assert list(read_run(copy).switches) == [11]

    def test_half_written_last_line_is_noted(self, copy, no_heatmaps):
        text = (copy / HEALTH_FILE).read_text()
        lines = text.splitlines()
        (copy / HEALTH_FILE).write_text(text[: -len(lines[-1]) // 2])
        run = read_run(copy)
        assert list(run.layers) == MEASURED[:-1]
        (note,) = run.notes
        assert f"{HEALTH_FILE}: line {len(lines)} is half-written" in note
        assert note in html.unescape(run_page(run).render())

    def test_half_written_state_falls_back_to_the_one_before(self, copy):
        (copy / LOG_FILE).unlink()
        (copy / "trainer_state.json").write_text('{"log_history": [')
        (copy / "checkpoint-12" / "trainer_state.json").write_text("")
        run = read_run(copy)
        assert [e["step"] for e in run.history] == list(range(1, 7))
        assert ["trainer_state.json is half-written" in note for note in run.notes] == [True]

    def test_losses_need_no_checkpoint(self, trained, copy):
        """As with save_strategy="no": the callback's own log has every entry of Trainer's."""
        for checkpoint in copy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        run = read_run(copy)
        logged = trained[1].state.log_history
        assert run.history == [e for e in logged if "loss" in e][:STEPS]
        assert run.evaluations == [e for e in logged if "eval_loss" in e]
        assert run.runtime == logged[-1]["train_runtime"]
        assert run.notes == []

    def test_log_goes_further_than_the_checkpoint(self, trained, copy):
        shutil.rmtree(copy / "checkpoint-12")
        assert read_run(copy).history == read_run(trained[0]).history

    def test_state_of_the_directory_is_preferred_where_it_went_further(self, trained, copy):
        (copy / LOG_FILE).unlink()
        trained[1].state.save_to_json(str(copy / "trainer_state.json"))
        shutil.rmtree(copy / "checkpoint-12")
        run = read_run(copy)
        assert run.history[-1]["step"] == STEPS
        assert run.seconds_per_step > 0  # the end of training is in this state alone

    @pytest.mark.parametrize("newer", [4, 14])
    def test_a_checkpoint_of_an_earlier_run_is_not_mixed_in(self, copy, newer):
        """A run of its own began in the directory, and has no checkpoint yet."""
        entries = [{"step": step, "loss": 9.0} for step in range(1, newer + 1)]
        (copy / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        description = json.loads((copy / "metis_run.json").read_text())
        description |= {"max_steps": 20, "config": {"scheme": "nvidia"}}
        (copy / "metis_run.json").write_text(json.dumps(description))
        run = read_run(copy)
        assert run.series("loss") == (list(range(1, newer + 1)), [9.0] * newer)
        assert (run.name, run.max_steps) == ("nvidia", 20)
        assert run.evaluations == []
        named = [note for note in run.notes if "it is of an earlier run in this directory" in note]
        assert len(named) == (newer < STEPS)

    @pytest.mark.parametrize("steps", [[], [9], [9, 13]], ids=str)
    def test_a_new_run_logs_no_step_of_an_earlier_one(self, steps, copy):
        """It has just begun, or logs its first loss after the earlier run's."""
        entries = [{"step": step, "loss": 9.0} for step in steps]
        (copy / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        assert json.loads((copy / "metis_run.json").read_text())["began_at"] == 0
        run = read_run(copy)
        assert run.series("loss") == (steps, [9.0] * len(steps))
        assert any("it is of an earlier run in this directory" in note for note in run.notes)

    @pytest.mark.parametrize(
        ("rate", "seconds"),
        [(2.0, 0.5), (1.5, 1 / 1.5), (1.9996, 0.5), (0.0, None), (None, None)],
        ids=["whole", "resumed after step 3", "whole, rounded", "rounded to none", "not known"],
    )
    def test_step_time_is_of_the_steps_of_the_call(self, rate, seconds, copy, no_heatmaps):
        """Trainer's runtime is of the steps after a resume: of 9 of 12 at 1.5 a second, 6 s."""
        *lines, end = (copy / LOG_FILE).read_text().splitlines()
        assert {"train_runtime", "train_steps_per_second"} <= json.loads(end).keys()
        end = {"step": STEPS, "train_runtime": 6.0, "train_steps_per_second": rate}
        end = {key: value for key, value in end.items() if value is not None}
        (copy / LOG_FILE).write_text("\n".join([*lines, json.dumps(end)]) + "\n")
        run = read_run(copy)
        assert run.seconds_per_step == (seconds and pytest.approx(seconds))
        assert "per step, mean of the last call" in run_page(run).render()

    def test_health_alone(self, copy, no_heatmaps):
        (copy / LOG_FILE).unlink()
        for checkpoint in copy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        run = read_run(copy)
        assert run.history == []
        assert any("No losses" in note for note in run.notes)
        assert "No losses were recorded" in run_page(run).render()
        assert run.config["scheme"] == "metis"
        assert any(f"No losses: {LOG_FILE}, which MetisCallback writes" in n for n in run.notes)

    def test_losses_alone(self, copy):
        (copy / HEALTH_FILE).unlink()
        run = read_run(copy)
        assert any("No spectral health" in note for note in run.notes)
        assert len(run.history) == STEPS
        assert "Layers by risk" not in run_page(run).render()

    def test_a_kept_file_of_an_earlier_run_is_not_read(self, copy):
        (copy / HEALTH_FILE).rename(copy / "metis_health-old.jsonl")
        run = read_run(copy)
        assert (run.layers, run.noise, run.refreshes, run.switches) == ({}, {}, {}, {})

    def test_an_unfinished_run_has_the_step_times_of_its_checkpoint(self, copy):
        """Of an experiment: its clock comes after the callback, whose log does not have them."""
        state = copy / "checkpoint-6/trainer_state.json"
        shutil.rmtree(copy / "checkpoint-12")
        saved = json.loads(state.read_text())
        for entry in saved["log_history"]:
            if "loss" in entry:
                entry["step_seconds"] = 0.5
        saved["log_history"][0] |= {"loss": 9.0, "step_seconds": 90.0}  # of another run
        state.write_text(json.dumps(saved))
        before = read_run(copy)
        assert before.series("step_seconds")[0] == [2, 3, 4, 5, 6]
        assert before.seconds_per_step == 0.5
        assert before.series("loss")[0] == list(range(1, STEPS + 1))
        assert before.history[0]["loss"] != 9.0

    @pytest.mark.parametrize(
        "text", ["{ // a comment", '["x"]', '{"sequence_length": 4096}', '{"experiment": {}}']
    )
    def test_settings_of_another_program(self, text, trained, tmp_path):
        shutil.copytree(trained[0], tmp_path / "runs" / "mine")
        (tmp_path / "settings.json").write_text(text)
        run = read_run(tmp_path / "runs" / "mine")
        assert run.tokens is None
        assert run.notes == []

    def test_experiment_directory(self, trained, tmp_path, no_heatmaps):
        """A scheme's directory of the demo: result.json in place of Trainer's state."""
        whole = read_run(trained[0])
        history = [{**entry, "step_seconds": 0.25} for entry in whole.history]
        directory = tmp_path / "metis"
        directory.mkdir()
        shutil.copy(trained[0] / HEALTH_FILE, directory)
        shutil.copy(trained[0] / "metis_run.json", directory)
        result = {"config": whole.config, "summary": whole.summary, "history": history}
        (directory / "result.json").write_text(json.dumps(result))
        settings = {"sequence_length": 24, "health_interval": 3}
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        run = read_run(directory)
        assert run.series("loss") == whole.series("loss")
        assert run.seconds_per_step == 0.25
        assert "per step, median" in run_page(run).render()
        assert run.tokens == STEPS * 2 * 24
        assert run.layers == whole.layers

    def test_tokens_of_a_run_of_a_comparison(self, trained, tmp_path):
        """Its settings lie two directories further up, with the length under "experiment"."""
        directory = tmp_path / "out/runs/metis/seed-0"
        shutil.copytree(trained[0], directory)
        settings = {"global_batch": 2, "experiment": {"sequence_length": 24, "health_interval": 3}}
        (tmp_path / "out/settings.json").write_text(json.dumps(settings))
        assert read_run(directory).tokens == STEPS * 2 * 24


class TestEvaluations:
    @pytest.fixture
    def of_sets(self, copy):
        """A record with two evaluation sets, as Trainer logs a dict of them, and seldom a loss."""
        for checkpoint in copy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        entries = [{"step": 6, "loss": 5.0}]
        entries += [{"step": s, f"eval_{n}_loss": s + 0.5} for s in (6, 8) for n in ("web", "code")]
        (copy / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return read_run(copy)

    def test_each_set_has_its_series(self, of_sets):
        expected = ([6, 8], [6.5, 8.5])
        assert of_sets.evaluation_series() == {"web": expected, "code": expected}

    def test_the_page_names_them_and_the_step_of_the_last_loss(self, of_sets, no_heatmaps):
        text = run_page(of_sets).render()
        assert "last evaluation, web" in text
        assert "last evaluation, code" in text
        assert _cards(of_sets)[0] == ("last loss", "5", "step 6")


class TestErrors:
    def test_a_directory_in_place_of_the_page(self, copy, tmp_path):
        with pytest.raises(ValueError, match="is a directory; give the page's file, as in "):
            write_report([copy], tmp_path)

    def test_no_directory(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere is no directory"):
            read_run(tmp_path / "nowhere")

    def test_no_record_names_what_was_looked_for(self, tmp_path):
        with pytest.raises(
            FileNotFoundError,
            match=r"no record of a run; looked for metis_log\.jsonl, trainer_state\.json, "
            r"checkpoint-\*/trainer_state\.json, result\.json, metis_health\.jsonl$",
        ):
            read_run(tmp_path)

    def test_directory_of_runs_names_them(self, tmp_path):
        for name in ("bf16", "metis"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "result.json").write_text("{}")
        with pytest.raises(FileNotFoundError, match="holds the runs bf16, metis"):
            read_run(tmp_path)

    def test_directory_of_a_comparison_names_its_runs(self, tmp_path):
        for name in ("bf16", "metis"):
            folder = tmp_path / "runs" / name / "seed-0"
            folder.mkdir(parents=True)
            (folder / "result.json").write_text("{}")
        with pytest.raises(FileNotFoundError, match="runs runs/bf16/seed-0, runs/metis/seed-0:"):
            read_run(tmp_path)

    def test_a_broken_file_and_nothing_else(self, tmp_path):
        (tmp_path / "result.json").write_text('{"history": [')
        with pytest.raises(FileNotFoundError, match=r"result\.json is half-written"):
            read_run(tmp_path)


def test_ratio_of_the_record(trained):
    """noise_ratios takes what the file holds."""
    record = json.loads((trained[0] / HEALTH_FILE).read_text().splitlines()[0])
    assert set(record["noise"]) == set(record["layers"])
    assert noise_ratios(record["noise"])["noise/ratio"] > 1


@pytest.mark.parametrize(
    ("config", "share"),
    [({"scheme": "bf16"}, 0), ({"scheme": "bf16-split"}, 0), ({"scheme": "nvfp4"}, 0.9), ({}, 0.9)],
)
def test_the_share_of_a_run_without_measurements_is_that_of_its_config(config, share):
    run = RunRecord(Path("run"), config=config, conversion={"flops_share": 0.9})
    assert run.fp4_share == share


@pytest.mark.parametrize(("scheme", "quantized"), [("nvfp4", True), ("bf16", False)])
def test_a_run_of_nothing_but_nan_is_quantized_as_its_config_says(scheme, quantized):
    """What is not finite has no SQNR, by which quantized tensors are known."""
    stats = {"absmax": math.nan, "nonfinite": 3.0}
    run = RunRecord(Path("run"), scheme, config={"scheme": scheme})
    run.layers = {1: {"layer": {"weight": stats}}}
    assert run.quantized is quantized
