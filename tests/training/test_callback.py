"""MetisCallback inside the real Trainer: checks, refresh, health in the logs, resume."""

from __future__ import annotations

import json
import math

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
from training.trainer_tools import (
    arguments,
    converted,
    lines,
    losses,
    metis_values,
    one_block,
    records,
    rows,
    trainer,
)

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
    made = trainer(tmp_path, model, [MetisCallback(health_interval=2, health_details="kinds")])
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


@pytest.mark.parametrize(
    ("scheme", "left_out"), [("metis", ()), ("bf16", ("sqnr", "zero", "noise"))]
)
def test_six_means_over_all_layers_are_logged_by_default(tmp_path, scheme, left_out):
    """And no more; each is the mean of the figures that the health file has layer by layer."""
    made = trainer(tmp_path, converted(scheme), [MetisCallback(health_interval=1)], max_steps=1)
    made.train()
    found = metis_values(made.state.log_history[0])
    assert found.pop("metis/nonfinite_tensors") == 0
    ratio = found.pop("metis/noise/ratio", None)
    layers = lines(tmp_path, HEALTH_FILE)[0]["layers"].values()
    means = {}
    for name in ("weight/sqnr_db", "activation/sqnr_db", "gradient/sqnr_db",
                 "activation/stable_rank", "gradient/zeroed"):  # fmt: skip
        tensor, statistic = name.split("/")
        if scheme == "metis" or statistic == "stable_rank":
            means[f"metis/{name}"] = sum(one[tensor][statistic] for one in layers) / len(layers)
    assert found == pytest.approx(means)
    assert (ratio is None) == (scheme == "bf16")


class Console(transformers.TrainerCallback):
    """Notes what it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append({key: value for key, value in logs.items() if key.startswith("metis/")})


class Screen(Console, transformers.PrinterCallback):
    """In the place of Trainer's printer."""


@pytest.mark.parametrize("cls", [transformers.Trainer, MetisTrainer])
@pytest.mark.parametrize("details", [None, "kinds", "layers"])
def test_reporters_get_details_and_the_console_means(tmp_path, cls, details):
    """In a plain Trainer too; reporters stand before the callback, and may follow the console."""
    reporter, console, later = Console(), Screen(), Console()
    given = [reporter, MetisCallback(health_interval=2, health_details=details)]
    made = trainer(tmp_path, converted("nvfp4"), given, cls, max_steps=3)
    made.add_callback(console)
    made.add_callback(later)
    made.train()
    assert [len(seen) for seen in console.seen[:3]] == [7, 7, 0]
    assert len(reporter.seen[0]) > (100 if details else 6)
    assert later.seen == reporter.seen
    last = records(made)[1]
    assert reporter.seen[1] == metis_values(last)
    if details:
        assert ("metis/weight/q_proj/sqnr_db" in last) == (details == "kinds")
        assert ("metis/weight/model.layers.0.mlp.up_proj/sqnr_db" in last) == (details == "layers")


def test_a_callback_that_is_added_last_shows_one_bar(tmp_path, capsys):
    """Behind Trainer's own progress bar, which it goes before while the run begins."""
    made = transformers.Trainer(
        converted("nvfp4"), arguments(tmp_path, max_steps=1, disable_tqdm=False),
        train_dataset=rows(8),
    )  # fmt: skip
    made.add_callback(MetisCallback(health_interval=1, health_details="kinds"))
    made.train()
    shown = capsys.readouterr()
    assert shown.err.count("0/1 [") == 1
    assert "metis/weight/sqnr_db" in shown.out + shown.err
    assert "q_proj" not in shown.out + shown.err


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
    said = (
        f"refreshed 2 times, most recently at step 4, when {len(names)} weights were "
        "decomposed again"
    )
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
        made.train()
        assert made.callback_handler.callbacks[0] is callback
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
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    found = describe_run(get_metis_model(one_block()), None, args, transformers.TrainerState())
    assert found["sequences_per_step"] == 24
