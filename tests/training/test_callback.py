"""MetisCallback inside the real Trainer: checks, refresh, health in the logs, resume."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import transformers
from conftest import VOCAB, llama

from metis_hf import (
    MetisCallback,
    MetisConfig,
    MetisTrainer,
    get_metis_model,
    metis_layers,
    refresh,
)
from metis_hf.lab.health_page import findings
from metis_hf.lab.run_records import read_run
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE, RUN_FILE, describe_run

STATS = {
    "nonfinite",
    "stable_rank",
    "energy",
    "narrowing",
    "sqnr_db",
    "zeroed",
    "saturated",
}


class Rows(torch.utils.data.Dataset):
    """Fixed random sequences."""

    def __init__(self, count=64, length=32):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def one_block():
    return llama(num_hidden_layers=1)


def trainer(tmp_path, model, callbacks, **changes):
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    } | changes
    optimizers = options.pop("optimizers", (None, None))
    made = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(tmp_path), **options),
        train_dataset=Rows(),
        callbacks=callbacks,
        optimizers=optimizers,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def measured_steps(directory):
    return [json.loads(line)["step"] for line in (directory / HEALTH_FILE).read_text().splitlines()]


@pytest.mark.parametrize("callback", [MetisCallback, MetisCallback(health_interval=100)])
def test_class_or_instance(tmp_path, callback):
    made = trainer(tmp_path, get_metis_model(one_block()), [callback], max_steps=2)
    made.train()
    assert len(losses(made)) == 2
    # The first step is always measured.
    assert "metis/weight/q_proj/stable_rank" in made.state.log_history[0]
    assert measured_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("scheme", "split"), [("bf16", False), ("nvidia", False), ("metis", False), ("metis", True)]
)
def test_health_reaches_the_logs_and_the_file(tmp_path, scheme, split):
    model = get_metis_model(one_block(), MetisConfig(scheme=scheme, split_weight=split))
    made = trainer(tmp_path, model, [MetisCallback(health_interval=3)])
    made.train()
    measured = [e for e in made.state.log_history if "metis/nonfinite_tensors" in e]
    assert [entry["step"] for entry in measured] == [1, 3, 6]
    expected = STATS if scheme != "bf16" else STATS - {"sqnr_db", "zeroed", "saturated"}
    for tensor in ("weight", "activation", "gradient"):
        for group in ("q_proj", "down_proj"):
            prefix = f"metis/{tensor}/{group}/"
            found = {k.removeprefix(prefix) for k in measured[0] if k.startswith(prefix)}
            extra = {"orthogonality"} if split and tensor == "weight" else set()
            assert found == expected | extra
    assert all(isinstance(v, float) and math.isfinite(v) for k, v in measured[0].items()
               if k.startswith("metis/"))  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / HEALTH_FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 3, 6]
    assert set(records[0]["layers"]) == {name for name, _ in metis_layers(model)}


class Console(transformers.TrainerCallback):
    """Notes what it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append({key: value for key, value in logs.items() if key.startswith("metis/")})


class Screen(Console, transformers.PrinterCallback):
    """In the place of Trainer's printer."""


@pytest.mark.parametrize("bound", [False, True])
def test_console_gets_a_summary(tmp_path, bound):
    callback = MetisCallback(health_interval=3)
    made = trainer(tmp_path, get_metis_model(one_block()), [callback], max_steps=3)
    console = Screen()
    made.add_callback(console)
    if bound:
        callback.bind(made)
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
    reporter = Console()
    given = [reporter] if cls is MetisTrainer else [MetisCallback(health_interval=1), reporter]
    made = cls(
        get_metis_model(one_block()),
        transformers.TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Rows(8),
        callbacks=given,
    )  # fmt: skip
    callbacks = made.callback_handler.callbacks
    printer = next(
        n for n, c in enumerate(callbacks) if isinstance(c, transformers.PrinterCallback)
    )
    console, later = Screen(), Console()
    callbacks.insert(printer, console)
    for callback in callbacks:
        if isinstance(callback, MetisCallback):
            callback.bind(made)
            break
    made.add_callback(later)
    made.train()
    assert len(reporter.seen[0]) > 100
    assert len(console.seen[0]) == 4
    assert later.seen[0] == reporter.seen[0]


def test_measuring_changes_nothing(tmp_path):
    """A run that measures at every step has the losses of one that never does."""
    runs = []
    for interval in (0, 1):
        torch.manual_seed(0)
        model = get_metis_model(one_block(), MetisConfig())
        callback = MetisCallback(health_interval=interval)
        made = trainer(tmp_path / str(interval), model, [callback], max_steps=4)
        made.train()
        runs.append(losses(made))
    assert runs[0] == runs[1]


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

    model = get_metis_model(one_block(), MetisConfig(refresh_interval=4, split_weight=True))
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
    """Each at its step, however seldom losses are logged."""
    model = get_metis_model(one_block(), MetisConfig(refresh_interval=2, split_weight=True))
    trainer(tmp_path, model, [MetisCallback(0)], max_steps=4, logging_steps=4).train()
    run = read_run(tmp_path)
    names = [name for name, _ in metis_layers(model)]
    assert run.refreshes == {step: {key: {} for key in names} for step in (2, 4)}
    said = f"refreshed 2 times, last at step 4, where {len(names)} weights were decomposed again"
    assert said in " ".join(findings(run))


def test_only_layers_that_are_decomposed_again_are_recorded(tmp_path):
    model = get_metis_model(one_block(), MetisConfig(refresh_interval=2, split_weight=True))
    frozen, *trained = (name for name, _ in metis_layers(model))
    model.get_submodule(frozen).requires_grad_(False)
    trainer(tmp_path, model, [MetisCallback(2)], max_steps=2).train()
    records = [json.loads(line) for line in (tmp_path / HEALTH_FILE).read_text().splitlines()]
    (refreshed,) = (record["refresh"] for record in records if "refresh" in record)
    assert list(refreshed) == trained


def test_refresh_refuses_a_state_that_it_does_not_know():
    """An average of weights, as schedule-free optimizers keep, must not be cleared."""
    model = get_metis_model(one_block(), MetisConfig(split_weight=True))
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
    callback, model = MetisCallback(health_interval=1), get_metis_model(one_block())
    for name in ("first", "second"):
        made = trainer(tmp_path / name, model, [callback], max_steps=1)
        callback.bind(made)
        assert made.callback_handler.callbacks[0] is callback
        callback.bind(made)
        assert made.callback_handler.callbacks.count(callback) == 1


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    """3 + 3 steps equal 6 steps, bit for bit: weights, moments, noise, refreshes, health file."""

    def run(directory, **changes):
        torch.manual_seed(0)
        config = MetisConfig(refresh_interval=2, forward_rounding="stochastic", split_weight=True)
        model = get_metis_model(one_block(), config)
        made = trainer(directory, model, [MetisCallback(health_interval=2)],
                       save_strategy="steps", save_steps=3, **changes)  # fmt: skip
        return made, model

    whole, model = run(tmp_path / "whole")
    whole.train()
    cut, _ = run(tmp_path / "cut")
    cut.train()
    resumed, resumed_model = run(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed_model.state_dict()[key]), key
    files = [(tmp_path / d / HEALTH_FILE).read_text() for d in ("whole", "cut")]
    assert files[0] == files[1]


def test_log_and_description_are_written_without_measurements(tmp_path):
    """What an earlier run left in the directory goes."""
    (tmp_path / HEALTH_FILE).write_text('{"step": 7, "layers": {}}\n')
    model = get_metis_model(one_block(), MetisConfig())
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")  # 0 is never, even so
    trainer(tmp_path, model, [MetisCallback(health_interval=0)]).train()
    steps = [json.loads(line)["step"] for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert steps[:2] == [1, 2]
    assert json.loads((tmp_path / RUN_FILE).read_text())["config"]["scheme"] == "metis"
    assert (tmp_path / HEALTH_FILE).read_text() == ""


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adamax, torch.optim.AdamW])
def test_an_optimizer_goes_on_with_new_factors_as_one_that_begins(kind, token_ids):
    """NAdam's product of momenta is 1 before the first step; all else is zero."""
    model = get_metis_model(one_block(), MetisConfig(scheme="bf16-split", rank=8))
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
    model = get_metis_model(one_block(), MetisConfig(scheme="w4a4"))
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
