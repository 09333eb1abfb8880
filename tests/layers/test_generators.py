"""Quantizers take nothing from the generators that dropout and data loading draw from.

So a control run does not notice that a quantizer exists.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from design import some_slow
from forked import python
from torch import nn

from layers import dropout_run
from layers.dropout_run import STEPS, Run, gpt2, train
from layers.layer_tools import FP4_SCHEMES, STOCHASTIC, of_each_kind
from metis_hf import MetisConfig, get_metis_model
from metis_hf.layers.make import convert_linear

TOKENS, IN, OUT = 40, 48, 32


def converted(model, scheme, **changes):
    return get_metis_model(model, MetisConfig(scheme=scheme, **changes))


def seed_generators():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def generator_states():
    _, keys, place, *_ = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), place


@functools.cache
def control_run():
    """(its digest, where it leaves every generator)."""
    seed_generators()
    run = train()
    return run.digest(), generator_states()


@pytest.mark.slow
def test_control_run_without_the_package():
    """A control with dropout is the same in a process that never imports metis_hf."""
    assert python(dropout_run.__file__, timeout=300).strip() == control_run()[0]


def test_converted_control():
    """Scheme bf16 with dropout trains as the model that was not converted, bit for bit."""
    digest, _ = control_run()
    assert digest != train(dropout=0.2).digest()  # dropout is in effect
    torch.manual_seed(0)
    run = Run(converted(gpt2(), "bf16"))
    for _ in range(STEPS):
        run.step()
    assert run.digest() == digest


CHANNELWISE = ["outlier-suppression-plus", "smoothquant"]  # svdquant has their state too


@pytest.mark.parametrize("scheme", some_slow(of_each_kind(FP4_SCHEMES), CHANNELWISE))
def test_a_quantized_run_draws_nothing(scheme):
    """Conversion and quantized steps leave every generator where a control leaves it."""
    seed_generators()
    run = Run(converted(gpt2(), scheme, **STOCHASTIC))
    for _ in range(STEPS):
        run.step()
    assert generator_states() == control_run()[1]


def test_a_layer_draws_nothing():
    linear, x = nn.Linear(IN, OUT), torch.randn(TOKENS, IN)
    states = generator_states()
    for scheme in FP4_SCHEMES:
        config = MetisConfig(scheme=scheme, **STOCHASTIC)
        layer = convert_linear(linear, config, name="layer").train()
        layer(x.requires_grad_()).sum().backward()
        assert generator_states() == states, scheme
