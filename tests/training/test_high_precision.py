"""Blocks in which a converted model runs unquantized, and what they leave untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import VOCAB, llama
from design import cases
from tensors import assert_same

from metis_hf import (
    high_precision,
    metis_layers,
    set_precision,
    to_dense,
)
from training.trainer_tools import KINDS, converted, up_proj


class TestHighPrecision:
    """The block of `high_precision`."""

    @cases({"scheme": KINDS}, rotated={"training": [True, False], "autocast": [True, False]})
    def test_is_the_dense_model(self, scheme, training, autocast, token_ids):
        model = converted(scheme).train(training)
        dense = to_dense(copy.deepcopy(model))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            before = model(input_ids=token_ids).logits
            with high_precision(model):
                inside = model(input_ids=token_ids).logits
            assert torch.equal(inside, dense(input_ids=token_ids).logits)
            assert torch.equal(model(input_ids=token_ids).logits, before) or training
        assert torch.equal(inside, before) == scheme.startswith("bf16")

    @pytest.mark.parametrize("scheme", KINDS)
    def test_training_goes_on_as_without(self, scheme, token_ids):
        """State, noise, configs and weights: the same steps, bit for bit."""

        def train(model, *, blocks):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for step in range(2):
                optimizer.zero_grad()
                if blocks:
                    with high_precision(model), torch.no_grad():
                        model(input_ids=(token_ids + step) % VOCAB)
                loss = model(input_ids=token_ids, labels=token_ids).loss
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found, model.state_dict()

        plain, model = converted(scheme).train(), converted(scheme).train()
        configs = [layer.config for _, layer in metis_layers(model)]
        (losses_, state), (expected, theirs) = train(model, blocks=True), train(plain, blocks=False)
        assert losses_ == expected
        assert_same(state, theirs)
        assert [layer.config for _, layer in metis_layers(model)] == configs
        assert model.config.to_dict() == plain.config.to_dict()

    def test_an_exception_ends_it(self):
        """Each layer has its own scheme back, also where they differ."""
        model = converted("metis", scheme_pattern={"down_proj": "mxfp4"})
        before = [(layer.scheme, layer.eval_scheme) for _, layer in metis_layers(model)]
        seen = []

        def fail():
            seen.extend(layer.active_scheme().is_high_precision for _, layer in metis_layers(model))
            raise KeyError

        with pytest.raises(KeyError), high_precision(model):
            fail()
        assert seen == [True] * len(before)
        after = [(layer.scheme, layer.eval_scheme) for _, layer in metis_layers(model)]
        assert all(a is b for pair in zip(before, after) for a, b in zip(*pair))

    def test_a_switch_inside_stays(self):
        """The layers are then as their config says; a block in a block ends as it began."""
        model = converted("nvfp4")
        with high_precision(model):
            with high_precision(model):
                pass
            assert up_proj(model).scheme.is_high_precision
            set_precision(model, scheme="nvidia")
        layer = up_proj(model)
        assert layer.config.scheme == "nvidia"
        assert layer.scheme == converted("nvidia").model.layers[0].mlp.up_proj.scheme

    def test_held_weights_stay(self, token_ids):
        """What evaluation keeps of a weight serves again after the block."""
        model = converted("nvfp4-rne").eval()
        with torch.no_grad():
            model(input_ids=token_ids)
            model(input_ids=token_ids)
            assert len(up_proj(model).evaluation_weight) == 1
            with high_precision(model):
                model(input_ids=token_ids)
        assert len(up_proj(model).evaluation_weight) == 1

    def test_no_converted_layer(self):
        with pytest.raises(ValueError, match="call get_metis_model"), high_precision(llama()):
            pass
