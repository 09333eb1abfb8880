"""Precision on a schedule: which steps are switched, and that a resumed run switches alike."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from conftest import llama
from design import cases
from peft import LoraConfig, get_peft_model

from metis_hf import MetisTrainer, PrecisionSchedule, metis_layers, set_precision
from training.precision_tools import KINDS, PASSES, converted, losses, trainer


def trained(directory, scheme, schedule=None):
    """The losses of a training run, and its model."""
    made = trainer(directory, converted(scheme), schedule)
    made.train()
    return losses(made), made.model


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    """The losses of a scheme without a schedule; the run is made once."""
    return functools.cache(lambda scheme: trained(tmp_path_factory.mktemp(scheme), scheme)[0])


@pytest.mark.parametrize("scheme", KINDS)
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

    by_hand, _ = trained(tmp_path / "hand", "metis", ByHand())
    for at in (2, 0.5):
        assert trained(tmp_path / str(at), "metis", PrecisionSchedule(at=at))[0] == by_hand, at


@pytest.mark.slow
@cases({"passes": PASSES}, rotated={"scheme": ["nvidia", "metis", "metis-paper"]})
def test_resume_across_the_switch_is_exact(scheme, passes, tmp_path):
    """4 steps with the switch after 2, cut after 1, 2 or 3: the same weights and losses."""

    def run(directory, **changes):
        return trainer(
            directory,
            converted(scheme),
            PrecisionSchedule(at=2, high_precision=passes),
            save_strategy="steps",
            save_steps=1,
            **changes,
        )

    whole = run(tmp_path)
    whole.train()
    for cut in (1, 2, 3):
        resumed = run(tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
        assert losses(resumed) == losses(whole), cut
        states = (resumed.model.state_dict(), whole.model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states)))
    # The checkpoints know what they were trained with.
    for cut, expected in ((1, ()), (2, ()), (3, passes), (4, passes)):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{cut}")
        assert loaded.config.quantization_config.high_precision == expected
        assert {layer.config.high_precision for _, layer in metis_layers(loaded)} == {expected}


def test_a_run_resumed_at_its_end_has_the_precision_of_its_last_step(tmp_path):
    """It makes no step, and what comes after the training is of the checkpoint."""

    def run():
        schedule = PrecisionSchedule(at=2)
        options = {"cls": MetisTrainer, "save_strategy": "steps", "save_steps": 2, "held_out": 4}
        return trainer(tmp_path, converted("nvidia"), schedule, **options)

    whole, again = run(), run()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.model.config.quantization_config.high_precision == ("forward",)
    assert again.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


def test_evaluation_before_the_first_step_has_its_precision(tmp_path):
    """Of a new run that of its first step, of a resumed one that of the last before it."""

    def run(place, **changes):
        options = {"save_strategy": "steps", "save_steps": 2, "held_out": 4, "eval_on_start": True}
        return trainer(tmp_path, converted("nvidia"), place, **options, **changes)

    def first(made):
        return next(e["eval_loss"] for e in made.state.log_history if "eval_loss" in e)

    new = run(PrecisionSchedule(until=3))
    exact = trainer(tmp_path, converted("bf16"), held_out=4).evaluate()["eval_loss"]
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
        tmp_path, model, PrecisionSchedule(at=2), save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, held_out=4,
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


def test_a_pass_that_the_schedule_does_not_name_stays(tmp_path):
    model = converted("nvidia", high_precision=("backward",))
    seen = []

    class Spy(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(set(next(metis_layers(model))[1].config.high_precision))

    made = trainer(tmp_path, model, PrecisionSchedule(at=2))
    made.add_callback(Spy)
    made.train()
    assert seen == [{"backward"}] * 2 + [{"forward", "backward"}] * 2


@pytest.mark.parametrize(
    ("at", "steps", "switch"), [(0.9, 100, 90), (0.5, 3, 2), (7, 100, 7), (1.0, 100, 1)]
)
def test_the_step_of_the_switch(at, steps, switch):
    schedule = PrecisionSchedule(at=at)
    assert [schedule.is_high(step, steps) for step in range(steps)] == (
        [False] * switch + [True] * (steps - switch)
    )
    schedule = PrecisionSchedule(until=at)  # and the last steps are quantized
    assert [schedule.is_high(step, steps) for step in range(steps)] == (
        [True] * switch + [False] * (steps - switch)
    )


def test_the_switch_is_late_if_nothing_else_is_said():
    schedule = PrecisionSchedule()
    assert [schedule.is_high(step, 20) for step in range(20)] == [False] * 18 + [True] * 2


def test_high_precision_in_the_middle(tmp_path):
    """Only the passes of those steps change, and a run resumed inside the part goes on in it."""
    seen = []

    class Spy(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(next(metis_layers(model))[1].config.high_precision)

    def run(**changes):
        made = trainer(
            tmp_path, converted("nvidia"), PrecisionSchedule(between=(1, 3)), **changes
        )  # fmt: skip
        made.add_callback(Spy)
        return made

    whole = run(save_strategy="steps", save_steps=1)
    whole.train()
    assert seen == [(), ("forward",), ("forward",), ()]
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen[4:] == [("forward",), ()]
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(("until", "at"), [(1, None), (1, 3), (0.25, 0.75)])
def test_high_precision_at_the_start(until, at, plain_losses, tmp_path):
    """The exact model's first loss, then four bits; a resumed run is the same to the bit."""

    def run(**changes):
        schedule = PrecisionSchedule(at=at, until=until, high_precision=PASSES[-1])
        return trainer(tmp_path, converted("nvidia"), schedule, **changes)

    whole = run(save_strategy="steps", save_steps=1)
    whole.train()
    exact, quantized = plain_losses("bf16"), plain_losses("nvidia")
    assert losses(whole)[0] == exact[0] != quantized[0]
    assert losses(whole)[1] != exact[1]
    ends = [layer.config.high_precision for _, layer in metis_layers(whole.model)]
    assert set(ends) == {() if at is None else PASSES[-1]}
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)


def high_steps(steps, **places):
    schedule = PrecisionSchedule(**places)
    return [step for step in range(steps) if schedule.is_high(step, steps)]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"between": (3, 5)}, [3, 4]),
        ({"between": [0.2, 0.5]}, [2, 3, 4]),
        ({"between": (0.2, 5)}, [2, 3, 4]),
        ({"between": (3, 5), "at": 0.9}, [3, 4, 9]),
        ({"between": (3, 5), "until": 1, "at": 8}, [0, 3, 4, 8, 9]),
        ({"between": (2, 5), "until": 3}, [0, 1, 2, 3, 4]),
        ({"between": (8, 20)}, [8, 9]),
        ({"between": (12, 20)}, []),
        ({"between": (0.5, 3)}, []),
        ({"until": 12, "at": 15}, list(range(10))),  # of a longer run
    ],
)
def test_the_steps_of_a_middle_part(places, expected):
    assert high_steps(10, **places) == expected


@pytest.mark.parametrize("between", [3, (3,), (1, 2, 3), "ab"])
def test_a_middle_part_has_two_ends(between):
    with pytest.raises(ValueError, match=r"between=.*; expected two steps, or shares"):
        PrecisionSchedule(between=between)


@pytest.mark.parametrize("between", [(5, 3), (0.3, 0.2), (4, 4)])
def test_a_middle_part_ends_after_it_begins(between):
    with pytest.raises(ValueError, match="expected the earlier of the two first"):
        PrecisionSchedule(between=between)


def test_parts_that_meet_leave_no_step():
    places = {"until": 3, "between": (2, 0.8), "at": 8}
    with pytest.raises(ValueError, match=r"until=3 and between=\(2, 0.8\) and at=8 of 10 steps"):
        high_steps(10, **places)
    places["at"] = 18
    assert high_steps(20, **places) == [*range(16), 18, 19]


@pytest.mark.parametrize("at", [0, -1, 2.5])
def test_schedule_at(at):
    with pytest.raises(ValueError, match=rf"at={at}; expected a step"):
        PrecisionSchedule(at=at)
    with pytest.raises(ValueError, match=rf"until={at}; expected a step"):
        PrecisionSchedule(until=at)
    with pytest.raises(ValueError, match=rf"between={at}; expected a step"):
        PrecisionSchedule(between=(at, 5))


def test_schedule_without_a_quantized_step():
    with pytest.raises(ValueError, match="leave no step quantized"):
        PrecisionSchedule(at=0.5, until=0.5).is_high(0, 100)


@pytest.mark.parametrize("passes", ["forward", (), ("upward",), ("forward", "upward")])
def test_schedule_passes(passes):
    with pytest.raises(ValueError, match=r"high_precision="):
        PrecisionSchedule(high_precision=passes)


def test_schedule_without_a_converted_layer(tmp_path):
    with pytest.raises(ValueError, match=r"no converted layer; call get_metis_model"):
        trainer(tmp_path, llama(), PrecisionSchedule()).train()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"at": 4}, "PrecisionSchedule(at=4): this run ends after 4 steps, so it never switches"),
        ({"until": 5}, "PrecisionSchedule(until=5): this run ends after 4 steps, so that no step"),
        ({"between": (4, 9)}, "PrecisionSchedule(between=(4, 9)): this run ends after 4 steps, so"),
        ({"between": (0.4, 0.6)}, "PrecisionSchedule(between=(0.4, 0.6)): this run ends after 4"),
        ({"between": (0.1, 0.99)}, "PrecisionSchedule(between=(0.1, 0.99)): this run ends after 4"),
        ({"at": 3, "until": 1}, None),
        ({"between": (1, 3)}, None),
    ],
)
def test_a_switch_behind_the_last_step_is_named(places, message, tmp_path, caplog):
    made = trainer(tmp_path, converted("nvidia"), PrecisionSchedule(**places))
    with caplog.at_level(logging.WARNING):
        made.train()
    said = [r.getMessage() for r in caplog.records if "PrecisionSchedule" in r.getMessage()]
    assert [text.startswith(message) for text in said] == [True] if message else not said


def test_a_resumed_run_records_a_switch_once(tmp_path):
    """Its model is built anew, in the precision of before the switch."""

    def run(**options):
        trainer(
            tmp_path, converted("nvfp4"), PrecisionSchedule(at=2), cls=MetisTrainer,
            save_strategy="steps", save_steps=3,
        ).train(**options)  # fmt: skip

    run()
    lines = (tmp_path / "metis_health.jsonl").read_text().splitlines()
    assert [entry["step"] for entry in map(json.loads, lines) if "switch" in entry] == [3]
    run(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    lines = (tmp_path / "metis_health.jsonl").read_text().splitlines()
    assert [entry["step"] for entry in map(json.loads, lines) if "switch" in entry] == [3]
