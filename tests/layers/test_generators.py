"""Quantizers take nothing from the generators that dropout and data loading draw from.

So a control run does not notice that a quantizer exists.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from layers import dropout_run
from layers.dropout_run import MODELS, STEPS, Run, train
from layers.layer_tools import FP4_SCHEMES, STOCHASTIC, of_each_kind
from metis_hf import MetisConfig, get_metis_model
from metis_hf.layers.make import convert_linear

TOKENS, IN, OUT = 40, 48, 32
FP4_KINDS = of_each_kind(FP4_SCHEMES)


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
def control_run(name):
    """(its digest, where it leaves every generator)."""
    seed_generators()
    run = train(name)
    return run.digest(), generator_states()


@pytest.mark.slow
def test_control_run_without_the_package():
    """A control with dropout is the same in a process that never imports metis_hf."""
    script = Path(dropout_run.__file__)
    out = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.split() == [control_run(name)[0] for name in MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_converted_control(name):
    """Scheme bf16 with dropout trains as the model that was not converted, bit for bit."""
    digest, _ = control_run(name)
    assert digest != train(name, dropout=0.2).digest()  # dropout is in effect
    torch.manual_seed(0)
    run = Run(converted(MODELS[name](), "bf16"))
    for _ in range(STEPS):
        run.step()
    assert run.digest() == digest


@pytest.mark.parametrize("scheme", FP4_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_control_beside_a_quantized_run(name, scheme):
    """Steps of an FP4 model in between change nothing in a control run with dropout."""
    quantized = Run(converted(MODELS[name](dropout=0.0), scheme, **STOCHASTIC))
    torch.manual_seed(0)
    run = Run(MODELS[name]())
    for _ in range(STEPS):
        quantized.step()
        run.step()
    assert run.digest() == control_run(name)[0]


@pytest.mark.parametrize("scheme", FP4_KINDS)
def test_same_draws_as_the_control(scheme):
    """Conversion and quantized steps leave every generator where a control leaves it."""
    seed_generators()
    run = Run(converted(MODELS["gpt2"](), scheme, **STOCHASTIC))
    for _ in range(STEPS):
        run.step()
    assert generator_states() == control_run("gpt2")[1]


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_a_layer_draws_nothing(scheme):
    linear, x = nn.Linear(IN, OUT), torch.randn(TOKENS, IN)
    states = generator_states()
    config = MetisConfig(scheme=scheme, **STOCHASTIC)
    layer = convert_linear(linear, config, name="layer").train()
    layer(x.requires_grad_()).sum().backward()
    assert generator_states() == states
