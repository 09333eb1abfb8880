"""Precision on a schedule: which steps are switched, and that a resumed run switches alike."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import transformers
from conftest import llama
from peft import LoraConfig, get_peft_model
from tensors import assert_same

from metis_hf import MetisTrainer, PrecisionSchedule, metis_layers, set_precision
from training.trainer_tools import EachStep, converted, lines, losses, trainer

BOTH = ("forward", "backward")


def trained(directory, scheme, *callbacks):
    """The losses of a training run, and its model."""
    made = trainer(directory, converted(scheme), callbacks)
    made.train()
    return losses(made), made.model


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    """The losses of a scheme without a schedule; the run is made once."""
    return functools.cache(lambda scheme: trained(tmp_path_factory.mktemp(scheme), scheme)[0])


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "metis-paper", "smoothquant"])
def test_schedule_in_training(scheme, plain_losses, tmp_path):
    """Before the switch the losses of a run without a schedule, and others after it."""
    plain = plain_losses(scheme)
    scheduled, model = trained(tmp_path, scheme, PrecisionSchedule(at=2))
    assert scheduled[:2] == plain[:2]
    assert (scheduled[2:] == plain[2:]) == scheme.startswith("bf16")
    assert all(layer.config.high_precision == ("forward",) for _, layer in metis_layers(model))


def test_schedule_equals_a_switch_by_hand(tmp_path):
    class ByHand(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                set_precision(model, high_precision=["forward"])

    by_hand, _ = trained(tmp_path / "hand", "nvidia", ByHand())
    assert trained(tmp_path / "schedule", "nvidia", PrecisionSchedule(at=0.5))[0] == by_hand


def test_a_run_resumed_at_its_end_has_the_precision_of_its_last_step(tmp_path):
    """It makes no step, and what comes after the training is of the checkpoint."""

    def run():
        callbacks, options = [PrecisionSchedule(at=2)], {"save_strategy": "steps", "save_steps": 2}
        return trainer(tmp_path, converted("nvidia"), callbacks, MetisTrainer, **options)

    whole, again = run(), run()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.model.config.quantization_config.high_precision == ("forward",)
    assert again.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


def test_evaluation_before_the_first_step_has_its_precision(tmp_path):
    """Of a new run that of its first step, of a resumed one that of the last before it."""

    def run(place, **changes):
        options = {"save_strategy": "steps", "save_steps": 2, "eval_on_start": True}
        return trainer(tmp_path, converted("nvidia"), [place], **options, **changes)

    def first(made):
        return next(e["eval_loss"] for e in made.state.log_history if "eval_loss" in e)

    new = run(PrecisionSchedule(until=3))
    exact = trainer(tmp_path, converted("bf16")).evaluate()["eval_loss"]
    new.train()
    assert first(new) == exact
    whole = run(PrecisionSchedule(at=3), eval_strategy="steps", eval_steps=1)
    whole.train()
    resumed = run(PrecisionSchedule(at=3))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    at_two = [e["eval_loss"] for e in whole.state.log_history if "eval_loss" in e][2]
    found = [e["eval_loss"] for e in resumed.state.log_history if "eval_loss" in e]
    assert found[-1] == at_two


class FirstIsBest(transformers.TrainerCallback):
    """Makes the first evaluation the best one."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_step"] = state.global_step


def best_of(tmp_path, model, **options):
    """Train past a switch at step 2, and go back to the weights of step 1."""
    made = trainer(
        tmp_path, model, [PrecisionSchedule(at=2)], save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="step", greater_is_better=False, **options,
    )  # fmt: skip
    made.add_callback(FirstIsBest)
    made.train()
    assert made.state.best_model_checkpoint.endswith("-1")
    first = next(e["eval_loss"] for e in made.state.log_history if "eval_loss" in e)
    assert not next(metis_layers(model))[1].config.high_precision
    assert made.evaluate()["eval_loss"] == first


@pytest.mark.parametrize("adapters", [False, True])
def test_the_best_checkpoint_has_its_precision(adapters, tmp_path):
    """Trainer loads its weights alone; the model would stay in the last step's precision."""
    model = converted("nvidia")
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    best_of(tmp_path, model)


@pytest.mark.parametrize("cls", [MetisTrainer, transformers.Trainer])
def test_a_best_checkpoint_without_a_config(cls, tmp_path, monkeypatch):
    """The shards of FSDP2 have none beside them: Trainer's state tells, or the step."""

    def without(self, output_dir=None, **kwargs):
        save(self, output_dir, **kwargs)
        (Path(output_dir) / "config.json").unlink()

    save = transformers.Trainer._save
    monkeypatch.setattr(transformers.Trainer, "_save", without)
    best_of(tmp_path, converted("nvidia"), cls=cls)


def passes_of_steps():
    """A callback that notes which passes were in high precision."""
    return EachStep(lambda model: next(metis_layers(model))[1].config.high_precision)


def test_a_pass_that_the_schedule_does_not_name_stays(tmp_path):
    model, spy = converted("nvidia", high_precision=("backward",)), passes_of_steps()
    trainer(tmp_path, model, [PrecisionSchedule(at=2), spy]).train()
    assert spy.seen == [("backward",)] * 2 + [("forward", "backward")] * 2


def test_high_precision_in_the_middle(tmp_path):
    """Only the passes of those steps change, and a run resumed inside the part goes on in it."""
    spy = passes_of_steps()

    def run(**changes):
        callbacks = [PrecisionSchedule(between=(1, 3)), spy]
        return trainer(tmp_path, converted("nvidia"), callbacks, **changes)

    whole = run(save_strategy="steps", save_steps=1)
    whole.train()
    assert spy.seen == [(), ("forward",), ("forward",), ()]
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert spy.seen[4:] == [("forward",), ()]
    assert losses(resumed) == losses(whole)
    assert_same(resumed.model, whole.model)
    for step, expected in enumerate(spy.seen[:4], start=1):  # a checkpoint loads as it was trained
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert loaded.config.quantization_config.high_precision == expected
        assert {layer.config.high_precision for _, layer in metis_layers(loaded)} == {expected}


@pytest.mark.parametrize(("until", "at"), [(1, None), (0.25, 0.75)])
def test_high_precision_at_the_start(until, at, plain_losses, tmp_path):
    """The exact model's first loss, then four bits; a resumed run is the same to the bit."""

    def run(**changes):
        schedule = PrecisionSchedule(at=at, until=until, high_precision=BOTH)
        return trainer(tmp_path, converted("nvidia"), [schedule], **changes)

    whole = run(save_strategy="steps", save_steps=1)
    whole.train()
    exact, quantized = plain_losses("bf16"), plain_losses("nvidia")
    assert losses(whole)[0] == exact[0] != quantized[0]
    assert losses(whole)[1] != exact[1]
    ends = [layer.config.high_precision for _, layer in metis_layers(whole.model)]
    assert set(ends) == {() if at is None else BOTH}
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)


def high_steps(steps, **places):
    schedule = PrecisionSchedule(**places)
    return [step for step in range(steps) if schedule.is_high(step, steps)]


@pytest.mark.parametrize(
    ("steps", "places", "expected"),
    [
        (20, {}, [18, 19]),
        (100, {"at": 0.9}, list(range(90, 100))),
        (3, {"until": 0.5}, [0, 1]),
        (100, {"until": 7}, list(range(7))),
        (10, {"at": 1.0}, list(range(1, 10))),
        (10, {"between": (3, 5)}, [3, 4]),
        (10, {"between": [0.2, 5], "at": 0.9}, [2, 3, 4, 9]),
        (10, {"between": (3, 5), "until": 1, "at": 8}, [0, 3, 4, 8, 9]),
        (10, {"between": (2, 5), "until": 3}, [0, 1, 2, 3, 4]),
        (10, {"between": (8, 20)}, [8, 9]),
        (10, {"between": (12, 20)}, []),
        (10, {"between": (0.5, 3)}, []),
        (10, {"until": 12, "at": 15}, list(range(10))),  # of a longer run
    ],
)
def test_the_steps_in_high_precision(steps, places, expected):
    assert high_steps(steps, **places) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"between": 3}, "between=3; expected two steps, or shares"),
        ({"between": (1, 2, 3)}, "expected two steps"),
        ({"between": "ab"}, "expected two steps"),
        ({"between": (5, 3)}, "expected the earlier step first"),
        ({"between": (0.2, 0.2)}, "expected the earlier step first"),
        ({"between": (0, 5)}, "between=0; expected a step"),
        ({"at": -1}, "at=-1; expected a step"),
        ({"until": 2.5}, "until=2.5; expected a step"),
        ({"high_precision": "forward"}, "high_precision='forward'"),
        ({"high_precision": ()}, "high_precision="),
        ({"high_precision": ("forward", "upward")}, "high_precision="),
    ],
)
def test_options_that_make_no_schedule(options, message):
    with pytest.raises(ValueError, match=message):
        PrecisionSchedule(**options)


def test_parts_that_meet_leave_no_step():
    with pytest.raises(ValueError, match="leave none of 100 steps quantized"):
        high_steps(100, at=0.5, until=0.5)
    places = {"until": 3, "between": (2, 0.8), "at": 8}
    with pytest.raises(
        ValueError, match=r"until=3 and between=\(2, 0.8\) and at=8 leave none of 10 steps"
    ):
        high_steps(10, **places)
    places["at"] = 18
    assert high_steps(20, **places) == [*range(16), 18, 19]


def test_schedule_without_a_converted_layer(tmp_path):
    with pytest.raises(ValueError, match=r"no converted layer; call get_metis_model"):
        trainer(tmp_path, llama(), [PrecisionSchedule()]).train()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"at": 4}, "PrecisionSchedule(at=4): this run ends after 4 steps, so it never switches"),
        ({"until": 5}, "PrecisionSchedule(until=5): this run ends after 4 steps, so no step"),
        ({"between": (4, 9)}, "PrecisionSchedule(between=(4, 9)): this run ends after 4 steps, so"),
        ({"between": (0.4, 0.6)}, "PrecisionSchedule(between=(0.4, 0.6)): this run ends after 4"),
        ({"at": 3, "until": 1}, None),
        ({"between": (1, 3)}, None),
    ],
)
def test_a_switch_behind_the_last_step_is_named(places, message, tmp_path, caplog):
    made = trainer(tmp_path, converted("bf16"), [PrecisionSchedule(**places)])
    with caplog.at_level(logging.WARNING):
        made.train()
    said = [r.getMessage() for r in caplog.records if "PrecisionSchedule" in r.getMessage()]
    assert [text.startswith(message) for text in said] == [True] if message else not said


def test_a_resumed_run_records_a_switch_once(tmp_path):
    """Its model is built anew, in the precision of before the switch."""
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        made = trainer(
            tmp_path, converted("nvfp4"), [PrecisionSchedule(at=2)], MetisTrainer,
            save_strategy="steps", save_steps=3,
        )  # fmt: skip
        made.train(resume_from_checkpoint=checkpoint)
        records = lines(tmp_path, "metis_health.jsonl")
        assert [record["step"] for record in records if "switch" in record] == [3]
