"""Masks of padding in calls other than the model's own, and in copies of layers and models."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from layers.mask_tools import batches, llama_with, masks_of, t5
from metis_hf import metis_layers, to_dense


def all_are(seen, mask):
    expected = mask.reshape(-1).bool()
    return bool(seen) and all(m is not None and torch.equal(m, expected) for m in seen.values())


class TestCopies:
    def test_of_a_layer_in_modules_to_save(self):
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj", "k_proj"])
        model = peft.get_peft_model(llama_with("metis"), config).train()
        batch = batches()[1]
        seen = masks_of(model, lambda: model(**batch))
        assert sum("modules_to_save" in name for name in seen) == 4
        assert all_are(seen, batch["attention_mask"])

    def test_of_replicated_layers(self):
        config = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
        model = peft.get_peft_model(llama_with("metis"), config).train()
        batch = batches()[1]
        seen = masks_of(model, lambda: model(**batch))
        assert len(seen) == 4 * 7
        assert all_are(seen, batch["attention_mask"])

    @pytest.mark.parametrize("part", ["model", "inner model"])
    def test_of_a_model_have_a_mask_of_their_own(self, part):
        model = llama_with("metis")
        whole = model if part == "model" else model.model
        other = copy.deepcopy(whole)
        of_model, of_copy = ({id(m.token_mask) for _, m in metis_layers(x)} for x in (model, other))
        assert len(of_model) == len(of_copy) == 1
        assert of_model != of_copy
        ids, mask = batches()[1]["input_ids"], batches()[1]["attention_mask"]
        other_mask = mask.flip(1)

        def nested(module, args):
            """The copy runs while the model does, with another mask."""
            seen = masks_of(other, lambda: other(input_ids=ids, attention_mask=other_mask))
            assert all_are(seen, other_mask)

        handle = model.model.embed_tokens.register_forward_pre_hook(nested)
        seen = masks_of(model, lambda: model(input_ids=ids, attention_mask=mask))
        handle.remove()
        assert all_are(seen, mask)


class TestCalls:
    def test_of_the_model_inside(self):
        model, batch = llama_with("metis"), batches()[1]
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert all_are(masks_of(model, lambda: model.model(ids, attention_mask=mask)), mask)
        assert all_are(masks_of(model, lambda: model.model(ids, mask)), mask)
        # Outside of calls nothing of them is left.
        layer = model.model.layers[0].mlp.up_proj
        assert layer.row_mask(torch.randn(*mask.shape, 64)) is None

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
    def test_of_the_model_inside_recomputed(self):
        """Gradients are those without checkpointing, and others than with padding sampled."""
        ids, mask = batches()[1]["input_ids"], batches()[1]["attention_mask"]

        def gradients(checkpointing, told=True):
            model = llama_with("mean", checkpointing)
            for _, layer in metis_layers(model):
                layer.token_mask = layer.token_mask if told else None
            states = model.model(ids, attention_mask=mask).last_hidden_state
            states.square().sum().backward()
            return [param.grad for param in model.model.parameters()]

        expected = gradients(False)
        assert all(map(torch.equal, gradients(True), expected))
        assert not all(map(torch.equal, gradients(False, told=False), expected))

    def test_of_an_encoder_alone(self):
        """As `generate` does. The decoder's own mask is no mask for what reads the encoder."""
        model = t5()
        ids, mask = batches()[1]["input_ids"], batches()[1]["attention_mask"]
        states = []
        encode = lambda: states.append(model.encoder(ids, attention_mask=mask)[0])  # noqa: E731
        assert all_are(masks_of(model, encode), mask)
        options = {"encoder_hidden_states": states[0], "encoder_attention_mask": mask}
        decode = lambda: model.decoder(ids, attention_mask=mask.flip(1), **options)  # noqa: E731
        assert set(masks_of(model, decode).values()) == {None}

    def test_after_a_prefix(self):
        """The mask has columns for the prefix, which is no row of any layer."""
        base = llama_with("metis")
        config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
        model, batch = peft.get_peft_model(base, config), batches()[1]
        seen = masks_of(model, lambda: model(**batch))
        assert all_are(seen, batch["attention_mask"])

    def test_after_tokens_in_a_cache(self):
        model, batch = llama_with("metis").eval(), batches()[1]
        ids, mask = batch["input_ids"], batch["attention_mask"].flip(1)
        cache = model(ids[:, :16], attention_mask=mask[:, :16]).past_key_values
        rest = {"input_ids": ids[:, 16:], "attention_mask": mask, "past_key_values": cache}
        assert all_are(masks_of(model, lambda: model(**rest)), mask[:, 16:])

    def test_of_the_model_inside_after_an_interrupt(self):
        """Torch calls no hook after Ctrl-C, so that the mask of the call is left behind."""
        model, batch = llama_with("metis"), batches()[1]
        ids, mask = batch["input_ids"], batch["attention_mask"]

        def interrupt(module, args):
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids, attention_mask=mask)
        handle.remove()
        other = mask.flip(1)
        assert all_are(masks_of(model, lambda: model.model(ids, attention_mask=other)), other)

    def test_to_dense_takes_all_hooks_off(self):
        model = to_dense(llama_with("metis"))
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert not module._forward_hooks_always_called
