"""The comparison of `make gpu`: equal steps, a batch that fits, trainings that go on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from on_gpu import compare
from on_gpu.context import Context
from on_gpu.record import Clock, CutOff, Entry, OutOfTime

from benchmarks.gpu_records import EndsAfter

LENGTH, ROWS = 16, 24
MODEL = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2,
         "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip


def comparison(work: Path, clock: Clock, **changes) -> compare.Comparison:
    options = {"schemes": ("bf16", "metis"), "train_minutes": 1.0, "quick": False, **changes}
    context = Context(
        device=torch.device("cpu"), clock=clock, entry=lambda name: Entry(), work=work, **options
    )
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    sequences = compare.Sequences(tokens.int())
    return compare.Comparison(MODEL, sequences, compare.Sequences(tokens[:2]), 4, context)


def trained(seconds: float, steps: int) -> SimpleNamespace:
    state = SimpleNamespace(global_step=steps)
    trainer = SimpleNamespace(state=state)
    return SimpleNamespace(trainer=trainer, seconds_per_step=seconds, parameters=7)


@pytest.mark.slow
def test_the_batch_is_divided_until_it_fits_and_all_train_equal_steps(monkeypatch, tmp_path):
    tried: list[tuple[str, int]] = []

    def train(self, scheme, steps, device_batch, run):
        tried.append((scheme, device_batch))
        if scheme == "metis" and device_batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return trained(2.0 if scheme == "metis" else 0.5, steps)

    monkeypatch.setattr(compare.Comparison, "train", train)
    found = compare.plan(comparison(tmp_path, Clock(None), train_minutes=5.5 / 60))
    assert tried == [("bf16", 4), ("metis", 4), ("metis", 2), ("metis", 1)]
    assert (found["device_batch"], found["sequences_per_step"]) == (1, 4)
    assert found["steps"] == 2  # 5.5 s for 2.5 s a step, and what evaluating takes
    assert found["bound_by"] == "the minutes for training"
    assert found["tokens"] == 2 * 4 * LENGTH
    found = compare.plan(comparison(tmp_path, Clock(None)))
    assert (found["steps"], found["bound_by"]) == (ROWS // 4, "the data, read once")


def test_a_new_plan_takes_up_no_checkpoint_of_another(monkeypatch, tmp_path):
    left = tmp_path / "compare" / "bf16" / "checkpoint-3"
    left.mkdir(parents=True)
    monkeypatch.setattr(compare.Comparison, "train", lambda *_: trained(1.0, 3))
    with pytest.raises(CutOff, match="bf16 was tried for 3 of 12 steps"):
        compare.plan(comparison(tmp_path, Clock(None)))
    assert left.exists()  # there is no other plan yet
    monkeypatch.setattr(
        compare.Comparison, "train", lambda self, name, steps, *_: trained(1.0, steps)
    )
    compare.plan(comparison(tmp_path, Clock(None)))
    assert not left.exists()


@pytest.mark.parametrize(("steps", "left"), [(10, ["plan", "bf16"]), (11, ["plan"])])
def test_schemes_of_other_steps_than_a_new_plan_s_go(monkeypatch, tmp_path, steps, left):
    """Measured again with --again; those of as many stay until they are measured anew."""
    planned = {"steps": 10, "seconds_per_step": {"bf16": 1.0}}
    entry = Entry(items={"plan": planned, "bf16": {"steps": 10}}).anew()
    made = comparison(tmp_path, Clock(None))
    context = Context(
        device=torch.device("cpu"), quick=True, clock=Clock(None), entry=lambda name: entry,
        work=tmp_path, data=tmp_path, schemes=("bf16",),
    )  # fmt: skip
    monkeypatch.setattr(compare, "open_data", lambda data, context: made)
    items = compare.compare(context)
    assert next(items).key == "plan"
    assert list(entry.items) == ["plan", "bf16"]  # until the plan is there
    entry.outdated.remove("plan")
    entry.items["plan"] = planned | {"steps": steps}
    assert next(items).key == "bf16"
    assert list(entry.items) == left


def test_a_scheme_that_this_call_has_no_time_for_does_not_begin(monkeypatch, tmp_path):
    entry = Entry(items={"plan": {"steps": 10, "seconds_per_step": {"bf16": 1.0, "metis": 100.0}}})
    made = comparison(tmp_path, Clock(5))
    context = Context(
        device=torch.device("cpu"), quick=True, clock=Clock(5), entry=lambda name: entry,
        work=tmp_path, data=tmp_path, schemes=("bf16", "metis"),
    )  # fmt: skip
    monkeypatch.setattr(compare, "open_data", lambda data, context: made)
    _, bf16, metis = list(compare.compare(context))
    assert bf16.seconds == pytest.approx(11.0)
    assert metis.seconds == 0.0  # 18 minutes fit no call of five: its checkpoint is taken up


@pytest.mark.slow
def test_a_training_that_the_minutes_ended_goes_on_as_if_nothing_had_been(tmp_path):
    planned = {"steps": 5, "device_batch": 2}
    whole = compare.run_scheme(comparison(tmp_path / "a", Clock(None)), "metis", planned)
    with pytest.raises(OutOfTime, match="2 of 5 steps are done"):
        compare.run_scheme(comparison(tmp_path / "b", EndsAfter(1)), "metis", planned)
    again = compare.run_scheme(comparison(tmp_path / "b", Clock(None)), "metis", planned)
    assert (whole["resumed"], again["resumed"]) == (False, True)
    assert again["curve"] == whole["curve"]
    assert again["loss"] == whole["loss"]
    assert not (tmp_path / "b" / "compare" / "metis").exists()  # 1.5 GB at 130M
