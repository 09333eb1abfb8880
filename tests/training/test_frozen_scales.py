"""Static tensor scales while the Trainer trains: kept, frozen after some steps, or refused."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import transformers
from peft import LoraConfig, get_peft_model

from metis_hf import (
    MetisCallback,
    MetisTrainer,
    calibrate,
    freeze_scales,
    metis_layers,
)
from training.test_calibration import converted, ids
from training.trainer_tools import EachStep, trainer


class TestTraining:
    """Quantization-aware training by the Trainer."""

    def train(self, tmp_path, model, *callbacks, resume=None, **changes):
        callbacks = callbacks or [MetisCallback(health_interval=0)]
        made = trainer(tmp_path, model, callbacks, MetisTrainer, learning_rate=1e-2, **changes)
        made.train(resume_from_checkpoint=resume)

    def test_a_resumed_adapter_without_the_fixed_scales_is_refused(self, tmp_path, caplog):
        """Its checkpoints do not hold them: they would be fixed again from one step's inputs."""

        def run(checkpoint=None, freeze_at=2):
            model = get_peft_model(converted(), LoraConfig(r=2, target_modules="all-linear"))
            callback = MetisCallback(health_interval=0, freeze_scales=freeze_at)
            options = {"save_strategy": "steps", "save_steps": 2, "resume": checkpoint}
            self.train(tmp_path, model, callback, **options)

        run()
        with pytest.raises(ValueError, match="resumes from step 2, freeze_scales=2 fixed"):
            run(str(tmp_path / "checkpoint-2"))
        assert "from the remaining steps alone" not in caplog.text
        run(str(tmp_path / "checkpoint-2"), freeze_at=3)  # what is not fixed yet can be
        assert "computes scales from the remaining steps alone" in caplog.text

    def test_calibrated_scales_stay_while_weights_train(self, tmp_path):
        model = converted()
        before = calibrate(model, ids())
        self.train(tmp_path, model)
        layers = dict(metis_layers(model))
        for name, scale in before.items():
            assert layers[name].input_amax == scale.input_amax
            assert layers[name].weight_amax == scale.weight_amax

    def test_frozen_after_some_steps(self, tmp_path):
        model = converted()
        callback = MetisCallback(health_interval=0, freeze_scales=2)

        def look(model):
            layer, other = model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj
            both = layer.weight.abs().max(), other.weight.abs().max()
            figures = layer.scales_frozen, layer.input_amax, layer.weight_amax, max(both)
            return [figure.item() for figure in figures]

        watch = EachStep(look)
        self.train(tmp_path, model, callback, watch)
        seen = watch.seen
        assert [frozen for frozen, *_ in seen] == [0, 1, 1, 1]
        assert seen[0][1] <= seen[1][1] == seen[2][1] == seen[3][1]
        assert seen[1][2] == seen[1][3]  # the larger of the two weights at that step
        assert seen[3][2] == seen[1][2] != seen[3][3]

    def test_a_best_checkpoint_of_before_is_said(self, tmp_path, caplog):
        """Trainer loads its buffers too, which say that nothing is fixed."""
        model = converted()
        callback = MetisCallback(health_interval=0, freeze_scales=2)

        class Rewind(transformers.TrainerCallback):
            def on_epoch_end(self, args, state, control, **kwargs):
                for _, layer in metis_layers(model):  # as a checkpoint of step 1 has them
                    layer.scales_frozen.zero_()

        self.train(tmp_path, model, callback, Rewind())
        assert (
            "scales are not fixed: the checkpoint was saved before they were fixed" in caplog.text
        )

    def skipping(self, steps):
        """A model whose last layers see nothing in its first `steps` calls in training."""
        model = converted()
        block, calls = model.model.layers[1].mlp, []
        forward = block.forward

        def sometimes(x):
            calls.append(x)
            return x if len(calls) <= steps else forward(x)

        block.forward = sometimes
        return model

    def test_a_layer_without_tokens_is_waited_for(self, tmp_path, caplog):
        frozen = EachStep(
            lambda model: {one.scales_frozen.item() for _, one in metis_layers(model)}
        )
        callback = MetisCallback(health_interval=0, freeze_scales=1)
        self.train(tmp_path, self.skipping(2), callback, frozen)
        assert frozen.seen == [{0}, {0}, {1}, {1}]
        assert caplog.text.count("freeze_scales=1 is delayed") == 1
        assert "model.layers.1.mlp.gate_proj" in caplog.text
        assert "not fixed" not in caplog.text

    def test_a_layer_that_never_has_tokens_is_said_at_the_end(self, tmp_path, caplog):
        callback = MetisCallback(health_interval=0, freeze_scales=1)
        self.train(tmp_path, self.skipping(9), callback)
        assert caplog.text.count("freeze_scales=1 is delayed") == 1
        assert "scales are not fixed: model.layers.1.mlp.gate_proj" in caplog.text

    def test_freezing_needs_static_scales(self, tmp_path):
        callback = MetisCallback(health_interval=0, freeze_scales=1)
        with pytest.raises(ValueError, match=r"freeze_scales=1, but no layer.*\"w4a4\""):
            self.train(tmp_path, converted("nvfp4"), callback)

    def test_nothing_seen_nothing_frozen(self):
        model = converted()
        with pytest.raises(ValueError, match="saw no token"):
            freeze_scales(model)
        assert all(layer.scales_frozen == 0 for _, layer in metis_layers(model))


def test_weights_that_zero_3_has_partitioned(monkeypatch):
    """Between two steps a process holds none of their elements."""

    class Gathered(contextlib.AbstractContextManager):
        def __init__(self, params) -> None:
            self.params = params

        def __enter__(self) -> None:
            for param in self.params:
                param.data = whole[id(param)]

        def __exit__(self, *_) -> None:
            for param in self.params:
                param.data = whole[id(param)].new_empty(0)

    zero = types.SimpleNamespace(GatheredParameters=Gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))
    model = converted()
    expected = calibrate(model, ids(1))
    whole = {}
    for _, layer in metis_layers(model):
        for param in layer.parameters():
            whole[id(param)], param.ds_id = param.data, 0
            param.data = param.data.new_empty(0)
    found = freeze_scales(model)
    assert {name: scale.weight_amax for name, scale in found.items()} == {
        name: scale.weight_amax for name, scale in expected.items()
    }
