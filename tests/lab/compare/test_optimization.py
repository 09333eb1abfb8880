"""Schedule, weight decay and initialization that an experiment sets beside TrainingArguments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers

from metis_hf import MetisConfig, get_metis_model
from metis_hf.lab.compare.optimization import ExperimentTrainer
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.training import initial_model, train
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.training.trainer import MetisTrainer

LAYERS, STEPS = 2, 14
MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
PEAK = 1.2e-3
TRAINING = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": PEAK,
    "weight_decay": 0.1, "adam_beta2": 0.95, "save_steps": 5, "use_cpu": True,
}  # fmt: skip
EXPERIMENT = Experiment(
    model=MODEL,
    training=TRAINING,
    sequence_length=8,
    health_interval=0,
    seed=0,
    **SIZES["quartet2-30m"].beyond,
)


def published_rate(step, steps):
    """Return the rate of a step: cosine from peak / 100 to the peak, then to peak / 10.

    The peak is where a tenth of the steps ends, counted from the first step as step 1.
    """
    warm = 0.1 * steps - 1
    if step <= warm:
        return PEAK / 100 + (PEAK - PEAK / 100) * (1 - math.cos(math.pi * step / warm)) / 2
    share = (step - warm) / (steps - 1 - warm)
    return PEAK / 10 + (PEAK - PEAK / 10) * (1 + math.cos(math.pi * share)) / 2


def trainer_of(experiment, folder, scheme=None, kind=ExperimentTrainer):
    model = initial_model(experiment, torch.device("cpu"))
    if scheme is not None:
        get_metis_model(model, MetisConfig(scheme=scheme))
    args = transformers.TrainingArguments(output_dir=str(folder), **experiment.training)
    first = (experiment,) if kind is ExperimentTrainer else ()
    return kind(*first, model=model, args=args)


class Rates(transformers.TrainerCallback):
    """The rate that each step was made with; ends the training after `last` steps."""

    def __init__(self, last=None):
        self.rates, self.last = [], last

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        self.rates.append(rate)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.last


def rates_of(trainer, steps):
    """Return the rates of a schedule of so many steps, as Trainer makes and steps it."""
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(steps)
    found = []
    for _ in range(steps):
        found.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("steps", [40, 37])
def test_rates_are_those_of_the_formula(steps, tmp_path):
    trainer = trainer_of(EXPERIMENT, tmp_path)
    rates = rates_of(trainer, steps)
    assert rates == pytest.approx([published_rate(s, steps) for s in range(steps)], rel=1e-9)
    assert rates[0] == pytest.approx(PEAK / 100)
    assert rates[-1] == pytest.approx(PEAK / 10)
    assert abs(rates.index(max(rates)) - 0.1 * steps) <= 1
    betas = {group["betas"] for group in trainer.optimizer.param_groups}
    assert betas == {(0.9, 0.95)}  # OneCycleLR would turn the first of them


def test_a_warm_up_of_a_single_step(tmp_path):
    """OneCycleLR by itself divides by the steps between its first and its last, which are none."""
    rates = rates_of(trainer_of(EXPERIMENT, tmp_path), 10)
    falling = [PEAK / 10 + 0.9 * PEAK * (1 + math.cos(math.pi * s / 9)) / 2 for s in range(1, 10)]
    assert rates == pytest.approx([PEAK / 100, *falling], rel=1e-6)


def test_shorter_runs_have_no_warm_up(tmp_path):
    for steps in (1, 9):
        rates = rates_of(trainer_of(EXPERIMENT, tmp_path), steps)
        assert rates == pytest.approx([published_rate(s, steps) for s in range(steps)], rel=1e-9)
        assert rates == sorted(rates, reverse=True)


def test_another_experiment_has_the_schedule_of_its_arguments(tmp_path):
    linear = replace(EXPERIMENT, one_cycle=None)
    rates = rates_of(trainer_of(linear, tmp_path), 8)
    assert rates == pytest.approx([PEAK * (1 - s / 8) for s in range(8)])


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path):
    """Its schedule too: the rates of both parts are those of one run."""
    tokens = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(1))
    from datasets import Dataset

    dataset = Dataset.from_dict({"input_ids": tokens.tolist()}).with_format("torch")
    variant = Variant.of_scheme("nvidia")

    def run(folder, last=None):
        seen = Rates(last)
        done = train(EXPERIMENT, variant, dataset, None, folder, lambda *_: None, [seen])
        return seen.rates, done.trainer.model.state_dict()

    whole, weights = run(tmp_path / "whole")
    first, _ = run(tmp_path / "parts", last=5)
    rest, resumed = run(tmp_path / "parts")
    assert (len(first), len(rest)) == (5, STEPS - 5)
    assert [*first, *rest] == whole
    assert whole == pytest.approx([published_rate(s, STEPS) for s in range(STEPS)])
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


PROJECTIONS = {
    f"model.layers.{layer}.{name}.weight"
    for layer in range(LAYERS)
    for name in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}


class TestDecay:
    def test_is_for_the_projections_alone(self, tmp_path):
        trainer = trainer_of(EXPERIMENT, tmp_path, "nvidia")
        assert set(trainer.get_decay_parameter_names(trainer.model)) == PROJECTIONS
        trainer.create_optimizer()
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        decayed = {
            names[id(p)]
            for group in trainer.optimizer.param_groups
            if group["weight_decay"]
            for p in group["params"]
        }
        assert decayed == PROJECTIONS

    def test_of_split_weights_is_as_ever(self, tmp_path):
        trainer = trainer_of(EXPERIMENT, tmp_path, "metis-paper")
        names = set(trainer.get_decay_parameter_names(trainer.model))
        usual = set(MetisTrainer.get_decay_parameter_names(trainer, trainer.model))
        assert usual - names == {"model.embed_tokens.weight", "lm_head.weight"}
        assert names < usual

    def test_of_a_tied_embedding(self, tmp_path):
        tied = replace(EXPERIMENT, model={**MODEL, "tie_word_embeddings": True})
        trainer = trainer_of(tied, tmp_path)
        assert set(trainer.get_decay_parameter_names(trainer.model)) == PROJECTIONS

    def test_of_other_experiments_is_that_of_trainer(self, tmp_path):
        plain = replace(EXPERIMENT, decay_embeddings=True)
        ours = trainer_of(plain, tmp_path)
        theirs = trainer_of(plain, tmp_path, kind=MetisTrainer)
        names = ours.get_decay_parameter_names(ours.model)
        assert names == theirs.get_decay_parameter_names(theirs.model)
        assert {"model.embed_tokens.weight", "lm_head.weight"} < set(names)


def test_residual_writers_start_smaller():
    """By 1 / sqrt(2 l); all other weights are those of the same seed without it."""
    wide = replace(EXPERIMENT, model={**MODEL, "hidden_size": 256, "num_hidden_layers": 3})
    scaled = initial_model(wide, torch.device("cpu")).state_dict()
    plain = initial_model(replace(wide, scaled_residuals=False), torch.device("cpu")).state_dict()
    changed = [name for name in plain if not torch.equal(plain[name], scaled[name])]
    assert changed == [n for n in plain if n.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(changed) == 2 * 3
    for name in changed:
        torch.testing.assert_close(scaled[name], plain[name] * 6**-0.5)
        assert scaled[name].std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.03)


def test_a_model_whose_residual_writers_are_not_known():
    gpt2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 1}
    with pytest.raises(ValueError, match="GPT2LMHeadModel is named o_proj or down_proj"):
        initial_model(replace(EXPERIMENT, model=gpt2), torch.device("cpu"))
