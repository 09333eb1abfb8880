"""MetisTrainer, and converted models under what transformers' Trainer and accelerate offer."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from accelerate import Accelerator
from design import cases, named, some_slow
from layers.layer_tools import FP4_SCHEMES, layer_of, of_each_kind
from schemes.test_stateful_schemes import OURS as STATEFUL
from tensors import assert_same

from metis_hf import (
    MetisCallback,
    MetisTrainer,
    PrecisionSchedule,
    metis_layers,
)
from metis_hf.training.run_record import HEALTH_FILE, RUN_FILE
from training.recomputation import is_recomputed, recomputed
from training.trainer_tools import (
    converted,
    lines,
    losses,
    metis_values,
    records,
    trainer,
)

FP4 = of_each_kind(FP4_SCHEMES)
# Direct, split, with state: what differs in the loop. `--full` runs all schemes.
SHORT = named(FP4_SCHEMES, ("nvfp4", "metis", "metis-paper", "smoothquant"))
# One fp32 rounding a step and operand.
DECAY_TOLERANCE = 1e-6
# Losses of about 5.5 nats in another order of fp32 sums, after a few steps of Adam.
FP32_LOSS = 1e-4
# bf16 has 8 bits: operands and products are off by 2^-9 each, which a mean over tokens averages.
BF16_LOSS = 2**-8


class TestWeightDecay:
    @pytest.mark.parametrize("scheme", ["bf16-split", "metis"])
    def test_decays_the_represented_weight(self, scheme, tmp_path):
        """k steps of decay alone: W (1 - lr wd)^k, the low-rank part included."""
        k, lr, wd = 5, 1e-2, 0.5
        model = converted(scheme, split_weight=True)
        made = trainer(tmp_path, model, cls=MetisTrainer, learning_rate=lr, weight_decay=wd)
        made.create_optimizer()
        groups = made.optimizer.param_groups
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        for name, param in model.named_parameters():
            kind = name.rpartition(".")[2]
            assert (id(param) in decayed) == (kind not in ("u", "vh") and "norm" not in name), name
        before = {name: self.parts(layer) for name, layer in metis_layers(model)}
        for _ in range(k):
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            made.optimizer.step()
        shrink = (1 - lr * wd) ** k
        for name, layer in metis_layers(model):
            for old, new in zip(before[name], self.parts(layer)):
                assert (new - shrink * old).abs().max() <= DECAY_TOLERANCE * old.abs().max()

    @staticmethod
    def parts(layer):
        """(W, its low-rank part), [o i] each."""
        weight = layer.weight.detach().clone()
        return weight, weight - layer.weight_residual.detach()


@cases({"scheme": ["bf16-split", *SHORT]}, rotated={"accumulation": [1, 2]})
def test_accelerate_loop_equals_trainer(scheme, accumulation, tmp_path):
    """Accelerator().prepare, accumulation and clipping by hand: Trainer's weights, bit for bit."""
    clip = 0.05  # below every gradient norm here
    made = trainer(
        tmp_path,
        converted(scheme),
        max_steps=2,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=clip,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
    )
    made.train()
    assert all(entry["grad_norm"] > clip for entry in records(made))

    model = converted(scheme).train()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = iter(made.get_train_dataloader())
    found = []
    for _ in range(2):
        total = 0.0
        for _ in range(accumulation):
            loss = model(**next(batches)).loss / accumulation
            accelerator.backward(loss)
            total += loss.item()
        accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    assert found == pytest.approx(losses(made), abs=1e-6)
    assert_same(model, made.model)


def test_accumulation_gives_the_losses_of_the_whole_batch(tmp_path):
    """Without quantizers; those see one micro-batch at a time, so that FP4 differs slightly."""
    whole = trainer(tmp_path, converted("bf16-split"), per_device_train_batch_size=4)
    parts = trainer(tmp_path, converted("bf16-split"), gradient_accumulation_steps=2)
    for made in (whole, parts):
        made.train()
    assert losses(parts) == pytest.approx(losses(whole), abs=FP32_LOSS)


@cases({"scheme": SHORT}, rotated={"reentrant": [True, False]})
def test_activation_checkpointing_changes_nothing(scheme, reentrant, tmp_path):
    """Recomputed passes draw the noise of the original: losses and weights bit for bit."""
    plain = trainer(tmp_path, converted(scheme), max_steps=2)
    checkpointed = trainer(
        tmp_path,
        converted(scheme),
        max_steps=2,
        **recomputed(use_reentrant=reentrant),
    )
    plain.train()
    checkpointed.train()
    assert is_recomputed(checkpointed.model)
    assert losses(checkpointed) == losses(plain)
    assert_same(checkpointed.model, plain.model)


@pytest.mark.parametrize("scheme", ["nvfp4", "metis-paper", "smoothquant"])
def test_bf16_autocast(scheme, tmp_path):
    """fp32 weights and moments, bf16 GEMMs, losses near those of fp32."""
    plain = trainer(tmp_path, converted(scheme, forward_rounding="nearest"))
    mixed = trainer(tmp_path, converted(scheme, forward_rounding="nearest"), bf16=True)
    for made in (plain, mixed):
        made.train()
    assert {param.dtype for param in mixed.model.parameters()} == {torch.float32}
    assert losses(mixed) != losses(plain)
    assert losses(mixed) == pytest.approx(losses(plain), rel=BF16_LOSS)


@pytest.mark.parametrize("scheme", SHORT)
def test_fp16_autocast(scheme, token_ids):
    """By torch's autocast: accelerate's fp16 wants an accelerator."""
    model = converted(scheme).train()
    with torch.autocast("cpu", torch.float16):
        out = model(input_ids=token_ids, labels=token_ids)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    for name, param in model.named_parameters():
        assert param.grad.dtype is torch.float32
        assert bool(torch.isfinite(param.grad).all()), name


@pytest.mark.slow
def test_auto_find_batch_size(tmp_path):
    """The first attempt runs out of memory in a measured step; the second starts clean."""
    model = converted()
    tried = []

    def refuse_large(block, args):
        rows = args[0].shape[0]
        tried.append(rows)
        if rows > 2:
            raise RuntimeError("CUDA out of memory.")

    handle = model.model.layers[0].register_forward_pre_hook(refuse_large)
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    made = trainer(tmp_path, model, [MetisCallback(health_interval=1)], **options)
    made.train()
    handle.remove()
    assert tried[0] == 4
    assert tried[-1] <= 2
    assert len(losses(made)) == 2
    assert all(metis_values(entry) for entry in records(made))
    assert [record["step"] for record in lines(tmp_path, HEALTH_FILE)] == [1, 2]
    assert not any(layer._forward_hooks for _, layer in metis_layers(model))
    assert json.loads((tmp_path / RUN_FILE).read_text())["sequences_per_step"] == tried[-1]


def test_nothing_of_an_interrupted_run_is_in_the_next(tmp_path):
    """Not the figures of its measured step, as those of another."""

    class Interrupt(transformers.TrainerCallback):
        raised = False

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3 and not self.raised:
                self.raised = True
                raise KeyboardInterrupt

    callbacks = [MetisCallback(health_interval=4), Interrupt()]
    made = trainer(tmp_path, converted("nvfp4"), callbacks, save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [record["step"] for record in lines(tmp_path, HEALTH_FILE)] == [1, 4]


def test_an_unlogged_refresh_of_one_run_is_not_in_the_next(tmp_path):
    model = converted("bf16-split", refresh_interval=3)
    callbacks = [MetisCallback(health_interval=0)]
    made = trainer(tmp_path, model, callbacks, max_steps=3, logging_steps=2)
    made.train()
    made.train()
    first = next(entry for entry in made.state.log_history if "loss" in entry)
    assert first["step"] == 2
    assert "metis/refresh_drift" not in first


def test_an_optimizer_that_a_refresh_refuses_is_refused_after_one_step(tmp_path):
    model = converted("bf16-split", refresh_interval=100)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-4)
    callbacks = [MetisCallback(health_interval=0)]
    made = trainer(tmp_path, model, callbacks, optimizer=optimizer, max_steps=200)
    with pytest.raises(NotImplementedError, match="refresh with Rprop, whose state has"):
        made.train()
    assert made.state.global_step == 1


# test_stateful_schemes resumes the others, within a window of steps.
STATELESS = [scheme for scheme in FP4 if scheme not in STATEFUL]


@pytest.mark.parametrize("scheme", some_slow(STATELESS, ["metis-paper", "nvfp4", "quartet2"]))
def test_resume_is_exact(scheme, tmp_path):
    """2 + 2 steps equal 4: weights, moments, noise, refreshes and a switch of precision."""
    interval = int(layer_of(scheme)[1].scheme.weight.is_split)

    def run():
        model = converted(scheme, refresh_interval=interval, forward_rounding="stochastic")
        callbacks = [MetisCallback(health_interval=2), PrecisionSchedule(at=3)]
        return trainer(tmp_path, model, callbacks, save_strategy="steps", save_steps=2)

    whole = run()
    whole.train()
    health = (tmp_path / HEALTH_FILE).read_text()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert records(resumed) == records(whole)
    assert (tmp_path / HEALTH_FILE).read_text() == health
    assert_same(resumed.model, whole.model)
    moments = [made.optimizer.state_dict()["state"] for made in (whole, resumed)]
    for state, other in zip(*(m.values() for m in moments)):
        assert all(torch.equal(state[key], other[key]) for key in state)


def test_a_run_at_its_end_makes_no_further_step(tmp_path):
    """Trainer would: it asks for the last step after a step."""
    options = {"cls": MetisTrainer, "save_strategy": "steps", "save_steps": 4}
    whole = trainer(tmp_path, converted("nvfp4"), **options)
    whole.train()
    again = trainer(tmp_path, converted("nvfp4"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 4
    assert losses(again) == losses(whole)
    assert_same(again.model, whole.model)


def test_load_best_model_at_end(tmp_path):
    made = trainer(
        tmp_path, converted("bf16-split"), [MetisCallback(health_interval=0)],
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, learning_rate=3.0, save_total_limit=2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    made.train()
    evaluations = {e["step"]: e["eval_loss"] for e in made.state.log_history
                   if "eval_loss" in e}  # fmt: skip
    best = min(evaluations, key=evaluations.get)
    assert best < 4, "a learning rate that ruins the model makes the last step the worst"
    assert made.evaluate()["eval_loss"] == evaluations[best]
    folder = tmp_path / f"checkpoint-{best}"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert_same(loaded, made.model)
