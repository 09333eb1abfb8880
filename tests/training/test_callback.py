"""MetisCallback inside the real Trainer: checks, refresh, health in the logs, resume."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import transformers

from metis_hf import (
    MetisCallback,
    MetisTrainer,
    get_metis_model,
    metis_layers,
    refresh,
)
from metis_hf.lab.health_page import findings
from metis_hf.lab.run_records import read_run
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE, RUN_FILE, describe_run
from training.trainer_tools import arguments, converted, lines, losses, one_block, rows, trainer

STATS = {
    "nonfinite",
    "stable_rank",
    "energy",
    "narrowing",
    "sqnr_db",
    "zeroed",
    "saturated",
}


@pytest.mark.parametrize(("scheme", "split"), [("bf16", False), ("nvidia", False), ("metis", True)])
def test_health_reaches_the_logs_and_the_file(tmp_path, scheme, split):
    model = converted(scheme, split_weight=split)
    made = trainer(tmp_path, model, [MetisCallback(health_interval=2)])
    made.train()
    measured = [e for e in made.state.log_history if "metis/nonfinite_tensors" in e]
    assert [entry["step"] for entry in measured] == [1, 2, 4]
    expected = STATS if scheme != "bf16" else STATS - {"sqnr_db", "zeroed", "saturated"}
    for tensor in ("weight", "activation", "gradient"):
        for group in ("q_proj", "down_proj"):
            prefix = f"metis/{tensor}/{group}/"
            found = {k.removeprefix(prefix) for k in measured[0] if k.startswith(prefix)}
            extra = {"orthogonality"} if split and tensor == "weight" else set()
            assert found == expected | extra
    assert all(isinstance(v, float) and math.isfinite(v) for k, v in measured[0].items()
               if k.startswith("metis/"))  # fmt: skip
    records = lines(tmp_path, HEALTH_FILE)
    assert [record["step"] for record in records] == [1, 2, 4]
    assert set(records[0]["layers"]) == {name for name, _ in metis_layers(model)}


class Console(transformers.TrainerCallback):
    """Notes what it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append({key: value for key, value in logs.items() if key.startswith("metis/")})


class Screen(Console, transformers.PrinterCallback):
    """In the place of Trainer's printer."""


def test_console_gets_a_summary_of_an_unbound_callback(tmp_path):
    made = trainer(tmp_path, converted("nvfp4"), [MetisCallback(health_interval=3)], max_steps=3)
    console = Screen()
    made.add_callback(console)
    made.train()
    names = {f"metis/{tensor}/sqnr_db" for tensor in ("weight", "activation", "gradient")}
    names |= {"metis/nonfinite_tensors"}
    assert [set(seen) for seen in console.seen[:3]] == [names, set(), names]
    record = made.state.log_history[0]
    groups = [v for k, v in record.items() if re.fullmatch(r"metis/weight/\w+/sqnr_db", k)]
    assert len(groups) == 7
    assert console.seen[0]["metis/weight/sqnr_db"] == pytest.approx(sum(groups) / 7)


@pytest.mark.parametrize("cls", [transformers.Trainer, MetisTrainer])
def test_reporters_get_all_and_the_console_a_summary(tmp_path, cls):
    """Whether the callback was given or MetisTrainer added it; a reporter may follow it."""
    reporter, console, later = Console(), Screen(), Console()
    given = [reporter] if cls is MetisTrainer else [MetisCallback(health_interval=1), reporter]
    made = cls(
        converted("nvfp4"), arguments(tmp_path, max_steps=1), train_dataset=rows(8), callbacks=given
    )
    callbacks = made.callback_handler.callbacks
    printers = (n for n, c in enumerate(callbacks) if isinstance(c, transformers.PrinterCallback))
    callbacks.insert(next(printers), console)
    next(one for one in callbacks if isinstance(one, MetisCallback)).bind(made)
    made.add_callback(later)
    made.train()
    assert len(reporter.seen[0]) > 100
    assert len(console.seen[0]) == 4
    assert later.seen[0] == reporter.seen[0]


def test_measuring_changes_nothing(tmp_path):
    """A run that measures at every step has the losses of one that never does."""
    runs = []
    for interval in (0, 1):
        callbacks = [MetisCallback(health_interval=interval)]
        runs.append(trainer(tmp_path / str(interval), converted(), callbacks, max_steps=2))
        runs[-1].train()
    assert losses(runs[0]) == losses(runs[1])


def test_refresh_keeps_the_function_and_resets_the_factors_moments(tmp_path):
    seen = {}

    class Spy(transformers.TrainerCallback):
        """Looks at the state just after the MetisCallback, which comes first in the list."""

        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            layer = next(layer for _, layer in metis_layers(model))
            u, _ = layer.weight_form.orthonormal(layer.weight_params())
            gram = u.T @ u - torch.eye(layer.rank)
            moments = {
                name: [v.abs().sum().item() for v in optimizer.state[param].values()]
                for name, param in layer.named_parameters()
            }
            seen[state.global_step] = gram.abs().max().item(), moments

    model = converted("bf16-split", refresh_interval=4)
    made = trainer(tmp_path, model, [MetisCallback(health_interval=0), Spy])
    made.train()
    assert seen[3][0] > 1e-4  # three Adam steps of 1e-3 leave the Stiefel manifold
    assert seen[4][0] < 1e-5
    before, after = seen[3][1], seen[4][1]
    for name in ("u", "s", "vh"):
        assert sum(before[name]) > 0
        assert sum(after[name]) == 0
    assert sum(after["weight_residual"]) > 0
    entry = next(e for e in made.state.log_history if "metis/refresh_drift" in e)
    assert entry["step"] == 4
    assert entry["metis/refresh_drift"] < 1e-6


def test_a_refresh_is_recorded_where_health_is_not_measured(tmp_path):
    """Each at its step, however seldom losses are logged, and of weights that train alone."""
    model = converted("bf16-split", refresh_interval=2)
    frozen, *names = (name for name, _ in metis_layers(model))
    model.get_submodule(frozen).requires_grad_(False)
    trainer(tmp_path, model, [MetisCallback(0)], logging_steps=4).train()
    run = read_run(tmp_path)
    assert run.refreshes == {step: {key: {} for key in names} for step in (2, 4)}
    said = f"refreshed 2 times, last at step 4, where {len(names)} weights were decomposed again"
    assert said in " ".join(findings(run))


def test_refresh_refuses_a_state_that_it_does_not_know():
    """An average of weights, as schedule-free optimizers keep, must not be cleared."""
    model = converted(split_weight=True)
    optimizer = torch.optim.AdamW(model.parameters())
    layer = next(layer for _, layer in metis_layers(model))
    u = layer.weight_params()[0]
    optimizer.state[u] = {"step": 3, "exp_avg": torch.ones_like(u), "z": u.detach().clone()}
    before = u.detach().clone()
    with pytest.raises(NotImplementedError, match=r"whose state has z: .*refresh_interval=0"):
        refresh(model, optimizer)
    assert torch.equal(u, before)
    del optimizer.state[u]["z"]
    refresh(model, optimizer)
    assert optimizer.state[u]["step"] == 0
    assert not optimizer.state[u]["exp_avg"].any()


def test_one_callback_in_two_trainers(tmp_path):
    callback, model = MetisCallback(health_interval=1), converted("nvfp4")
    for name in ("first", "second"):
        made = trainer(tmp_path / name, model, [callback], max_steps=1)
        callback.bind(made)
        assert made.callback_handler.callbacks[0] is callback
        callback.bind(made)
        assert made.callback_handler.callbacks.count(callback) == 1


def test_log_and_description_are_written_without_measurements(tmp_path):
    """What an earlier run left in the directory goes."""
    (tmp_path / HEALTH_FILE).write_text('{"step": 7, "layers": {}}\n')
    model = converted()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")  # 0 is never, even so
    trainer(tmp_path, model, [MetisCallback(health_interval=0)], max_steps=2).train()
    assert [entry["step"] for entry in lines(tmp_path, LOG_FILE)][:2] == [1, 2]
    assert json.loads((tmp_path / RUN_FILE).read_text())["config"]["scheme"] == "metis"
    assert (tmp_path / HEALTH_FILE).read_text() == ""


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adamax])
def test_an_optimizer_goes_on_with_new_factors_as_one_that_begins(kind, token_ids):
    """NAdam's product of momenta is 1 before the first step; all else is zero."""
    model = converted("bf16-split", rank=8)
    factors = next(layer for _, layer in metis_layers(model)).weight_params()[:-1]
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        optimizer.step()
    refresh(model, optimizer)
    copies = [torch.nn.Parameter(factor.detach().clone()) for factor in factors]
    fresh = kind(copies, lr=1e-2)
    for factor, copy in zip(factors, copies, strict=True):
        factor.grad = torch.randn_like(factor)
        copy.grad = factor.grad.clone()
    optimizer.step()
    fresh.step()
    assert all(map(torch.equal, factors, copies))


def test_scales_may_be_fixed_after_the_last_step(tmp_path):
    model = converted("w4a4")
    callback = MetisCallback(health_interval=0, freeze_scales=2)
    trainer(tmp_path, model, [callback], max_steps=2).train()
    assert all(layer.scales_frozen == 1 for _, layer in metis_layers(model))


def test_sequences_of_a_step_are_those_of_all_processes(tmp_path, monkeypatch):
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, use_cpu=True
    )
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    found = describe_run(get_metis_model(one_block()), None, args, transformers.TrainerState())
    assert found["sequences_per_step"] == 24
