"""Nothing of a step waits for the device: a step runs where there are no values to wait for.

Fake tensors have shapes and no content; whatever needs a value on the host raises with them. What
happens inside one operator does not show: `torch.linalg.eigh` of a small matrix, of which a split
takes one, reads its status back from CUDA devices.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
from conftest import llama
from design import cases
from torch._subclasses.fake_tensor import FakeTensorMode

from layers.layer_tools import SCHEME_MODES, layer_of
from metis_hf import MetisConfig, get_metis_model, reuse_weights
from metis_hf.numerics import Quantizer
from metis_hf.operands import Conditioner, Operand
from metis_hf.schemes import Scheme
from metis_hf.transforms import rotate, unrotate
from metis_hf.transforms.groups import rotate_groups, unrotate_groups
from metis_hf.transforms.rotation import rotate_by


def step_of_a_layer(layer, row_mask=None):
    layer = copy.deepcopy(layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(mode.from_tensor(param.detach())))
        for name, buffer in list(layer.named_buffers()):
            setattr(layer, name, mode.from_tensor(buffer))
        x = torch.empty(96, 64, requires_grad=True)
        layer(x, row_mask if row_mask is None else mode.from_tensor(row_mask)).sum().backward()
        assert x.grad is not None
        assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@cases(
    {"scheme, mode": SCHEME_MODES},
    rotated={"masked": [False, True], "reuses": [False, True]},
)
def test_a_layer(scheme, mode, masked, reuses):
    _, layer = layer_of(scheme, mode, i=64, o=48)
    mask = torch.ones(96, dtype=torch.bool) if masked else None
    with reuse_weights(layer) if reuses else contextlib.nullcontext():
        step_of_a_layer(layer, mask)


@pytest.mark.parametrize("scheme", ["nvidia", "metis", "smoothquant"])
def test_a_model_and_its_optimizer(scheme):
    model = get_metis_model(llama().to("meta"), MetisConfig(scheme=scheme))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(2, 16, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()


def test_the_detector_detects():
    class Peeking(Conditioner):
        """A conditioner that looks at what it quantizes."""

        def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
            return quantizer(x, dim=dim, key=key, dtype=dtype) if x.abs().max() > 0 else x

    _, layer = layer_of("nvfp4", i=64, o=48)
    layer.scheme = Scheme(fprop_input=Operand(Quantizer(), Peeking()))
    with pytest.raises((RuntimeError, NotImplementedError), match="_local_scalar_dense"):
        step_of_a_layer(layer)


SEED = 990  # that no other test has
CACHED = {
    "hadamard": (partial(rotate, seed=SEED), partial(unrotate, seed=SEED)),
    "whole hadamard": (
        partial(rotate_by, kind="hadamard", seed=SEED),
        partial(rotate_by, kind="hadamard", seed=SEED, inverse=True),
    ),
    "kronecker": (
        partial(rotate_by, kind="kronecker", seed=SEED),
        partial(rotate_by, kind="kronecker", seed=SEED, inverse=True),
    ),
    "random signs": (
        # Groups of 8, which are no conditioner's.
        partial(rotate_groups, signs=torch.ones(8)),
        partial(unrotate_groups, signs=torch.ones(8)),
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_constants_without_values_are_not_kept(name):
    """Planning a run traces one step so; what it makes must not meet real tensors later."""
    there, back = CACHED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        there(torch.empty(16, 16), dim=0)
    x = torch.eye(16)
    assert torch.allclose(back(there(x, dim=0), dim=0), x, atol=1e-6)
