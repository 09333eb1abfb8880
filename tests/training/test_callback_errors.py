"""What MetisCallback refuses, and what it says of NaN and of layers that nothing calls."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, DistributedType, PartialState
from peft import LoraConfig, get_peft_model

from metis_hf import (
    MetisCallback,
    MetisConfig,
    MetisLinear,
    MetisTrainer,
    get_metis_model,
    metis_layers,
    refresh,
)
from metis_hf.training.run_record import HEALTH_FILE
from metis_hf.training.start_checks import check_optimizer
from training.trainer_tools import converted, lines, losses, one_block, trainer


class TestErrors:
    def test_unconverted_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"no converted layer.*get_metis_model"):
            trainer(tmp_path, one_block(), [MetisCallback]).train()

    def test_converted_after_the_optimizer(self, tmp_path):
        model = one_block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        get_metis_model(model, MetisConfig(split_weight=True))
        made = trainer(tmp_path, model, [MetisCallback], optimizer=optimizer)
        with pytest.raises(ValueError, match=r"does not own .*q_proj.u.*after the optimizer"):
            made.train()

    def test_an_optimizer_that_steps_inside_backward(self):
        from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

        model = one_block()
        with pytest.raises(NotImplementedError, match=r"inside the backward pass.*_layerwise"):
            check_optimizer(dict(metis_layers(model)), LayerWiseDummyOptimizer())

    def test_an_optimizer_of_a_part_of_the_model(self, tmp_path):
        """What it leaves out has to be frozen: the message says that too."""
        model = converted("nvfp4")
        part = [param for name, param in model.named_parameters() if "q_proj" in name]
        optimizer = torch.optim.AdamW(part, lr=1e-3)
        made = trainer(tmp_path, model, [MetisCallback], optimizer=optimizer)
        with pytest.raises(ValueError, match=r"k_proj.weight.*freeze the rest.*requires_grad_"):
            made.train()
        for param in model.parameters():
            param.requires_grad_(any(param is one for one in part))
        trainer(tmp_path, model, [MetisCallback(0)], optimizer=optimizer, max_steps=1).train()

    def test_refresh_under_deepspeed_is_refused(self, tmp_path, monkeypatch):
        """Its fp32 master weights would overwrite refreshed ones at the next step."""
        model = converted(split_weight=True)
        made = trainer(tmp_path, model, [MetisCallback(refresh_interval=2)])
        shared = AcceleratorState._shared_state
        monkeypatch.setitem(shared, "distributed_type", DistributedType.DEEPSPEED)
        callback = made.callback_handler.callbacks[-1]
        assert isinstance(callback, MetisCallback)
        with pytest.raises(NotImplementedError, match=r"refresh_interval=2.*DeepSpeed"):
            callback.on_train_begin(made.args, made.state, made.control, model=made.model)

    def test_fp8_of_accelerate_is_refused(self, tmp_path, monkeypatch):
        made = trainer(tmp_path, converted(), [MetisCallback])
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp8")
        with pytest.raises(NotImplementedError, match=r"mixed_precision=fp8.*bf16"):
            made.train()

    def test_a_device_without_fp64_is_refused(self, tmp_path, monkeypatch):
        made = trainer(tmp_path, converted(), [MetisCallback])
        for state in (PartialState, AcceleratorState):
            monkeypatch.setitem(state._shared_state, "device", torch.device("mps"))
        callback = made.callback_handler.callbacks[-1]
        with pytest.raises(NotImplementedError, match=r"Trainer runs on mps.*use_cpu=True"):
            callback.on_train_begin(made.args, made.state, made.control, model=made.model)

    def test_refresh_of_frozen_weights(self, tmp_path):
        """Under adapters the base stays: a config's interval is left out, one asked for refused."""
        config = MetisConfig(scheme="metis", split_weight=True, refresh_interval=1)
        base = get_metis_model(one_block(), config)
        before = {name: value.clone() for name, value in base.state_dict().items()}
        model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
        trainer(tmp_path, model, [MetisCallback(0)], max_steps=2).train()
        after = {k.replace(".base_layer", ""): v for k, v in base.state_dict().items()}
        assert all(torch.equal(after[name], value) for name, value in before.items())
        with pytest.raises(ValueError, match="all split weights of this model are frozen"):
            trainer(tmp_path, model, [MetisCallback(refresh_interval=1)]).train()

    def test_refresh_of_one_stored_matrix(self, tmp_path):
        """Nothing is there to decompose, and asking for it is an error before any step."""
        message = r".*no layer of this model has them \(scheme 'metis' .*split_weight=True"
        for model, callback in (
            (converted(refresh_interval=2), MetisCallback()),
            (converted(), MetisCallback(2, 2)),
        ):
            made = trainer(tmp_path, model, [callback])
            with pytest.raises(ValueError, match="^refresh_interval=2 " + message):
                made.train()
            assert made.state.global_step == 0
            with pytest.raises(ValueError, match=r"^refresh\(\) " + message):
                refresh(model)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"health_interval": -1}, r"health_interval=-1; expected a whole number of steps >= 0"),
            ({"refresh_interval": 0.1}, r"refresh_interval=0.1; expected a whole number"),
            ({"freeze_scales": 0}, r"freeze_scales=0; expected a whole number of steps >= 1"),
        ],
    )
    def test_no_number_of_steps(self, option, message):
        with pytest.raises(ValueError, match=message):
            MetisCallback(**option)

    def test_scales_that_would_never_be_fixed(self, tmp_path):
        model = converted("w4a4")
        made = trainer(tmp_path, model, [MetisCallback(freeze_scales=5)])
        with pytest.raises(
            ValueError, match="freeze_scales=5, but the run has 4 steps: scales would never"
        ):
            made.train()

    def test_compiling_a_model_says_that_it_takes_long(self, tmp_path, caplog):
        """Before the first step, which shows nothing until it is done."""
        callback = MetisCallback(health_interval=0)
        made = trainer(tmp_path, converted(), [callback])
        for compiles in (False, True):
            made.args.torch_compile = compiles
            callback.on_train_begin(made.args, made.state, made.control, model=made.model)
            assert ("first step takes a long time" in caplog.text) == compiles
        assert "7 quantized layers" in caplog.text

    def test_non_finite_activation_is_shown_and_named(self, tmp_path, caplog):
        """The loss is NaN in the logs, the health log names the layer and has the next step too."""
        model = converted(split_weight=True)
        layer = model.model.layers[0].mlp.up_proj
        assert isinstance(layer, MetisLinear)
        layer.weight_residual.data[0, 0] = float("inf")
        made = trainer(tmp_path, model, [MetisCallback(health_interval=100)], max_steps=2)
        made.train()
        assert math.isnan(losses(made)[0])
        assert made.state.log_history[0]["metis/nonfinite_tensors"] > 0
        assert "step 1: NaN or inf in model.layers.0.mlp.down_proj (activation)," in caplog.text
        assert [record["step"] for record in lines(tmp_path, HEALTH_FILE)] == [1, 2]


class FusedHead:
    """Computes the loss of a trainer from the head's weight, as fused losses do."""

    def compute_loss(self, model, inputs, **_):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        hidden = inner.model(inputs["input_ids"]).last_hidden_state
        logits = F.linear(hidden, inner.lm_head.weight)
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


class PlainFused(FusedHead, transformers.Trainer):
    pass


class MetisFused(FusedHead, MetisTrainer):
    pass


class CallsBefore(transformers.TrainerCallback):
    """Calls every layer in a step, without gradients: generation and evaluation do so."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model(torch.arange(8)[None])


HEAD = {"target_modules": ["lm_head", "q_proj"]}
UNCALLED = "the first step called 1 of 2 converted layers, but not lm_head."


class TestUncalledLayers:
    @pytest.mark.parametrize("health_interval", [0, 1])
    @pytest.mark.parametrize("cls", [PlainFused, MetisFused])
    def test_a_head_that_the_loss_only_reads_is_named_once(
        self, cls, health_interval, tmp_path, caplog
    ):
        callbacks = [MetisCallback(health_interval), CallsBefore()]
        for _ in range(2):  # of each run, whatever was called before it
            caplog.clear()
            model = converted("nvfp4", **HEAD)
            model(torch.arange(8)[None])
            trainer(tmp_path, model, callbacks, cls=cls, max_steps=2).train()
            assert caplog.text.count(UNCALLED) == 1

    def test_a_head_that_is_called_is_not(self, tmp_path, caplog):
        for changes in ({}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}):
            made = trainer(tmp_path, converted("nvfp4", **HEAD), [MetisCallback(0)], **changes)
            made.train()
        assert "converted layers" not in caplog.text

    @pytest.mark.parametrize("cls", [transformers.Trainer, PlainFused])
    def test_compiled_steps_know_it_too(self, cls, tmp_path, caplog, fresh_dynamo):
        compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
        model = converted("bf16", **HEAD)
        for _ in range(2):  # the second run traces nothing
            caplog.clear()
            trainer(tmp_path, model, [MetisCallback(0)], cls=cls, max_steps=2, **compiled).train()
            assert caplog.text.count(UNCALLED) == (cls is PlainFused)

    def test_copies_of_adapters_may_wait(self, tmp_path, caplog):
        adapters = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(converted("nvfp4", **HEAD), adapters)
        trainer(tmp_path, model, [MetisCallback(0)], max_steps=1).train()
        assert "converted layers" not in caplog.text

    def test_many_layers_of_one_kind_are_named_together(self, tmp_path, caplog):
        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.idle = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
                self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 32) for _ in range(6))

            def forward(self, input_ids, labels):
                x = self.used(F.one_hot(input_ids % 64, 64).float())
                return {"loss": (self.experts[2](F.pad(x, (0, 32))) ** 2).mean()}

        config = MetisConfig(scheme="nvfp4", target_modules="all-linear")
        model = get_metis_model(Branches(), config)
        trainer(tmp_path, model, [MetisCallback(0)], max_steps=1).train()
        assert "called 2 of 8 converted layers, but not idle, experts.* (5 layers)." in caplog.text
