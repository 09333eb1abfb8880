"""Models with quantized attention: trained, recomputed, and switched while they train."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from conftest import llama
from tensors import assert_same, logits
from training.trainer_tools import losses, trainer

from conversion.attention_tools import (
    CONFIG,
    converted,
    left_padded,
    results,
)
from metis_hf import (
    MetisConfig,
    PrecisionSchedule,
    get_metis_model,
    high_precision,
    set_precision,
)
from metis_hf.conversion.attention import attention_products


class TestTraining:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_gives_the_same_bits(self, reentrant, token_ids):
        batch = left_padded(token_ids) | {"labels": token_ids}
        config = MetisConfig(scheme="nvfp4", attention="nvfp4")  # stochastic everywhere
        plain, model = (converted(llama(), config).train() for _ in range(2))
        model.load_state_dict(plain.state_dict())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert_same(results(model, batch), results(plain, batch))

    def test_evaluation_repeats_and_training_draws_by_content(self, token_ids):
        model = converted(config=MetisConfig(scheme="bf16", attention="nvfp4"))
        with torch.no_grad():
            first = model.eval()(input_ids=token_ids).logits
            assert torch.equal(first, model(input_ids=token_ids).logits)
            noisy = model.train()(input_ids=token_ids).logits
            assert torch.equal(noisy, model(input_ids=token_ids).logits)
        assert not torch.equal(first, noisy)

    def test_save_and_reload(self, tmp_path, token_ids):
        attention = "quartet2"
        model = converted(config=MetisConfig(scheme="nvidia", attention=attention)).train()
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
        assert loaded.config.quantization_config.attention == attention
        assert len(list(attention_products(loaded))) == 2
        assert all(products.training for _, products in attention_products(loaded))
        batch = {"input_ids": token_ids, "labels": token_ids}
        expected = results(model, batch)
        assert_same(results(loaded, batch), expected)
        assert_same(results(copy.deepcopy(model), batch), expected)

    def test_dense_checkpoint_is_converted_on_its_way(self, tmp_path, token_ids):
        dense = llama()
        dense.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=CONFIG
        )
        model = converted(dense).eval()
        assert torch.equal(logits(model, token_ids), logits(loaded, token_ids))

    def test_a_trainer_run_with_a_schedule(self, tmp_path, token_ids):
        """Four steps: quantized, then attention and layers with an exact forward pass."""
        config = MetisConfig(scheme="nvfp4-rne", attention="nvfp4-rne")
        model = converted(llama(), config)
        seen = []

        class Watch(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                _, products = next(attention_products(model))
                quantizer = products.scheme.fprop_input.quantizer
                backward = products.scheme.dgrad_grad_output.quantizer
                seen.append((quantizer is None, backward is None))

        data = [{"input_ids": row, "labels": row} for row in token_ids]
        callbacks = [PrecisionSchedule(at=0.5), Watch()]
        made = trainer(tmp_path, model, callbacks, data=data, bf16=True, save_strategy="steps")
        made.train()
        assert len(losses(made)) == 4
        assert losses(made)[-1] < losses(made)[0]
        assert seen == [(False, False)] * 2 + [(True, False)] * 2
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
        assert loaded.config.quantization_config.high_precision == ("forward",)
        _, products = next(attention_products(loaded))
        assert products.scheme.fprop_input.quantizer is None

    def test_bf16_is_the_dense_model_to_the_bit(self, token_ids):
        dense = llama()
        model = converted(copy.deepcopy(dense), MetisConfig(scheme="bf16", attention="bf16"))
        batch = {"input_ids": token_ids, "labels": token_ids}
        assert_same(results(model, batch), results(dense, batch))


class TestSetPrecision:
    def test_on_off_and_another(self, token_ids, tmp_path):
        dense = llama()
        model = get_metis_model(copy.deepcopy(dense), MetisConfig(scheme="bf16"))
        plain = logits(model, token_ids)
        set_precision(model, attention="nvfp4-rne")
        on = logits(model, token_ids)
        assert torch.equal(on, logits(converted(copy.deepcopy(dense)), token_ids))
        set_precision(model, attention="four-over-six")
        other = logits(model, token_ids)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(other, logits(loaded, token_ids))
        set_precision(model, high_precision=("forward", "backward"))
        assert torch.equal(logits(model, token_ids), plain)
        set_precision(model, attention=None, high_precision=())
        assert not list(attention_products(model))
        assert torch.equal(logits(model, token_ids), plain)
        assert len({tuple(x.flatten().tolist()) for x in (plain, on, other)}) == 3

    def test_refusals_change_nothing(self, token_ids):
        model = converted()
        before = logits(model, token_ids)
        for changes, message in (
            ({"attention": "metis"}, "splits tensors"),
            ({"attention": "quartet2", "format": "int4"}, "does not take format"),
            ({"attention": "none"}, "is not registered"),
        ):
            with pytest.raises(ValueError, match=message):
                set_precision(model, **changes)
            assert torch.equal(logits(model, token_ids), before)
            assert model.config.quantization_config == CONFIG

    def test_high_precision_leaves_the_noise_alone(self, token_ids):
        model = converted(config=MetisConfig(scheme="nvfp4", attention="nvfp4")).train()
        batch = {"input_ids": token_ids, "labels": token_ids}
        before = results(model, batch)
        with high_precision(model):
            exact = results(model, batch)
        assert not torch.equal(exact[0], before[0])
        assert_same(results(model, batch), before)
